"""A job whose type, or whose tenant, no worker of its queue hosts: it waits, costs nothing, and reaches an operator."""

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from durable_jobs import DurableJobs, DurableJobService, EventName, Job, JobContext, JobStatus
from durable_jobs.client import JobHandle
from durable_jobs.temporal.listener import EnqueueListener
from tests.conftest import Specs, Workers
from tests.probes import Probe, eventually, workflow_status
from tests.support import claimed, expire, names, sql
from tests.sweeping import NEVER

WITHIN, BEYOND = timedelta(minutes=14, seconds=30), timedelta(minutes=15, seconds=30)


@pytest.fixture(autouse=True)
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hears of nothing that was enqueued in SQL."""
    monkeypatch.setattr(EnqueueListener, "start", lambda self: None)


class Other(Probe):
    """Hosts another type."""

    job_type = "other"


async def returns(job: JobContext, request: dict[str, Any]) -> Any:
    return {"attempt": job.attempt, "generation": job.generation}


async def due_for(service: DurableJobService, job_id: UUID, waited: timedelta) -> None:
    """Let the job have been due for so long."""
    await sql(
        service,
        "UPDATE durable_jobs.jobs SET created_at = created_at - %(waited)s, scheduled_at = scheduled_at - %(waited)s"
        " WHERE id = %(id)s",
        id=job_id,
        waited=waited,
    )


async def looks(client: Client, handle: JobHandle) -> int:
    """How many attempts of the job's workflow have ended, so far."""
    history = await client.get_workflow_handle(handle.workflow_id).fetch_history()
    return sum(each.HasField("activity_task_completed_event_attributes") for each in history.events)


async def looked_again(client: Client, handle: JobHandle) -> None:
    """Have the workflow look at once, and return when it has."""
    before = await looks(client, handle)
    await handle.wake()

    async def look() -> bool:
        return await looks(client, handle) > before

    await eventually(look, "the workflow looks again")


STRANGERS: dict[str, Any] = {
    "another type": (lambda: Other(returns), {}),
    "other tenants": (lambda: Probe(returns), {"organizations": ["globex", "initech"]}),
}


@pytest.mark.parametrize(("stranger", "scope"), STRANGERS.values(), ids=STRANGERS)
async def test_what_is_not_hosted_reaches_an_operator_and_then_its_worker(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, stranger: Any, scope: dict[str, Any]
) -> None:
    told: list[Job] = []
    handler = stranger()
    async with worker(handler, reconcile_every=NEVER, on_escalation=told.append, **scope):
        handle = await jobs.create_job(spec())
        await due_for(jobs.service, handle.id, WITHIN)
        await looked_again(temporal_client, handle)
        assert (await handle.job()).escalated_at is None
        await due_for(jobs.service, handle.id, BEYOND - WITHIN)
        for _ in range(2):
            await looked_again(temporal_client, handle)
        job = await handle.job()
        assert (job.status, job.attempt_count, job.lease_generation) == (JobStatus.QUEUED, 0, 0)
        assert job.escalation_reason is not None
        assert job.escalation_reason.startswith("NOT_HOSTED: ")
        assert repr("probe") in job.escalation_reason
        # A worker's hook hears of the jobs of the tenants that it hosts.
        heard = [] if scope else [(job.id, job.escalated_at)]
        assert [(each.id, each.escalated_at) for each in told] == heard
        (event,) = await handle.events()
        assert (event.name, event.status, event.data["reason"]) == (
            EventName.ESCALATED,
            JobStatus.QUEUED,
            job.escalation_reason,
        )
        assert await workflow_status(temporal_client, handle.id) is WorkflowExecutionStatus.RUNNING
        assert (await jobs.service.list_job_attempts(handle.id)).items == []
    async with worker(Probe(returns), reconcile_every=NEVER, on_escalation=told.append):
        await handle.wake()
        assert await handle.result(timeout=20) == {"attempt": 1, "generation": 1}
    job = await handle.job()
    assert (job.escalated_at, job.escalation_reason) == (None, None)
    trail = await names(jobs.service, job.id)
    assert trail == [EventName.ESCALATED, EventName.CLAIMED, EventName.HEARTBEAT, EventName.COMPLETED]
    assert (len(told), handler.calls) == (0 if scope else 1, 0)


async def test_the_time_counts_from_when_it_was_due(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs
) -> None:
    """Not from its creation."""
    async with worker(Other(returns), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        await sql(jobs.service, "UPDATE durable_jobs.jobs SET created_at = created_at - interval '1 day'")
        await looked_again(temporal_client, handle)
        assert (await handle.job()).escalated_at is None
    assert await handle.events() == []


async def test_what_is_not_hosted_can_be_cancelled(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs
) -> None:
    async with worker(Other(returns), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        assert await handle.cancel("not wanted", "ann") == "cancelled"

        async def closed() -> bool:
            return await workflow_status(temporal_client, handle.id) is WorkflowExecutionStatus.CANCELED

        await eventually(closed, "its workflow is closed")


async def test_an_expired_lease_of_what_is_not_hosted_reaches_an_operator(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    """Invariant 6. Its worker died before the boundary, and the deploy that followed no longer hosts its type."""
    claim = await claimed(jobs.service, spec())
    await expire(jobs.service, claim.job_id)
    await due_for(jobs.service, claim.job_id, timedelta(hours=1))
    await sql(
        jobs.service,
        "UPDATE durable_jobs.jobs SET updated_at = updated_at - interval '1 hour',"
        " lease_expires_at = lease_expires_at - interval '1 hour'",
    )
    handle = jobs.handle(claim.job_id)
    async with worker(Other(returns), reconcile_every=NEVER):
        await handle.wake()
        await eventually(lambda: looks(temporal_client, handle), "the workflow has looked")
        await jobs.sweep(queue)
    job = await handle.job()
    assert job.escalated_at is not None or job.status is JobStatus.DEAD_LETTER
