"""The activities of the scheduled sweep: the reconciliation of uncertain jobs, and the launch of missing workflows."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from temporalio import activity
from temporalio.service import RPCError

from durable_jobs.contract.decisions import LAUNCH_CHECK_SECONDS
from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.contract.reconciliation import Action, ReconciliationPolicy
from durable_jobs.contract.states import JobStatus
from durable_jobs.contract.summary import SweepSummary
from durable_jobs.handler import JobHandler
from durable_jobs.service import DurableJobService
from durable_jobs.service.reconciliation import Candidate, Handled
from durable_jobs.temporal import messages
from durable_jobs.temporal.beats import beat
from durable_jobs.temporal.escalation import Escalations
from durable_jobs.temporal.launch import Launcher

logger = logging.getLogger(__name__)

LAUNCH_CONCURRENCY = 50
HEARTBEAT_SECONDS = 3.0


class SweepActivities:
    """Bound to one worker: what it hosts, its policy, its own connections."""

    def __init__(
        self,
        service: DurableJobService,
        launcher: Launcher,
        handlers: Mapping[str, JobHandler[Any, Any]],
        organizations: Sequence[str] | None,
        policy: ReconciliationPolicy,
        escalations: Escalations,
    ) -> None:
        self._service = service
        self._launcher = launcher
        self._handlers = handlers
        self._organizations = organizations
        self._policy = policy
        self._escalations = escalations

    @activity.defn(name=messages.RECONCILIATION_SWEEP)
    async def reconciliation_sweep(self, queue: str) -> SweepSummary:
        """Resolve or escalate every candidate of the queue that this worker hosts."""
        async with _beating():
            summary = await self._service.sweep_reconciliation_candidates(
                queue, self._handlers, organizations=self._organizations, policy=self._policy, tell=self._tell
            )
        await self._count(queue, summary.counted())
        return summary

    async def _count(self, queue: str, counted: Mapping[tuple[str, str], int]) -> None:
        """For monitoring alone: what was swept stays swept when it can't be counted."""
        try:
            await self._service.count(queue, counted)
        except DurableJobsError as error:
            logger.warning("The sweep of queue %s could not be counted: %s", queue, error)

    async def _tell(self, handled: Handled) -> None:
        """After a commit: the escalation hook, the job's own workflow, its follow-ups."""
        job = handled.job
        if job is None:
            return
        if job.escalated_at is not None and handled.word != Action.LEAVE_TO_RECLAIM:
            await self._escalations(job)
        try:
            await self._launcher.tell(job)
            for follow_up in handled.follow_ups:
                await self._launcher.start(follow_up)
        except RPCError as error:
            logger.warning("Job %s: Temporal could not be told, the launch sweep will: %s", job.id, error)

    @activity.defn(name=messages.LAUNCH_SWEEP)
    async def launch_sweep(self, queue: str) -> int:
        """`launch_due`, as an activity."""
        async with _beating():
            launched = await self.launch_due(queue)
        await self._count(queue, {("sweep_results", "launched"): launched} if launched else {})
        return launched

    async def launch_due(self, queue: str) -> int:
        """Start the workflows of unsettled jobs that have none, in claim order; returns how many were looked for."""
        looked_for = 0
        slots = asyncio.Semaphore(LAUNCH_CONCURRENCY)
        while due := await self._service.take_due_for_launch(queue):
            await asyncio.gather(*(self._launch(candidate, slots) for candidate in due))
            looked_for += len(due)
        return looked_for

    async def _launch(self, candidate: Candidate, slots: asyncio.Semaphore) -> None:
        """A queued job's workflow is started if none runs; another's is woken; a settled job's is told, if it runs."""
        job, now = candidate
        async with slots:
            try:
                if job.status is JobStatus.QUEUED:
                    await self._launcher.start(job, now=now)
                elif job.status.is_settled:
                    await self._launcher.nudge(job)
                elif not _lease_alive(candidate):
                    await self._launcher.wake(job)
            except RPCError as error:
                logger.warning("Job %s: its workflow could not be launched now: %s", job.id, error)
                with contextlib.suppress(DurableJobsError):  # else at the time that was set as it was taken
                    await self._service.check_launch_soon(job.id, LAUNCH_CHECK_SECONDS)

    def all(self) -> list[Any]:
        """The activities to register with the worker."""
        return [self.reconciliation_sweep, self.launch_sweep]


def _lease_alive(candidate: Candidate) -> bool:
    job, now = candidate
    return job.lease_expires_at is not None and job.lease_expires_at > now


@contextlib.asynccontextmanager
async def _beating() -> AsyncIterator[None]:
    """Heartbeats to Temporal while a sweep runs."""
    beats = asyncio.create_task(beat(HEARTBEAT_SECONDS))
    try:
        yield
    finally:
        beats.cancel()
