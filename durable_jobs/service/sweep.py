"""The sweep over the uncertain jobs of one queue: a control loop over the verbs of reconciliation. Never dispatches."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.contract.models import Job
from durable_jobs.contract.provider import ProviderAnswer, ProviderState, state_problem
from durable_jobs.contract.reconciliation import Action, ReconciliationPolicy, classify
from durable_jobs.contract.rules import json_problem, storable_text
from durable_jobs.contract.specs import FollowUp
from durable_jobs.contract.states import ACTIVE, JobStatus
from durable_jobs.contract.summary import SweepSummary
from durable_jobs.service.reconciliation import Candidate, Handled, Reconciliation
from durable_jobs.service.registry import Registry

logger = logging.getLogger(__name__)

SOURCE = "sweep"
PAGE = 200


class Lookup(Protocol):
    """What the sweep needs of a job type's handler."""

    @property
    def has_follow_ups(self) -> bool: ...

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[Any]:
        """Ask the provider; may raise, hang, or answer rubbish."""
        ...

    def follow_ups(self, job: Job, result: Any) -> Sequence[FollowUp]: ...

    def dump_result(self, result: object) -> object: ...

    def parse_result(self, result: dict[str, Any]) -> Any: ...


class Sweeps(Reconciliation, Registry):
    async def sweep_reconciliation_candidates(
        self,
        queue: str,
        lookups: Mapping[str, Lookup],
        *,
        organizations: Sequence[str] | None = None,
        policy: ReconciliationPolicy | None = None,
        tell: Callable[[Handled], Awaitable[None]],
    ) -> SweepSummary:
        """Look once at every uncertain job of `queue` whose type is in `lookups`; each write its own transaction.

        `tell` is called after each commit that changed a job, or found it without a holder: it is to wake the job's
        workflow, launch its follow-ups, and call the escalation hook. Raises `StoreUnavailable`.
        """
        return await Sweep(self, queue, lookups, organizations, policy or ReconciliationPolicy(), tell).run()


class Rubbish(Exception):
    """The lookup's answer can't be what a provider said."""


@dataclass
class Sweep:
    """Sweeps one queue for the job types and organizations that its worker hosts."""

    service: Sweeps
    queue: str
    lookups: Mapping[str, Lookup]
    organizations: Sequence[str] | None
    policy: ReconciliationPolicy
    tell: Callable[[Handled], Awaitable[None]]

    async def run(self) -> SweepSummary:
        """Look at every candidate once, oldest first within its project, many lookups at a time.

        One that raises, hangs or answers rubbish is counted and left; it stops no other.
        """
        summary = SweepSummary()
        summary.skipped["escalated"] = await self.service.count_escalated(
            self.queue, list(self.lookups), self.organizations
        )
        slots = asyncio.Semaphore(self.policy.lookup_concurrency)

        async def handle(candidate: Candidate, organization: str, project: str) -> None:
            try:
                handled = await self._handle(candidate, organization, project)
                await self.tell(handled)
            except Exception as error:
                logger.warning(
                    "Job %s: its reconciliation failed and is left to the next sweep: %r", candidate[0].id, error
                )
                handled = Handled("error")
            finally:
                slots.release()
            summary.count(handled.word)

        try:
            async with asyncio.TaskGroup() as group:
                async for candidate, organization, project in self._candidates():
                    await slots.acquire()
                    summary.looked_at += 1
                    group.create_task(handle(candidate, organization, project))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        await self._escalate_unhosted(summary)
        await self._create_follow_ups(summary)
        return summary

    async def _candidates(self) -> AsyncIterator[tuple[Candidate, str, str]]:
        types = list(self.lookups)
        for organization, project in await self.service.list_candidate_projects(self.queue, types, self.organizations):
            last: Candidate | None = None
            while True:
                page = await self.service.find_reconciliation_candidates(
                    organization,
                    project,
                    queue=self.queue,
                    job_types=types,
                    organizations=self.organizations,
                    escalated=False,
                    after=last,
                    limit=PAGE,
                )
                for candidate in page:
                    yield candidate, organization, project
                if len(page) < PAGE:
                    break
                last = page[-1]

    async def _handle(self, candidate: Candidate, organization: str, project: str) -> Handled:
        job, now = candidate
        if (job.organization_id, job.project_id) != (organization, project):
            logger.error(
                "Job %s belongs to %s/%s, not to the project swept", job.id, job.organization_id, job.project_id
            )
            return Handled("project_mismatch")
        action, reason = classify(job, now)
        if action is Action.FENCE:
            fenced = await self.service.fence_expired(job, SOURCE)
            if fenced is None:
                return Handled("moved")
            if fenced.status is not JobStatus.INDETERMINATE:
                return Handled(fenced.status, fenced)
            job, (action, reason) = fenced, classify(fenced, now)
        if action is Action.LEAVE_TO_RECLAIM:
            return Handled(action, job)
        if action is Action.ESCALATE:
            escalated = await self.service.escalate_job(job, reason, SOURCE)
            return Handled("escalated" if escalated else "moved", escalated)
        if action is not Action.LOOK_UP or job.operation_key is None:
            return Handled(action)
        handler = self.lookups[job.job_type]
        try:
            # Another sweep may have been here since the page was read: then nobody is asked.
            if not await self.service.stands(job):
                return Handled("moved")
            state = await self._ask(handler, job.operation_key, job)
        except (KeyboardInterrupt, SystemExit, asyncio.CancelledError, StoreUnavailable):
            raise
        except BaseException as error:  # a library's panic is none of Python's ordinary exceptions
            problem = f"{type(error).__name__}: {storable_text(error, 1024)}"
            return await self.service.defer_lookup(job, problem, policy=self.policy, source=SOURCE)
        follow_ups, follow_up_problem = _follow_ups(handler, job, state)
        # `now` was read before the lookup began: a send deadline that it has passed, the lookup has too.
        return await self.service.resolve_by_provider(
            job,
            state,
            policy=self.policy,
            source=SOURCE,
            evidence={"operation_key": job.operation_key, "asked": type(handler).__name__},
            began=now,
            follow_ups=follow_ups,
            follow_up_problem=follow_up_problem,
        )

    async def _ask(self, handler: Lookup, key: str, job: Job) -> ProviderState[dict[str, Any]]:
        """The lookup within its time limit, its result as a JSON object. Raises on all that is no answer."""
        asking = asyncio.create_task(handler.provider_state(key, job))
        # Not wait_for: a lookup that swallows its cancellation would hold it for ever.
        await asyncio.wait({asking}, timeout=self.policy.lookup_timeout)
        if not asking.done():
            asking.cancel()
            raise TimeoutError(f"no answer within {self.policy.lookup_timeout:g} s")
        if asking.cancelled():
            raise Rubbish("the lookup cancelled itself")
        state = asking.result()
        if problem := state_problem(state):
            raise Rubbish(str(problem))
        if state.answer is not ProviderAnswer.SUCCEEDED:
            return state
        result: Any = handler.dump_result(state.result)
        if problem := json_problem(result, "result"):
            raise Rubbish(str(problem))
        handler.parse_result(result)
        return ProviderState.succeeded(result)

    async def _escalate_unhosted(self, summary: SweepSummary) -> None:
        """Whoever sweeps puts before an operator what nobody hosts: its own sweep will never come."""
        last: Job | None = None
        while page := await self.service.list_unhosted(
            self.policy.no_handler_after,
            organizations=self.organizations,
            after=last.id if last else None,
            limit=PAGE,
        ):
            for job in page:
                summary.looked_at += 1
                try:
                    handled = await self._unhosted(job)
                    await self.tell(handled)
                except Exception as error:
                    logger.warning("Job %s: nobody hosts it, and it could not be escalated: %r", job.id, error)
                    handled = Handled("error")
                summary.count(handled.word)
            last = page[-1]

    async def _unhosted(self, job: Job) -> Handled:
        """Fence what is past its marker or under a cancellation, and escalate what is left uncertain or waiting."""
        found: Job | None = job
        if job.status in ACTIVE and (job.dispatched_at is not None or job.cancel_requested_at is not None):
            found = await self.service.fence_expired(job, SOURCE)
            if found is not None and found.status is JobStatus.CANCELLED:
                return Handled("cancelled", found)
        if found is not None:
            reason = f"NO_HANDLER: no live worker hosts {job.job_type!r} on queue {job.queue!r}"
            found = await self.service.escalate_job(found, reason, SOURCE)
        return Handled("escalated" if found else "moved", found)

    async def _create_follow_ups(self, summary: SweepSummary) -> None:
        """Those of jobs that were completed where no handler was at hand: by an operator or a webhook."""
        scope = {"queue": self.queue, "job_types": list(self.lookups), "organizations": self.organizations}
        last: Job | None = None
        while page := await self.service.list_follow_ups_due(scope, after=last, limit=PAGE):
            for job in page:
                try:
                    handler = self.lookups[job.job_type]
                    parent, created = await self.service.create_follow_ups_due(
                        job, partial(named_follow_ups, handler), SOURCE
                    )
                    summary.follow_ups += len(created)
                    await self.tell(Handled("completed", parent, created))
                except Exception as error:
                    logger.warning("Job %s: its follow-ups are left to the next sweep: %r", job.id, error)
            last = page[-1]


def named_follow_ups(handler: Lookup, job: Job) -> tuple[list[FollowUp], str | None]:
    """What the handler wants created after the job's completion; or what kept it from saying so."""
    if not handler.has_follow_ups:
        return [], None
    try:
        named: list[Any] = list(handler.follow_ups(job, handler.parse_result(job.result or {})))
        if strangers := [type(each).__name__ for each in named if not isinstance(each, FollowUp)]:
            raise TypeError(f"follow_ups() gave {', '.join(strangers)}, not FollowUp")
        return named, None
    except Exception as error:
        return [], storable_text(f"FOLLOW_UPS_FAILED: {type(error).__name__}: {error}", 1024)


def _follow_ups(handler: Lookup, job: Job, state: ProviderState[dict[str, Any]]) -> tuple[list[FollowUp], str | None]:
    if state.answer is not ProviderAnswer.SUCCEEDED:
        return [], None
    return named_follow_ups(handler, job.model_copy(update={"status": JobStatus.COMPLETED, "result": state.result}))
