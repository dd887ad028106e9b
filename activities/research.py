"""`research` and `deep_research`: one question, one call to a provider that can't be trusted to deduplicate.

Both keep one order: the cancellation check, the heartbeat that proves the claim is still ours, the boundary, the
provider. A lost lease ends the attempt with `LEASE_LOST`, the one outcome that simply goes round again.
"""

from typing import Any, Literal

from openai.types.chat import ChatCompletion
from pydantic import BaseModel, ConfigDict, Field

from durable_jobs import Job, JobContext, JobHandler, LeaseStatus, ProviderState
from durable_jobs.contract.errors import CancellationRequested, LeaseLost
from durable_jobs.providers import Provider

Mode = Literal["quick", "thorough", "sceptical"]

INSTRUCTIONS: dict[Mode, str] = {
    "quick": "Answer in at most five sentences. Name what you are unsure of.",
    "thorough": "Answer with all that matters, ordered by weight. Say what each claim rests on.",
    "sceptical": "Look for what speaks against the obvious answer, and say how strong it is.",
}
"""The system message of each lane."""


class ResearchRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str = Field(min_length=1, max_length=20_000)
    mode: Mode = "quick"


class DeepResearchRequest(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str = Field(min_length=1, max_length=20_000)
    run_id: str | None = Field(default=None, min_length=1, max_length=128)
    """Names the run within the job's lineage; by default the run of the job's identity."""


class Report(BaseModel):
    """What a provider's model answered."""

    text: str
    model: str
    reference: str
    """The provider's own id of the answer."""


def report_of(completion: ChatCompletion) -> Report:
    """The report in a completion. Raises `ValueError` where there is none."""
    text = completion.choices[0].message.content if completion.choices else None
    if not text:
        raise ValueError(f"completion {completion.id} holds no text")
    return Report(text=text, model=completion.model, reference=completion.id)


def batched_report_of(body: Any) -> Report:
    """The same, of the response's body in a batch's output. Raises `ValueError`."""
    return report_of(ChatCompletion.model_validate(body))


async def ready_to_dispatch(job: JobContext, **progress: Any) -> None:
    """The cancellation check and the owner check, before the boundary.

    Raises `CancellationRequested`, by which the attempt acknowledges and nothing is sent; `LeaseLost`.
    """
    status = LeaseStatus.CANCEL_REQUESTED if job.cancel_requested else await job.heartbeat(progress)
    if status is LeaseStatus.CANCEL_REQUESTED:
        raise CancellationRequested(f"job {job.id}: cancelled before its dispatch")
    if status is LeaseStatus.LOST:
        raise LeaseLost(f"job {job.id}: its lease was lost before its dispatch")


class Research(JobHandler[ResearchRequest, Report]):
    """One lane: a stored chat completion."""

    job_type = "research"

    def __init__(self, provider: Provider[Report], model: str) -> None:
        self.provider = provider
        self.model = model

    async def run(self, job: JobContext, request: ResearchRequest) -> Report:
        messages = [
            {"role": "system", "content": INSTRUCTIONS[request.mode]},
            {"role": "user", "content": request.question},
        ]
        await ready_to_dispatch(job, lane=request.mode)
        async with job.dispatch(f"research:{job.id}:{request.mode}") as operation_key:
            sent = await self.provider.send(operation_key, {"model": self.model, "messages": messages})
            return await sent.result(job)

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[Report]:
        return await self.provider.state(operation_key, job.dispatched_at)


class DeepResearch(JobHandler[DeepResearchRequest, Report]):
    """A run that takes minutes to hours at the provider: a batch of one request, waited for with heartbeats that name
    it. Give the job a `timeout_seconds` of more than the provider's own window."""

    job_type = "deep_research"

    def __init__(self, provider: Provider[Report], model: str) -> None:
        self.provider = provider
        self.model = model

    async def run(self, job: JobContext, request: DeepResearchRequest) -> Report:
        run_id = request.run_id or (job.identity.run if job.identity else None) or "main"
        messages = [
            {"role": "system", "content": INSTRUCTIONS["thorough"]},
            {"role": "user", "content": request.question},
        ]
        await ready_to_dispatch(job, run=run_id)
        async with job.dispatch(f"deep-research:{job.id}:{run_id}") as operation_key:
            sent = await self.provider.send(operation_key, {"model": self.model, "messages": messages})
            return await sent.result(job)

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[Report]:
        return await self.provider.state(operation_key, job.dispatched_at)
