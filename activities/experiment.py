"""`experiment`: policies compared over one dataset, resumable by case."""

from activities import product as products
from activities.cases import Evaluated, evaluate
from activities.comparison import compared
from activities.contracts import ComparisonResult, ExperimentRequest, ExperimentResult
from activities.product import Product
from activities.store import executions
from durable_jobs import JobContext, JobHandler


class Experiment(JobHandler[ExperimentRequest, ExperimentResult]):
    """Evaluates each policy, and compares the first, the baseline, with each of the others."""

    job_type = "experiment"

    def __init__(self, product: Product) -> None:
        self.product = product

    async def run(self, job: JobContext, request: ExperimentRequest) -> ExperimentResult:
        dataset = products.dataset(request.dataset_id)
        policies = [products.policy(policy_id) for policy_id in request.policy_ids]
        baseline, *candidates = [
            await evaluate(self.product, job, dataset, policy, request.seed) for policy in policies
        ]
        comparisons = [
            await self._compare(job, policy_id, baseline, candidate)
            for policy_id, candidate in zip(request.policy_ids[1:], candidates, strict=True)
        ]
        job.nothing_sent()
        return ExperimentResult(
            baseline=baseline.result, candidates=[each.result for each in candidates], comparisons=comparisons
        )

    async def _compare(
        self, job: JobContext, policy_id: str, baseline: Evaluated, candidate: Evaluated
    ) -> ComparisonResult:
        both = compared(baseline.outcomes, candidate.outcomes)
        pair = (baseline.result.evaluation_id, candidate.result.evaluation_id)
        tenant = products.tenant_of(job)
        row = await self.product.write(
            lambda connection: executions.record_comparison(connection, tenant, job.id, "evaluation", pair, both)
        )
        kept = {name: row[name] for name in ("agreements", "correct_delta", "score_delta")}
        return ComparisonResult(comparison_id=row["id"], policy_id=policy_id, **kept)
