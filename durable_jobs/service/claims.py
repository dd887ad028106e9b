"""Claiming a job, keeping the claim, and crossing the dispatch boundary."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.admission import CHANGED_PAYLOAD, admission
from durable_jobs.contract.decisions import fail, mark_refusal, require_holder
from durable_jobs.contract.envelope import SQL_DIGEST
from durable_jobs.contract.errors import (
    AdmissionRefused,
    FieldProblem,
    InvalidInput,
    LeaseLost,
    OperationKeyConflict,
)
from durable_jobs.contract.models import Claim, ClaimOutcome, ClaimRefusal, Job, JobError, LeaseStatus
from durable_jobs.contract.rules import operation_key_problem
from durable_jobs.contract.states import EventName
from durable_jobs.service.approvals import PostgresApprovals
from durable_jobs.service.base import ServicePart, folded, require_json, require_text

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
        scope = {"organizations": organizations, "queues": queues, "job_types": folded(job_types)}

        async def work(connection: AsyncConnection) -> tuple[str, Job] | None:
            return await self._store.claim(
                connection, worker_id=worker_id, claim_token=claim_token, job_id=job_id, scope=scope
            )

        while True:
            claimed = await self.database.run(work)
            if claimed is None:
                return ClaimOutcome(refusal=ClaimRefusal.NOT_FOUND) if job_id else None
            decision, job = claimed
            if decision == ClaimRefusal.OUT_OF_SCOPE:
                # Another tenant's row, perhaps: the refusal tells nothing of it.
                return ClaimOutcome(refusal=ClaimRefusal.OUT_OF_SCOPE) if job_id else None
            if decision in ("claim", "reclaim", "repeated"):
                claim = Claim(job_id=job.id, worker_id=worker_id, generation=job.lease_generation)
                return ClaimOutcome(claim=claim, job=job, reclaimed=decision == "reclaim")
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

    async def mark_provider_dispatched(self, claim: Claim, operation_key: str, *, consequential: bool = True) -> Job:
        """Record the dispatch boundary, the point of no blind return: the time, the generation and the key.

        To be called just before the provider is. Renews the lease, promotes to running. A `consequential` job, as all
        are unless the caller says otherwise, is admitted first, in the same transaction: its identity and governance as
        the row holds them now, and its approval live, which is consumed with the mark; the decision leaves
        `admission_checked`.

        Raises `InvalidInput`; `LeaseLost` (also when the lease ran out unclaimed), `CancellationRequested`,
        `AlreadyDispatched` (by any generation of this intent), `OperationKeyConflict`, `AdmissionRefused`,
        `IllegalTransition`, `JobNotFound`. None of them wrote anything: nothing may be sent.
        """
        if problem := operation_key_problem(operation_key):
            raise InvalidInput([FieldProblem("operation_key", problem)])

        async def work(connection: AsyncConnection) -> Job:
            admission = await self._admit(connection, claim) if consequential else None
            job, now, applied = await self._store.mark_dispatched(
                connection, claim, operation_key, self.grace_seconds, admission
            )
            if not applied:
                # Raised in here, so that an approval consumed for it is given back.
                refusal = mark_refusal(job, claim, now)
                raise refusal or LeaseLost(f"job {job.id}: the time of generation {claim.generation} is up")
            return job

        try:
            return await self.database.run(work)
        except OperationKeyConflict:
            raise OperationKeyConflict(f"operation key {operation_key!r} is in use by another attempt") from None

    async def _admit(self, connection: AsyncConnection, claim: Claim) -> dict[str, Any]:
        """The one place that decides whether a consequential job may be dispatched; what to leave on the trail."""
        job, now = await self._store.lock(connection, claim.job_id)
        if refusal := mark_refusal(job, claim, now):
            raise refusal
        reasons, approval, intent = admission(job, now)
        if not reasons and job.request_digest.startswith(SQL_DIGEST):
            reasons = [] if await self._store.digest_holds(connection, job.id) else [CHANGED_PAYLOAD]
        if not reasons and approval is not None:
            store = self._approvals or PostgresApprovals(self.database.schema)
            # Judged again afterwards: it may have waited for another job's decision on the same approval.
            reasons = await store.consume(connection, job, approval, intent or "")
            reasons = reasons or admission(job, await self._store.clock(connection)).reasons
        if reasons:
            raise AdmissionRefused(reasons)
        return {"allowed": True, "approval": approval}

    async def refuse_dispatch(self, claim: Claim, refusal: AdmissionRefused) -> Job:
        """End a job whose dispatch was not admitted: `failed`, nothing sent, and `admission_checked` with the reasons.

        Raises `LeaseLost`, `IllegalTransition`, `JobNotFound`: a stale worker leaves nothing.
        """
        error = JobError.of(refusal.code, refusal.message, type=type(refusal).__name__)

        async def work(connection: AsyncConnection) -> Job:
            job, now = await self._store.lock(connection, claim.job_id)
            change = fail(job, claim, error, retryable=False, now=now)
            data = {"allowed": False, "reasons": list(refusal.reasons)}
            await self._store.append_event(connection, job.id, EventName.ADMISSION_CHECKED, claim.worker_id, data)
            return await self._store.apply(connection, job, change, now)

        return await self.database.run(work)

    async def record_shadow(self, claim: Claim, data: Mapping[str, Any]) -> None:
        """Leave what a policy in shadow would have decided. Raises `LeaseLost`, `IllegalTransition`, `InvalidInput`."""
        require_json("data", dict(data))

        async def work(connection: AsyncConnection) -> None:
            job, _ = await self._store.lock(connection, claim.job_id)
            require_holder(job, claim)
            name = EventName.EXECUTION_CONTROL_SHADOW
            await self._store.append_event(connection, job.id, name, claim.worker_id, data)

        await self.database.run(work)
