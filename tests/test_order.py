"""How a job's priority, organization and schedule reach Temporal."""

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus

from durable_jobs import DurableJobs, JobContext, JobStatus
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.probes import Probe, trail, until_workflow


async def returns(job: JobContext, request: dict[str, Any]) -> Any:
    return {}


async def first_event(client: Client, job_id: Any) -> Any:
    history = await client.get_workflow_handle(workflow_id(job_id)).fetch_history()
    return history.events[0].workflow_execution_started_event_attributes


async def test_priority(jobs: DurableJobs, spec: Specs, temporal_client: Client) -> None:
    keys = {}
    for priority in range(-2, 3):
        handle = await jobs.create_job(spec(priority=priority))
        started = await first_event(temporal_client, handle.id)
        keys[priority] = started.priority.priority_key
    assert keys == {-2: 5, -1: 4, 0: 3, 1: 2, 2: 1}


async def test_the_attempt_inherits_priority_and_fairness(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    """Of the workflow that schedules it: what waits in the queue behind saturated slots is the activity."""
    async with worker(Probe(returns)):
        handle = await jobs.create_job(spec(priority=2))
        await handle.result(timeout=20)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
    history = await temporal_client.get_workflow_handle(workflow_id(handle.id)).fetch_history()
    (scheduled,) = [
        event.activity_task_scheduled_event_attributes
        for event in history.events
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
    ]
    started = await first_event(temporal_client, handle.id)
    assert (started.priority.priority_key, started.priority.fairness_key) == (1, "acme")
    # Unset on the activity is inherited.
    assert scheduled.priority.priority_key in (0, 1)
    assert scheduled.priority.fairness_key in ("", "acme")


async def test_fairness_among_organizations(jobs: DurableJobs, spec: Specs, temporal_client: Client) -> None:
    """Temporal takes keys of 64 bytes: a longer name enters as its digest."""
    long = "a" + "/long.name_:-" * 9
    wanted = {name: name for name in ("acme", "o" * 64)}
    wanted |= {name: hashlib.sha256(name.encode()).hexdigest() for name in ("o" * 65, long)}
    keys = {}
    for organization in wanted:
        handle = await jobs.create_job(spec(organization=organization))
        started = await first_event(temporal_client, handle.id)
        keys[organization] = started.priority.fairness_key
    assert keys == wanted


async def test_a_future_schedule_is_a_start_delay(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    due = datetime.now(UTC) + timedelta(seconds=1.5)
    handler = Probe(returns)
    async with worker(handler):
        handle = await jobs.create_job(spec(scheduled_at=due))
        started = await first_event(temporal_client, handle.id)
        delay = started.first_workflow_task_backoff.ToTimedelta()
        job = await handle.job()
        assert abs(delay - (job.scheduled_at - job.created_at)) < timedelta(milliseconds=5)
        await handle.result(timeout=20)
    (attempt,) = (await jobs.service.list_job_attempts(handle.id)).items
    assert attempt.claimed_at >= due
    # Nothing happened before: the workflow slept in Temporal, with no task and no look at the row.
    history = await temporal_client.get_workflow_handle(workflow_id(handle.id)).fetch_history()
    assert EventType.EVENT_TYPE_TIMER_STARTED not in [event.event_type for event in history.events]


async def test_a_wake_reaches_a_workflow_in_its_start_delay(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    """Signal-with-start does, where a plain signal would wait for the schedule."""
    handler = Probe(returns)
    async with worker(handler):
        handle = await jobs.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
        assert await handle.cancel("not wanted", "ann") == "cancelled"
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)
    assert handler.calls == 0


async def test_a_wake_before_the_schedule_runs_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    handler = Probe(returns)
    async with worker(handler):
        handle = await jobs.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(seconds=2)))
        for _ in range(3):
            assert await handle.wake()
            await asyncio.sleep(0.2)
        assert await handle.status() is JobStatus.QUEUED
        assert await trail(jobs.service, handle.id) == []
        await handle.result(timeout=20)
    job = await handle.job()
    assert (handler.calls, job.attempt_count, job.lease_generation) == (1, 1, 1)
    assert job.started_at is not None
    assert job.started_at >= job.scheduled_at


async def test_a_schedule_in_the_past_is_now(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async with worker(Probe(returns)):
        handle = await jobs.create_job(spec(scheduled_at=datetime(2020, 1, 1, tzinfo=UTC)))
        assert await handle.result(timeout=10) == {}


async def test_what_the_temporal_ui_shows(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    async with worker(Probe(returns)):
        handle = await jobs.create_job(spec())
        await handle.result(timeout=20)
    described = await temporal_client.get_workflow_handle(workflow_id(handle.id)).describe()
    assert await described.static_summary() == "probe · acme/alpha"
    assert described.task_queue == (await handle.job()).queue
    assert described.workflow_type == "DurableJob"
