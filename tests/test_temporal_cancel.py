"""A workflow cancelled from Temporal, as its UI does: in each phase of the job it becomes `cancel_job`."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from durable_jobs import DurableJobs, EventName, JobContext, JobHandle, JobStatus
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, Provider, eventually, execute, noticed, trail, until, until_workflow


async def cancel_in_temporal(client: Client, handle: JobHandle) -> None:
    await client.get_workflow_handle(workflow_id(handle.id)).cancel()


async def returns(job: JobContext, request: dict[str, Any]) -> Any:
    return {}


async def test_while_scheduled_for_later(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    handler = Probe(returns)
    async with worker(handler):
        handle = await jobs.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
        await cancel_in_temporal(temporal_client, handle)
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED, timeout=5)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)
    assert (job.cancel_actor, handler.calls, job.lease_generation) == ("temporal", 0, 0)
    assert await trail(jobs.service, job.id) == [EventName.CANCELLED]


async def test_while_backing_off(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client, database_url: str
) -> None:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        raise ValueError("broke")

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(backoff_base_seconds=3600))

        async def backing_off() -> bool:
            return EventName.RETRIED in await trail(jobs.service, handle.id)

        await eventually(backing_off, "the backoff")
        await cancel_in_temporal(temporal_client, handle)
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)
    assert (job.cancel_actor, handler.calls) == ("temporal", 1)
    audit = "SELECT action, actor FROM durable_jobs.control_events WHERE job_id = %s"
    assert execute(database_url, audit, job.id) == [("cancel", "temporal")]


async def test_while_no_worker_hosts_it(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    handler = Probe(returns)
    async with worker(handler):
        handle = await jobs.create_job(spec(job_type="unknown"))
        await cancel_in_temporal(temporal_client, handle)
        await until(jobs.service, handle.id, JobStatus.CANCELLED)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)
    assert handler.calls == 0


async def test_before_the_boundary(jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client) -> None:
    gate, provider = Gate(), Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        await cancel_in_temporal(temporal_client, handle)
        await until(jobs.service, handle.id, JobStatus.CANCELLED)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)
    assert provider.keys == []
    assert await trail(jobs.service, handle.id) == [EventName.CLAIMED, EventName.CANCELLED]


async def test_past_the_boundary(jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client) -> None:
    """The handler is told, not interrupted: its result still completes the job, and the workflow is Completed."""
    gate, provider = Gate(), Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            answer = await provider.call(key)
            gate.reached.set()
            await noticed(lambda: job.cancel_requested)
            return answer

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        await cancel_in_temporal(temporal_client, handle)
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
    job = await handle.job()
    assert (job.status, job.cancel_actor) == (JobStatus.COMPLETED, "temporal")
    assert provider.keys == [f"probe:{job.id}"]


@pytest.mark.parametrize("asked", [1, 2], ids=["once", "twice"])
async def test_while_indeterminate(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client, database_url: str, asked: int
) -> None:
    """It has ended for workers already: the workflow stays Running until the truth is known, and ends by that."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            raise ValueError("broke")

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
        for _ in range(asked):
            await cancel_in_temporal(temporal_client, handle)

        async def answered() -> Any:
            audit = "SELECT data ->> 'reply' FROM durable_jobs.control_events WHERE job_id = %s AND action = 'cancel'"
            return execute(database_url, audit, handle.id)

        assert await eventually(answered, "the reply") == [("already_terminal:indeterminate",)]
        description = await temporal_client.get_workflow_handle(workflow_id(handle.id)).describe()
        assert description.status is WorkflowExecutionStatus.RUNNING
        await handle.resolve(JobStatus.COMPLETED, {"seen": "on the invoice"}, "ann", result={"found": True})
        assert await handle.result(timeout=20) == {"found": True}
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)


async def test_together_with_the_row(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client, database_url: str
) -> None:
    """The product's cancel first, then Temporal's: the first request stands, and the workflow ends Canceled."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        assert await handle.cancel("not wanted", "ann") == "requested"
        await cancel_in_temporal(temporal_client, handle)
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)
    assert (job.cancel_actor, job.cancel_reason) == ("ann", "not wanted")


@pytest.mark.parametrize("reason", [" ", "\x00", "x" * 5000])
async def test_with_a_reason_that_no_row_can_hold(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client, reason: str
) -> None:
    """Whoever cancels there types what he likes: the job is cancelled, and its workflow ends."""
    handler = Probe(returns)
    async with worker(handler):
        handle = await jobs.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
        await temporal_client.get_workflow_handle(workflow_id(handle.id)).cancel(reason=reason)
        job = await until(jobs.service, handle.id, JobStatus.CANCELLED)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)
    assert job.cancel_reason
    assert len(job.cancel_reason) <= 2048
