"""Waiting for the end of an operation that a provider has accepted: `Sent.result`, inside a real job."""

import asyncio
from typing import Any

import pytest

from durable_jobs import DurableJobs, JobContext, JobError, JobStatus, ProviderState
from durable_jobs.contract.states import EventName
from durable_jobs.providers import LOOKS, NotVisibleYet, Sent
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, noticed, outage, take_over, until
from tests.sweeping import NEVER

RESULT = {"total": 7}
LANDED: ProviderState[dict[str, int]] = ProviderState.succeeded(RESULT)
PENDING: ProviderState[dict[str, int]] = ProviderState.pending()


class Operation:
    """An operation whose looks go as a test says; the last of them for ever."""

    def __init__(self, *looks: ProviderState[dict[str, int]] | Exception) -> None:
        self.looks = list(looks)
        self.count = 0

    async def look(self) -> ProviderState[dict[str, int]]:
        self.count += 1
        answer = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def run(self, job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            sent = Sent("operation-1", self.look)
        return await sent.result(job, longest_poll=0.01)


async def waiting_for(jobs: DurableJobs, job_id: Any) -> list[Any]:
    """What the job's heartbeats say that it waits for."""
    events = (await jobs.service.list_job_events(job_id)).items
    beats = [event.data.get("waiting_for") for event in events if event.name is EventName.HEARTBEAT]
    return [beat for beat in beats if beat is not None]


async def test_what_has_ended_is_not_waited_for(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    operation = Operation(LANDED)
    async with worker(Probe(operation.run), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == RESULT
    assert operation.count == 1
    assert await waiting_for(jobs, handle.id) == []


async def test_a_wait_leaves_one_heartbeat_for_many_looks(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    operation = Operation(*[PENDING] * 20, LANDED)
    async with worker(Probe(operation.run), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == RESULT
    assert operation.count == 21
    assert await waiting_for(jobs, handle.id) == ["operation-1"]


ENDS: dict[str, tuple[list[Any], JobStatus, str]] = {
    "failed": ([PENDING, ProviderState.failed(JobError.of("NO_FUNDS", "no"))], JobStatus.FAILED, "NO_FUNDS"),
    "absent": ([PENDING, ProviderState.absent()], JobStatus.INDETERMINATE, "HANDLER_ERROR"),
    "unknown": ([PENDING, ProviderState.unknown("gone")], JobStatus.INDETERMINATE, "HANDLER_ERROR"),
    "looks that fail": ([NotVisibleYet("not yet")], JobStatus.INDETERMINATE, "HANDLER_ERROR"),
}


@pytest.mark.parametrize(("looks", "status", "code"), ENDS.values(), ids=ENDS)
async def test_how_a_wait_ends_without_a_result(
    jobs: DurableJobs, worker: Workers, spec: Specs, looks: list[Any], status: JobStatus, code: str
) -> None:
    """By the provider's word the job failed; without it nobody knows."""
    operation = Operation(*looks)
    async with worker(Probe(operation.run), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, status)
    assert job.error is not None
    assert job.error.code == code


async def test_looks_that_fail_are_repeated_while_one_in_five_succeeds(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    broken = [ConnectionError("reset by peer")] * (LOOKS - 1)
    operation = Operation(*broken, PENDING, *broken, LANDED)
    async with worker(Probe(operation.run), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == RESULT
    assert operation.count == 2 * LOOKS


async def test_a_wait_goes_on_without_the_database(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str, durable_jobs_stack: Any
) -> None:
    """The heartbeat that finds it away is left out."""
    gate = Gate()
    operation = Operation(PENDING, LANDED)

    async def run(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            sent = Sent("operation-1", operation.look)
        await gate.wait()
        return await sent.result(job, longest_poll=0.01)

    async with worker(Probe(run), reconcile_every=NEVER):
        handle = await jobs.create_job(spec(lease_seconds=60))
        await gate.handler_came()
        with outage(durable_jobs_stack.database_url, database_url):
            gate.go_on.set()
            await noticed(lambda: operation.count >= 2)
        assert await handle.result(timeout=30) == RESULT


async def test_a_wait_ends_when_the_lease_is_lost(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """Else it would go on until the job's own time limit, for nobody."""
    gate = Gate()
    operation = Operation(PENDING)
    ended = asyncio.Event()

    async def run(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            sent = Sent("operation-1", operation.look)
        await gate.wait()
        try:
            return await sent.result(job, longest_poll=0.01)
        finally:
            ended.set()

    async with worker(Probe(run), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
        await take_over(jobs.service, database_url, handle.id)
        gate.go_on.set()
        async with asyncio.timeout(20):
            await ended.wait()
        assert (await jobs.service.get_job(handle.id)).status is JobStatus.INDETERMINATE
    assert operation.count == 1
