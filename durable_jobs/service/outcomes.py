"""How an attempt ends: the verbs of the holder. Accepted until it is fenced, also after its lease ran out."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from pydantic import BaseModel, ConfigDict
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract import decisions
from durable_jobs.contract.decisions import require_holder
from durable_jobs.contract.errors import (
    FieldProblem,
    InvalidInput,
    LeaseLost,
    NotStorable,
    Refused,
)
from durable_jobs.contract.models import Claim, CreatedJob, Job, JobError
from durable_jobs.contract.rules import encode_json, json_problem
from durable_jobs.contract.specs import FollowUp
from durable_jobs.contract.states import JobStatus
from durable_jobs.contract.trail import result_in_event
from durable_jobs.service.base import require_json, require_text
from durable_jobs.service.follow_ups import FollowUps


class Completion(BaseModel):
    """What `complete_job` returns."""

    model_config = ConfigDict(frozen=True)

    job: Job
    follow_ups: list[CreatedJob] = []


class Outcomes(FollowUps):
    async def complete_job(
        self,
        claim: Claim,
        result: dict[str, Any],
        follow_ups: Sequence[FollowUp] = (),
        *,
        follow_up_problem: str | None = None,
    ) -> Completion:
        """Complete the job with its result, and create its follow-ups, in one transaction.

        A job that is still `claimed` is promoted first. A follow-up whose key has another request, or the
        `follow_up_problem` that kept them from being named, undoes nothing: it is recorded and the job escalated.

        Raises `NotStorable`, naming what in the result can't be stored; `LeaseLost`, after keeping the result on the
        attempt's row as evidence; `IllegalTransition`; `JobNotFound`.
        """
        if problem := json_problem(result, "result"):
            raise NotStorable([problem])
        encoded, data = encode_json(result), result_in_event(result)

        async def work(connection: AsyncConnection) -> Completion | Refused:
            job, _, applied = await self._store.complete(connection, claim, encoded, data)
            if not applied and job.holds(claim):
                await self._store.renew(connection, claim, grace_seconds=self.grace_seconds, details=None)
                job, _, applied = await self._store.complete(connection, claim, encoded, data)
            if not applied:
                try:
                    require_holder(job, claim)
                except LeaseLost as refusal:
                    await self._store.keep_late_result(connection, claim, encoded)
                    return refusal
            job, created = await self._follow_up(connection, job, follow_ups, follow_up_problem, claim.worker_id)
            return Completion(job=job, follow_ups=created)

        answer = await self.database.run(work)
        if isinstance(answer, Refused):
            raise answer
        return answer

    async def fail_job(self, claim: Claim, error: JobError, retryable: bool) -> Job:
        """End the attempt in failure, as the boundary decides: `contract.decisions.fail`.

        Raises `InvalidInput`, `LeaseLost`, `IllegalTransition`, `JobNotFound`.
        """
        error = _storable(error)
        return await self._decided(
            claim.job_id, lambda job, now: decisions.fail(job, claim, error, retryable=retryable, now=now)
        )

    async def mark_indeterminate(self, claim: Claim, error: JobError) -> Job:
        """The outcome is uncertain: only reconciliation or an operator resolves it. Raises as `fail_job`."""
        return await self._land(claim, JobStatus.INDETERMINATE, error)

    async def mark_halt_unsafe(self, claim: Claim, error: JobError) -> Job:
        """The job must never move again. Raises as `fail_job`."""
        return await self._land(claim, JobStatus.HALT_UNSAFE, error)

    async def mark_timed_out(self, claim: Claim, error: JobError) -> Job:
        """The handler's time ran out past the boundary. Raises as `fail_job`."""
        return await self._land(claim, JobStatus.TIMED_OUT, error)

    async def _land(self, claim: Claim, status: JobStatus, error: JobError) -> Job:
        error = _storable(error)

        def decide(job: Job, now: Any) -> decisions.Change:
            require_holder(job, claim)
            return decisions.land(job, claim, status, error, now)

        return await self._decided(claim.job_id, decide)

    async def release_job(self, claim: Claim, cause: str) -> Job:
        """Give the job back to the queue unharmed; the attempt isn't counted, ten times at most.

        Raises `NotReleasable` past the boundary, and as `fail_job`.
        """
        require_text(cause=cause)
        return await self._decided(claim.job_id, lambda job, now: decisions.release(job, claim, cause=cause, now=now))

    async def acknowledge_cancellation(self, claim: Claim, provider_confirmed: dict[str, Any] | None = None) -> Job:
        """Yield to a requested cancellation: `cancelled` without a marker; past it only with the provider's own
        confirmation, a JSON object kept as evidence, and else `indeterminate`. Raises as `fail_job`."""
        if provider_confirmed is not None:
            require_json("provider_confirmed", provider_confirmed)
            if not provider_confirmed:
                raise InvalidInput.at("provider_confirmed", "must not be empty: it is the evidence")
        return await self._decided(
            claim.job_id,
            lambda job, now: decisions.acknowledge_cancellation(
                job, claim, provider_confirmed=provider_confirmed, now=now
            ),
        )

    async def keep_late_result(self, claim: Claim, result: dict[str, Any]) -> bool:
        """Keep what a fenced holder got, on its own attempt row, as evidence; True if it was kept."""
        require_json("result", result)
        return await self.database.run(lambda own: self._store.keep_late_result(own, claim, encode_json(result)))

    async def attempt_outcome(self, job_id: UUID, generation: int) -> str | None:
        """How the attempt of this generation ended; None while it runs."""
        attempts = await self.database.run(
            lambda own: self._store.list_attempts(own, job_id, after=generation - 1, limit=1)
        )
        return attempts[0].outcome if attempts else None


def _storable(error: JobError) -> JobError:
    """The error, escaped and cut. Raises `InvalidInput` where it says nothing."""
    empty = [name for name in ("code", "message") if not getattr(error, name)]
    if empty:
        raise InvalidInput(FieldProblem(f"error.{name}", "must not be empty") for name in empty)
    return JobError.of(error.code, error.message, type=error.type, traceback=error.traceback)
