"""One-request batches, through OpenAI's client: sent to aimock, and shown in each state by a server of the tests."""

import json
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from starlette.responses import JSONResponse, PlainTextResponse

from durable_jobs import DurableJobs, JobFailed, JobStatus, ProviderState
from durable_jobs.contract.provider import ProviderAnswer
from durable_jobs.providers import NotVisibleYet
from durable_jobs.providers.openai_batch import REQUEST as CUSTOM_ID
from durable_jobs.providers.openai_batch import OpenAIBatch
from tests.conftest import Specs, Workers
from tests.http_api import served
from tests.openai_server import REFUSED, OpenAIServer
from tests.provider_servers import Calls, LossyProxy, aimock, lost, swept_until_completed
from tests.sweeping import NEVER

CREATE = ("POST", "/v1/batches")
UPLOAD = ("POST", "/v1/files")
REQUEST: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "How many?"}]}
RESULT = {"text": "Mock batch completion"}
"""What aimock completes each request with."""

Batches = OpenAIBatch[dict[str, Any]]


def read(body: Any) -> dict[str, Any]:
    return {"text": body["choices"][0]["message"]["content"]}


def ago(**span: float) -> datetime:
    return datetime.now(UTC) - timedelta(**span)


def client(url: str, **headers: str) -> AsyncOpenAI:
    """As a product makes it: with the client's own two repetitions."""
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="test", timeout=20, default_headers=headers)


def batches(own: AsyncOpenAI) -> Batches:
    return OpenAIBatch(own, "/v1/chat/completions", read=read)


@pytest.fixture(scope="module")
def aimock_url() -> Iterator[str]:
    with aimock() as url:
        yield url


@pytest.fixture
def server() -> OpenAIServer:
    return OpenAIServer()


@pytest_asyncio.fixture
async def shown(server: OpenAIServer) -> AsyncIterator[Batches]:
    """The provider over the tests' own server."""
    async with served(server.app) as url, client(url) as own:
        yield batches(own)


async def test_a_batch_is_found_by_its_key_while_it_is_at_work_and_when_it_has_ended(aimock_url: str) -> None:
    async with client(aimock_url) as own:
        provider = batches(own)
        since = ago(seconds=1)
        sent = await provider.send("summary:1", REQUEST)
        await provider.send("summary:10", REQUEST)
        assert await provider.state("summary:1", since) == ProviderState.pending()
        assert await provider.state("summary:1", since) == ProviderState.succeeded(RESULT)
        assert await sent.state() == ProviderState.succeeded(RESULT)
        batch = await own.batches.retrieve(sent.reference)
        assert batch.metadata == {"operation_key": "summary:1"}
        line = json.loads((await own.files.content(batch.input_file_id)).text)
    assert line == {"custom_id": CUSTOM_ID, "method": "POST", "url": "/v1/chat/completions", "body": REQUEST}


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("failed", "mock_failure"), ("expired", "BATCH_EXPIRED"), ("cancelled", "BATCH_CANCELLED")],
)
async def test_a_batch_that_ended_without_executing_its_request_has_failed(
    aimock_url: str, outcome: str, code: str
) -> None:
    key = f"ends:{outcome}"
    async with client(aimock_url, **{"X-AIMock-Batch-Outcome": outcome}) as own:
        provider = batches(own)
        since = ago(seconds=1)
        await provider.send(key, REQUEST)
        assert await provider.state(key, since) == ProviderState.pending()
        state = await provider.state(key, since)
    assert state.answer is ProviderAnswer.FAILED
    assert state.error is not None
    assert state.error.code == code


def line(status: int | None, body: Any, error: Any = None, custom_id: str = CUSTOM_ID) -> dict[str, Any]:
    response = None if status is None else {"status_code": status, "request_id": "r", "body": body}
    return {"id": "batch_req", "custom_id": custom_id, "response": response, "error": error}


GOOD = line(200, {"choices": [{"message": {"content": "7"}}]})
BAD = line(400, REFUSED)
EXPIRED = line(None, None, {"code": "batch_expired", "message": "not executed in time"})
STRANGER = line(200, {}, custom_id="another")
DONE = {"total": 1, "completed": 1, "failed": 0}
NONE_DONE = {"total": 1, "completed": 0, "failed": 1}
SEVEN: ProviderState[Any] = ProviderState.succeeded({"text": "7"})

ENDS: dict[str, tuple[str, list[Any] | None, list[Any] | None, dict[str, int], Any]] = {
    "completed": ("completed", [GOOD], None, DONE, SEVEN),
    "completed with an error": ("completed", None, [BAD], NONE_DONE, "model_not_found"),
    "completed with a 500 and no body of OpenAI's": (
        "completed",
        None,
        [line(500, "oops")],
        NONE_DONE,
        "PROVIDER_FAILED",
    ),
    "completed without files": ("completed", None, None, DONE, ProviderAnswer.UNKNOWN),
    "completed with another's line": ("completed", [STRANGER], None, DONE, ProviderAnswer.UNKNOWN),
    "expired after it was executed": ("expired", [GOOD], None, DONE, SEVEN),
    "expired before": ("expired", None, [EXPIRED], NONE_DONE, "batch_expired"),
    "expired, executed, and no file": ("expired", None, None, DONE, ProviderAnswer.UNKNOWN),
    "cancelled after it was executed": ("cancelled", [GOOD], None, DONE, SEVEN),
    "cancelled before": ("cancelled", None, None, NONE_DONE, "BATCH_CANCELLED"),
    "refused as it was validated": ("failed", None, None, NONE_DONE, "BATCH_FAILED"),
    "a status of tomorrow": ("paused", None, None, NONE_DONE, ProviderAnswer.UNKNOWN),
}


@pytest.mark.parametrize(("status", "output", "errors", "counts", "expected"), ENDS.values(), ids=ENDS)
async def test_how_a_batch_ends_says_what_became_of_its_request(
    shown: Batches, server: OpenAIServer, status: str, output: Any, errors: Any, counts: Any, expected: Any
) -> None:
    files = {
        "output_file_id": server.show_file(*output) if output else None,
        "error_file_id": server.show_file(*errors) if errors else None,
    }
    server.show_batch(status, "summary:1", request_counts=counts, **files)
    state = await shown.state("summary:1", ago(minutes=1))
    if isinstance(expected, ProviderState):
        assert state == expected
    elif isinstance(expected, ProviderAnswer):
        assert state.answer is expected
    else:
        assert state.answer is ProviderAnswer.FAILED
        assert state.error is not None
        assert state.error.code == expected


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
async def test_a_batch_at_work_is_pending(shown: Batches, server: OpenAIServer, status: str) -> None:
    server.show_batch(status, "summary:1")
    assert await shown.state("summary:1", ago(minutes=1)) == ProviderState.pending()


async def test_the_errors_of_a_batch_that_was_refused_are_told(shown: Batches, server: OpenAIServer) -> None:
    problem = {"code": "invalid_json_line", "message": "not JSON", "line": 1, "param": None}
    server.show_batch("failed", "summary:1", errors={"object": "list", "data": [problem]})
    state = await shown.state("summary:1", ago(minutes=1))
    assert state.error is not None
    assert state.error.message == "invalid_json_line: not JSON"


async def test_a_batch_whose_output_is_gone_is_unknown(shown: Batches, server: OpenAIServer) -> None:
    server.show_batch("completed", "summary:1", output_file_id="file-deleted", request_counts=DONE)
    assert (await shown.state("summary:1", ago(days=31))).answer is ProviderAnswer.UNKNOWN


async def test_an_output_that_cannot_be_read_is_no_answer(shown: Batches, server: OpenAIServer) -> None:
    server.show_batch("completed", "summary:1", output_file_id=server.show_file(line(None, None)))
    with pytest.raises(ValueError, match="can't be read"):
        await shown.state("summary:1", ago(minutes=1))


async def test_the_list_is_read_back_to_the_dispatch_and_no_further(shown: Batches, server: OpenAIServer) -> None:
    """350 batches: 150 older than the dispatch by more than clocks may differ, the job's own on the third page."""
    for _ in range(150):
        server.show_batch("completed", None, age=7200)
    server.show_batch("in_progress", "summary:1", age=3600)
    for _ in range(220):
        server.show_batch("completed", "summary:2", age=60)
    listed = ("GET", "/v1/batches")
    assert await shown.state("summary:1", ago(minutes=60, seconds=5)) == ProviderState.pending()
    assert server.requests.count(listed) == 4  # three with newer ones, and one that is older as a whole
    server.requests.clear()
    assert await shown.state("summary:3", ago(minutes=40)) == ProviderState.absent()
    assert server.requests.count(listed) == 4
    server.requests.clear()
    assert await shown.state("summary:3", ago(days=1)) == ProviderState.absent()
    assert server.requests.count(listed) == 4  # the whole list
    server.batches[:] = server.batches[-150:]
    server.requests.clear()
    assert await shown.state("summary:3", ago(minutes=40)) == ProviderState.absent()
    assert server.requests.count(listed) == 1


async def test_a_key_is_matched_exactly(shown: Batches, server: OpenAIServer) -> None:
    for near in ("summary:10", "Summary:1", "summary:1 ", None):
        server.show_batch("in_progress", near)
    assert await shown.state("summary:1", ago(hours=1)) == ProviderState.absent()


async def test_two_batches_under_one_key_are_unknown(shown: Batches, server: OpenAIServer) -> None:
    server.show_batch("in_progress", "summary:1", age=60)
    for _ in range(100):
        server.show_batch("in_progress", None)
    server.show_batch("completed", "summary:1")
    assert (await shown.state("summary:1", ago(hours=1))).answer is ProviderAnswer.UNKNOWN


async def test_nothing_listed_proves_nothing_for_five_minutes_and_after_thirty_days(shown: Batches) -> None:
    with pytest.raises(NotVisibleYet):
        await shown.state("summary:1", ago(minutes=4))
    assert await shown.state("summary:1", ago(minutes=6)) == ProviderState.absent()
    for dispatched_at in (ago(days=30), None):
        assert (await shown.state("summary:1", dispatched_at)).answer is ProviderAnswer.UNKNOWN


async def test_an_upload_that_fails_sends_nothing(shown: Batches, server: OpenAIServer) -> None:
    """Repeated by the client, as it starts nothing; and then certain, as no batch was asked for."""
    server.hide["/v1/files"] = PlainTextResponse("bad gateway", 502)
    with pytest.raises(JobFailed) as failed:
        await shown.send("summary:1", REQUEST)
    assert (failed.value.retryable, failed.value.code) == (False, "NOT_SENT")
    assert set(server.requests) == {UPLOAD}
    assert len(server.requests) > 1


async def test_a_refused_batch_is_a_definite_no(shown: Batches, server: OpenAIServer) -> None:
    server.refuse["/v1/batches"] = JSONResponse(REFUSED, 400)
    with pytest.raises(JobFailed, match="no such model") as refused:
        await shown.send("summary:1", REQUEST)
    assert (refused.value.retryable, refused.value.code) == (False, "PROVIDER_REFUSED")
    assert server.requests == [UPLOAD, CREATE]


async def test_an_error_after_the_batch_was_made_is_raised_as_it_comes(shown: Batches, server: OpenAIServer) -> None:
    server.hide["/v1/batches"] = PlainTextResponse("bad gateway", 502)
    with pytest.raises(openai.InternalServerError):
        await shown.send("summary:1", REQUEST)
    assert server.requests == [UPLOAD, CREATE]
    assert await shown.state("summary:1", ago(seconds=1)) == ProviderState.pending()


async def test_a_job_waits_for_its_batch(jobs: DurableJobs, worker: Workers, spec: Specs, aimock_url: str) -> None:
    """Pending at the first look: its trail then names the batch that it waits for."""
    async with client(aimock_url) as own, worker(Calls(batches(own)), reconcile_every=NEVER):
        handle = await jobs.create_job(spec(payload=REQUEST))
        assert await handle.result(timeout=20) == RESULT
    job = await jobs.service.get_job(handle.id)
    assert (job.status, job.reconciliation) == (JobStatus.COMPLETED, None)
    beats = [event.data for event in (await jobs.service.list_job_events(handle.id)).items if event.name == "heartbeat"]
    assert any(str(beat.get("waiting_for")).startswith("batch") for beat in beats), beats


async def test_a_send_whose_answer_was_lost_is_completed_by_the_sweep(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, aimock_url: str
) -> None:
    """The first sweep finds the batch at work, and leaves it; a later one finds its result."""
    async with LossyProxy.before(aimock_url) as proxy, client(proxy.url) as own:
        proxy.lose.add(CREATE)
        async with worker(Calls(batches(own)), reconcile_every=NEVER):
            handle = await lost(jobs, spec(payload=REQUEST))
            assert (await jobs.sweep(queue)).skipped == {"escalated": 0, "pending": 1}
            assert await swept_until_completed(jobs, queue, handle) == RESULT
        assert proxy.requests.count(CREATE) == 1
