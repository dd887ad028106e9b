"""Handlers that a test scripts, gates that it holds them at, and looks at what a job left behind."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
from psycopg import sql
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus

from durable_jobs import DurableJobService, Job, JobContext, JobHandler, JobStatus
from durable_jobs.contract.models import ClaimOutcome, ClaimRefusal
from durable_jobs.contract.states import EventName
from durable_jobs.temporal.messages import workflow_id

Script = Callable[[JobContext, dict[str, Any]], Awaitable[Any]]

OTHER_WORKER = "another worker"


class Probe(JobHandler[dict[str, Any], Any]):
    """Runs the script that it was given, and counts its calls."""

    job_type = "probe"
    consequential = False

    def __init__(self, script: Script) -> None:
        self.script = script
        self.calls = 0

    async def run(self, job: JobContext, request: dict[str, Any]) -> Any:
        self.calls += 1
        return await self.script(job, request)


class ConsequentialProbe(Probe):
    """The same, of the kind that needs an identity to dispatch."""

    consequential = True


class Provider:
    """Stands for the outside world: remembers the key of every call that it was sent."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def call(self, key: str) -> dict[str, Any]:
        self.keys.append(key)
        return {"sent": key}


async def for_ever() -> Any:
    """Longer than any test lets a handler run; bounded, so that a test that fails doesn't hang."""
    async with asyncio.timeout(25):
        await asyncio.Event().wait()


class Gate:
    """A place in a handler: it says that it got there, and waits until the test lets it go on."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def wait(self) -> None:
        self.reached.set()
        async with asyncio.timeout(25):
            await self.go_on.wait()

    async def handler_came(self) -> None:
        async with asyncio.timeout(20):
            await self.reached.wait()


async def eventually(look: Callable[[], Awaitable[Any]], what: str, timeout: float = 20) -> Any:
    """Look again and again until the answer is true, and return it."""
    ends = time.monotonic() + timeout
    while not (answer := await look()):
        if time.monotonic() > ends:
            raise AssertionError(f"{what}: not within {timeout} s")
        await asyncio.sleep(0.02)
    return answer


async def noticed(look: Callable[[], bool]) -> None:
    """Returns once a flag that a handler is given, such as `job.cancel_requested`, is up."""

    async def up() -> bool:
        return look()

    await eventually(up, "the flag")


async def until(service: DurableJobService, job_id: UUID, *statuses: JobStatus, timeout: float = 20) -> Job:
    """The job, once it is in one of `statuses`."""

    async def look() -> Job | None:
        job = await service.get_job(job_id)
        return job if job.status in statuses else None

    wanted = " or ".join(statuses)
    job: Job = await eventually(look, f"job {job_id} {wanted}", timeout)
    return job


async def trail(service: DurableJobService, job_id: UUID, *, beats: bool = False) -> list[EventName]:
    """The names of the job's events, in their order; with `beats`, its heartbeats too.

    Without them by default, as the keeper's next tick may promote a job just before its handler does. Never with what
    a sweep adds to an uncertain job: it may run at any moment.
    """
    hidden = {EventName.ESCALATED} | (set() if beats else {EventName.HEARTBEAT})
    page = await service.list_job_events(job_id)
    return [event.name for event in page.items if event.name not in hidden]


async def workflow_status(client: Client, job_id: UUID) -> WorkflowExecutionStatus | None:
    """How the job's workflow stands in Temporal."""
    return (await client.get_workflow_handle(workflow_id(job_id)).describe()).status


async def until_workflow(client: Client, job_id: UUID, status: WorkflowExecutionStatus, timeout: float = 20) -> None:
    """Returns once the job's workflow has this status in Temporal."""

    async def look() -> bool:
        return await workflow_status(client, job_id) is status

    await eventually(look, f"workflow of {job_id} {status.name}", timeout)


async def history_of(client: Client, job_id: UUID) -> list[str]:
    """The types of the events in the history of the job's workflow, such as `ACTIVITY_TASK_COMPLETED`."""
    history = await client.get_workflow_handle(workflow_id(job_id)).fetch_history()
    return [EventType.Name(event.event_type).removeprefix("EVENT_TYPE_") for event in history.events]


def execute(database_url: str, statement: str, *parameters: Any) -> list[Any]:
    """One statement, committed, as somebody outside would send it."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        cursor = connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []


async def take_over(service: DurableJobService, database_url: str, job_id: UUID) -> ClaimOutcome:
    """Let the lease run out, and have another worker claim the job, whoever renews it meanwhile."""
    while True:
        execute(
            database_url,
            "UPDATE durable_jobs.jobs SET lease_expires_at = clock_timestamp() - interval '1 second'"
            " WHERE id = %s AND lease_expires_at IS NOT NULL",
            job_id,
        )
        outcome = await service.claim_job(OTHER_WORKER, uuid4(), job_id=job_id)
        assert outcome is not None
        if outcome.refusal is not ClaimRefusal.HELD:
            return outcome


@contextmanager
def outage(server_url: str, database_url: str) -> Iterator[None]:
    """This one database refuses every connection and has dropped those it had; `server_url` is another one's."""
    name = urlsplit(database_url).path[1:]
    with psycopg.connect(server_url, autocommit=True) as connection:
        allow = "ALTER DATABASE {} ALLOW_CONNECTIONS {}"
        connection.execute(sql.SQL(allow).format(sql.Identifier(name), sql.SQL("false")))
        try:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
            yield
        finally:
            connection.execute(sql.SQL(allow).format(sql.Identifier(name), sql.SQL("true")))
