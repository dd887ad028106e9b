"""Fixtures of the suite: real servers, a fresh database for each test, and the trail checker over all that it holds."""

import asyncio
import faulthandler
import gc
import sys
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from durable_jobs import Database, DurableJobs, DurableJobService, DurableJobsPlugin, JobHandler, JobSpec
from durable_jobs.temporal.schedule import schedule_id
from tests import spec_trails

pytest_plugins = ["durable_jobs.testing"]

Workers = Callable[..., AbstractAsyncContextManager[Worker]]
Specs = Callable[..., JobSpec]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object | None) -> None:
    """A process of tests that dies ends the run: the tests it had left would not be missed by anyone."""
    if error:
        pytest.exit(f"{node} died: {error}", returncode=pytest.ExitCode.INTERRUPTED)


def out_of_time(call: pytest.CallInfo[None]) -> bool:
    return call.excinfo is not None and "Timeout" in str(call.excinfo.value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that ran out of its time says what each of its tasks was waiting for."""
    report = yield
    if out_of_time(call):
        for task in [found for found in gc.get_objects() if issubclass(type(found), asyncio.Task) and not found.done()]:
            frames = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in task.get_stack()]
            report.sections.append((f"task {task.get_name()}", "\n".join([repr(task.get_coro()), *frames])))
    return report


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(call: pytest.CallInfo[None]) -> None:
    """One that ran out of its time and then can't be torn down either ends its process."""
    if out_of_time(call):
        faulthandler.dump_traceback_later(120, exit=True, file=sys.__stderr__)


@pytest_asyncio.fixture
async def service(database_url: str, request: pytest.FixtureRequest) -> AsyncIterator[DurableJobService]:
    """The verbs over this test's own database; at the end every job in it must equal the fold of its trail."""
    database = Database(database_url, pool_size=20)
    try:
        service = DurableJobService(database, grace_seconds=5)
        yield service
        assert await unsound(service) == {}
        await spec_trails.record(service, request.node.nodeid)
    finally:
        await database.close()


async def unsound(service: DurableJobService) -> dict[str, list[str]]:
    """The jobs whose row differs from the fold of their events, and how."""
    found: dict[str, list[str]] = {}
    cursor: str | None = None
    while True:
        page = await service.list_jobs(after=cursor, limit=1000)
        for job in page.items:
            if differences := await service.check_trail(job.id):
                found[str(job.id)] = differences
        cursor = page.next_cursor
        if cursor is None:
            return found


@pytest_asyncio.fixture
async def jobs(database_url: str, temporal_client: Client, service: DurableJobService) -> AsyncIterator[DurableJobs]:
    """The client over this test's database and the run's Temporal server."""
    async with await DurableJobs.connect(database_url, temporal_client) as jobs:
        yield jobs


@pytest.fixture
def queue() -> str:
    """A task queue of this test's own: all tests share one Temporal server."""
    return f"queue-{uuid4().hex[:12]}"


@pytest.fixture
def spec(queue: str) -> Specs:
    """Makes a valid `JobSpec`, with a new idempotency key and whatever is overridden."""

    def make(**overrides: Any) -> JobSpec:
        fields: dict[str, Any] = {
            "organization": "acme",
            "project": "alpha",
            "queue": queue,
            "job_type": "probe",
            "idempotency_key": uuid4().hex,
            "payload": {"n": 1},
        }
        return JobSpec(**(fields | overrides))

    return make


@pytest.fixture
def worker(database_url: str, temporal_client: Client, queue: str) -> Workers:
    """`async with worker(handler, …)`: a Temporal worker on this test's queue that hosts the handlers."""

    @asynccontextmanager
    async def run(*handlers: JobHandler[Any, Any], **options: Any) -> AsyncIterator[Worker]:
        plugin = DurableJobsPlugin(database_url, handlers, **({"grace_seconds": 2} | options))
        async with Worker(temporal_client, task_queue=queue, plugins=[plugin]) as running:
            yield running
        with suppress(RPCError):
            await temporal_client.get_schedule_handle(schedule_id(queue)).delete()

    return run
