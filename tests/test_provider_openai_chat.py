"""Stored chat completions, through OpenAI's own client, on a server that stores and lists them."""

import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from starlette.responses import JSONResponse, PlainTextResponse, Response

from durable_jobs import DurableJobs, JobFailed, JobStatus, ProviderState
from durable_jobs.contract.errors import JobFailedError
from durable_jobs.contract.provider import ProviderAnswer
from durable_jobs.providers import NotVisibleYet
from durable_jobs.providers.openai_chat import OpenAIChat
from tests.conftest import Specs, Workers
from tests.http_api import served
from tests.openai_server import REFUSED, OpenAIServer
from tests.provider_servers import Calls, LossyProxy, lost, swept_until_completed
from tests.sweeping import NEVER

COMPLETIONS = "/v1/chat/completions"
SEND = ("POST", COMPLETIONS)
REQUEST: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "How many?"}]}
RESULT = {"text": "7"}
DOCS = Path(__file__).parent.parent / "docs/providers.md"


def read(completion: Any) -> dict[str, Any]:
    return {"text": completion.choices[0].message.content}


@pytest.fixture
def server() -> OpenAIServer:
    return OpenAIServer()


@pytest_asyncio.fixture
async def url(server: OpenAIServer) -> AsyncIterator[str]:
    async with served(server.app) as url:
        yield url


@pytest_asyncio.fixture
async def chat(url: str) -> AsyncIterator[OpenAIChat[dict[str, Any]]]:
    async with client(url) as own:
        yield OpenAIChat(own, read=read)


def client(url: str) -> AsyncOpenAI:
    """As a product makes it: with the client's own two repetitions."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="test", timeout=20)


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)


Chat = OpenAIChat[dict[str, Any]]


async def test_what_was_sent_is_found_by_its_key_alone(chat: Chat, server: OpenAIServer) -> None:
    sent = await chat.send("summary:1", REQUEST | {"metadata": {"team": "blue"}})
    assert sent.reference == server.completions[0]["id"]
    assert await sent.state() == ProviderState.succeeded(RESULT)
    assert server.completions[0]["metadata"] == {"team": "blue", "operation_key": "summary:1"}
    server.store({"operation_key": "summary:10"}, "70")
    server.store({"operation_key": "Summary:1"}, "71")
    assert await chat.state("summary:1", ago(seconds=1)) == ProviderState.succeeded(RESULT)
    assert await chat.state("summary:10", ago(seconds=1)) == ProviderState.succeeded({"text": "70"})


async def test_nothing_listed_proves_nothing_before_a_quarter_of_an_hour_and_after_thirty_days(chat: Chat) -> None:
    """It may still be generated; and what was stored is no longer kept."""
    with pytest.raises(NotVisibleYet):
        await chat.state("summary:1", ago(minutes=14))
    assert await chat.state("summary:1", ago(minutes=16)) == ProviderState.absent()
    assert await chat.state("summary:1", ago(days=29)) == ProviderState.absent()
    for dispatched_at in (ago(days=30), None):
        assert (await chat.state("summary:1", dispatched_at)).answer is ProviderAnswer.UNKNOWN


async def test_two_completions_under_one_key_are_unknown(chat: Chat, server: OpenAIServer) -> None:
    two = [server.store({"operation_key": "summary:1"})["id"] for _ in range(2)]
    state = await chat.state("summary:1", ago(hours=1))
    assert state.answer is ProviderAnswer.UNKNOWN
    assert all(each in (state.reason or "") for each in two)


async def test_a_list_without_the_filter_is_unknown(chat: Chat, server: OpenAIServer) -> None:
    """Whether it shows others' metadata, or none."""
    server.filters = False
    server.store({"operation_key": "summary:2"})
    assert (await chat.state("summary:1", ago(hours=1))).answer is ProviderAnswer.UNKNOWN
    server.completions = [server.store({}) | {"metadata": {}}]
    assert (await chat.state("summary:1", ago(hours=1))).answer is ProviderAnswer.UNKNOWN


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_the_providers_own_no_is_definite(chat: Chat, server: OpenAIServer, status: int) -> None:
    server.refuse[COMPLETIONS] = JSONResponse(REFUSED, status)
    with pytest.raises(JobFailed, match=f"HTTP {status}, model_not_found: no such model") as refused:
        await chat.send("summary:1", REQUEST)
    assert (refused.value.retryable, refused.value.code) == (False, "PROVIDER_REFUSED")
    assert server.requests == [SEND]


@pytest.mark.parametrize(
    "answer",
    [
        PlainTextResponse("<html>no</html>", 403),
        JSONResponse({"error": "no"}, 404),
        JSONResponse(["no"], 400),
        JSONResponse(REFUSED, 408),
        JSONResponse(REFUSED, 409),
        JSONResponse(REFUSED, 429),
        JSONResponse(REFUSED, 500),
        PlainTextResponse("bad gateway", 502),
    ],
)
async def test_what_may_hide_a_call_that_landed_is_raised_as_it_comes_and_not_repeated(
    chat: Chat, server: OpenAIServer, answer: Response
) -> None:
    server.hide[COMPLETIONS] = answer
    with pytest.raises(openai.APIStatusError):
        await chat.send("summary:1", REQUEST)
    assert server.requests == [SEND]
    assert await chat.state("summary:1", ago(seconds=1)) == ProviderState.succeeded(RESULT)


async def test_an_answer_that_cannot_be_read_is_no_refusal(chat: Chat, server: OpenAIServer) -> None:
    server.hide[COMPLETIONS] = PlainTextResponse("<html>welcome</html>", 200)
    with pytest.raises(ValueError, match="can't be read"):
        await chat.send("summary:1", REQUEST)


@pytest.mark.parametrize("wrong", [{"stream": True}, {"metadata": ["no"]}, {"seed": float("nan")}, {"user": object()}])
async def test_what_cannot_be_sent_is_not(chat: Chat, server: OpenAIServer, wrong: dict[str, Any]) -> None:
    with pytest.raises(JobFailed) as failed:
        await chat.send("summary:1", REQUEST | wrong)
    assert (failed.value.retryable, failed.value.code) == (False, "NOT_SENT")
    assert server.requests == []


async def test_a_send_whose_answer_was_lost_is_completed_by_the_sweep(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, url: str, server: OpenAIServer
) -> None:
    async with LossyProxy.before(url) as proxy, client(proxy.url) as own:
        proxy.lose.add(SEND)
        async with worker(Calls(OpenAIChat(own, read=read)), reconcile_every=NEVER):
            handle = await lost(jobs, spec(payload=REQUEST))
            assert await swept_until_completed(jobs, queue, handle) == RESULT
        assert proxy.requests.count(SEND) == 1
    assert len(server.completions) == 1


async def test_a_refusal_fails_the_job(
    jobs: DurableJobs, worker: Workers, spec: Specs, chat: Chat, server: OpenAIServer
) -> None:
    server.refuse[COMPLETIONS] = JSONResponse(REFUSED, 404)
    async with worker(Calls(chat), reconcile_every=NEVER):
        handle = await jobs.create_job(spec(payload=REQUEST))
        with pytest.raises(JobFailedError, match="no such model"):
            await handle.result(timeout=20)
    job = await jobs.service.get_job(handle.id)
    assert job.error is not None
    assert (job.status, job.error.code) == (JobStatus.FAILED, "PROVIDER_REFUSED")
    assert server.requests == [SEND]


async def test_the_example_of_the_docs_runs(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To its result by the send, and by the lookup."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    monkeypatch.setattr(names["Summarize"], "consequential", False)
    async with (
        LossyProxy.before(url) as proxy,
        client(proxy.url) as own,
        worker(names["Summarize"](own), reconcile_every=NEVER),
    ):
        answered = await jobs.create_job(spec(job_type="summarize", payload=REQUEST))
        assert await answered.result(timeout=20) == RESULT
        proxy.lose.add(SEND)
        handle = await lost(jobs, spec(job_type="summarize", payload=REQUEST))
        assert await swept_until_completed(jobs, queue, handle) == RESULT
