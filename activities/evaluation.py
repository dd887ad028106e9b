"""`evaluation`: a dataset under a policy, resumable by case."""

from activities import product as products
from activities.cases import evaluate
from activities.contracts import EvaluationRequest, EvaluationResult
from activities.product import Product
from durable_jobs import JobContext, JobHandler


class Evaluation(JobHandler[EvaluationRequest, EvaluationResult]):
    """Runs the cases in the isolated runtime and records each as an execution, which a replay or an audit may name."""

    job_type = "evaluation"

    def __init__(self, product: Product) -> None:
        self.product = product

    async def run(self, job: JobContext, request: EvaluationRequest) -> EvaluationResult:
        dataset, policy = products.dataset(request.dataset_id), products.policy(request.policy_id)
        evaluated = await evaluate(self.product, job, dataset, policy, request.seed)
        job.nothing_sent()
        return evaluated.result
