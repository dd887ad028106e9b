"""What a product writes: its request, its result, and the handler that calls the provider."""

from typing import Literal
from urllib.parse import quote

import httpx
from pydantic import BaseModel, Field

from durable_jobs import Job, JobContext, JobFailed, JobHandler, ProviderState

QUEUE = "research"


class ResearchRequest(BaseModel, extra="forbid"):
    """The payload of a job."""

    question: str = Field(min_length=1)
    mode: Literal["quick", "deep"] = "quick"


class Source(BaseModel):
    """An article that the answer rests on."""

    title: str
    score: float
    excerpt: str


class ResearchReport(BaseModel):
    """The result of a job."""

    answer: str
    sources: list[Source]
    searches: int


class ResearchProvider:
    """The provider's HTTP interface. Nothing here repeats a call: what it cannot tell, it leaves uncertain."""

    def __init__(self, url: str) -> None:
        # A connection of its own for each call: one that is kept may be closed by the server just as it is used.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(60, connect=5), limits=limits)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def run(self, request: ResearchRequest, key: str) -> ResearchReport:
        """Sends the request once.

        Raises `JobFailed` only where the provider itself says no. A broken connection, a timeout, a 5xx, another's 4xx
        or an answer that can't be read may all hide a call that landed, and are raised as they come.
        """
        response = await self._http.post("/research", json=request.model_dump() | {"operation_key": key})
        if response.is_client_error and (error := _own_error(response)):
            raise JobFailed(error.message, retryable=False, code=error.code)
        response.raise_for_status()
        return ResearchReport.model_validate_json(response.content)

    async def state(self, key: str) -> ProviderState[ResearchReport]:
        """Asks what became of a key. It only reads."""
        response = await self._http.get(f"/operations/{quote(key, safe='')}")
        response.raise_for_status()
        operation = _Operation.model_validate_json(response.content)
        match operation:
            case _Operation(state="succeeded", result=ResearchReport() as report):
                return ProviderState.succeeded(report)
            case _Operation(state="failed", error=_Error() as error):
                return ProviderState.failed(f"{error.code}: {error.message}")
            case _Operation(state="pending"):
                return ProviderState.pending()
            case _Operation(state="absent"):
                return ProviderState.absent()
        return ProviderState.unknown(f"its answer is {operation.state!r}")


class Research(JobHandler[ResearchRequest, ResearchReport]):
    """Answers one question by one call to the provider."""

    job_type = "research"
    # An answer changes nothing in the world. `examples/governed` shows a handler whose calls do.
    consequential = False

    def __init__(self, provider: ResearchProvider) -> None:
        self.provider = provider

    async def run(self, job: JobContext, request: ResearchRequest) -> ResearchReport:
        async with job.dispatch(f"research:{job.id}:{request.mode}") as operation_key:
            return await self.provider.run(request, key=operation_key)

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[ResearchReport]:
        return await self.provider.state(operation_key)


class _Error(BaseModel):
    code: str
    message: str


class _Refusal(BaseModel):
    error: _Error


class _Operation(BaseModel):
    state: Literal["succeeded", "failed", "pending", "absent", "unknown"]
    result: ResearchReport | None = None
    error: _Error | None = None


def _own_error(response: httpx.Response) -> _Error | None:
    """The provider's own error; None for a body that is not the provider's, such as a proxy's page."""
    try:
        return _Refusal.model_validate_json(response.content).error
    except ValueError:
        return None
