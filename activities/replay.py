"""`replay_execution` and `replay_evaluation`: run a recorded execution again, and say what came out differently."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from activities import product as products
from activities.comparison import CaseOutcome, compared, drift_of
from activities.contracts import (
    CONTROL,
    AuditSample,
    ReplayEvaluationRequest,
    ReplayEvaluationResult,
    ReplayRequest,
    ReplayResult,
)
from activities.influence import Lineage
from activities.lineage import Tenant, evidence_digest
from activities.product import Product
from activities.runtime import AgentRef, RuntimeOutcome, RuntimeRefused, RuntimeRequest
from activities.runtimes import ISOLATED, run, runtime
from activities.store import audits, executions, inputs
from durable_jobs import FollowUp, Job, JobContext, JobFailed, JobHandler, ProviderState
from durable_jobs.contract.envelope import raw_payload


class ReplayExecution(JobHandler[ReplayRequest, ReplayResult]):
    """Runs the execution's case again and commits the execution that it produced, named by the job: a redelivered job
    finds it, and runs nothing. The evaluation is queued with the completion, after that commit.

    The isolated runtime needs no boundary: a run of it has no effect outside. A model's run is a call to a provider.
    """

    job_type = "replay_execution"

    def __init__(self, product: Product) -> None:
        self.product = product

    async def run(self, job: JobContext, request: ReplayRequest) -> ReplayResult:
        tenant = products.tenant_of(job)
        if produced := await self._produced(tenant, job.id, request):
            job.nothing_sent()
            return produced
        original = await self.product.read(lambda own: executions.read_execution(own, tenant, request.execution_id))
        if original is None:
            raise JobFailed(f"no execution {request.execution_id}", retryable=False, code="EXECUTION_UNKNOWN")
        if request.audit is not None:
            await self._require_sample(tenant, original, request.audit, request)
        asked, lineage = await self._asked(tenant, job.id, original, request)
        adapter = runtime(self.product.runtimes, lineage.runtime)
        key = None
        if lineage.runtime == ISOLATED:
            job.nothing_sent()
            outcome = await run(adapter, asked, key=f"replay:{job.id}")
        else:
            async with job.dispatch(f"replay:{job.id}") as key:
                outcome = await run(adapter, asked, key=key)
        return await self._commit(tenant, job.id, request, asked, lineage, outcome, key)

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[ReplayResult]:
        """The product's own tables first: the answer to this very key may have been committed. Then the provider."""
        tenant, request = products.tenant_of_row(job), self.parse_request(raw_payload(job.payload))
        if produced := await self._produced(tenant, job.id, request, operation_key):
            return ProviderState.succeeded(produced)
        original = await self.product.read(lambda own: executions.read_execution(own, tenant, request.execution_id))
        if original is None:
            return ProviderState.unknown(f"the replayed execution {request.execution_id} is gone")
        asked, lineage = await self._asked(tenant, job.id, original, request)
        adapter = runtime(self.product.runtimes, lineage.runtime)
        lookup = getattr(adapter, "state", None)
        if lookup is None:
            return ProviderState.unknown(f"the {lineage.runtime} runtime has no lookup")
        state: ProviderState[RuntimeOutcome] = await lookup(asked, key=operation_key, dispatched_at=job.dispatched_at)
        if state.result is None:
            return ProviderState(state.answer, None, state.error, state.reason, state.send_deadline)
        return ProviderState.succeeded(
            await self._commit(tenant, job.id, request, asked, lineage, state.result, operation_key)
        )

    def follow_ups(self, job: Job, result: ReplayResult) -> Sequence[FollowUp]:
        """A replay is evaluated; a controlled one returns its outcome to its audit instead."""
        if result.audit is not None:
            return ()
        payload = {"replay_id": str(result.replay_id)}
        return [FollowUp(name="evaluation", job_type=ReplayEvaluation.job_type, payload=payload)]

    async def _require_sample(
        self, tenant: Tenant, original: executions.Execution, audit: AuditSample, request: ReplayRequest
    ) -> None:
        """Raises `JobFailed` unless the audit asks for just this replay: before anything is run for it."""
        seed = original.seed if request.seed is None else request.seed
        wanted = (audit.intervention, audit.sample, seed)
        if not await self.product.read(
            lambda own: audits.asks_for(own, tenant, audit.audit_id, request.execution_id, wanted)
        ):
            raise JobFailed(f"no audit {audit.audit_id} asks for it", retryable=False, code="SAMPLE_UNKNOWN")

    async def _asked(
        self, tenant: Tenant, job_id: UUID, original: executions.Execution, request: ReplayRequest
    ) -> tuple[RuntimeRequest, Lineage]:
        """The run that is asked for, and what it runs on: the same for every delivery. Raises `JobFailed`."""
        was = original.lineage
        name = request.runtime or was.runtime

        async def read(connection: AsyncConnection) -> tuple[inputs.FrozenCase, str, dict[str, object]]:
            digest: str | None = was.policy_digest
            if request.policy_id is not None:
                digest = await inputs.replay_policy(connection, tenant, job_id)
                if digest is None:
                    await inputs.fix_replay_policy(connection, tenant, job_id, products.policy(request.policy_id))
                    digest = await inputs.replay_policy(connection, tenant, job_id)
            assert digest is not None, "it was just fixed"
            case = await inputs.frozen_case(connection, tenant, was.dataset_digest, was.case_id)
            return case, digest, await inputs.frozen_policy(connection, tenant, digest)

        case, policy_digest, rules = await self.product.write(read)
        asked = RuntimeRequest(
            agent=AgentRef(name=was.agent, version=was.agent_version),
            case_id=was.case_id,
            question=case.question,
            policy=rules,
            evidence=case.evidence,
            seed=original.seed if request.seed is None else request.seed,
        )
        if request.audit is not None and request.audit.intervention != CONTROL:
            try:
                asked = asked.without(request.audit.intervention)
            except RuntimeRefused as refused:
                raise JobFailed(str(refused), retryable=False, code="INTERVENTION_IMPOSSIBLE") from refused
        return asked, Lineage(
            dataset_digest=was.dataset_digest,
            case_id=was.case_id,
            policy_digest=policy_digest,
            agent=asked.agent.name,
            agent_version=asked.agent.version,
            build="",  # known once it has run
            runtime=name,
        )

    async def _commit(
        self,
        tenant: Tenant,
        job_id: UUID,
        request: ReplayRequest,
        asked: RuntimeRequest,
        lineage: Lineage,
        outcome: RuntimeOutcome,
        key: str | None,
    ) -> ReplayResult:
        """Commit the produced execution, the replay, and the audit's sample, in one transaction."""
        audit = request.audit
        ran = executions.Ran(
            job_id=job_id,
            kind="counterfactual" if audit else "replay",
            lineage=Lineage(**(vars(lineage) | {"build": outcome.build})),
            evidence_digest=evidence_digest(asked.evidence),
            without=(audit.intervention or None) if audit else None,
            seed=asked.seed,
            outcome=outcome,
            operation_key=key,
        )

        async def write(connection: AsyncConnection) -> ReplayResult:
            execution = await executions.record_execution(connection, tenant, ran)
            replay = executions.Replay(job_id, request.execution_id, execution.id, audit.audit_id if audit else None)
            await executions.record_replay(connection, tenant, replay)
            if audit is not None:
                await audits.fill_sample(
                    connection, tenant, audit.audit_id, audit.intervention, audit.sample, execution.id
                )
            committed = await _committed(connection, tenant, job_id, request)
            assert committed is not None, "it was just recorded"
            return committed

        return await self.product.write(write)

    async def _produced(
        self, tenant: Tenant, job_id: UUID, request: ReplayRequest, operation_key: str | None = None
    ) -> ReplayResult | None:
        """What an earlier delivery of the job committed; with a key, only what was sent under it."""
        return await self.product.read(lambda own: _committed(own, tenant, job_id, request, operation_key))


class ReplayEvaluation(JobHandler[ReplayEvaluationRequest, ReplayEvaluationResult]):
    """Writes a replay's evaluation, its comparison with what was replayed, and the drift between them, once."""

    job_type = "replay_evaluation"

    def __init__(self, product: Product) -> None:
        self.product = product

    async def run(self, job: JobContext, request: ReplayEvaluationRequest) -> ReplayEvaluationResult:
        tenant = products.tenant_of(job)
        job.nothing_sent()

        async def write(connection: AsyncConnection) -> ReplayEvaluationResult:
            replay = await executions.read_replay(connection, tenant, request.replay_id)
            if replay is None:
                raise JobFailed(f"no replay {request.replay_id}", retryable=False, code="REPLAY_UNKNOWN")
            if replay.audit_id is not None:
                raise JobFailed(
                    "a controlled replay is its audit's to judge", retryable=False, code="CONTROLLED_REPLAY"
                )
            original = await executions.read_execution(connection, tenant, replay.execution_id)
            produced = await executions.read_execution(connection, tenant, replay.produced_execution_id)
            assert original is not None and produced is not None, "foreign keys hold them"  # noqa: PT018
            lineage = produced.lineage
            case = await inputs.frozen_case(connection, tenant, lineage.dataset_digest, lineage.case_id)
            before, after = (
                CaseOutcome(lineage.case_id, case.expected, each.decision, each.score) for each in (original, produced)
            )
            both = compared([before], [after])
            evaluation = await executions.record_evaluation(
                connection,
                tenant,
                job.id,
                (lineage.dataset_digest, lineage.policy_digest),
                [after],
                after.score,
                replay.id,
            )
            comparison = await executions.record_comparison(
                connection, tenant, job.id, "execution", (original.id, produced.id), both
            )
            drift = drift_of(both)
            found = {"replay_id": replay.id, "evaluation_id": evaluation["id"], "comparison_id": comparison["id"]}
            await executions.record_drift(connection, tenant, **found, drift=drift, score_delta=both.score_delta)
            return ReplayEvaluationResult(**found, correct=after.correct, drift=drift, score_delta=both.score_delta)

        return await self.product.write(write)


async def _committed(
    connection: AsyncConnection, tenant: Tenant, job_id: UUID, request: ReplayRequest, operation_key: str | None = None
) -> ReplayResult | None:
    replay = await executions.read_replay(connection, tenant, job_id)
    if replay is None:
        return None
    execution = await executions.read_execution(connection, tenant, replay.produced_execution_id)
    assert execution is not None, "a foreign key holds it"
    if operation_key is not None and execution.operation_key != operation_key:
        return None
    return ReplayResult(
        replay_id=replay.id,
        execution_id=replay.execution_id,
        produced_execution_id=replay.produced_execution_id,
        decision=execution.decision,
        score=execution.score,
        audit=request.audit,
    )
