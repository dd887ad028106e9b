"""Claiming a job, keeping the claim, and crossing the dispatch boundary."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.admission import admission_reasons
from durable_jobs.contract.decisions import mark_refusal
from durable_jobs.contract.envelope import read_governance
from durable_jobs.contract.errors import (
    AdmissionRefused,
    FieldProblem,
    InvalidInput,
    OperationKeyConflict,
    RetryTransaction,
)
from durable_jobs.contract.models import Claim, ClaimOutcome, ClaimRefusal, Job, LeaseStatus
from durable_jobs.contract.rules import key_problem
from durable_jobs.contract.states import EventName, JobStatus
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

    async def mark_provider_dispatched(self, claim: Claim, operation_key: str, *, consequential: bool = False) -> Job:
        """Record the dispatch boundary, the point of no blind return: the time, the generation and the key.

        To be called just before the provider is. Renews the lease and promotes to running. A `consequential` one is
        admitted first, in the same transaction: its identity and governance as the row holds them now, and its
        approval live, which is consumed with the mark; the decision leaves `admission_checked`.

        Raises `InvalidInput`; `LeaseLost` (also when the lease ran out unclaimed), `CancellationRequested`,
        `AlreadyDispatched` (by any generation of this intent), `OperationKeyConflict`, `AdmissionRefused`,
        `IllegalTransition`, `JobNotFound`. None of them wrote anything: nothing may be sent.
        """
        if problem := key_problem(operation_key):
            raise InvalidInput([FieldProblem("operation_key", problem)])

        async def work(connection: AsyncConnection) -> tuple[Job, datetime, bool]:
            if consequential:
                await self._admit(connection, claim)
            return await self._store.mark_dispatched(connection, claim, operation_key, self.grace_seconds)

        try:
            job, now, applied = await self.database.run(work)
        except OperationKeyConflict:
            raise OperationKeyConflict(f"operation key {operation_key!r} is in use by another attempt") from None
        if applied:
            marker = {"dispatched_at": now, "dispatched_generation": claim.generation, "operation_key": operation_key}
            return job.model_copy(update={"status": JobStatus.RUNNING, **marker})
        raise mark_refusal(job, claim, now) or RetryTransaction(f"job {job.id}: the mark lost a race; repeat it")

    async def _admit(self, connection: AsyncConnection, claim: Claim) -> None:
        """The one place that decides whether a consequential job may be dispatched."""
        job, now = await self._store.lock(connection, claim.job_id)
        if refusal := mark_refusal(job, claim, now):
            raise refusal
        reasons = admission_reasons(job, now)
        governance = None if reasons else read_governance(job)
        if governance is not None and governance.approval is not None:
            store = self._approvals or PostgresApprovals(self.database.schema)
            reasons = await store.consume(connection, job, governance.approval, governance.action_intent)
        if reasons:
            raise AdmissionRefused(reasons)
        data = {"allowed": True, "approval": governance.approval if governance else None}
        await self._store.append_event(connection, job.id, EventName.ADMISSION_CHECKED, claim.worker_id, data)
