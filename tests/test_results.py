"""What a `JobHandle` tells of every ending, and how each ending looks in Temporal."""

import asyncio
import gc
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from durable_jobs import DurableJobs, DurableJobService, EventName, HaltUnsafe, JobContext, JobFailed, JobStatus
from durable_jobs.contract.errors import (
    DurableJobsError,
    JobCancelledError,
    JobDeadLetteredError,
    JobFailedError,
    JobHaltedError,
    JobNotFound,
    JobOutcomeError,
    ResultTimeout,
)
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, Provider, for_ever, trail, until, until_workflow, workflow_status


def raising(error: Exception) -> Probe:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        raise error

    return Probe(script)


async def returns(job: JobContext, request: dict[str, Any]) -> Any:
    return {"n": request["n"]}


@pytest.mark.parametrize(
    ("error", "kind", "status", "code"),
    [
        (JobFailed("the card is void", retryable=False, code="VOID"), JobFailedError, JobStatus.FAILED, "VOID"),
        (ValueError("it broke"), JobDeadLetteredError, JobStatus.DEAD_LETTER, "HANDLER_ERROR"),
        (HaltUnsafe("the books differ", code="BOOKS"), JobHaltedError, JobStatus.HALT_UNSAFE, "BOOKS"),
    ],
    ids=["failed", "dead_letter", "halt_unsafe"],
)
async def test_an_unsuccessful_ending(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    temporal_client: Client,
    error: Exception,
    kind: type[JobOutcomeError],
    status: JobStatus,
    code: str,
) -> None:
    async with worker(raising(error)):
        handle = await jobs.create_job(spec(max_attempts=1))
        with pytest.raises(kind) as raised:
            await handle.result(timeout=20)
        told = raised.value
        assert (told.job_id, told.status, told.error_code, told.error_message) == (handle.id, status, code, str(error))
        assert str(told) == f"job {handle.id} ended {status} ({code}: {error})"
        assert isinstance(told, DurableJobsError)
        # In Temporal: Failed, with the code and none of the text.
        workflow = temporal_client.get_workflow_handle(workflow_id(handle.id))
        with pytest.raises(WorkflowFailureError) as closed:
            await workflow.result()
        assert isinstance(closed.value.cause, ApplicationError)
        assert closed.value.cause.type == code
        assert str(error) not in str(await workflow.fetch_history())
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.FAILED)


async def test_cancelled(jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client) -> None:
    async with worker(Probe(returns)):
        handle = await jobs.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
        assert await handle.cancel("not wanted", "ann") == "cancelled"
        with pytest.raises(JobCancelledError) as raised:
            await handle.result(timeout=20)
        assert (raised.value.status, raised.value.error_code, raised.value.error_message) == (
            JobStatus.CANCELLED,
            "CANCELLED",
            "cancelled by ann: not wanted",
        )
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.CANCELED)


async def test_completed(jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client) -> None:
    async with worker(Probe(returns)):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == {"n": 1}
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
        outcome = await temporal_client.get_workflow_handle(workflow_id(handle.id)).result()
    assert outcome == {"job_id": str(handle.id), "status": "completed"}
    assert await handle.status() is JobStatus.COMPLETED
    # Again, by another handle, with no worker at hand.
    assert await jobs.handle(handle.id).result(timeout=5) == {"n": 1}


@pytest.mark.parametrize("status", [JobStatus.INDETERMINATE, JobStatus.TIMED_OUT])
async def test_an_uncertain_job_is_waited_for(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client, status: JobStatus
) -> None:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            if status is JobStatus.TIMED_OUT:
                await for_ever()
            raise ValueError("broke")

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(timeout_seconds=1))
        await until(jobs.service, handle.id, status)
        with pytest.raises(ResultTimeout) as late:
            await handle.result(timeout=0.2)
        assert isinstance(late.value, TimeoutError)
        assert late.value.retryable
        assert await workflow_status(temporal_client, handle.id) is WorkflowExecutionStatus.RUNNING
        waiting = asyncio.create_task(handle.result(timeout=20))
        await asyncio.sleep(0)
        await handle.resolve(JobStatus.FAILED, {"seen": "no such charge"}, "ann")
        with pytest.raises(JobFailedError) as failed:
            await waiting
        assert failed.value.status is JobStatus.FAILED
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.FAILED)


async def test_awaited_before_the_launch(
    jobs: DurableJobs, service: DurableJobService, worker: Workers, spec: Specs
) -> None:
    request = spec()
    created = await service.create_job(request)
    handle = jobs.handle(created.job.id)
    assert not handle.created
    waiting = asyncio.create_task(handle.result(timeout=20))
    async with worker(Probe(returns)):
        await asyncio.sleep(0.7)  # it has looked once, and found no workflow
        assert not waiting.done()
        assert await handle.launch()
        assert await waiting == {"n": 1}
        assert await handle.launch()  # settled: nothing to start


async def test_awaited_through_a_terminated_workflow(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        async with job.dispatch(f"probe:{job.id}") as key:
            return {"sent": key}

    handler, request = Probe(script), spec()
    async with worker(handler):
        handle = await jobs.create_job(request)
        await gate.handler_came()
        waiting = asyncio.create_task(handle.result(timeout=20))
        await asyncio.sleep(0)
        await temporal_client.get_workflow_handle(workflow_id(handle.id)).terminate("an operator's mistake")
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.TERMINATED)
        gate.go_on.set()
        # The row is the authority: the attempt runs on, and its result counts.
        assert await waiting == {"sent": f"probe:{handle.id}"}
    assert handler.calls == 1


async def test_a_terminated_workflow_is_launched_again(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    handler, request = Probe(returns), spec(scheduled_at=datetime.now(UTC) + timedelta(seconds=1.5))
    async with worker(handler):
        handle = await jobs.create_job(request)
        await temporal_client.get_workflow_handle(workflow_id(handle.id)).terminate("an operator's mistake")
        waiting = asyncio.create_task(handle.result(timeout=20))
        again = await jobs.create_job(request)
        assert again.id == handle.id
        assert await waiting == {"n": 1}
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
    assert handler.calls == 1


async def test_after_a_retry(jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client) -> None:
    """A new intent: a new key, a new run of the workflow, and a result that counts."""
    provider, gate = Provider(), Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            await provider.call(key)
            if job.intent == 0:
                raise JobFailed("no", retryable=False)
            await gate.wait()
            return {"sent": key, "attempt": job.attempt}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        with pytest.raises(JobFailedError):
            await handle.result(timeout=20)
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.FAILED)
        await handle.retry("ann", "the card works again")
        await gate.handler_came()
        waiting = asyncio.create_task(handle.result(timeout=20))
        assert await workflow_status(temporal_client, handle.id) is WorkflowExecutionStatus.RUNNING
        gate.go_on.set()
        assert await waiting == {"sent": f"probe:{handle.id}:retry-1", "attempt": 1}
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
    job = await handle.job()
    assert (job.intent_number, job.lease_generation, job.error) == (1, 2, None)
    assert provider.keys == [f"probe:{job.id}", f"probe:{job.id}:retry-1"]
    assert await trail(jobs.service, job.id) == [
        EventName.CLAIMED,
        EventName.DISPATCHED,
        EventName.FAILED,
        EventName.RETRIED,
        EventName.CLAIMED,
        EventName.DISPATCHED,
        EventName.COMPLETED,
    ]


async def test_the_replies_of_cancel(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            await gate.wait()
            return {}

    async with worker(Probe(script)):
        queued = await jobs.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(hours=1)))
        running = await jobs.create_job(spec())
        await gate.handler_came()
        assert await queued.cancel("why", "ann") == "cancelled"
        assert await queued.cancel("why", "ann") == "already_terminal:cancelled"
        assert await running.cancel("why", "ann") == "requested"
        assert await running.cancel("why, again", "bob") == "requested"
        assert (await running.job()).cancel_actor == "ann"
        gate.go_on.set()
        assert await running.result(timeout=20) == {}
        assert await running.cancel("too late", "ann") == "already_terminal:completed"


async def test_no_such_job(jobs: DurableJobs) -> None:
    handle = jobs.handle(uuid4())
    for ask in (handle.result, handle.status, handle.job, handle.launch, handle.wake):
        with pytest.raises(JobNotFound):
            await ask()
    with pytest.raises(JobNotFound):
        await handle.cancel("why", "ann")
    with pytest.raises(JobNotFound):
        await handle.events()


async def test_a_result_without_temporal(
    jobs: DurableJobs,
    service: DurableJobService,
    worker: Workers,
    spec: Specs,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The row is what is read: a client that can't reach Temporal learns the result too, and warns of nothing."""
    async with worker(Probe(returns)):
        handle = await jobs.create_job(spec())
        await handle.result(timeout=20)
    away = DurableJobs(service, Launcher(await Client.connect("127.0.0.1:1", lazy=True)))
    assert await away.handle(handle.id).result(timeout=10) == {"n": 1}
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_the_events_are_all_there(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            for n in range(3):
                await job.heartbeat({"done": n})
            return {}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        await handle.result(timeout=20)
    events = [event for event in await handle.events() if event.name is not EventName.HEARTBEAT or event.data]
    assert [(event.name, event.data.get("done")) for event in events] == [
        (EventName.CLAIMED, None),
        (EventName.DISPATCHED, None),
        (EventName.HEARTBEAT, 0),
        (EventName.HEARTBEAT, 1),
        (EventName.HEARTBEAT, 2),
        (EventName.COMPLETED, None),
    ]
    assert [event.id for event in events] == sorted(event.id for event in events)
    assert {event.actor for event in events} == {(await handle.job()).claimed_by}
