"""`run_job`, from a product's own workflow: the job as a child, its result or its error, its cancellation."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import Worker

from durable_jobs import (
    DurableJobs,
    DurableJobsPlugin,
    EventName,
    HaltUnsafe,
    JobContext,
    JobFailed,
    JobSpec,
    JobStatus,
)
from durable_jobs.temporal.messages import workflow_id
from durable_jobs.temporal.schedule import schedule_id
from tests.conftest import Specs
from tests.probes import Gate, Probe, eventually, noticed, trail, until, until_workflow
from tests.products import Forgives, RunsAJob, Smuggles

Hosting = Callable[[Probe], AbstractAsyncContextManager[None]]


@pytest.fixture
def hosting(database_url: str, temporal_client: Client, queue: str) -> Hosting:
    """A product's worker: its workflows, in the sandbox, beside the plugin."""

    @asynccontextmanager
    async def run(handler: Probe) -> AsyncIterator[None]:
        plugin = DurableJobsPlugin(database_url, [handler], grace_seconds=1)
        workflows = [RunsAJob, Forgives, Smuggles]
        async with Worker(temporal_client, task_queue=queue, workflows=workflows, plugins=[plugin]):
            yield
        with suppress(RPCError):
            await temporal_client.get_schedule_handle(schedule_id(queue)).delete()

    return run


async def start(client: Client, product: Any, spec: JobSpec) -> WorkflowHandle[Any, Any]:
    request = spec.model_dump(exclude_defaults=True)
    return await client.start_workflow(product.run, request, id=f"product-{uuid4()}", task_queue=spec.queue)


async def job_of(jobs: DurableJobs, spec: JobSpec) -> Any:
    async def look() -> Any:
        return await jobs.service.find_by_idempotency_key(spec.organization, spec.project, spec.idempotency_key)

    return await eventually(look, "the job")


async def sends(job: JobContext, request: dict[str, Any]) -> Any:
    async with job.dispatch(f"probe:{job.id}"):
        return {"n": request["n"] + 1}


async def test_its_result(jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client) -> None:
    request, handler = spec(priority=2), Probe(sends)
    async with hosting(handler):
        product = await start(temporal_client, RunsAJob, request)
        assert await product.result() == {"result": {"n": 2}}
        job = await job_of(jobs, request)
        assert await trail(jobs.service, job.id) == [EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED]
        # The job's workflow is a child, seen as any job's: its own id, its summary, its priority.
        child = await temporal_client.get_workflow_handle(workflow_id(job.id)).describe()
        assert child.status is WorkflowExecutionStatus.COMPLETED
        assert child.parent_id == product.id
        assert await child.static_summary() == "probe · acme/alpha"
        assert child.raw_info.priority.priority_key == 1
        assert child.raw_info.priority.fairness_key == "acme"
    assert handler.calls == 1


async def test_its_workflow_is_found_by_the_same_attributes(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    request = spec()
    async with hosting(Probe(sends)):
        await (await start(temporal_client, RunsAJob, request)).result()
        plain = await jobs.create_job(spec())
        await plain.result(timeout=20)
    attributes = []
    for job_id in ((await job_of(jobs, request)).id, plain.id):
        described = await temporal_client.get_workflow_handle(workflow_id(job_id)).describe()
        attributes.append({name: value for name, value in described.search_attributes.items() if name != "BuildIds"})
    assert attributes[0] == attributes[1]


@pytest.mark.parametrize(
    ("error", "type_", "status"),
    [
        (JobFailed("the card is void", retryable=False, code="VOID"), "VOID", JobStatus.FAILED),
        (HaltUnsafe("the books differ"), "HALT_UNSAFE", JobStatus.HALT_UNSAFE),
        (ValueError("it broke"), "HANDLER_ERROR", JobStatus.DEAD_LETTER),
    ],
    ids=["failed", "halt_unsafe", "dead_letter"],
)
async def test_its_failure(
    jobs: DurableJobs,
    hosting: Hosting,
    spec: Specs,
    temporal_client: Client,
    error: Exception,
    type_: str,
    status: JobStatus,
) -> None:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        raise error

    request = spec(max_attempts=1)
    async with hosting(Probe(script)):
        caught = await (await start(temporal_client, Forgives, request)).result()
        job = await job_of(jobs, request)
        assert caught == {"type": type_, "message": f"job {job.id} ended {status}: {error}"}
        # One that nobody catches fails the product's workflow; the job exists, and is not run again.
        product = await start(temporal_client, RunsAJob, request)
        with pytest.raises(WorkflowFailureError) as failed:
            await product.result()
    assert isinstance(failed.value.cause, ApplicationError)
    assert (failed.value.cause.type, failed.value.cause.non_retryable) == (type_, True)
    assert (await jobs.handle(job.id).job()).lease_generation == 1


async def test_a_job_that_is_done_already(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    request, handler = spec(), Probe(sends)
    async with hosting(handler):
        handle = await jobs.create_job(request)
        await handle.result(timeout=20)
        assert await (await start(temporal_client, RunsAJob, request)).result() == {"result": {"n": 2}}
    assert handler.calls == 1


async def test_a_job_that_somebody_else_runs_is_waited_for(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            await gate.wait()
            return {"n": 7}

    request, handler = spec(), Probe(script)
    async with hosting(handler):
        await jobs.create_job(request)
        await gate.handler_came()
        products = [await start(temporal_client, RunsAJob, request) for _ in range(2)]
        gate.go_on.set()
        assert [await product.result() for product in products] == [{"result": {"n": 7}}] * 2
    assert handler.calls == 1


async def test_a_refused_specification(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    """`ApplicationError` "for a spec that is refused", as its documentation says."""
    request = spec()
    other = spec(idempotency_key=request.idempotency_key, payload={"n": 2})
    async with hosting(Probe(sends)):
        await (await start(temporal_client, Forgives, request)).result()
        conflict = await (await start(temporal_client, Forgives, other)).result()
        assert conflict["type"] == "IDEMPOTENCY_KEY_CONFLICT"
        unseen = spec().model_dump(exclude_defaults=True) | {"payload": {}, "priority": 9}
        product = await temporal_client.start_workflow(
            Smuggles.run, unseen, id=f"product-{uuid4()}", task_queue=request.queue
        )
        assert (await product.result())["type"] == "INVALID_JOB"


async def test_a_refused_specification_is_not_tried_for_ever(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    """By whichever error: nothing is written, and the product's workflow goes on at once."""
    unseen = spec().model_dump(exclude_defaults=True) | {"payload": {"text": "fine"}, "priority": 9}
    async with hosting(Probe(sends)):
        product = await temporal_client.start_workflow(
            Smuggles.run, unseen, id=f"product-{uuid4()}", task_queue=unseen["queue"]
        )
        caught = await asyncio.wait_for(product.result(), 20)
    assert "result" not in caught
    assert "priority" in str(caught)
    assert (await jobs.service.list_jobs()).items == []


async def test_cancelling_the_caller_cancels_the_job(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()

    request = spec(lease_seconds=1.5)
    async with hosting(Probe(script)):
        product = await start(temporal_client, RunsAJob, request)
        await gate.handler_came()
        await product.cancel()
        job = await job_of(jobs, request)
        job = await until(jobs.service, job.id, JobStatus.CANCELLED)
        await until_workflow(temporal_client, job.id, WorkflowExecutionStatus.CANCELED)
        with pytest.raises(WorkflowFailureError):
            await product.result()
        assert (await product.describe()).status is WorkflowExecutionStatus.CANCELED
    assert job.cancel_actor == "temporal"


async def test_cancelling_the_caller_past_the_boundary_waits_for_the_truth(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    """The job completes all the same, and the caller, whose wait was not cut short, gets its result."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            gate.reached.set()
            await noticed(lambda: job.cancel_requested)
            return {"n": 5}

    request = spec(lease_seconds=1.5)
    async with hosting(Probe(script)):
        product = await start(temporal_client, RunsAJob, request)
        await gate.handler_came()
        await product.cancel()
        job = await job_of(jobs, request)
        await until(jobs.service, job.id, JobStatus.COMPLETED)
        assert await asyncio.wait_for(product.result(), 20) == {"result": {"n": 5}}


async def test_a_terminated_child_is_waited_for(
    jobs: DurableJobs, hosting: Hosting, spec: Specs, temporal_client: Client
) -> None:
    """The row is the authority, for a calling workflow as well."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            await gate.wait()
            return {"n": 3}

    request = spec()
    async with hosting(Probe(script)):
        product = await start(temporal_client, RunsAJob, request)
        await gate.handler_came()
        job = await job_of(jobs, request)
        await temporal_client.get_workflow_handle(workflow_id(job.id)).terminate("an operator's mistake")
        gate.go_on.set()
        assert await asyncio.wait_for(product.result(), 30) == {"result": {"n": 3}}
