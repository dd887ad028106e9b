"""One job per idempotency key, for as long as the row is kept: whatever became of it, and of its workflow."""

import asyncio
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DeleteWorkflowExecutionRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from durable_jobs import (
    DurableJobs,
    DurableJobService,
    HaltUnsafe,
    JobContext,
    JobError,
    JobFailed,
    JobHandle,
    JobSpec,
    JobStatus,
)
from durable_jobs.contract.states import SETTLED, TERMINAL
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.probes import Probe, eventually, for_ever, until, workflow_status


class Endings(Probe):
    """Ends each job as its payload says, and counts the calls of each."""

    def __init__(self) -> None:
        super().__init__(self._end)
        self.calls_of: Counter[UUID] = Counter()

    async def _end(self, job: JobContext, request: dict[str, Any]) -> Any:
        self.calls_of[job.id] += 1
        match request["end"]:
            case "failed":
                raise JobFailed("no", retryable=False)
            case "dead_letter":
                raise ValueError("broke")
            case "halt_unsafe":
                raise HaltUnsafe("stop")
            case "indeterminate":
                async with job.dispatch(f"probe:{job.id}"):
                    raise ValueError("broke")
            case "timed_out":
                async with job.dispatch(f"probe:{job.id}"):
                    await for_ever()
        return {}


def ending(spec: Specs, status: JobStatus) -> JobSpec:
    """The request of a job that ends in `status`; a cancelled one never ran."""
    later = datetime.now(UTC) + timedelta(hours=1) if status is JobStatus.CANCELLED else None
    return spec(payload={"end": str(status)}, max_attempts=1, timeout_seconds=1, scheduled_at=later)


async def forgotten_by_temporal(client: Client, job_id: UUID) -> None:
    """Delete the job's workflow, as Temporal's retention does."""
    execution = WorkflowExecution(workflow_id=workflow_id(job_id))
    request = DeleteWorkflowExecutionRequest(namespace=client.namespace, workflow_execution=execution)
    await client.workflow_service.delete_workflow_execution(request)

    async def gone() -> bool:
        try:
            await client.get_workflow_handle(workflow_id(job_id)).describe()
        except RPCError as error:
            return error.status is RPCStatusCode.NOT_FOUND
        return False

    await eventually(gone, "the end of the retention")


async def created_again(jobs: DurableJobs, spec: Specs, request: JobSpec) -> JobHandle:
    handle = await jobs.create_job(request)
    # Another job, run after it on the same queue: a second run of the first would have come before.
    sentinel = await jobs.create_job(spec(payload={"end": "completed"}))
    await sentinel.result(timeout=20)
    return handle


@pytest.mark.parametrize("status", sorted(TERMINAL))
async def test_created_again_after_its_end(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client, status: JobStatus
) -> None:
    """Case 26 of the catalogue, of the kind "duplicate effects": the same job each time, and no second run."""
    handler, request = Endings(), ending(spec, status)
    async with worker(handler):
        first = await jobs.create_job(request)
        if status is JobStatus.CANCELLED:
            assert await first.cancel("not wanted", "ann") == "cancelled"
        job = await until(jobs.service, first.id, status)
        calls = handler.calls_of[first.id]
        assert calls == (0 if status is JobStatus.CANCELLED else 1)

        again = await created_again(jobs, spec, request)
        assert (again.id, again.created) == (first.id, False)
        assert handler.calls_of[first.id] == calls

        if not status.is_settled:
            # Somebody may await its truth: its workflow is made again, and only waits.
            await forgotten_by_temporal(temporal_client, first.id)
            again = await created_again(jobs, spec, request)
            assert (again.id, again.created) == (first.id, False)
            assert handler.calls_of[first.id] == calls
            assert await workflow_status(temporal_client, first.id) is WorkflowExecutionStatus.RUNNING
        after = await first.job()
    assert (after.status, after.lease_generation, after.finished_at) == (
        status,
        job.lease_generation,
        job.finished_at,
    )


async def test_created_again_after_temporals_retention(
    jobs: DurableJobs, service: DurableJobService, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    """Case 26 of the catalogue, of the kind "duplicate effects": no workflow is known of a settled job.

    The rows are made without Temporal, which comes to the same: the dev server takes half a minute to delete the
    workflow of a settled job.
    """
    requests = {status: ending(spec, status) for status in sorted(SETTLED)}
    ids = {}
    for status, request in requests.items():
        ids[status] = (await service.create_job(request)).job.id
        if status is JobStatus.CANCELLED:
            await service.cancel_job(ids[status], "not wanted", "ann")
            continue
        claimed = await service.claim_job("a worker", uuid4(), job_id=ids[status])
        assert claimed is not None
        assert claimed.claim is not None
        if status is JobStatus.COMPLETED:
            await service.complete_job(claimed.claim, {})
        elif status is JobStatus.HALT_UNSAFE:
            await service.mark_halt_unsafe(claimed.claim, JobError.of("STOP", "stop"))
        else:
            retryable = status is JobStatus.DEAD_LETTER
            await service.fail_job(claimed.claim, JobError.of("NO", "no"), retryable=retryable)
    handler = Endings()
    async with worker(handler):
        for status, request in requests.items():
            again = await created_again(jobs, spec, request)
            assert (again.id, again.created) == (ids[status], False)
            assert await again.status() is status
            with pytest.raises(RPCError, match="not found"):
                await workflow_status(temporal_client, again.id)
    assert [handler.calls_of[job_id] for job_id in ids.values()] == [0] * len(ids)


async def dead_client() -> Client:
    """A client of a Temporal server that isn't there."""
    return await Client.connect("127.0.0.1:1", lazy=True)


async def test_created_with_temporal_away_from_the_start(
    jobs: DurableJobs, service: DurableJobService, worker: Workers, spec: Specs
) -> None:
    """The job is accepted with its row; the next `create_job` with its key starts it."""
    request = spec(payload={"end": "completed"})
    away = DurableJobs(service, Launcher(await dead_client()))
    async with asyncio.timeout(15):
        handle = await away.create_job(request)
    assert handle.created
    assert await handle.status() is JobStatus.QUEUED
    handler = Endings()
    async with worker(handler):
        again = await jobs.create_job(request)
        assert (again.id, again.created) == (handle.id, False)
        assert await again.result(timeout=20) == {}
    assert handler.calls == 1


async def test_created_while_temporal_is_away(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, handler = spec(payload={"end": "completed"}), Endings()

    async def unavailable(*arguments: Any, **named: Any) -> Any:
        raise RPCError("the server went away", RPCStatusCode.UNAVAILABLE, b"")

    async with worker(handler):
        with monkeypatch.context() as patched:
            patched.setattr(Client, "start_workflow", unavailable)
            handle = await jobs.create_job(request)
            assert not await handle.launch()
        assert (handle.created, await handle.status()) == (True, JobStatus.QUEUED)
        again = await jobs.create_job(request)
        assert again.id == handle.id
        assert await handle.result(timeout=20) == {}
    assert handler.calls == 1


async def test_a_batch_created_while_temporal_is_away(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, handler = [spec(payload={"end": "completed"}) for _ in range(3)], Endings()

    async def unavailable(*arguments: Any, **named: Any) -> Any:
        raise RPCError("the server went away", RPCStatusCode.UNAVAILABLE, b"")

    async with worker(handler):
        with monkeypatch.context() as patched:
            patched.setattr(Client, "start_workflow", unavailable)
            handles = await jobs.create_jobs(requests)
        again = await jobs.create_jobs(requests)
        assert [handle.id for handle in again] == [handle.id for handle in handles]
        assert [await handle.result(timeout=20) for handle in handles] == [{}] * 3
    assert handler.calls == 3


async def test_launched_late_it_starts_when_due(
    jobs: DurableJobs, service: DurableJobService, worker: Workers, spec: Specs
) -> None:
    """Its delay counts from now, not from its creation: a job that is overdue starts at once."""
    due = datetime.now(UTC) + timedelta(seconds=2)
    request = spec(payload={"end": "completed"}, scheduled_at=due)
    await service.create_job(request)  # committed, and not launched
    await asyncio.sleep((due - datetime.now(UTC)).total_seconds() + 0.1)
    async with worker(Endings()):
        handle = await jobs.create_job(request)
        await handle.result(timeout=1.5)


async def test_launched_again_in_its_backoff_it_starts_when_due(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    """A workflow that was terminated is launched again for the time that the row says."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt == 1:
            await asyncio.sleep(3)
            raise ValueError("broke")
        return {"attempt": job.attempt}

    request = spec(backoff_base_seconds=0.5)
    async with worker(Probe(script)):
        handle = await jobs.create_job(request)

        async def backing_off() -> bool:
            job = await handle.job()
            return job.status is JobStatus.QUEUED and job.attempt_count == 1

        await eventually(backing_off, "the backoff")
        await temporal_client.get_workflow_handle(workflow_id(handle.id)).terminate()
        again = await jobs.create_job(request)
        assert await again.result(timeout=2.5) == {"attempt": 2}


async def test_a_row_of_the_callers_own_transaction_is_launched_after_its_commit(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    handler = Endings()
    try:
        async with worker(handler):
            async with engine.begin() as connection:
                handle = await jobs.create_job(spec(payload={"end": "completed"}), connection=connection)
                assert handle.created
                assert handler.calls == 0
            assert await handle.launch()
            assert await handle.result(timeout=20) == {}
    finally:
        await engine.dispose()
    assert handler.calls == 1
