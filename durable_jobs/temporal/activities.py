"""The activities that the plugin adds to a worker: the fenced attempt, and the workflow's few words with the row."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from durable_jobs.contract.errors import DurableJobsError, InvalidInput, JobNotFound
from durable_jobs.contract.models import ClaimRefusal, Job
from durable_jobs.contract.rules import storable_text
from durable_jobs.contract.specs import JobSpec
from durable_jobs.contract.states import ACTIVE, JobStatus
from durable_jobs.handler import JobHandler, ShadowPolicy
from durable_jobs.service import DurableJobService
from durable_jobs.temporal import messages
from durable_jobs.temporal.attempt import Attempt, claim_for_attempt
from durable_jobs.temporal.beats import beat
from durable_jobs.temporal.escalation import Escalations
from durable_jobs.temporal.keeper import LeaseKeeper
from durable_jobs.temporal.launch import Launcher, job_priority, job_start, job_summary
from durable_jobs.temporal.messages import CancelAsk, ChildJob, JobAnswer, JobStart, JobView
from durable_jobs.temporal.tally import Counted, Tally

logger = logging.getLogger(__name__)

HEARTBEATS_PER_LEASE = 3
NOT_HOSTED_FOR = timedelta(minutes=15)
"""How long a due job waits for a worker with its handler before it is escalated; the design, section 7."""


class JobActivities:
    """Bound to one worker: its id, its handlers, its service, its keeper."""

    def __init__(
        self,
        worker_id: str,
        service: DurableJobService,
        keeper: LeaseKeeper,
        launcher: Launcher,
        handlers: Mapping[str, JobHandler[Any, Any]],
        organizations: Sequence[str] | None,
        escalations: Escalations,
        tally: Tally,
        shadow: ShadowPolicy | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._tally = tally
        self._shadow = shadow
        self._escalations = escalations
        self._service = service
        self._keeper = keeper
        self._launcher = launcher
        self._handlers = handlers
        self._organizations = organizations

    @activity.defn(name=messages.RUN_ATTEMPT)
    async def run_attempt(self, start: JobStart) -> JobView:
        """One attempt. Whatever cancellation Temporal delivers (pause, reset, a worker's shutdown) reaches a flag or a
        log line: the attempt runs on, and the row decides what its outcome is worth."""
        handler = self._handlers.get(start.job_type)
        if handler is None or not self._hosts(start.organization):
            return await self._not_hosted(UUID(start.job_id))
        working = asyncio.create_task(self._attempt(handler, UUID(start.job_id)))
        beating = asyncio.create_task(beat(start.lease_seconds / HEARTBEATS_PER_LEASE))
        given_up = False
        try:
            while True:
                try:
                    return await asyncio.shield(working)
                except asyncio.CancelledError:
                    if working.done():
                        raise
                    given_up = True
                    why = activity.cancellation_details()
                    logger.info("Job %s: Temporal cancelled its attempt: %s", start.job_id, why)
        except DurableJobsError as error:
            raise ApplicationError(error.code, type=error.code, non_retryable=True) from None
        except Exception as error:
            # Its text may hold a tenant's content, which enters no history.
            logger.exception("Job %s: its attempt broke", start.job_id)
            raise ApplicationError("the attempt broke", type=type(error).__name__, non_retryable=True) from None
        finally:
            beating.cancel()
            if given_up:
                await self._wake(UUID(start.job_id))

    def _hosts(self, organization: str) -> bool:
        return self._organizations is None or organization in self._organizations

    async def _not_hosted(self, job_id: UUID) -> JobView:
        """Nothing is claimed and no attempt consumed; a job that has been due for long goes before an operator."""
        try:
            job, now = await self._service.get_job_and_clock(job_id)
        except JobNotFound:
            return await self._view(job_id)
        view = view_of(job, now)
        if view.terminal:
            return view
        view.code = messages.NOT_HOSTED
        since = max(filter(None, (job.scheduled_at, job.created_at, job.lease_expires_at)))
        if view.due_in == 0 and now - since > NOT_HOSTED_FOR:
            reason = (
                f"NOT_HOSTED: the workers of queue {job.queue!r} do not host {job.job_type!r} for this organization"
            )
            escalated = await self._service.escalate_job(job, reason, self.worker_id)
            # The hook is that of the tenants hosted here, and hears of no other's job.
            if escalated is not None and self._hosts(job.organization_id):
                await self._escalations(escalated)
        return view

    async def _attempt(self, handler: JobHandler[Any, Any], job_id: UUID) -> JobView:
        outcome = await claim_for_attempt(
            self._service,
            self.worker_id,
            job_id,
            organizations=self._organizations,
            queue=activity.info().task_queue,
            job_type=handler.job_type,
        )
        if outcome.refusal is ClaimRefusal.OUT_OF_SCOPE:
            # The workflow's own input names another type, queue or tenant than the row.
            return await self._not_hosted(job_id)
        if outcome.reclaimed or outcome.refusal is ClaimRefusal.LANDED:
            self._tally.add(Counted.RECLAIMS)
        if outcome.claim is None or outcome.job is None:
            view = await self._view(job_id)
            if outcome.refusal is ClaimRefusal.PAUSED:
                view.code = messages.PAUSED
            return view
        self._tally.add(Counted.CLAIMS)
        attempt = Attempt(self._service, self._keeper, handler, outcome.claim, outcome.job, self._tally, self._shadow)
        stopping = asyncio.create_task(_on_shutdown(attempt))
        try:
            ended = await attempt.run()
        finally:
            stopping.cancel()
        for job in ended.follow_ups:
            await self._launch(job)
        if ended.job is None:
            return await self._view(job_id)
        if ended.job.escalated_at is not None:
            await self._escalations(ended.job)
        return view_of(ended.job, ended.job.updated_at)

    async def _launch(self, job: Job) -> None:
        """Start a follow-up's workflow; one that can't be started now is found by the launch sweep."""
        try:
            await self._launcher.start(job)
        except RPCError as error:
            logger.warning("Job %s: its workflow could not be started now: %s", job.id, error)

    async def _wake(self, job_id: UUID) -> None:
        """Temporal lost this attempt, and its workflow waits on the row alone: tell it that the attempt has ended."""
        try:
            job = await self._service.get_job(job_id)
            await self._launcher.tell(job)
        except (RPCError, DurableJobsError) as error:
            logger.info("Job %s: its workflow will look by itself: %s", job_id, error)

    async def _view(self, job_id: UUID) -> JobView:
        try:
            return view_of(*await self._service.get_job_and_clock(job_id))
        except JobNotFound:
            return JobView(status="not_found", settled=True, terminal=True, code=messages.NOT_FOUND)

    @activity.defn(name=messages.READ_JOB)
    async def read_job(self, job_id: str) -> JobView:
        """The row, as the workflow sees it. A local activity."""
        return await self._view(UUID(job_id))

    @activity.defn(name=messages.CANCEL_JOB)
    async def cancel_job(self, ask: CancelAsk) -> str:
        """A cancellation from Temporal becomes `cancel_job`. A local activity.

        Its reason is whatever somebody typed there; one that the table can't hold must not keep the job from ending.
        """
        reason = storable_text(ask.reason, 2048).strip() or "cancelled in Temporal"
        try:
            return await self._service.cancel_job(UUID(ask.job_id), reason, ask.actor)
        except JobNotFound:
            return messages.NOT_FOUND

    @activity.defn(name=messages.CLOSE_AS_CANCELLED)
    async def close_as_cancelled(self, job_id: str) -> None:
        """Ask Temporal to cancel the workflow of a job whose row is cancelled. A local activity."""
        await self._launcher.close_as_cancelled(job_id)

    @activity.defn(name=messages.CREATE_JOB)
    async def create_job(self, spec: str) -> ChildJob:
        """Create a job for a product's workflow, from the JSON of its `JobSpec`."""
        try:
            asked = JobSpec.model_validate_json(spec)
            if not self._hosts(asked.organization):
                raise InvalidInput.at("organization", f"{asked.organization!r} is not hosted by this worker")
            job = (await self._service.create_job(asked)).job
        except DurableJobsError as error:
            raise ApplicationError(error.message, type=error.code, non_retryable=not error.retryable) from None
        priority = job_priority(job)
        return ChildJob(
            start=job_start(job, indexed=await self._launcher.indexed()),
            queue=job.queue,
            summary=job_summary(job),
            priority_key=priority.priority_key or 3,
            fairness_key=priority.fairness_key or "",
            settled=job.status.is_settled,
        )

    @activity.defn(name=messages.READ_RESULT)
    async def read_result(self, job_id: str) -> JobAnswer:
        """How a job stands, with its result, for a product's workflow."""
        job = await self._service.get_job(UUID(job_id))
        if not self._hosts(job.organization_id):
            raise ApplicationError("no such job here", type=JobNotFound.code, non_retryable=True)
        return JobAnswer(
            status=job.status,
            settled=job.status.is_settled,
            result=job.result,
            error_code=job.error.code if job.error else None,
            error_message=job.error.message if job.error else None,
        )

    def all(self) -> list[Any]:
        """The activities to register with the worker."""
        return [
            self.run_attempt,
            self.read_job,
            self.cancel_job,
            self.close_as_cancelled,
            self.create_job,
            self.read_result,
        ]


def view_of(job: Job, now: datetime) -> JobView:
    """The row as its workflow sees it, at `now` on the database's clock."""
    due = job.lease_expires_at if job.status in ACTIVE else job.scheduled_at if job.status is JobStatus.QUEUED else None
    return JobView(
        status=job.status,
        settled=job.status.is_settled,
        terminal=job.status.is_terminal,
        generation=job.lease_generation,
        attempt=job.attempt_count,
        due_in=max(0.0, (due - now).total_seconds()) if due else 0.0,
        code=job.error.code if job.error and job.status.is_terminal else None,
        operation_key=job.operation_key,
    )


async def _on_shutdown(attempt: Attempt) -> None:
    await activity.wait_for_worker_shutdown()
    attempt.shut_down()
