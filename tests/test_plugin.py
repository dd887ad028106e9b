"""The plugin on a product's worker: wherever it is given, beside whatever the worker has of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio import activity, workflow
from temporalio.api.workflowservice.v1 import SetWorkerDeploymentCurrentVersionRequest
from temporalio.client import Client, Plugin, WorkflowExecutionStatus
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.service import RPCError
from temporalio.worker import Worker, WorkerDeploymentConfig

from durable_jobs import DurableJobs, DurableJobsPlugin, JobContext, JobHandler, JobStatus
from durable_jobs.contract.errors import InvalidInput, SchemaMissing, StoreUnavailable
from durable_jobs.dev import DevStack
from durable_jobs.temporal.schedule import schedule_id
from tests.conftest import Specs, Workers
from tests.probes import Probe, eventually, until_workflow


@pytest_asyncio.fixture(autouse=True)
async def _no_schedule_stays(temporal_client: Client, queue: str) -> AsyncIterator[None]:
    """All tests share one Temporal server."""
    yield
    for name in (queue, f"{queue}-2"):
        with suppress(RPCError):
            await temporal_client.get_schedule_handle(schedule_id(name)).delete()


async def client_like(client: Client, plugins: Sequence[Plugin] = (), **options: Any) -> Client:
    """Another client of the same server."""
    target = client.service_client.config.target_host
    return await Client.connect(target, namespace=client.namespace, plugins=plugins, **options)


async def where(job: JobContext, request: dict[str, Any]) -> Any:
    async with job.dispatch(f"probe:{job.id}") as key:
        return {"sent": key}


# The SDK's own, for plugins that don't mind being given twice as little as ours does.
@pytest.mark.filterwarnings("ignore:The same plugin type .* is present from both client and worker:UserWarning")
@pytest.mark.parametrize("given", ["on the client", "on both", "on the client and another on the worker", "twice"])
async def test_wherever_it_is_given(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str, given: str
) -> None:
    handler = Probe(where)
    plugin = DurableJobsPlugin(database_url, [handler], grace_seconds=1)
    other = DurableJobsPlugin(database_url, [handler], grace_seconds=1)
    on_client, on_worker = {
        "on the client": ([plugin], []),
        "on both": ([plugin], [plugin]),
        "on the client and another on the worker": ([plugin], [other]),
        "twice": ([], [plugin, plugin]),
    }[given]
    client = await client_like(temporal_client, on_client)
    async with Worker(client, task_queue=queue, plugins=on_worker):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert handler.calls == 1
    assert (await handle.job()).lease_generation == 1


async def test_two_workers_of_one_client(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    handler = Probe(where)
    client = await client_like(temporal_client, [DurableJobsPlugin(database_url, [handler], grace_seconds=1)])
    async with Worker(client, task_queue=queue), Worker(client, task_queue=f"{queue}-2"):
        handles = [await jobs.create_job(spec(queue=name)) for name in (queue, f"{queue}-2")]
        for handle in handles:
            assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
        holders = {(await handle.job()).claimed_by for handle in handles}
    assert len(holders) == 2


async def test_two_workers_of_one_queue_share_its_jobs(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    """Neither can run its first job to the end before the other has one too; and no job runs twice."""
    working = {"first": asyncio.Event(), "second": asyncio.Event()}

    def meeting(mine: str, theirs: str) -> Probe:
        async def script(job: JobContext, request: dict[str, Any]) -> Any:
            async with job.dispatch(f"probe:{job.id}") as key, asyncio.timeout(20):
                working[mine].set()
                await working[theirs].wait()
                return {"sent": key}

        return Probe(script)

    first, second = meeting("first", "second"), meeting("second", "first")

    async def hosting(handler: Probe) -> Worker:
        return Worker(
            await client_like(temporal_client),  # the SDK allows one worker of a queue for each client
            task_queue=queue,
            plugins=[DurableJobsPlugin(database_url, [handler], grace_seconds=1)],
            max_concurrent_activities=3,
        )

    async with await hosting(first), await hosting(second):
        handles = await jobs.create_jobs([spec() for _ in range(12)])
        for handle in handles:
            assert await handle.result(timeout=30) == {"sent": f"probe:{handle.id}"}
    assert first.calls + second.calls == 12
    assert [(await handle.job()).lease_generation for handle in handles] == [1] * 12


class Untyped(JobHandler[dict[str, Any], dict[str, Any]]):
    async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        return {}


class BadlyTyped(Untyped):
    job_type = "two words"


class Shouting(Probe):
    job_type = "PROBE"


@pytest.mark.parametrize(
    ("handlers", "field"),
    [
        ([Untyped()], "handlers.Untyped.job_type"),
        ([BadlyTyped()], "handlers.BadlyTyped.job_type"),
        ([Probe(where), Probe(where)], "handlers.Probe.job_type"),
        ([Probe(where), Shouting(where)], "handlers.Shouting.job_type"),
    ],
    ids=["without a type", "no name for a type", "the same type", "the same type in capitals"],
)
def test_handlers_that_cannot_be_hosted(handlers: list[Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        DurableJobsPlugin("postgresql://localhost/jobs", handlers)
    assert [problem.field for problem in refused.value.problems] == [field]


@pytest.mark.parametrize(
    "url",
    [
        "mysql://localhost/jobs",
        "",
        "localhost",
        pytest.param("postgresql://", marks=()),
    ],
)
async def test_a_url_that_is_not_postgres(temporal_client: Client, queue: str, url: str) -> None:
    try:
        plugin = DurableJobsPlugin(url, [Probe(where)])
        running = Worker(temporal_client, task_queue=queue, plugins=[plugin])
    except InvalidInput:
        return
    with pytest.raises((InvalidInput, StoreUnavailable)):
        await asyncio.wait_for(running.run(), 20)


async def test_a_type_in_capitals_hosts_what_is_submitted_in_any(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    async with worker(Shouting(where)):
        handle = await jobs.create_job(spec(job_type="Probe"))
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}


@pytest.mark.parametrize(("asked", "given"), [(None, 45), (5, 45), (600, 600)], ids=["default", "short", "long"])
async def test_the_graceful_shutdown_timeout_covers_the_grace(
    temporal_client: Client, database_url: str, queue: str, asked: float | None, given: float
) -> None:
    options: Any = {} if asked is None else {"graceful_shutdown_timeout": timedelta(seconds=asked)}
    plugin = DurableJobsPlugin(database_url, [Probe(where)], grace_seconds=30)
    running = Worker(temporal_client, task_queue=queue, plugins=[plugin], **options)
    assert running.config(active_config=True)["graceful_shutdown_timeout"] == timedelta(seconds=given)


NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.mark.parametrize("how", ["run", "async with"])
@pytest.mark.parametrize("problem", ["no database", "no schema"])
async def test_a_worker_that_cannot_start_shuts_down_and_raises(
    temporal_client: Client, queue: str, durable_jobs_stack: DevStack, how: str, problem: str
) -> None:
    url, kind = {
        "no database": (NOWHERE, StoreUnavailable),
        # The server's first database: only the clones of the template have a schema.
        "no schema": (durable_jobs_stack.database_url, SchemaMissing),
    }[problem]
    running = Worker(temporal_client, task_queue=queue, plugins=[DurableJobsPlugin(url, [Probe(where)])])

    async def inside() -> None:
        async with running:
            await asyncio.Event().wait()

    with pytest.raises(kind):
        await asyncio.wait_for(running.run() if how == "run" else inside(), 30)
    assert running.is_shutdown


async def test_hosts_the_named_organizations_alone(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    handler = Probe(where)
    async with worker(handler, organizations=["acme", "globex"]):
        hosted = [await jobs.create_job(spec(organization=name)) for name in ("acme", "globex")]
        stranger = await jobs.create_job(spec(organization="Acme"))
        for handle in hosted:
            await handle.result(timeout=20)
        last = await jobs.create_job(spec())
        await last.result(timeout=20)
        assert await stranger.status() is JobStatus.QUEUED
    assert handler.calls == 3


async def test_hosts_nobody(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """An empty list is no tenant, not every tenant."""
    handler = Probe(where)
    async with worker(handler, organizations=[]):
        handle = await jobs.create_job(spec())
        await asyncio.sleep(1)
        assert await handle.status() is JobStatus.QUEUED
    assert handler.calls == 0


@activity.defn
async def greet(name: str) -> str:
    return f"hello {name}"


@workflow.defn(sandboxed=False)
class Greeting:
    @workflow.run
    async def run(self, name: str) -> str:
        return await workflow.execute_activity(greet, name, start_to_close_timeout=timedelta(seconds=20))


@pytest.mark.parametrize("converter", ["default", "pydantic"])
async def test_beside_the_products_own_workflows(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str, converter: str
) -> None:
    """And with no demand on its data converter: the worker's differs from the submitter's here."""
    options: Any = {"data_converter": pydantic_data_converter} if converter == "pydantic" else {}
    client = await client_like(temporal_client, **options)
    plugin = DurableJobsPlugin(database_url, [Probe(where)], grace_seconds=1)
    async with (
        Worker(client, task_queue=queue, workflows=[Greeting], activities=[greet], plugins=[plugin]),
        await DurableJobs.connect(database_url, client) as theirs,
    ):
        greeting = await client.start_workflow(Greeting.run, "ann", id=f"greeting-{uuid4()}", task_queue=queue)
        for submitter in (jobs, theirs):
            handle = await submitter.create_job(spec())
            assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
            await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
        assert await greeting.result() == "hello ann"


@pytest.mark.parametrize("behaviour", ["undeclared", "default"])
async def test_a_versioned_worker(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str, behaviour: str
) -> None:
    version = WorkerDeploymentVersion(deployment_name=f"jobs-{queue}", build_id="1")
    defaults: Any = {"default_versioning_behavior": VersioningBehavior.PINNED} if behaviour == "default" else {}
    config = WorkerDeploymentConfig(version=version, use_worker_versioning=True, **defaults)
    plugin = DurableJobsPlugin(database_url, [Probe(where)], grace_seconds=1)
    async with Worker(temporal_client, task_queue=queue, deployment_config=config, plugins=[plugin]):
        request = SetWorkerDeploymentCurrentVersionRequest(
            namespace=temporal_client.namespace,
            deployment_name=version.deployment_name,
            build_id=version.build_id,
        )

        async def current() -> bool:
            try:
                await temporal_client.workflow_service.set_worker_deployment_current_version(request)
            except RPCError:
                return False
            return True

        await eventually(current, "the current version")
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
