"""Every cell of the design's table of failures that needs no process to die: before the marker, and after it."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel

from durable_jobs import DurableJobs, EventName, HaltUnsafe, Job, JobContext, JobFailed, JobHandler, JobStatus
from durable_jobs.contract.envelope import ExecutionInput
from durable_jobs.contract.errors import AdmissionRefused
from tests.conftest import Specs, Workers
from tests.probes import (
    ConsequentialProbe,
    Gate,
    Probe,
    Provider,
    Script,
    eventually,
    for_ever,
    noticed,
    take_over,
    trail,
    until,
)

CLAIMED, DISPATCHED, RETRIED = EventName.CLAIMED, EventName.DISPATCHED, EventName.RETRIED
PROMOTED = EventName.HEARTBEAT
"""A job that completes undispatched is promoted to running on the way."""

Then = Callable[[JobContext], Awaitable[Any]]

before_and_after = pytest.mark.parametrize("crossed", [False, True], ids=["before the marker", "after it"])


def scripted(provider: Provider, then: Then, *, crossed: bool) -> Script:
    """Do `then` before the boundary, or just after the provider was called."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if not crossed:
            return await then(job)
        async with job.dispatch(f"probe:{job.id}") as key:
            await provider.call(key)
            return await then(job)

    return script


def raises(error: BaseException) -> Then:
    async def then(job: JobContext) -> Any:
        raise error

    return then


def returns(result: Any) -> Then:
    async def then(job: JobContext) -> Any:
        return result

    return then


async def takes_for_ever(job: JobContext) -> Any:
    await for_ever()


def sent_once(job: Job, provider: Provider, crossed: bool) -> bool:
    return provider.keys == ([f"probe:{job.id}"] if crossed else [])


@before_and_after
@pytest.mark.parametrize(
    ("error", "code", "before", "after"),
    [
        (ValueError("broke"), "HANDLER_ERROR", JobStatus.DEAD_LETTER, JobStatus.INDETERMINATE),
        (JobFailed("broke", retryable=True, code="BUSY"), "BUSY", JobStatus.DEAD_LETTER, JobStatus.INDETERMINATE),
        (JobFailed("broke", retryable=False, code="NO"), "NO", JobStatus.FAILED, JobStatus.FAILED),
        (HaltUnsafe("broke", code="DANGER"), "DANGER", JobStatus.HALT_UNSAFE, JobStatus.HALT_UNSAFE),
        (asyncio.CancelledError("broke"), "HANDLER_ERROR", JobStatus.DEAD_LETTER, JobStatus.INDETERMINATE),
        (TimeoutError("broke"), "HANDLER_ERROR", JobStatus.DEAD_LETTER, JobStatus.INDETERMINATE),
    ],
    ids=["an exception", "retryable", "a definite no", "halt unsafe", "a cancellation of its own", "its own timeout"],
)
async def test_the_handler_fails_in_its_last_attempt(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    error: BaseException,
    code: str,
    before: JobStatus,
    after: JobStatus,
    crossed: bool,
) -> None:
    provider = Provider()
    handler = Probe(scripted(provider, raises(error), crossed=crossed))
    status = after if crossed else before
    async with worker(handler):
        handle = await jobs.create_job(spec(max_attempts=1))
        job = await until(jobs.service, handle.id, status)
    assert job.error is not None
    assert (job.error.code, job.error.message, job.error.type) == (code, "broke", type(error).__name__)
    assert job.error.traceback is not None
    assert "broke" in job.error.traceback
    last = {
        JobStatus.DEAD_LETTER: EventName.DEAD_LETTERED,
        JobStatus.INDETERMINATE: EventName.INDETERMINATE,
        JobStatus.FAILED: EventName.FAILED,
        JobStatus.HALT_UNSAFE: EventName.HALT_UNSAFE,
    }[status]
    assert await trail(jobs.service, job.id) == [CLAIMED, *([DISPATCHED] if crossed else []), last]
    assert (handler.calls, job.attempt_count, job.lease_generation) == (1, 1, 1)
    assert sent_once(job, provider, crossed)
    (attempt,) = (await jobs.service.list_job_attempts(job.id)).items
    assert (attempt.outcome, attempt.error, attempt.ended_at) == (status, job.error, job.finished_at)


@pytest.mark.parametrize(
    "error", [ValueError("broke"), JobFailed("broke", retryable=True)], ids=["raises", "retryable"]
)
async def test_a_failure_before_the_marker_goes_round_after_its_backoff(
    jobs: DurableJobs, worker: Workers, spec: Specs, error: Exception
) -> None:
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt == 1:
            raise error
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(backoff_base_seconds=0.75))
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert await trail(jobs.service, handle.id) == [CLAIMED, RETRIED, CLAIMED, DISPATCHED, EventName.COMPLETED]
    job = await handle.job()
    assert (handler.calls, job.attempt_count, job.lease_generation, job.error) == (2, 2, 2, None)
    assert provider.keys == [f"probe:{handle.id}"]
    first, second = (await jobs.service.list_job_attempts(handle.id)).items
    assert (first.outcome, second.outcome) == (JobStatus.QUEUED, JobStatus.COMPLETED)
    # The backoff counts from the failure, on the database's clock; the next attempt waits for it.
    assert first.ended_at is not None
    assert job.scheduled_at - first.ended_at == timedelta(seconds=0.75)
    assert second.claimed_at >= job.scheduled_at
    (retried,) = [event for event in await handle.events() if event.name is RETRIED]
    assert (retried.data["cause"], retried.actor) == ("backoff", first.worker_id)


@before_and_after
async def test_the_handlers_time_runs_out(jobs: DurableJobs, worker: Workers, spec: Specs, crossed: bool) -> None:
    provider = Provider()
    handler = Probe(scripted(provider, takes_for_ever, crossed=crossed))
    status = JobStatus.TIMED_OUT if crossed else JobStatus.DEAD_LETTER
    async with worker(handler):
        handle = await jobs.create_job(spec(max_attempts=1, timeout_seconds=0.3))
        job = await until(jobs.service, handle.id, status)
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("HANDLER_TIMEOUT", "the handler ran longer than 0.3 s")
    assert handler.calls == 1
    assert sent_once(job, provider, crossed)


async def test_time_that_runs_out_before_the_marker_is_a_retryable_failure(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    interrupted = []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt == 1:
            try:
                await for_ever()
            except asyncio.CancelledError:
                interrupted.append(job.attempt)
                raise
        return {"attempt": job.attempt}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(timeout_seconds=0.3, backoff_base_seconds=0.1))
        assert await handle.result(timeout=20) == {"attempt": 2}
    assert interrupted == [1]
    assert await trail(jobs.service, handle.id) == [CLAIMED, RETRIED, CLAIMED, EventName.COMPLETED]


async def test_cancellation_before_the_marker_interrupts_the_handler(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    provider, gate, interrupted = Provider(), Gate(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            interrupted.append(job.cancel_requested)
            raise
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        assert await handle.cancel("not wanted", "ann") == "requested"
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED)
    assert interrupted == [True]
    assert provider.keys == []
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("CANCELLED", "cancelled by ann: not wanted")
    assert await trail(jobs.service, job.id) == [CLAIMED, EventName.CANCELLED]
    (attempt,) = (await jobs.service.list_job_attempts(job.id)).items
    assert attempt.outcome == JobStatus.CANCELLED


async def test_cancellation_that_nobody_noticed_closes_the_boundary(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """With a long lease the keeper has not ticked yet: the mark itself is what refuses."""
    provider, gate, refusals = Provider(), Gate(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        assert not job.cancel_requested
        try:
            async with job.dispatch(f"probe:{job.id}") as key:
                return await provider.call(key)
        except Exception as error:
            refusals.append(type(error).__name__)
            raise

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
        assert await handle.cancel("not wanted", "ann") == "requested"
        gate.go_on.set()
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED)
    assert refusals == ["CancellationRequested"]
    assert provider.keys == []
    assert await trail(jobs.service, job.id) == [CLAIMED, EventName.CANCELLED]


async def test_a_failure_under_cancellation_before_the_marker_is_no_new_attempt(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """Case 18 of the catalogue, of the kind "duplicate effects": the cancellation goes before the backoff."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        raise ValueError("broke")

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(backoff_base_seconds=0.05))
        await gate.handler_came()
        assert await handle.cancel("not wanted", "ann") == "requested"
        gate.go_on.set()
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED)
    assert (handler.calls, job.lease_generation) == (1, 1)
    assert await trail(jobs.service, job.id) == [CLAIMED, EventName.CANCELLED]


async def _finishes(job: JobContext) -> Any:
    return {"finished": True}


async def _breaks(job: JobContext) -> Any:
    raise ValueError("broke")


async def _yields_confirmed(job: JobContext) -> Any:
    await job.acknowledge_cancellation({"provider": "voided"})


async def _yields_unconfirmed(job: JobContext) -> Any:
    await job.acknowledge_cancellation()


@pytest.mark.parametrize(
    ("then", "status", "code"),
    [
        (_finishes, JobStatus.COMPLETED, None),
        (_breaks, JobStatus.INDETERMINATE, "HANDLER_ERROR"),
        (_yields_confirmed, JobStatus.CANCELLED, "CANCELLED"),
        (_yields_unconfirmed, JobStatus.INDETERMINATE, "CANCELLED_AFTER_DISPATCH"),
    ],
    ids=["its result completes the job", "it raises", "the provider confirms", "the provider does not"],
)
async def test_cancellation_after_the_marker_tells_the_handler(
    jobs: DurableJobs, worker: Workers, spec: Specs, then: Then, status: JobStatus, code: str | None
) -> None:
    """Case 18 of the catalogue, of the kind "duplicate effects", where the handler raises: never a new attempt."""
    provider, gate = Provider(), Gate()

    async def waits(job: JobContext) -> Any:
        gate.reached.set()
        await noticed(lambda: job.cancel_requested)
        return await then(job)

    async with worker(Probe(scripted(provider, waits, crossed=True))):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        assert await handle.cancel("not wanted", "ann") == "requested"
        job = await until(jobs.service, handle.id, status)
    assert (job.error.code if job.error else None) == code
    assert provider.keys == [f"probe:{job.id}"]
    assert job.cancel_requested_at is not None
    events = (await jobs.service.list_job_events(job.id)).items
    assert await trail(jobs.service, job.id) == [CLAIMED, DISPATCHED, EventName(status)]
    confirmed = {"provider": "voided"} if status is JobStatus.CANCELLED else None
    assert [event.data.get("provider_confirmed") for event in events if event.name == status] == [confirmed]


async def test_a_lost_lease_before_the_marker_stops_the_attempt_and_changes_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    provider, gate = Provider(), Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
        other = await take_over(jobs.service, database_url, handle.id)
        assert other.claim is not None
        gate.go_on.set()
        # The workflow sees another holder; the truth comes from that one.
        await jobs.service.complete_job(other.claim, {"by": "the other"})
        assert await handle.result(timeout=20) == {"by": "the other"}
    assert provider.keys == []
    assert handler.calls == 1
    assert await trail(jobs.service, handle.id) == [CLAIMED, CLAIMED, EventName.COMPLETED]
    first, second = (await jobs.service.list_job_attempts(handle.id)).items
    assert (first.outcome, first.late_result, second.outcome) == ("lease_expired", None, JobStatus.COMPLETED)


async def test_a_lost_lease_after_the_marker_lands_in_indeterminate(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    provider, gate = Provider(), Gate()

    async def waits(job: JobContext) -> Any:
        await gate.wait()
        return {"late": True}

    handler = Probe(scripted(provider, waits, crossed=True))
    async with worker(handler):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
        other = await take_over(jobs.service, database_url, handle.id)
        assert other.claim is None
        gate.go_on.set()

        async def late() -> bool:
            return (await jobs.service.list_job_attempts(handle.id)).items[0].late_result == {"late": True}

        await eventually(late, "the late result")
    job = await handle.job()
    assert job.error is not None
    assert (job.status, job.error.code) == (JobStatus.INDETERMINATE, "LEASE_EXPIRED_AFTER_DISPATCH")
    assert provider.keys == [f"probe:{job.id}"]
    assert await trail(jobs.service, job.id) == [CLAIMED, DISPATCHED, EventName.INDETERMINATE]


async def test_shutdown_leaves_the_handler_its_grace(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        gate.reached.set()
        await noticed(lambda: job.shutting_down)
        async with job.dispatch(f"probe:{job.id}") as key:
            return {"sent": key}

    async with worker(Probe(script), grace_seconds=20):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
    assert await trail(jobs.service, handle.id) == [CLAIMED, DISPATCHED, EventName.COMPLETED]


async def test_shutdown_before_the_marker_releases_at_the_end_of_the_grace(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        return {"attempt": job.attempt}

    async with worker(Probe(script), grace_seconds=0.3):
        handle = await jobs.create_job(spec(max_attempts=1))
        await gate.handler_came()
    job = await handle.job()
    assert (job.status, job.attempt_count, job.release_count) == (JobStatus.QUEUED, 0, 1)
    assert (await jobs.service.list_job_events(job.id)).items[-1].data["cause"] == "shutdown"
    gate.go_on.set()
    async with worker(Probe(script)):
        assert await handle.result(timeout=30) == {"attempt": 1}
    assert await trail(jobs.service, job.id) == [CLAIMED, RETRIED, CLAIMED, EventName.COMPLETED]
    first, second = (await jobs.service.list_job_attempts(job.id)).items
    assert (first.outcome, second.outcome) == ("released", JobStatus.COMPLETED)
    assert first.worker_id != second.worker_id


async def test_shutdown_after_the_marker_is_indeterminate_at_the_end_of_the_grace(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    provider, gate = Provider(), Gate()

    async def waits(job: JobContext) -> Any:
        await gate.wait()

    async with worker(Probe(scripted(provider, waits, crossed=True)), grace_seconds=0.3):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
    job = await handle.job()
    assert job.error is not None
    assert (job.status, job.error.code) == (JobStatus.INDETERMINATE, "WORKER_SHUTDOWN")
    assert provider.keys == [f"probe:{job.id}"]
    assert await trail(jobs.service, job.id) == [CLAIMED, DISPATCHED, EventName.INDETERMINATE]


@before_and_after
@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ({"text": "a\x00b"}, "result.text: must hold no U+0000"),
        ({"rows": [{"price": float("nan")}]}, "result.rows[0].price: must be finite"),
        ({"text": "x" * (8 * 1024 * 1024)}, "result: must be at most 8388608 bytes"),
        (["not", "an", "object"], "result: must be a JSON object, not list"),
    ],
    ids=["NUL", "NaN", "too large", "no object"],
)
async def test_a_result_that_cannot_be_stored(
    jobs: DurableJobs, worker: Workers, spec: Specs, result: Any, problem: str, crossed: bool
) -> None:
    provider = Provider()
    handler = Probe(scripted(provider, returns(result), crossed=crossed))
    status = JobStatus.INDETERMINATE if crossed else JobStatus.FAILED
    async with worker(handler):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, status)
    assert job.error is not None
    assert job.error.code == "RESULT_NOT_STORABLE"
    assert job.error.message.startswith(problem)
    # A text form of what the provider gave is kept as evidence, and bounded.
    assert "; the result read: " in job.error.message
    assert len(job.error.message) <= 4096
    assert (job.result, handler.calls) == (None, 1)
    assert sent_once(job, provider, crossed)


class Order(BaseModel):
    item: str
    count: int


class Orders(JobHandler[Order, Order]):
    job_type = "probe"
    consequential = False

    def __init__(self) -> None:
        self.seen: list[Order] = []

    async def run(self, job: JobContext, request: Order) -> Order:
        self.seen.append(request)
        return request


async def test_a_payload_that_does_not_fit_the_handlers_model(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    handler = Orders()
    async with worker(handler):
        unfit = await jobs.create_job(spec(payload={"item": "tea", "count": "many"}))
        fit = await jobs.create_job(spec(payload={"item": "tea", "count": 2}))
        job = await until(jobs.service, unfit.id, JobStatus.FAILED)
        assert await fit.result(timeout=20) == {"item": "tea", "count": 2}
    assert job.error is not None
    assert (job.error.code, job.error.type) == ("PAYLOAD_INVALID", "ValidationError")
    assert "count" in job.error.message
    assert handler.seen == [Order(item="tea", count=2)]
    assert await trail(jobs.service, job.id) == [CLAIMED, EventName.FAILED]


@pytest.mark.parametrize("said", [False, True], ids=["in silence", "saying that nothing was sent"])
async def test_a_consequential_handler_returns_undispatched(
    jobs: DurableJobs, worker: Workers, spec: Specs, said: bool
) -> None:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if said:
            job.nothing_sent()
        return {"done": True}

    async with worker(ConsequentialProbe(script)):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, JobStatus.COMPLETED if said else JobStatus.INDETERMINATE)
    if said:
        assert (job.result, job.error) == ({"done": True}, None)
    else:
        assert job.error is not None
        assert job.error.code == "DISPATCH_NOT_RECORDED"
        assert await trail(jobs.service, job.id) == [CLAIMED, EventName.INDETERMINATE]


@pytest.mark.parametrize("swallowed", [False, True], ids=["the refusal passes through", "the handler swallows it"])
async def test_a_consequential_handler_without_an_identity_never_dispatches(
    jobs: DurableJobs, worker: Workers, spec: Specs, swallowed: bool
) -> None:
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        with contextlib.suppress(*([AdmissionRefused] if swallowed else [])):
            async with job.dispatch(f"probe:{job.id}") as key:
                return await provider.call(key)
        job.nothing_sent()
        return {"sent": None}

    async with worker(ConsequentialProbe(script)):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, JobStatus.FAILED)
    assert provider.keys == []
    assert job.dispatched_at is None
    assert job.error is not None
    assert (job.error.code, job.error.type) == ("ADMISSION_REFUSED", "AdmissionRefused")
    assert await trail(jobs.service, job.id) == [CLAIMED, EventName.ADMISSION_CHECKED, EventName.FAILED]
    (checked,) = [event for event in await handle.events() if event.name is EventName.ADMISSION_CHECKED]
    assert checked.data["allowed"] is False
    assert checked.data["reasons"] == ["execution: missing; a consequential job needs an execution identity"]


async def test_a_consequential_handler_with_an_identity_dispatches(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    identity = ExecutionInput(tenant="acme", actor="ann", trace="4bf92f3577b34da6a3ce929d0e0e4736")
    async with worker(ConsequentialProbe(script)):
        handle = await jobs.create_job(spec(execution=identity))
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert await trail(jobs.service, handle.id) == [
        CLAIMED,
        EventName.ADMISSION_CHECKED,
        DISPATCHED,
        EventName.COMPLETED,
    ]


class OtherType(Probe):
    job_type = "other"


@pytest.mark.parametrize("lacking", ["its type", "its organization"])
async def test_not_hosted_claims_nothing_and_costs_no_attempt(
    jobs: DurableJobs, worker: Workers, spec: Specs, lacking: str
) -> None:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        return {"attempt": job.attempt, "generation": job.generation}

    stranger, host = OtherType(script), Probe(script)
    without: Any = worker(stranger) if lacking == "its type" else worker(host, organizations=["globex"])
    async with without:
        handle = await jobs.create_job(spec())
        # One that is hosted, submitted after it, shows that the worker has had its turn at the first.
        hosted = await jobs.create_job(spec(job_type="other") if lacking == "its type" else spec(organization="globex"))
        await hosted.result(timeout=20)
        job = await handle.job()
        assert (job.status, job.attempt_count, job.lease_generation) == (JobStatus.QUEUED, 0, 0)
        assert await trail(jobs.service, job.id) == []
    async with worker(host):
        assert await handle.result(timeout=30) == {"attempt": 1, "generation": 1}
    assert await trail(jobs.service, handle.id, beats=True) == [CLAIMED, PROMOTED, EventName.COMPLETED]
