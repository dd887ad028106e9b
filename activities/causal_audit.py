"""`causal_audit`: freeze an audit's inputs and start its workflow; and, as its last job, judge what the replays gave.

Between the two, `workflows.causal_audit` creates the controlled replays and waits for every one of them.
"""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from pydantic import RootModel
from sqlalchemy.ext.asyncio import AsyncConnection
from temporalio import activity
from temporalio.common import WorkflowIDConflictPolicy

from activities import product as products
from activities.contracts import (
    CONTROL,
    LARGEST_SEED,
    CausalAuditFinalization,
    CausalAuditRequest,
    CausalAuditResult,
    CausalAuditResumption,
)
from activities.influence import Frozen, Verdict, judge
from activities.lineage import Tenant, evidence_digest
from activities.messages import (
    AUDIT_ABANDONED,
    AUDIT_PLAN,
    AUDIT_TYPE,
    Abandoned,
    AuditStart,
    PlannedSample,
    audit_workflow_id,
    final_key,
    replay_key,
)
from activities.product import Product
from activities.runtimes import ISOLATED
from activities.store import audits, executions, inputs
from durable_jobs import JobContext, JobFailed, JobHandler, JobStatus


class AuditPayload(RootModel[CausalAuditRequest | CausalAuditResumption | CausalAuditFinalization]):
    """One job type, as one audit has one beginning and one end."""


class CausalAudit(JobHandler[AuditPayload, CausalAuditResult]):
    """No phase calls a provider: each may be repeated, and leaves one audit, one workflow, one verdict."""

    job_type = "causal_audit"

    def __init__(self, product: Product) -> None:
        self.product = product

    async def run(self, job: JobContext, request: AuditPayload) -> CausalAuditResult:
        job.nothing_sent()
        tenant = products.tenant_of(job)
        match request.root:
            case CausalAuditFinalization(audit_id=audit_id):
                return await self._finalize(tenant, job.id, audit_id)
            case CausalAuditResumption(audit_id=audit_id):
                found = await self.product.read(lambda own: audit_result(own, tenant, audit_id))
                if found.status == "FROZEN":
                    await _start_workflow(job, audit_id)
                return found
            case CausalAuditRequest():
                return await self._start(job, request.root)

    async def _start(self, job: JobContext, request: CausalAuditRequest) -> CausalAuditResult:
        """Freeze, commit, and only then start the workflow; a redelivered job finds both as they are."""
        tenant = products.tenant_of(job)

        async def freeze(connection: AsyncConnection) -> int:
            execution, frozen = await _audited(connection, tenant, request.execution_id)
            if execution.lineage.runtime != ISOLATED or execution.without is not None:
                raise JobFailed(
                    "only an isolated execution with all its evidence can be audited",
                    retryable=False,
                    code="NOT_ELIGIBLE",
                )
            if not frozen.evidence:
                raise JobFailed("the execution had no evidence", retryable=False, code="NOT_ELIGIBLE")
            if execution.seed > LARGEST_SEED - request.samples:
                raise JobFailed("its seed leaves no room for the samples'", retryable=False, code="NOT_ELIGIBLE")
            interventions = [CONTROL, *(piece.evidence_id for piece in frozen.evidence)]
            seeds = [execution.seed + number for number in range(request.samples)]
            await audits.freeze_audit(connection, tenant, job.id, execution.id, interventions, seeds)
            return len(await audits.asked_samples(connection, tenant, job.id))

        replays = await self.product.write(freeze)
        await _start_workflow(job, job.id)
        return CausalAuditResult(
            audit_id=job.id, status="FROZEN", replays=replays, workflow_id=audit_workflow_id(str(job.id))
        )

    async def _finalize(self, tenant: Tenant, job_id: UUID, audit_id: UUID) -> CausalAuditResult:
        """Judge all samples and write the verdict, in one transaction; judged before, it stands as it was judged.

        Only the job under the audit's own key judges, and how each replay ended is read from the job table.
        """
        key = final_key(str(audit_id))
        final = await self.product.jobs.find_by_idempotency_key(*tenant, key)
        if final is None or final.id != job_id:
            raise JobFailed(f"only the job under {key} judges", retryable=False, code="NOT_THE_FINAL_JOB")
        asked = await self.product.read(lambda own: audits.asked_samples(own, tenant, audit_id))
        failures = await self._failures(tenant, audit_id, asked)

        async def finish(connection: AsyncConnection) -> CausalAuditResult:
            audit = await audits.read_audit(connection, tenant, audit_id, lock=True)
            if audit is None:
                raise JobFailed(f"no audit {audit_id}", retryable=False, code="AUDIT_UNKNOWN")
            if audit.status == "FROZEN":
                verdict = await _verdict(connection, tenant, audit, failures)
                await audits.finish_audit(connection, tenant, audit.id, verdict, job_id)
            return await audit_result(connection, tenant, audit_id)

        return await self.product.write(finish)

    async def _failures(
        self, tenant: Tenant, audit_id: UUID, asked: Sequence[audits.Asked]
    ) -> dict[tuple[str, int], str]:
        """The codes of the replays whose jobs did not complete, by (intervention, sample)."""
        keys = {replay_key(str(audit_id), each.intervention, each.sample): each for each in asked}
        jobs = await self.product.jobs.find_by_idempotency_keys(*tenant, list(keys))
        return {
            (keys[key].intervention, keys[key].sample): job.error.code if job.error else str(job.status)
            for key, job in jobs.items()
            if job.status is not JobStatus.COMPLETED
        }


async def _start_workflow(job: JobContext, audit_id: UUID) -> None:
    """Start the audit's workflow, unless it runs. Again does no harm: all that it creates is found by its key."""
    queue, _, isolation = activity.info().task_queue.partition("@")
    start = AuditStart(
        audit_id=str(audit_id),
        organization=job.organization,
        project=job.project,
        queue=queue,
        isolated=bool(isolation),
        tenant=job.identity.tenant if job.identity else None,
        actor=job.identity.actor if job.identity else None,
        trace=job.identity.trace if job.identity else None,
    )
    await activity.client().start_workflow(
        AUDIT_TYPE,
        start,
        id=audit_workflow_id(start.audit_id),
        task_queue=activity.info().task_queue,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
        static_summary=f"causal audit · {job.organization}/{job.project}",
    )


class AuditActivities:
    """What the audit's workflow asks of the product's tables."""

    def __init__(self, product: Product) -> None:
        self.product = product

    @activity.defn(name=AUDIT_PLAN)
    async def audit_plan(self, start: AuditStart) -> list[PlannedSample]:
        """The controlled replays that the audit needs, from its frozen inputs."""
        tenant, audit_id = Tenant(start.organization, start.project), UUID(start.audit_id)

        async def read(connection: AsyncConnection) -> list[PlannedSample]:
            audit = await audits.read_audit(connection, tenant, audit_id)
            assert audit is not None, "it was frozen before its workflow was started"
            asked = await audits.asked_samples(connection, tenant, audit_id)
            return [PlannedSample(str(audit.execution_id), each.intervention, each.sample, each.seed) for each in asked]

        return await self.product.read(read)

    @activity.defn(name=AUDIT_ABANDONED)
    async def audit_abandoned(self, abandoned: Abandoned) -> str:
        """Write FAILED with the reason, unless a verdict stands; the status that the audit has then."""
        start = abandoned.start
        tenant, audit_id = Tenant(start.organization, start.project), UUID(start.audit_id)

        async def write(connection: AsyncConnection) -> str:
            verdict = Verdict(None, (), (abandoned.reason,))
            await audits.finish_audit(connection, tenant, audit_id, verdict, audit_id)
            audit = await audits.read_audit(connection, tenant, audit_id)
            assert audit is not None, "it was frozen before its workflow was started"
            return audit.status

        return await self.product.write(write)

    def all(self) -> list[Callable[..., Any]]:
        """The activities to register with the worker."""
        return [self.audit_plan, self.audit_abandoned]


async def audit_result(connection: AsyncConnection, tenant: Tenant, audit_id: UUID) -> CausalAuditResult:
    """An audit as it stands; figures of a completed one alone. Raises `JobFailed` for an unknown one."""
    audit = await audits.read_audit(connection, tenant, audit_id)
    if audit is None:
        raise JobFailed(f"no audit {audit_id}", retryable=False, code="AUDIT_UNKNOWN")
    return CausalAuditResult.model_validate(
        {
            "audit_id": audit.id,
            "status": audit.status,
            "replays": len(await audits.asked_samples(connection, tenant, audit_id)),
            "workflow_id": audit_workflow_id(str(audit.id)),
            "classification": audit.classification,
            "influences": await audits.published(connection, tenant, audit_id),
            "reasons": audit.reasons,
        }
    )


async def _audited(
    connection: AsyncConnection, tenant: Tenant, execution_id: UUID
) -> tuple[executions.Execution, inputs.FrozenCase]:
    execution = await executions.read_execution(connection, tenant, execution_id)
    if execution is None:
        raise JobFailed(f"no execution {execution_id}", retryable=False, code="EXECUTION_UNKNOWN")
    case = await inputs.frozen_case(connection, tenant, execution.lineage.dataset_digest, execution.lineage.case_id)
    if evidence_digest(case.evidence) != execution.evidence_digest:
        raise JobFailed("the execution ran on other evidence", retryable=False, code="NOT_ELIGIBLE")
    return execution, case


async def _verdict(
    connection: AsyncConnection, tenant: Tenant, audit: audits.Audit, failures: dict[tuple[str, int], str]
) -> Verdict:
    try:
        execution, case = await _audited(connection, tenant, audit.execution_id)
    except (inputs.EvidenceMissing, JobFailed) as gone:
        return Verdict(None, (), (str(gone),))
    left = {
        piece.evidence_id: evidence_digest(other for other in case.evidence if other is not piece)
        for piece in case.evidence
    }
    frozen = Frozen(
        lineage=execution.lineage,
        evidence={CONTROL: execution.evidence_digest, **left},
        samples=audit.samples,
        decision=execution.decision,
        score=execution.score,
        seeds=[execution.seed + number for number in range(audit.samples)],
    )
    return judge(frozen, await audits.samples_of(connection, tenant, audit.id), failures)
