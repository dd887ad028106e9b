"""Resolving uncertain jobs by evidence: candidates, one candidate's handling, and a provider's own word.

Never dispatches. Every write locks the row and goes on only where it still stands as it was looked at, so that a
sweep's snapshot overwrites nothing that happened meanwhile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract import reconciliation
from durable_jobs.contract.decisions import escalate
from durable_jobs.contract.errors import InvalidInput, JobNotFound, NotResolvable
from durable_jobs.contract.models import Job
from durable_jobs.contract.provider import ProviderAnswer, ProviderState, state_problem
from durable_jobs.contract.reconciliation import Judgement, ReconciliationPolicy
from durable_jobs.contract.rules import json_problem, time_problem
from durable_jobs.contract.specs import FollowUp
from durable_jobs.contract.states import JobStatus
from durable_jobs.service.base import folded, require_json, require_keys, require_text
from durable_jobs.service.follow_ups import FollowUps
from durable_jobs.store.sweeps import scope_of

Candidate = tuple[Job, datetime]
"""A row, and the database's clock as it was read."""


@dataclass
class Handled:
    """What became of one candidate."""

    word: str
    job: Job | None = None
    """The row, where it was changed or its workflow is to be woken."""
    follow_ups: list[Job] = field(default_factory=list)


class Reconciliation(FollowUps):
    async def find_reconciliation_candidates(
        self,
        organization: str,
        project: str,
        *,
        queue: str | None = None,
        job_types: Sequence[str] | None = None,
        organizations: Sequence[str] | None = None,
        escalated: bool = True,
        after: Candidate | None = None,
        limit: int = 100,
    ) -> list[Candidate]:
        """One page of a project's candidates, oldest first, never across projects.

        Candidates are indeterminate or timed out, of any age, or claimed or running with an expired lease.
        `escalated=False` leaves out those that stand before an operator. `after` is the last of the previous page.
        """
        scope = scope_of(queue, folded(job_types), organizations)
        position = (after[0].created_at, after[0].id) if after else None
        return await self.database.run(
            lambda own: self._sweeps.candidates(
                own, organization, project, scope=scope, escalated=escalated, after=position, limit=limit
            )
        )

    async def stands(self, candidate: Job) -> bool:
        """Whether the row is still as `candidate` was read."""
        try:
            return _position(await self.database.run(lambda own: self._store.get(own, candidate.id))) == _position(
                candidate
            )
        except JobNotFound:
            return False

    async def fence_expired(self, candidate: Job, actor: str) -> Job | None:
        """Take an expired lease under a new generation: `indeterminate` past the marker, `cancelled` under a flag.

        None when the row has moved: the lease was renewed, the job ended or was claimed anew.
        """
        return await self._if_unmoved(
            candidate, lambda job, now: Judgement(reconciliation.fence(job, actor=actor, now=now))
        )

    async def escalate_job(self, candidate: Job, reason: str, actor: str) -> Job | None:
        """Put a job before an operator, once; None when its row has moved or it stands there already."""
        if candidate.escalated_at is not None:
            return None
        return await self._if_unmoved(
            candidate, lambda job, now: Judgement(escalate(job, reason=reason, actor=actor, now=now))
        )

    async def resolve_by_provider(
        self,
        candidate: Job,
        state: ProviderState[dict[str, Any]],
        *,
        policy: ReconciliationPolicy,
        source: str,
        evidence: dict[str, Any],
        began: datetime,
        follow_ups: Sequence[FollowUp] = (),
        follow_up_problem: str | None = None,
    ) -> Handled:
        """Write what a lookup's answer leads to, with the follow-ups of a completion in the same transaction."""

        def judge(job: Job, now: datetime) -> Judgement:
            return reconciliation.judge(
                job, state, policy=policy, source=source, evidence=evidence, began=began, now=now
            )

        return await self._judged(candidate, judge, follow_ups, follow_up_problem)

    async def defer_lookup(self, candidate: Job, problem: str, *, policy: ReconciliationPolicy, source: str) -> Handled:
        """A lookup failed: put it off, or past the deadline escalate."""

        def judge(job: Job, now: datetime) -> Judgement:
            return reconciliation.lookup_failed(job, problem, policy=policy, source=source, now=now)

        return await self._judged(candidate, judge)

    async def record_provider_state(
        self,
        operation_key: str,
        state: ProviderState[dict[str, Any]],
        evidence: dict[str, Any],
        source: str,
        *,
        organization: str,
        project: str,
        policy: ReconciliationPolicy | None = None,
        asked_at: datetime | None = None,
    ) -> Job:
        """A provider's own word, such as by its webhook, on an indeterminate job, escalated or not.

        Does what a sweep's lookup would. `asked_at` is when the provider looked: without it an answer of absent proves
        nothing, as it may have been under way for long.

        The follow-ups of a completion are created by the next sweep, where the handler is at hand. Operation keys are
        unique within organization and project alone, hence both are asked for.

        Raises `JobNotFound`, `NotResolvable` when the job is not indeterminate, `InvalidInput`.
        """
        require_text(source=source)
        require_keys(organization=organization, project=project, operation_key=operation_key[:255])
        require_json("evidence", evidence)
        _require_state(state)
        if asked_at is not None and (problem := time_problem(asked_at)):
            raise InvalidInput.at("asked_at", problem)

        async def work(connection: AsyncConnection) -> Job:
            job_id = await self._sweeps.by_operation_key(connection, organization, project, operation_key)
            job, now = await self._store.lock(connection, job_id) if job_id else (None, None)
            # Compared once more under the lock: the job may have gone round meanwhile.
            if job is None or now is None or job.operation_key != operation_key:
                raise JobNotFound(f"no job of {organization}/{project} has operation key {operation_key!r}")
            if job.status is not JobStatus.INDETERMINATE:
                reason = "a provider's word resolves an indeterminate job alone"
                raise NotResolvable(f"job {job.id} is {job.status}: {reason}")
            judgement = reconciliation.judge(
                job,
                state,
                policy=policy or ReconciliationPolicy(),
                source=source,
                evidence=evidence,
                began=min(asked_at, now) if asked_at is not None else None,
                now=now,
            )
            if judgement.bookkeeping is not None:
                await self._store.set_columns(connection, job, judgement.bookkeeping, now)
            if judgement.change is not None:
                if judgement.change.status is JobStatus.COMPLETED:
                    judgement.change.columns["follow_ups_due"] = True
                job = await self._store.apply(connection, job, judgement.change, now)
            await self._store.record_control(
                connection, "provider_state", actor=source, reason=None, job=job, answer=state.answer, evidence=evidence
            )
            return job

        return await self.database.run(work)

    async def _if_unmoved(self, candidate: Job, decide: Callable[[Job, datetime], Judgement]) -> Job | None:
        return (await self._judged(candidate, decide)).job

    async def _judged(
        self,
        candidate: Job,
        decide: Callable[[Job, datetime], Judgement],
        follow_ups: Sequence[FollowUp] = (),
        follow_up_problem: str | None = None,
    ) -> Handled:
        """Compare-and-set on (status, generation, escalated_at): zero writes where the row has moved."""

        async def work(connection: AsyncConnection) -> Handled:
            job, now = await self._store.lock(connection, candidate.id)
            if _position(job) != _position(candidate):
                return Handled("moved")
            judgement = decide(job, now)
            if judgement.bookkeeping is not None:
                await self._store.set_columns(connection, job, judgement.bookkeeping, now)
            if judgement.change is None:
                return Handled(judgement.word)
            job = await self._store.apply(connection, job, judgement.change, now)
            if job.status is not JobStatus.COMPLETED:
                return Handled(judgement.word, job)
            actor = judgement.change.actor
            job, created = await self._follow_up(connection, job, follow_ups, follow_up_problem, actor)
            return Handled(judgement.word, job, [each.job for each in created if each.created])

        try:
            return await self.database.run(work)
        except JobNotFound:
            return Handled("moved")


def _position(job: Job) -> tuple[Any, ...]:
    """What a decision rests on; the bookkeeping of lookups as well, so that two sweeps count a failure once."""
    return (job.status, job.lease_generation, job.escalated_at, job.lookup_tries, job.reconcile_after)


def _require_state(state: ProviderState[dict[str, Any]]) -> None:
    """Raises `InvalidInput` for a state that can't be what a provider said."""
    problem = state_problem(state)
    if problem is None and state.answer is ProviderAnswer.SUCCEEDED:
        problem = json_problem(state.result, "state.result")
    if problem:
        raise InvalidInput([problem])
