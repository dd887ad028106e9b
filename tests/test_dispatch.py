"""The dispatch boundary as a handler crosses it: once per attempt, under one key, through lost replies."""

import asyncio
import contextlib
from typing import Any

import pytest

from durable_jobs import DurableJobs, DurableJobService, EventName, Job, JobContext, JobFailed, JobStatus
from durable_jobs.contract.errors import (
    AlreadyDispatched,
    CancellationRequested,
    LeaseLost,
    OperationKeyConflict,
    StoreUnavailable,
)
from durable_jobs.contract.models import Claim
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, Provider, for_ever, trail, until

CLAIMED, DISPATCHED, COMPLETED = EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED


async def test_a_second_dispatch_of_an_attempt_is_refused(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"first:{job.id}") as key:
            await provider.call(key)
        async with job.dispatch(f"second:{job.id}") as key:
            return await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
    assert job.error is not None
    assert (job.error.code, job.error.type) == ("HANDLER_ERROR", "AlreadyDispatched")
    assert provider.keys == [f"first:{job.id}"]
    assert job.operation_key == f"first:{job.id}"
    assert handler.calls == 1
    assert await trail(jobs.service, job.id) == [CLAIMED, DISPATCHED, EventName.INDETERMINATE]


async def test_a_second_dispatch_that_is_caught_spoils_nothing(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            answer = await provider.call(key)
            with pytest.raises(AlreadyDispatched):
                async with job.dispatch(f"probe:{job.id}") as again:
                    await provider.call(again)
            return answer

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert provider.keys == [f"probe:{handle.id}"]


async def test_the_key_is_a_function_of_the_job_and_the_intent(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Case 15 of the catalogue, of the kind "duplicate effects": the key over attempts, retries and a restart."""
    provider, stored = Provider(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt == 1:
            raise ValueError("before the boundary")
        async with job.dispatch(f"probe:{job.id}") as key:
            stored.append((await jobs.service.get_job(job.id)).operation_key)
            await provider.call(key)
            if job.intent < 2:
                raise JobFailed("the provider said no", retryable=False)
            return {"intent": job.intent}

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(backoff_base_seconds=0.05))
        await until(jobs.service, handle.id, JobStatus.FAILED)
        await handle.retry("ann", "try again")
        await until(jobs.service, handle.id, JobStatus.FAILED)
    await handle.retry("ann", "and again")
    async with worker(handler):
        assert await handle.result(timeout=30) == {"intent": 2}
    key = f"probe:{handle.id}"
    assert provider.keys == [key, f"{key}:retry-1", f"{key}:retry-2"]
    assert stored == provider.keys
    attempts = (await jobs.service.list_job_attempts(handle.id)).items
    assert [(each.intent_number, each.operation_key) for each in attempts] == [
        (0, None),
        (0, key),
        (1, None),
        (1, f"{key}:retry-1"),
        (2, None),
        (2, f"{key}:retry-2"),
    ]
    assert [each.generation for each in attempts] == [1, 2, 3, 4, 5, 6]


async def test_a_key_that_fits_the_first_intent_fits_its_retries(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"{job.id}:".ljust(255, "k")) as key:
            await provider.call(key)
            if job.intent == 0:
                raise JobFailed("the provider said no", retryable=False)
            return {"length": len(key)}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(max_attempts=1))
        job = await until(jobs.service, handle.id, JobStatus.FAILED)
        if job.error is not None and job.error.code == "HANDLER_ERROR":
            return  # a limit that leaves no room for the suffix may as well be refused at the first intent
        await handle.retry("ann", "try again")
        result = await handle.result(timeout=20)
    assert result["length"] <= 255 + len(":retry-1")
    assert len(set(provider.keys)) == 2


async def test_a_key_in_use_by_another_job_is_refused(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    provider, refusals = Provider(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        try:
            async with job.dispatch("the same for all") as key:
                return await provider.call(key)
        except OperationKeyConflict as error:
            refusals.append(error.code)
            raise

    async with worker(Probe(script)):
        first = await jobs.create_job(spec())
        assert await first.result(timeout=20) == {"sent": "the same for all"}
        second = await jobs.create_job(spec())
        job = await until(jobs.service, second.id, JobStatus.FAILED)
        elsewhere = await jobs.create_job(spec(project="beta"))
        assert await elsewhere.result(timeout=20) == {"sent": "the same for all"}
    assert refusals == ["OPERATION_KEY_CONFLICT"]
    assert job.error is not None
    assert (job.error.code, job.dispatched_at) == ("OPERATION_KEY_CONFLICT", None)
    assert provider.keys == ["the same for all"] * 2


class LostReply:
    """Makes the first mark raise `StoreUnavailable`: after it was committed, or before it reached the database."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, committed: bool, failures: int = 1) -> None:
        self.calls = 0
        self.on_loss: Any = None
        real = DurableJobService.mark_provider_dispatched

        async def mark(service: DurableJobService, claim: Claim, operation_key: str, **how: Any) -> Job:
            self.calls += 1
            if self.calls > failures:
                return await real(service, claim, operation_key, **how)
            if committed:
                await real(service, claim, operation_key, **how)
            if self.on_loss is not None:
                await self.on_loss(claim)
            raise StoreUnavailable("the reply was lost")

        monkeypatch.setattr(DurableJobService, "mark_provider_dispatched", mark)


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "did not reach the database"])
async def test_the_mark_goes_through_a_lost_reply(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    lost, provider = LostReply(monkeypatch, committed=committed), Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert lost.calls == (1 if committed else 2)
    assert provider.keys == [f"probe:{handle.id}"]
    assert handler.calls == 1
    assert await trail(jobs.service, handle.id) == [CLAIMED, DISPATCHED, COMPLETED]


async def test_a_mark_that_never_reached_the_database_sends_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    LostReply(monkeypatch, committed=False, failures=99)
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(max_attempts=1))
        job = await until(jobs.service, handle.id, JobStatus.DEAD_LETTER)
    assert provider.keys == []
    assert job.error is not None
    assert (job.error.code, job.error.type) == ("HANDLER_ERROR", "StoreUnavailable")
    assert await trail(jobs.service, job.id) == [CLAIMED, EventName.DEAD_LETTERED]


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "did not reach the database"])
async def test_a_cancellation_comes_between_a_lost_mark_and_its_repetition(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """Whichever way it goes, what the row says of the provider is true, and the handler runs once."""
    lost, provider, refusals = LostReply(monkeypatch, committed=committed), Provider(), []

    async def cancel(claim: Claim) -> None:
        assert await jobs.service.cancel_job(claim.job_id, "not wanted", "ann") == "requested"

    lost.on_loss = cancel

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        try:
            async with job.dispatch(f"probe:{job.id}") as key:
                return await provider.call(key)
        except (AlreadyDispatched, CancellationRequested) as error:
            refusals.append(error.code)
            raise

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED, JobStatus.INDETERMINATE, JobStatus.COMPLETED)
    assert handler.calls == 1
    if committed:
        # The boundary was crossed before the cancellation: the send may go on, or be called off; never `cancelled`.
        assert (job.status, provider.keys) in (
            (JobStatus.INDETERMINATE, []),
            (JobStatus.COMPLETED, [f"probe:{job.id}"]),
        )
    else:
        assert (job.status, provider.keys, refusals) == (JobStatus.CANCELLED, [], ["CANCELLATION_REQUESTED"])


async def test_an_exception_between_the_mark_and_the_send_is_uncertain(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """Nothing was sent, yet nobody but the handler can know: the row must not go round again."""
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            raise ConnectionError("could not even connect")
            await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
    assert job.error is not None
    assert (job.error.type, handler.calls, provider.keys) == ("ConnectionError", 1, [])


async def test_a_handlers_timeout_strikes_past_the_boundary(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with asyncio.timeout(0.2), job.dispatch(f"probe:{job.id}") as key:
            await provider.call(key)
            await for_ever()

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
    assert job.error is not None
    assert (job.error.code, job.error.type) == ("HANDLER_ERROR", "TimeoutError")
    assert (provider.keys, handler.calls) == ([f"probe:{job.id}"], 1)


class SlowMark:
    """Holds the mark, before or after its statement, until the gate opens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = Gate()
        real = DurableJobService.mark_provider_dispatched

        async def mark(service: DurableJobService, claim: Claim, operation_key: str, **how: Any) -> Job:
            await self.gate.wait()
            return await real(service, claim, operation_key, **how)

        monkeypatch.setattr(DurableJobService, "mark_provider_dispatched", mark)


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, id="once"),
        pytest.param(2, id="twice", marks=()),
    ],
)
async def test_a_handler_that_is_cancelled_while_the_mark_is_under_way(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """By its own hand, as `asyncio.timeout` does. The mark lands: the attempt is past the boundary, sent or not."""
    slow, provider = SlowMark(monkeypatch), Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async def call() -> None:
            async with job.dispatch(f"probe:{job.id}") as key:
                await provider.call(key)

        calling = asyncio.create_task(call())
        await slow.gate.handler_came()
        for _ in range(times):
            calling.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        slow.gate.go_on.set()
        with contextlib.suppress(asyncio.CancelledError):
            await calling
        await asyncio.wait_for(asyncio.Event().wait(), 3)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(timeout_seconds=0.5))
        job = await until(jobs.service, handle.id, JobStatus.TIMED_OUT, timeout=5)
    assert (handler.calls, provider.keys) == (1, [])
    assert job.dispatched_at is not None
    assert await trail(jobs.service, job.id) == [CLAIMED, DISPATCHED, EventName.TIMED_OUT]


async def test_no_interrupt_comes_between_the_mark_and_the_handler(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time runs out while the mark is under way: it ends the attempt only once the row knows of the boundary."""
    slow, provider = SlowMark(monkeypatch), Provider()
    after = asyncio.Event()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            await provider.call(key)
            after.set()
            await for_ever()

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(timeout_seconds=0.3))
        await slow.gate.handler_came()
        await asyncio.sleep(0.6)
        assert await handle.status() is JobStatus.CLAIMED
        slow.gate.go_on.set()
        await after.wait()
        job = await until(jobs.service, handle.id, JobStatus.TIMED_OUT)
    assert provider.keys == [f"probe:{job.id}"]


async def test_nothing_is_dispatched_after_the_attempt_has_ended(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """A handler that swallows its interruption goes on, and is stopped at the boundary."""
    provider, stopped = Provider(), asyncio.Event()
    refusals = []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        with contextlib.suppress(asyncio.CancelledError):
            await for_ever()
        try:
            async with job.dispatch(f"probe:{job.id}") as key:
                return await provider.call(key)
        except LeaseLost as error:
            refusals.append(error.code)
            raise
        finally:
            stopped.set()

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(timeout_seconds=0.3, max_attempts=1))
        await until(jobs.service, handle.id, JobStatus.DEAD_LETTER)
        await stopped.wait()
    assert (provider.keys, refusals) == ([], ["LEASE_LOST"])
