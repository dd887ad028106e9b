"""Workflows under an operation key, on the run's Temporal server; a proxy before it loses what it answers."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RetryConfig, RPCError, RPCStatusCode
from temporalio.worker import Worker

from durable_jobs import DurableJobs, JobFailed, JobStatus, ProviderState
from durable_jobs.contract.errors import JobFailedError
from durable_jobs.contract.provider import ProviderAnswer
from durable_jobs.dev import DevStack
from durable_jobs.providers.temporal_workflow import TemporalWorkflow
from tests.conftest import Specs, Workers
from tests.probes import eventually, until
from tests.products import Counts, RunsAJob
from tests.provider_servers import Calls, CutOffProxy, swept_until_completed
from tests.sweeping import NEVER

Workflows = TemporalWorkflow[dict[str, Any]]


def read(result: Any) -> dict[str, Any]:
    return {"read": result["total"]}


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)


@pytest_asyncio.fixture
async def counters(temporal_client: Client) -> AsyncIterator[str]:
    """The task queue of a worker that runs the workflow; it has nothing to do with the jobs' own."""
    task_queue = f"counters-{uuid4().hex[:12]}"
    async with Worker(temporal_client, task_queue=task_queue, workflows=[Counts]):
        yield task_queue


@pytest.fixture
def workflows(temporal_client: Client, counters: str) -> Workflows:
    return over(temporal_client, counters)


def over(client: Client, task_queue: str) -> Workflows:
    return TemporalWorkflow(client, "Counts", task_queue=task_queue, read=read)


@pytest.fixture
def key() -> str:
    return f"summary:{uuid4()}"


async def answered(workflows: Workflows, key: str) -> ProviderState[Any]:
    """What the provider says of the key, once it is no longer pending."""

    async def look() -> ProviderState[Any] | None:
        state = await workflows.state(key, ago(minutes=1))
        return None if state == ProviderState.pending() else state

    state: ProviderState[Any] = await eventually(look, f"an answer on {key}")
    return state


async def test_what_was_started_is_found_by_its_id(workflows: Workflows, temporal_client: Client, key: str) -> None:
    sent = await workflows.send(key, {"total": 7, "again": True})
    assert sent.reference == key
    assert await answered(workflows, key) == ProviderState.succeeded({"read": 7})
    assert await sent.state() == ProviderState.succeeded({"read": 7})


async def test_a_workflow_at_work_is_pending(workflows: Workflows, key: str) -> None:
    await workflows.send(key, {"hang": True})
    assert await workflows.state(key, ago(minutes=1)) == ProviderState.pending()


async def test_a_workflow_that_failed_says_why(workflows: Workflows, key: str) -> None:
    await workflows.send(key, {"fail": "NO_FUNDS"})
    state = await answered(workflows, key)
    assert state.answer is ProviderAnswer.FAILED
    assert state.error is not None
    assert (state.error.code, state.error.message) == ("NO_FUNDS", "workflow failed: NO_FUNDS: it failed")


@pytest.mark.parametrize("end", ["terminate", "cancel"])
async def test_a_workflow_that_was_ended_has_failed(
    workflows: Workflows, temporal_client: Client, key: str, end: str
) -> None:
    await workflows.send(key, {"hang": True})
    await getattr(temporal_client.get_workflow_handle(key), end)()
    state = await answered(workflows, key)
    assert state.answer is ProviderAnswer.FAILED
    assert state.error is not None
    assert state.error.message.startswith("workflow terminated" if end == "terminate" else "workflow canceled")


async def test_nothing_found_is_absent_for_as_long_as_the_namespace_remembers(
    workflows: Workflows, temporal_client: Client, key: str
) -> None:
    """What ended at once is forgotten the retention later."""
    asked = DescribeNamespaceRequest(namespace=temporal_client.namespace)
    namespace = await temporal_client.workflow_service.describe_namespace(asked)
    forgotten = datetime.now(UTC) - namespace.config.workflow_execution_retention_ttl.ToTimedelta()
    assert await workflows.state(key, ago(seconds=0)) == ProviderState.absent()
    assert await workflows.state(key, forgotten + timedelta(minutes=15)) == ProviderState.absent()
    for dispatched_at in (forgotten, None):
        assert (await workflows.state(key, dispatched_at)).answer is ProviderAnswer.UNKNOWN


async def test_a_second_start_finds_the_first(workflows: Workflows, temporal_client: Client, key: str) -> None:
    """While it runs and after it has ended: already started means that it landed."""
    first = await workflows.send(key, {"total": 7})
    assert await answered(workflows, key) == ProviderState.succeeded({"read": 7})
    run_id = (await temporal_client.get_workflow_handle(key).describe()).run_id
    second = await workflows.send(key, {"total": 8})
    assert await second.state() == await first.state() == ProviderState.succeeded({"read": 7})
    assert (await temporal_client.get_workflow_handle(key).describe()).run_id == run_id


async def test_a_workflow_of_another_type_is_not_ours(
    workflows: Workflows, temporal_client: Client, counters: str, key: str
) -> None:
    await temporal_client.start_workflow(RunsAJob.run, {}, id=key, task_queue=f"{counters}-none")
    assert (await workflows.state(key, ago(minutes=1))).answer is ProviderAnswer.UNKNOWN
    with pytest.raises(JobFailed, match="is a RunsAJob") as failed:
        await workflows.send(key, {"total": 7})
    assert (failed.value.retryable, failed.value.code) == (False, "OPERATION_KEY_TAKEN")
    await temporal_client.get_workflow_handle(key).terminate()


async def test_a_workflow_from_before_the_dispatch_is_not_ours(workflows: Workflows, key: str) -> None:
    """Clocks may differ by ten minutes."""
    await workflows.send(key, {"hang": True})
    assert await workflows.state(key, datetime.now(UTC) + timedelta(minutes=9)) == ProviderState.pending()
    assert (await workflows.state(key, datetime.now(UTC) + timedelta(minutes=11))).answer is ProviderAnswer.UNKNOWN


async def test_a_missing_namespace_is_no_absence(
    durable_jobs_stack: DevStack, temporal_client: Client, key: str
) -> None:
    """The same gRPC status as that of a missing workflow. As an answer to a start it is a definite no."""
    elsewhere = over(Client(temporal_client.service_client, namespace=f"no-such-{uuid4().hex}"), "none")
    with pytest.raises(RPCError) as raised:
        await elsewhere.state(key, ago(minutes=1))
    assert raised.value.status is RPCStatusCode.NOT_FOUND
    with pytest.raises(JobFailed) as failed:
        await elsewhere.send(key, {"total": 7})
    assert (failed.value.retryable, failed.value.code) == (False, "PROVIDER_REFUSED")


async def test_a_refused_start_is_a_definite_no(workflows: Workflows) -> None:
    with pytest.raises(JobFailed, match="INVALID_ARGUMENT") as failed:
        await workflows.send("k" * 2000, {"total": 7})
    assert (failed.value.retryable, failed.value.code) == (False, "PROVIDER_REFUSED")


async def started(client: Client, key: str) -> None:
    """Returns once the server has the workflow."""

    async def look() -> bool:
        try:
            await client.get_workflow_handle(key).describe()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise
            return False
        return True

    await eventually(look, f"workflow {key} is started")


async def runs(client: Client, key: str) -> int:
    return len([each async for each in client.list_workflows(f"WorkflowId = '{key}'")])


async def test_a_start_whose_answer_was_lost_is_repeated_by_the_client_and_runs_once(
    durable_jobs_stack: DevStack, temporal_client: Client, counters: str, key: str
) -> None:
    async with CutOffProxy.before(durable_jobs_stack.temporal_address) as proxy:
        client = await Client.connect(proxy.address, namespace=temporal_client.namespace)
        proxy.deaf = True
        sending = asyncio.create_task(over(client, counters).send(key, {"total": 7}))
        await started(temporal_client, key)
        proxy.deaf = False
        proxy.drop()
        sent = await sending
        assert sent.reference == key
    assert await answered(over(temporal_client, counters), key) == ProviderState.succeeded({"read": 7})
    await eventually(lambda: runs(temporal_client, key), "the workflow is listed")
    assert await runs(temporal_client, key) == 1


class Halves(TemporalWorkflow[dict[str, Any]]):
    """Sends through one client, and looks through another."""

    def __init__(self, sending: Client, looking: Client, task_queue: str) -> None:
        super().__init__(looking, "Counts", task_queue=task_queue, read=read)
        self._through = over(sending, task_queue)
        self.sends: list[str] = []

    async def send(self, operation_key: str, request: dict[str, Any]) -> Any:
        self.sends.append(operation_key)
        return await self._through.send(operation_key, request)


async def test_a_send_whose_answer_was_lost_is_completed_by_the_sweep(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    queue: str,
    durable_jobs_stack: DevStack,
    temporal_client: Client,
    counters: str,
) -> None:
    async with CutOffProxy.before(durable_jobs_stack.temporal_address) as proxy:
        soon = RetryConfig(max_elapsed_time_millis=500, max_retries=1)
        client = await Client.connect(proxy.address, namespace=temporal_client.namespace, retry_config=soon)
        provider = Halves(client, temporal_client, counters)
        proxy.deaf = True
        async with worker(Calls(provider), reconcile_every=NEVER):
            handle = await jobs.create_job(spec(payload={"total": 7}))
            key = f"summary:{handle.id}"
            await started(temporal_client, key)
            proxy.cut()
            await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
            assert await swept_until_completed(jobs, queue, handle) == {"read": 7}
    assert provider.sends == [key]
    await eventually(lambda: runs(temporal_client, key), "the workflow is listed")
    assert await runs(temporal_client, key) == 1


async def test_a_job_waits_for_its_workflow(
    jobs: DurableJobs, worker: Workers, spec: Specs, workflows: Workflows, temporal_client: Client
) -> None:
    """To its good end, and to its bad one, which is the provider's own word."""
    async with worker(Calls(workflows), reconcile_every=NEVER):
        good = await jobs.create_job(spec(payload={"total": 7}))
        bad = await jobs.create_job(spec(payload={"fail": "NO_FUNDS"}))
        assert await good.result(timeout=20) == {"read": 7}
        with pytest.raises(JobFailedError, match="NO_FUNDS"):
            await bad.result(timeout=20)
    for handle, status in ((good, WorkflowExecutionStatus.COMPLETED), (bad, WorkflowExecutionStatus.FAILED)):
        described = await temporal_client.get_workflow_handle(f"summary:{handle.id}").describe()
        assert described.status is status
