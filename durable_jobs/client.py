"""What a product starts jobs with: `DurableJobs` and the `JobHandle` of each job."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio.client import Client, WorkflowFailureError
from temporalio.service import RPCError

from durable_jobs.contract.errors import (
    JobCancelledError,
    JobDeadLetteredError,
    JobFailedError,
    JobHaltedError,
    JobOutcomeError,
    ResultTimeout,
)
from durable_jobs.contract.models import CreatedJob, Job, JobEvent
from durable_jobs.contract.specs import JobSpec
from durable_jobs.contract.states import JobStatus
from durable_jobs.contract.summary import SweepSummary
from durable_jobs.service import Database, DurableJobService
from durable_jobs.store.tables import SCHEMA
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.messages import workflow_id
from durable_jobs.temporal.schedule import sweep_now

logger = logging.getLogger(__name__)

_ERRORS: dict[JobStatus, type[JobOutcomeError]] = {
    JobStatus.FAILED: JobFailedError,
    JobStatus.CANCELLED: JobCancelledError,
    JobStatus.DEAD_LETTER: JobDeadLetteredError,
    JobStatus.HALT_UNSAFE: JobHaltedError,
}
_FIRST_POLL, _LONGEST_POLL = 0.5, 10.0
_WATCHED_POLL = 5.0
"""While the job's workflow runs, its end is the sign; the row is looked at all the same, but not so often."""
_CONCURRENT_STARTS = 50


class DurableJobs:
    """The client of the job service: creates jobs in Postgres and starts their workflows on Temporal.

    `async with await DurableJobs.connect(database_url, temporal) as jobs:`, or call `close` at the end. `service` has
    the verbs; after one that lets a job go on, such as `service.retry_job`, call `wake` or use the handle's.
    """

    def __init__(self, service: DurableJobService, launcher: Launcher) -> None:
        self.service = service
        self._launcher = launcher

    @classmethod
    async def connect(cls, database_url: str, temporal: Client, *, schema: str = SCHEMA, pool_size: int = 10) -> Self:
        """Raises `InvalidInput` for the URL, `StoreUnavailable`, or `SchemaMissing` on a database not migrated."""
        database = Database(database_url, schema=schema, pool_size=pool_size)
        try:
            await database.check()
        except BaseException:
            await database.close()
            raise
        return cls(DurableJobService(database), Launcher(temporal))

    async def close(self) -> None:
        """Close the connections to Postgres; the Temporal client stays the caller's."""
        await self.service.database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create_job(self, spec: JobSpec, connection: AsyncConnection | None = None) -> "JobHandle":
        """Create the job, or find the one under its idempotency key, and start its workflow.

        The job is accepted once its row is committed: with Temporal away its workflow is started by a later sweep, or
        by the next `create_job` with the same key. With `connection`, an SQLAlchemy connection on the psycopg driver,
        the row joins the caller's transaction; `launch` the handle after the commit, or leave that to the sweep.

        Raises what `DurableJobService.create_job` raises.
        """
        created = await self.service.create_job(spec, connection)
        handle = self._handle_of(created)
        if connection is None:
            await handle.launch()
        return handle

    async def create_jobs(self, specs: Iterable[JobSpec | Mapping[str, Any]]) -> "list[JobHandle]":
        """Create many jobs in one transaction, all or nothing, and start their workflows; in the order given.

        Raises `InvalidBatch`, naming each one that can't be created.
        """
        handles = [self._handle_of(created) for created in await self.service.create_jobs(specs)]
        await self._each(JobHandle.launch, handles)
        return handles

    async def _each(self, tell: "Callable[[JobHandle], Awaitable[bool]]", handles: "Sequence[JobHandle]") -> None:
        slots = asyncio.Semaphore(_CONCURRENT_STARTS)

        async def one(handle: JobHandle) -> None:
            async with slots:
                await tell(handle)

        await asyncio.gather(*map(one, handles))

    async def sweep(self, queue: str) -> SweepSummary:
        """Sweep the queue now, beside its schedule, by one of its live workers: uncertain jobs and missing workflows.

        Raises Temporal's `RPCError` or `WorkflowFailureError`.
        """
        return await sweep_now(self._launcher.client, queue)

    async def resume_queue(
        self, queue: str, job_type: str | None = None, *, actor: str, reason: str, organization: str | None = None
    ) -> int:
        """`resume_queue`, and `wake_due`; returns how many were woken."""
        await self.service.resume_queue(queue, job_type, actor=actor, reason=reason, organization=organization)
        return await self.wake_due(queue, job_type, organization=organization)

    async def wake_due(self, queue: str, job_type: str | None = None, *, organization: str | None = None) -> int:
        """Wake the workflows of the queue's due jobs in claim order; returns how many."""
        woken = 0
        last: Job | None = None
        while page := await self.service.list_claimable(queue, job_type, organization=organization, after=last):
            await self._each(JobHandle.wake, [self.handle(job.id) for job in page])
            woken, last = woken + len(page), page[-1]
        return woken

    @property
    def temporal(self) -> Client:
        """The Temporal client it was connected with."""
        return self._launcher.client

    def handle(self, job_id: UUID) -> "JobHandle":
        """The handle of a job created elsewhere; nothing is read until it is used."""
        return JobHandle(self.service, self._launcher, job_id)

    def _handle_of(self, created: CreatedJob) -> "JobHandle":
        return JobHandle(self.service, self._launcher, created.job.id, created)


class JobHandle:
    """One job, from outside."""

    def __init__(
        self, service: DurableJobService, launcher: Launcher, job_id: UUID, created: CreatedJob | None = None
    ) -> None:
        self.id = job_id
        self.created = created is not None and created.created
        """Whether this very call made the job."""
        self._service = service
        self._launcher = launcher
        self._job = created.job if created else None

    @property
    def workflow_id(self) -> str:
        """The id of the job's workflow in Temporal."""
        return workflow_id(self.id)

    async def job(self) -> Job:
        """The row as it stands. Raises `JobNotFound`."""
        return await self._service.get_job(self.id)

    async def status(self) -> JobStatus:
        """Raises `JobNotFound`."""
        return (await self.job()).status

    async def events(self) -> list[JobEvent]:
        """The whole trail, oldest first."""
        events: list[JobEvent] = []
        cursor: str | None = None
        while True:
            page = await self._service.list_job_events(self.id, after=cursor)
            events += page.items
            cursor = page.next_cursor
            if cursor is None:
                return events

    async def launch(self) -> bool:
        """Start the job's workflow unless the job is settled or it runs; False with Temporal away."""
        fresh, self._job = self._job, None
        if fresh is not None and self.created:
            return await self._tell(self._launcher.start(fresh), fresh)
        job, now = await self._service.get_job_and_clock(self.id)
        if job.status.is_settled:
            return True
        return await self._tell(self._launcher.start(job, now=now), job)

    async def wake(self) -> bool:
        """Make the job's workflow look at the row now; False with Temporal away, and it looks by its own timer."""
        job = await self.job()
        return await self._tell(self._launcher.wake(job), job)

    async def _tell(self, telling: Any, job: Job) -> bool:
        try:
            await telling
        except (RPCError, RuntimeError) as error:  # RuntimeError: a lazy client that can't connect
            logger.warning("Job %s: Temporal could not be told now: %s", job.id, error)
            return False
        return True

    async def cancel(self, reason: str, actor: str) -> str:
        """`cancel_job`: replies `cancelled`, `requested` or `already_terminal:<status>`; and wakes the workflow."""
        reply = await self._service.cancel_job(self.id, reason, actor)
        if not reply.startswith("already_terminal"):
            await self.wake()
        return reply

    async def retry(self, actor: str, reason: str, *, accept_duplicate_risk: bool = False) -> None:
        """`retry_job`, and wakes the workflow. Raises `NotRetryable`, `InvalidInput`, `JobNotFound`."""
        await self._service.retry_job(self.id, actor, reason, accept_duplicate_risk=accept_duplicate_risk)
        await self.wake()

    async def requeue(self, actor: str, reason: str) -> None:
        """`requeue_job`, and wakes the workflow. Raises `NotRequeueable`, `InvalidInput`, `JobNotFound`."""
        await self._service.requeue_job(self.id, actor, reason)
        await self.wake()

    async def resolve(
        self, verdict: JobStatus, evidence: dict[str, Any], actor: str, *, result: dict[str, Any] | None = None
    ) -> None:
        """`resolve_job`, and wakes the workflow. Raises `NotResolvable`, `InvalidInput`, `JobNotFound`."""
        await self._service.resolve_job(self.id, verdict, evidence, actor, result=result)
        await self.wake()

    async def result(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait until the job is settled, and return its result, a JSON object.

        An uncertain job is waited for until its truth is known. It reads the row: before the launch, after a
        terminated workflow, and after a retry as well. `timeout` in seconds; None waits for ever.

        Raises `JobFailedError`, `JobCancelledError`, `JobDeadLetteredError` or `JobHaltedError`, each with the code
        and message of the row; `ResultTimeout`; `JobNotFound`; `StoreUnavailable`.
        """
        try:
            async with asyncio.timeout(timeout):
                job = await self._settled()
        except TimeoutError:
            raise ResultTimeout(f"job {self.id} was not settled within {timeout} s") from None
        if job.status is JobStatus.COMPLETED:
            return job.result or {}
        code, message = (job.error.code, job.error.message) if job.error else (None, None)
        raise _ERRORS[job.status](job.id, job.status, code, message)

    async def _settled(self) -> Job:
        """The workflow's end is the quick sign, looking at the row the sure one."""
        poll = _FIRST_POLL
        closing = asyncio.create_task(self._workflow_closed())
        try:
            while True:
                # The first look waits for the sign: a job just created is not done yet.
                await asyncio.wait({closing}, timeout=_WATCHED_POLL)
                job = await self.job()
                if job.status.is_settled:
                    return job
                if closing.done():
                    await asyncio.sleep(poll)
                    poll = min(poll * 1.5, _LONGEST_POLL)
                    closing = asyncio.create_task(self._workflow_closed())
        finally:
            closing.cancel()

    async def _workflow_closed(self) -> None:
        handle = self._launcher.client.get_workflow_handle(workflow_id(self.id))
        with contextlib.suppress(WorkflowFailureError, RPCError, RuntimeError):  # a lazy client can't connect
            await handle.result()
