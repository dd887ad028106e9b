"""Running a dataset under a policy, case by case, each one committed: what a redelivered job has done stays done."""

from dataclasses import dataclass
from functools import partial

from sqlalchemy.ext.asyncio import AsyncConnection

from activities import product as products
from activities.comparison import CaseOutcome, mean_score
from activities.contracts import EvaluationResult
from activities.datasets import Dataset, Policy
from activities.influence import Lineage
from activities.lineage import evidence_digest
from activities.product import Product
from activities.runtimes import ISOLATED, run, runtime
from activities.store import executions, inputs
from durable_jobs import JobContext, JobFailed

PROGRESS_EVERY = 10
"""Cases between two progress events on the job's trail."""


@dataclass(frozen=True)
class Evaluated:
    result: EvaluationResult
    outcomes: list[CaseOutcome]


async def evaluate(product: Product, job: JobContext, dataset: Dataset, policy: Policy, seed: int) -> Evaluated:
    """Run every case that this job has not run yet, then write the job's evaluation of the whole.

    On the isolated runtime alone: two calls to a provider are two jobs, and this is one. Raises `JobFailed`.
    """
    tenant = products.tenant_of(job)
    adapter = runtime(product.runtimes, ISOLATED)

    async def freeze(connection: AsyncConnection) -> set[str]:
        await inputs.freeze_policy(connection, tenant, policy)
        await inputs.freeze_dataset(connection, tenant, dataset)
        done = await executions.executions_of_job(connection, tenant, job.id)
        if any(each.lineage.dataset_digest != dataset.digest for each in done):
            raise _changed(f"this job began on another version of {dataset.dataset_id}")
        return {each.lineage.case_id for each in done if each.lineage.policy_digest == policy.digest}

    done = await product.write(freeze)
    for number, case in enumerate(dataset.cases):
        if case.case_id in done:
            continue
        if number % PROGRESS_EVERY == 0:
            await job.heartbeat({"policy": policy.policy_id, "cases": number, "of": len(dataset.cases)})
        outcome = await run(adapter, case.request(policy, product.agent, seed=seed), key=f"{job.id}:{case.case_id}")
        ran = executions.Ran(
            job_id=job.id,
            kind="evaluation",
            lineage=Lineage(
                dataset_digest=dataset.digest,
                case_id=case.case_id,
                policy_digest=policy.digest,
                agent=outcome.agent.name,
                agent_version=outcome.agent.version,
                build=outcome.build,
                runtime=ISOLATED,
            ),
            evidence_digest=evidence_digest(case.evidence),
            without=None,
            seed=seed,
            outcome=outcome,
        )
        await product.write(partial(executions.record_execution, tenant=tenant, ran=ran))

    async def conclude(connection: AsyncConnection) -> Evaluated:
        ran = await executions.executions_of_job(connection, tenant, job.id)
        # A stale worker of another version may have recorded some of them.
        if len({(each.lineage.dataset_digest, each.lineage.agent_version, each.lineage.build) for each in ran}) > 1:
            raise _changed("its cases were run by more than one build of the agent")
        outcomes = await executions.outcomes_of_job(connection, tenant, job.id, policy.digest)
        row = await executions.record_evaluation(
            connection, tenant, job.id, (dataset.digest, policy.digest), outcomes, mean_score(outcomes)
        )
        kept = {name: row[name] for name in ("dataset_digest", "policy_digest", "cases", "correct", "mean_score")}
        return Evaluated(EvaluationResult(evaluation_id=row["id"], **kept), outcomes)

    return await product.write(conclude)


def _changed(what: str) -> JobFailed:
    """An evaluation is of one dataset and one agent, or there is none."""
    return JobFailed(what, retryable=False, code="INPUTS_CHANGED")
