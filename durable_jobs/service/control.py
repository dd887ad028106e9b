"""The verbs of products and operators. Each leaves an audit row, and runs on a small pool of its own."""

from functools import partial
from typing import Any
from uuid import UUID

from pydantic import AwareDatetime, BaseModel, ConfigDict
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract import decisions, reconciliation
from durable_jobs.contract.envelope import EXECUTION, GOVERNANCE
from durable_jobs.contract.errors import FieldProblem, InvalidInput, NotRetryable
from durable_jobs.contract.models import Job
from durable_jobs.contract.rules import hosted_queue_problem, identifier_problem
from durable_jobs.contract.states import JobStatus
from durable_jobs.service.base import ServicePart, require_json, require_text
from durable_jobs.store import sweeps

_RECHECK_PAGE = 500


class RecheckFilter(BaseModel):
    """Which escalated jobs; at least one field. Times carry a zone: after, inclusive, and before, exclusive."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job_id: UUID | None = None
    organization: str | None = None
    project: str | None = None
    queue: str | None = None
    job_type: str | None = None
    escalated_after: AwareDatetime | None = None
    escalated_before: AwareDatetime | None = None


class Control(ServicePart):
    async def cancel_job(self, job_id: UUID, reason: str, actor: str, *, organization: str | None = None) -> str:
        """Queued: cancelled at once. Claimed or running: plants the flag that its holder must acknowledge.

        Replies `cancelled`, `requested`, or `already_terminal:<status>`. Raises `InvalidInput`, `JobNotFound`.
        """
        require_text(reason=reason, actor=actor)

        async def work(connection: AsyncConnection) -> str:
            job, now = await self._store.lock(connection, job_id, organization)
            answer = decisions.cancel(job, reason=reason, actor=actor, now=now)
            if answer.change:
                await self._store.apply(connection, job, answer.change, now)
            elif answer.columns:
                await self._store.set_columns(connection, job, answer.columns, now)
            await self._store.record_control(
                connection, "cancel", actor=actor, reason=reason, job=job, reply=answer.reply
            )
            return answer.reply

        return await self.database.run(work, control=True)

    async def retry_job(
        self,
        job_id: UUID,
        actor: str,
        reason: str,
        *,
        accept_duplicate_risk: bool = False,
        organization: str | None = None,
    ) -> Job:
        """Queue a failed job again as a new intent, whose send has an operation key of its own.

        Raises `NotRetryable` (see `contract.decisions.retry`; also when its approval is consumed), `InvalidInput`,
        `JobNotFound`.
        """
        require_text(actor=actor, reason=reason)

        async def work(connection: AsyncConnection) -> Job:
            job, now = await self._store.lock(connection, job_id, organization)
            change = decisions.retry(
                job, actor=actor, reason=reason, accept_duplicate_risk=accept_duplicate_risk, now=now
            )
            # Consumed with the boundary: whichever store it was, the mark tells.
            if job.dispatched_at is not None and (approval := _approval_of(job)):
                raise NotRetryable(f"job {job_id} has consumed its approval {approval!r}: a new job needs a new one")
            job = await self._store.apply(connection, job, change, now)
            risk = change.data["accept_duplicate_risk"]
            await self._store.record_control(
                connection, "retry", actor=actor, reason=reason, job=job, accept_duplicate_risk=risk
            )
            return job

        return await self.database.run(work, control=True)

    async def requeue_job(self, job_id: UUID, actor: str, reason: str, *, organization: str | None = None) -> Job:
        """Queue an interrupted job, whose lease ran out before its boundary, its attempts given back.

        It is fenced with a new generation first; one whose cancellation is requested is cancelled instead.

        Raises `NotRequeueable`, naming the verb that applies; `InvalidInput`, `JobNotFound`.
        """
        require_text(actor=actor, reason=reason)
        return await self._decided(
            job_id,
            lambda job, now: reconciliation.requeue_interrupted(job, actor=actor, reason=reason, now=now),
            control=True,
            organization=organization,
            action="requeue",
            actor=actor,
            reason=reason,
        )

    async def resolve_job(
        self,
        job_id: UUID,
        verdict: JobStatus,
        evidence: dict[str, Any],
        actor: str,
        *,
        result: dict[str, Any] | None = None,
        organization: str | None = None,
    ) -> Job:
        """Settle an indeterminate or timed out job on a named operator's word: completed, failed or dead_letter.

        `evidence`, a JSON object, not empty, says what the word rests on; `result` is that of a completion, whose
        follow-ups the next sweep creates.

        Raises `NotResolvable`, `InvalidInput`, `JobNotFound`.
        """
        require_text(actor=actor)
        require_json("evidence", evidence)
        if not evidence:
            raise InvalidInput.at("evidence", "must not be empty: a resolution rests on something")
        if verdict not in reconciliation.VERDICTS:
            raise InvalidInput.at("verdict", f"must be one of {', '.join(reconciliation.VERDICTS)}")
        if result is not None:
            require_json("result", result)
            if verdict != JobStatus.COMPLETED:
                raise InvalidInput.at("result", "goes with the verdict completed alone")
        return await self._decided(
            job_id,
            lambda job, now: reconciliation.resolve(
                job, JobStatus(verdict), evidence=evidence, actor=actor, result=result, now=now
            ),
            control=True,
            organization=organization,
            action="resolve",
            actor=actor,
            reason=None,
            verdict=verdict,
            evidence=evidence,
        )

    async def recheck_job(self, filter: RecheckFilter, actor: str, reason: str) -> list[UUID]:
        """Take escalated jobs from before the operator; each in a transaction of its own.

        Uncertain ones go back into the sweep, their lookups counted anew. A queued one that nobody hosts is escalated
        again unless that changes; a completed one, whose follow-ups conflicted, is done with.

        Returns the ids of those taken back. Raises `InvalidInput`, also for an empty filter.
        """
        require_text(actor=actor, reason=reason)
        wanted = filter.model_dump(exclude_none=True)
        if "job_type" in wanted:
            wanted["job_type"] = wanted["job_type"].lower()
        if not wanted:
            raise InvalidInput.at("filter", "must name at least one field")
        return await self._each(
            partial(self._sweeps.escalated, wanted=wanted, limit=_RECHECK_PAGE),
            _RECHECK_PAGE,
            partial(self._recheck, actor=actor, reason=reason),
        )

    async def _recheck(self, job_id: UUID, actor: str, reason: str) -> bool:
        async def work(connection: AsyncConnection) -> bool:
            job, now = await self._store.lock(connection, job_id)
            if job.escalated_at is None:
                return False
            change = reconciliation.recheck(job, actor=actor, reason=reason, now=now)
            job = await self._store.apply(connection, job, change, now)
            await self._store.record_control(connection, "recheck", actor=actor, reason=reason, job=job)
            return True

        return await self.database.run(work, control=True)

    async def pause_queue(
        self, queue: str, job_type: str | None = None, *, actor: str, reason: str, organization: str | None = None
    ) -> bool:
        """Stop the claims of a queue, or there of one job type, of one organization, or of both.

        Attempts in hand go on. False: it was paused already.

        Raises `InvalidInput`.
        """
        return await self._switch("pause", sweeps.PAUSE, queue, job_type, organization, actor, reason)

    async def resume_queue(
        self, queue: str, job_type: str | None = None, *, actor: str, reason: str, organization: str | None = None
    ) -> bool:
        """Let the claims that `pause_queue` stopped start again. False: this very pause did not stand.

        Raises `InvalidInput`.
        """
        return await self._switch("resume", sweeps.RESUME, queue, job_type, organization, actor, reason)

    async def _switch(
        self,
        action: str,
        statement: str,
        queue: str,
        job_type: str | None,
        organization: str | None,
        actor: str,
        reason: str,
    ) -> bool:
        require_text(actor=actor, reason=reason)
        named = {"job_type": job_type, "organization": organization}
        problems = [FieldProblem("queue", problem) for problem in [hosted_queue_problem(queue)] if problem]
        problems += [
            FieldProblem(field, problem)
            for field, value in named.items()
            if value is not None and (problem := identifier_problem(value))
        ]
        if problems:
            raise InvalidInput(problems)
        kind = (job_type or "").lower()

        async def work(connection: AsyncConnection) -> bool:
            given = {"queue": queue, "job_type": kind, "organization": organization or ""}
            if action == "pause":
                given |= {"actor": actor, "reason": reason}
            changed = await self._sweeps.execute(connection, statement, **given)
            await self._store.record_control(
                connection,
                action,
                actor=actor,
                reason=reason,
                job=None,
                tenant=organization,
                queue=queue,
                job_type=job_type,
                organization=organization,
                changed=bool(changed),
            )
            return bool(changed)

        return await self.database.run(work, control=True)

    async def list_claimable(
        self,
        queue: str,
        job_type: str | None = None,
        *,
        organization: str | None = None,
        after: Job | None = None,
        limit: int = 500,
    ) -> list[Job]:
        """A page of the queue's due jobs in claim order, after `after`: those to wake on a resume."""
        return await self.database.run(
            lambda own: self._sweeps.claimable(
                own, queue, (job_type or "").lower(), organization=organization, after=after, limit=limit
            ),
            control=True,
        )


def _approval_of(job: Job) -> str | None:
    """The approval that the job's envelopes name, read leniently: here it can only refuse."""
    for name in (GOVERNANCE, EXECUTION):
        envelope = job.payload.get(name)
        if isinstance(envelope, dict) and isinstance(envelope.get("approval"), str):
            return str(envelope["approval"])
    return None
