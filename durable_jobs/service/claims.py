"""Claiming a job, keeping the claim, and crossing the dispatch boundary."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.decisions import mark_refusal
from durable_jobs.contract.errors import FieldProblem, InvalidInput, OperationKeyConflict, RetryTransaction
from durable_jobs.contract.models import Claim, ClaimOutcome, ClaimRefusal, Job, LeaseStatus
from durable_jobs.contract.rules import key_problem
from durable_jobs.contract.states import JobStatus
from durable_jobs.service.base import ServicePart, require_json, require_text

_REFUSALS = {refusal.value: refusal for refusal in ClaimRefusal}


class Claims(ServicePart):
    async def claim_job(
        self,
        worker_id: str,
        claim_token: UUID,
        job_id: UUID | None = None,
        organizations: Sequence[str] | None = None,
        queues: Sequence[str] | None = None,
        job_types: Sequence[str] | None = None,
    ) -> ClaimOutcome | None:
        """Claim the job `job_id`, or the next eligible one by priority, schedule and age, within the scope given.

        Each claim mints a strictly greater generation. `claim_token` is to be drawn at random by the attempt that
        claims, and by nothing that repeats: the same token returns the same claim. A job whose lease ran out past its
        boundary, under cancellation, or in its last attempt is not claimed: it lands in `indeterminate`, `cancelled`
        or `dead_letter`.

        Returns None when nothing is eligible; with `job_id` always an outcome, falsy with the reason.
        """
        require_text(worker_id=worker_id)
        scope = {"organizations": organizations, "queues": queues, "job_types": job_types}

        async def work(connection: AsyncConnection) -> tuple[str, Job] | None:
            return await self._store.claim(
                connection, worker_id=worker_id, claim_token=claim_token, job_id=job_id, scope=scope
            )

        while True:
            claimed = await self.database.run(work)
            if claimed is None:
                return ClaimOutcome(refusal=ClaimRefusal.NOT_FOUND) if job_id else None
            decision, job = claimed
            if decision in ("claim", "repeated"):
                claim = Claim(job_id=job.id, worker_id=worker_id, generation=job.lease_generation)
                return ClaimOutcome(claim=claim, job=job)
            if job_id is not None:
                return ClaimOutcome(refusal=_REFUSALS.get(decision, ClaimRefusal.LANDED), job=job)

    async def renew_lease(self, claim: Claim) -> LeaseStatus:
        """Extend the lease from the database's clock and promote a claimed job to running.

        Falsy when the claim was fenced (`LOST`), or a cancellation is requested (`CANCEL_REQUESTED`, extended all the
        same, so that a sender in mid-call isn't fenced).
        """
        return await self.database.run(
            lambda own: self._store.renew(own, claim, grace_seconds=self.grace_seconds, details=None)
        )

    async def heartbeat(self, claim: Claim, details: Mapping[str, Any] | None = None) -> LeaseStatus:
        """As `renew_lease`, and leaves a heartbeat event with `details`, a JSON object. Raises `InvalidInput`."""
        details = dict(details or {})
        require_json("details", details)
        return await self.database.run(
            lambda own: self._store.renew(own, claim, grace_seconds=self.grace_seconds, details=details)
        )

    async def mark_provider_dispatched(self, claim: Claim, operation_key: str) -> Job:
        """Record the dispatch boundary, the point of no blind return: the time, the generation and the key.

        To be called just before the provider is. Renews the lease and promotes to running.

        Raises `InvalidInput`; `LeaseLost` (also when the lease ran out unclaimed), `CancellationRequested`,
        `AlreadyDispatched` (by any generation of this intent), `OperationKeyConflict`, `IllegalTransition`,
        `JobNotFound`. None of them wrote anything: nothing may be sent.
        """
        if problem := key_problem(operation_key):
            raise InvalidInput([FieldProblem("operation_key", problem)])
        try:
            job, now, applied = await self.database.run(
                lambda own: self._store.mark_dispatched(own, claim, operation_key, self.grace_seconds)
            )
        except OperationKeyConflict:
            raise OperationKeyConflict(f"operation key {operation_key!r} is in use by another attempt") from None
        if applied:
            marker = {"dispatched_at": now, "dispatched_generation": claim.generation, "operation_key": operation_key}
            return job.model_copy(update={"status": JobStatus.RUNNING, **marker})
        raise mark_refusal(job, claim, now) or RetryTransaction(f"job {job.id}: the mark lost a race; repeat it")
