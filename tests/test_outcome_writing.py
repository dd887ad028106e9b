"""An outcome is written through an absent database, under the same generation, until the lease is gone."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from durable_jobs import DurableJobs, DurableJobService, EventName, HaltUnsafe, JobContext, JobFailed, JobStatus
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.contract.models import Claim
from durable_jobs.dev import DevStack
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, Provider, eventually, history_of, outage, take_over, trail, until, until_workflow

CLAIMED, DISPATCHED, COMPLETED = EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED

both_losses = pytest.mark.parametrize("committed", [False, True], ids=["it did not arrive", "its reply was lost"])


class Unreliable:
    """Makes a verb raise `StoreUnavailable` the first `failures` times, before or after it was committed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verb: str, *, committed: bool, failures: float) -> None:
        self.calls = 0
        real = getattr(DurableJobService, verb)

        async def unreliable(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls > failures:
                return await real(*arguments, **named)
            if committed and self.calls == 1:
                await real(*arguments, **named)
            raise StoreUnavailable("the connection broke")

        monkeypatch.setattr(DurableJobService, verb, unreliable)


@both_losses
async def test_a_completion(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    temporal_client: Client,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
) -> None:
    """Case 40 of the catalogue, of the kind "Postgres": outcomes are retried with the same generation."""
    complete, provider = Unreliable(monkeypatch, "complete_job", committed=committed, failures=3), Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())

        async def written() -> bool:
            return complete.calls == 4

        await eventually(written, "the fourth try")
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
    assert await trail(jobs.service, handle.id) == [CLAIMED, DISPATCHED, COMPLETED]
    # The attempt knows its own success, whether it was told or not.
    assert "ACTIVITY_TASK_FAILED" not in await history_of(temporal_client, handle.id)
    job = await handle.job()
    assert (handler.calls, provider.keys, job.lease_generation) == (1, [f"probe:{job.id}"], 1)


async def _no(job: JobContext) -> Any:
    raise JobFailed("the provider said no", retryable=False)


async def _halt(job: JobContext) -> Any:
    raise HaltUnsafe("never again")


async def _nothing(job: JobContext) -> Any:
    return {"text": "\x00"}


@both_losses
@pytest.mark.parametrize(
    ("verb", "then", "status"),
    [
        ("fail_job", _no, JobStatus.FAILED),
        ("mark_halt_unsafe", _halt, JobStatus.HALT_UNSAFE),
        ("mark_indeterminate", _nothing, JobStatus.INDETERMINATE),
    ],
)
async def test_an_unsuccessful_ending(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    monkeypatch: pytest.MonkeyPatch,
    committed: bool,
    verb: str,
    then: Callable[[JobContext], Awaitable[Any]],
    status: JobStatus,
) -> None:
    unreliable = Unreliable(monkeypatch, verb, committed=committed, failures=2)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            return await then(job)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, status)
    assert unreliable.calls == 3
    assert (handler.calls, job.lease_generation) == (1, 1)
    assert await trail(jobs.service, job.id) == [CLAIMED, DISPATCHED, EventName(status)]


@both_losses
async def test_a_failure_that_goes_back_to_the_queue(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    """With its reply lost the job is queued already: it must not be failed a second time, nor run twice."""
    unreliable = Unreliable(monkeypatch, "fail_job", committed=committed, failures=2)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt == 1:
            raise ValueError("broke")
        async with job.dispatch(f"probe:{job.id}") as key:
            return {"sent": key}

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(backoff_base_seconds=0.05))
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert (handler.calls, unreliable.calls) == (2, 3)
    assert await trail(jobs.service, handle.id) == [CLAIMED, EventName.RETRIED, CLAIMED, DISPATCHED, COMPLETED]


@pytest.mark.parametrize("crossed", [False, True], ids=["before the marker", "after it"])
async def test_given_up_when_the_lease_is_gone(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    crossed: bool,
) -> None:
    tried: list[int] = []
    real = DurableJobService.complete_job

    async def unreliable(service: DurableJobService, claim: Claim, *arguments: Any, **named: Any) -> Any:
        tried.append(claim.generation)
        if claim.generation == 1:
            raise StoreUnavailable("the connection broke")
        return await real(service, claim, *arguments, **named)

    monkeypatch.setattr(DurableJobService, "complete_job", unreliable)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if crossed:
            async with job.dispatch(f"probe:{job.id}"):
                pass
        return {"generation": job.generation}

    async with worker(Probe(script), grace_seconds=60):
        handle = await jobs.create_job(spec(lease_seconds=1.5))

        async def again() -> bool:
            return len(tried) >= 2

        await eventually(again, "a second try")
        other = await take_over(jobs.service, database_url, handle.id)
        if not crossed:
            assert other.claim is not None
            assert await handle.result(timeout=20) == {"generation": 3}
        leaving = time.monotonic()
    # An attempt that went on trying would have held the worker for its grace.
    assert time.monotonic() - leaving < 10
    job = await handle.job()
    attempts = (await jobs.service.list_job_attempts(job.id)).items
    if crossed:
        assert job.error is not None
        assert (job.status, job.error.code) == (JobStatus.INDETERMINATE, "LEASE_EXPIRED_AFTER_DISPATCH")
        assert [attempt.outcome for attempt in attempts] == ["lease_expired", JobStatus.INDETERMINATE]
        assert await trail(jobs.service, job.id) == [CLAIMED, DISPATCHED, EventName.INDETERMINATE]
    else:
        assert [attempt.outcome for attempt in attempts] == ["lease_expired", "lease_expired", JobStatus.COMPLETED]
        assert await trail(jobs.service, job.id) == [CLAIMED, CLAIMED, CLAIMED, COMPLETED]


async def test_every_slot_through_an_outage(
    jobs: DurableJobs, worker: Workers, spec: Specs, durable_jobs_stack: DevStack, database_url: str
) -> None:
    """Case 40 of the catalogue, of the kind "Postgres": the database goes away just as all slots write outcomes."""
    provider, gate, at_work = Provider(), Gate(), asyncio.Semaphore(0)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            await provider.call(key)
            at_work.release()
            await gate.wait()
            return {"sent": key}

    handler = Probe(script)
    async with worker(handler):
        handles = await jobs.create_jobs([spec() for _ in range(8)])
        for _ in handles:
            await asyncio.wait_for(at_work.acquire(), 20)
        with outage(durable_jobs_stack.database_url, database_url):
            gate.go_on.set()
            await asyncio.sleep(2)
        results = await asyncio.gather(*(handle.result(timeout=30) for handle in handles))
    assert results == [{"sent": f"probe:{handle.id}"} for handle in handles]
    for handle in handles:
        assert await trail(jobs.service, handle.id) == [CLAIMED, DISPATCHED, COMPLETED]
        assert (await handle.job()).lease_generation == 1
    assert sorted(provider.keys) == sorted(f"probe:{handle.id}" for handle in handles)


async def test_an_outage_that_outlasts_the_lease(
    jobs: DurableJobs, worker: Workers, spec: Specs, durable_jobs_stack: DevStack, database_url: str
) -> None:
    """Past the boundary the row says indeterminate, for reconciliation to find the result; before it, it runs again."""
    provider, gate, at_work = Provider(), Gate(), asyncio.Semaphore(0)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if request["crosses"] or job.attempt > 1:
            async with job.dispatch(f"probe:{job.id}") as key:
                await provider.call(key)
                at_work.release()
                await gate.wait()
                return {"attempt": job.attempt}
        at_work.release()
        await gate.wait()
        return {"attempt": job.attempt}

    async with worker(Probe(script)):
        crossed = await jobs.create_job(spec(lease_seconds=1, payload={"crosses": True}))
        undispatched = await jobs.create_job(spec(lease_seconds=1, payload={"crosses": False}))
        for _ in range(2):
            await asyncio.wait_for(at_work.acquire(), 20)
        with outage(durable_jobs_stack.database_url, database_url):
            gate.go_on.set()
            await asyncio.sleep(3)
        job = await until(jobs.service, crossed.id, JobStatus.INDETERMINATE, timeout=40)
        assert await undispatched.result(timeout=40) == {"attempt": 2}
    assert job.error is not None
    assert job.error.code == "LEASE_EXPIRED_AFTER_DISPATCH"
    assert sorted(provider.keys) == sorted([f"probe:{crossed.id}", f"probe:{undispatched.id}"])
