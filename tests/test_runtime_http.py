"""A model behind an HTTP API gives a checked outcome, or an error that says whether the request's fate is open."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from activities.runtime import (
    AgentRef,
    Evidence,
    OutcomeInvalid,
    RuntimeCrashed,
    RuntimeFailure,
    RuntimeRefused,
    RuntimeRequest,
    RuntimeTimedOut,
)
from activities.runtime.http_adapter import HttpAdapter, HttpSettings

AGENT = AgentRef(name="support-model", version="2026-01")
KEY = "replay:case-1"
ANSWER = {
    "decision": "refund",
    "score": 0.9,
    "confidence": 0.8,
    "evidence_used": ["e1"],
    "trace": [{"note": "the parcel was lost", "evidence_id": "e1"}],
}

Reply = Callable[[Request], Awaitable[Response]]


class Server:
    """A chat completions endpoint that keeps what it was sent and answers as told."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.reply: Reply = answering(completion(json.dumps(ANSWER)))
        self.url = ""

    async def handle(self, request: Request) -> Response:
        self.requests.append((dict(request.headers), await request.json()))
        return await self.reply(request)


def completion(content: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_780_000_000,
        "model": "judge-1",
        "system_fingerprint": "fp_1",
        "choices": [
            {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **message}}
        ],
    }


def answering(body: object, status: int = 200) -> Reply:
    async def reply(_: Request) -> Response:
        return JSONResponse(body, status_code=status)

    return reply


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    routes = [Route("/v1/chat/completions", server.handle, methods=["POST"])]
    listener = socket.create_server(("127.0.0.1", 0))
    server.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    serving = uvicorn.Server(config)
    task = asyncio.create_task(serving.serve(sockets=[listener]))
    try:
        yield server
    finally:
        serving.should_exit = True
        await task


def settings_of(url: str, **overrides: Any) -> HttpSettings:
    fields: dict[str, Any] = {
        "base_url": url,
        "api_key": "key-1",
        "model": "judge",
        "agent": AGENT,
        "instructions": "You decide support tickets.",
    }
    return HttpSettings(**(fields | overrides))


def request_of(**overrides: Any) -> RuntimeRequest:
    fields: dict[str, Any] = {
        "agent": AGENT,
        "case_id": "case-1",
        "question": {"request": "refund"},
        "policy": {"approve": "0.7"},
        "evidence": (Evidence(evidence_id="e1", kind="delivery_scan", text="No scan for 12 days."),),
        "seed": 7,
    }
    return RuntimeRequest(**(fields | overrides))


async def run(url: str, key: str = KEY, request: RuntimeRequest | None = None, **settings: Any) -> Any:
    async with HttpAdapter(settings_of(url, **settings)) as adapter:
        return await adapter.run(request or request_of(), key=key)


async def failure(url: str, **settings: Any) -> RuntimeFailure:
    with pytest.raises(RuntimeFailure) as caught:
        await run(url, **settings)
    return caught.value


async def test_it_asks_once_and_reads_the_outcome(server: Server) -> None:
    outcome = await run(server.url)
    assert (outcome.decision, outcome.score, outcome.confidence) == ("refund", 0.9, 0.8)
    assert outcome.evidence_used == ("e1",)
    assert (outcome.trace[0].note, outcome.trace[0].evidence_id) == ("the parcel was lost", "e1")
    assert (outcome.agent, outcome.build) == (AGENT, "judge-1/fp_1")
    ((headers, body),) = server.requests
    assert headers["authorization"] == "Bearer key-1"
    assert headers["x-client-request-id"] == KEY
    assert (body["model"], body["temperature"], body["seed"]) == ("judge", 0, 7)
    assert body["response_format"] == {"type": "json_object"}
    assert "store" not in body
    assert body["messages"][0]["content"].startswith("You decide support tickets.")
    assert json.loads(body["messages"][1]["content"]) == {
        "case_id": "case-1",
        "question": {"request": "refund"},
        "policy": {"approve": "0.7"},
        "evidence": [{"evidence_id": "e1", "kind": "delivery_scan", "text": "No scan for 12 days.", "fields": {}}],
    }


async def test_the_key_goes_where_it_can_be_found_again(server: Server) -> None:
    await run(server.url, key="replay:é 1", store=True)
    ((headers, body),) = server.requests
    assert headers["x-client-request-id"] == "replay:%C3%A9 1"
    assert (body["store"], body["metadata"]) == (True, {"operation_key": "replay:é 1"})


async def test_another_agent_is_refused_and_nothing_is_sent(server: Server) -> None:
    with pytest.raises(RuntimeRefused, match="other 1 is not hosted here"):
        await run(server.url, request=request_of(agent=AgentRef(name="other", version="1")))
    assert server.requests == []


@pytest.mark.parametrize(
    ("status", "kind", "definite", "retryable"),
    [
        (400, RuntimeRefused, True, False),
        (401, RuntimeRefused, True, False),
        (403, RuntimeRefused, True, False),
        (404, RuntimeRefused, True, False),
        (422, RuntimeRefused, True, False),
        (429, RuntimeRefused, True, True),
        (408, RuntimeCrashed, False, True),
        (409, RuntimeCrashed, False, True),
        (500, RuntimeCrashed, False, True),
        (502, RuntimeCrashed, False, True),
        (503, RuntimeCrashed, False, True),
        (504, RuntimeCrashed, False, True),
    ],
)
async def test_a_status_is_a_refusal_or_leaves_it_open(
    server: Server, status: int, kind: type[RuntimeFailure], definite: bool, retryable: bool
) -> None:
    server.reply = answering({"error": {"message": "not today"}}, status)
    error = await failure(server.url)
    assert type(error) is kind
    assert (error.definite, error.retryable) == (definite, retryable)
    assert str(status) in str(error)
    assert "not today" in str(error)
    assert len(server.requests) == 1


async def test_a_redirect_is_not_followed(server: Server) -> None:
    async def reply(_: Request) -> Response:
        return RedirectResponse(f"{server.url}/chat/completions", status_code=307)

    server.reply = reply
    error = await failure(server.url)
    assert (type(error), error.definite) == (RuntimeCrashed, False)
    assert len(server.requests) == 1


async def test_where_nobody_listens_nothing_was_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = await failure(f"http://127.0.0.1:{port}/v1")
    assert type(error) is RuntimeRefused
    assert (error.definite, error.retryable) == (True, True)
    assert "nothing was sent" in str(error)


async def test_silence_leaves_it_open(server: Server) -> None:
    released = asyncio.Event()

    async def reply(_: Request) -> Response:
        await released.wait()
        return JSONResponse({})

    server.reply = reply
    error = await failure(server.url, timeout_seconds=0.3)
    released.set()
    assert type(error) is RuntimeTimedOut
    assert not error.definite


async def test_an_answer_that_drips_counts_against_the_whole_request(server: Server) -> None:
    released = asyncio.Event()

    async def drip() -> AsyncIterator[bytes]:
        while not released.is_set():
            yield b" "
            await asyncio.sleep(0.02)

    async def reply(_: Request) -> Response:
        return StreamingResponse(drip(), media_type="application/json")

    server.reply = reply
    error = await failure(server.url, timeout_seconds=0.3)
    released.set()
    assert type(error) is RuntimeTimedOut
    assert not error.definite


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"])
async def test_a_connection_that_breaks_leaves_it_open(sent: bytes) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        error = await failure(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1")
    assert type(error) is RuntimeCrashed
    assert not error.definite
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("body", "kind", "problem"),
    [
        (completion("no JSON"), OutcomeInvalid, "content: .*is not JSON"),
        (completion(None), OutcomeInvalid, "content: .*is not JSON"),
        (completion('{"decision": "a"}'), OutcomeInvalid, "score: Field required"),
        (completion('{"decision": "a", "score": NaN}'), OutcomeInvalid, r"content\.score: must be finite"),
        (completion('{"decision": "a", "score": 1, "score": 0}'), OutcomeInvalid, "score: stands twice"),
        (completion('{"decision": "a", "score": 1, "evidence_used": ["e2"]}'), OutcomeInvalid, "e2 is no evidence"),
        (completion('{"decision": "a"', finish="length"), OutcomeInvalid, "broke off, finish_reason 'length'"),
        (completion("", finish="content_filter"), RuntimeRefused, "its answer was filtered"),
        (completion(None, refusal="I can't"), RuntimeRefused, "the model refused: I can't"),
        (completion('{"refused": "no policy"}'), RuntimeRefused, "the agent refused: no policy"),
        ({"model": "judge-1", "choices": []}, OutcomeInvalid, "response: choices: "),
        ([], OutcomeInvalid, "response: .*must be a JSON object"),
    ],
)
async def test_an_answer_read_to_its_end_is_definite(
    server: Server, body: object, kind: type[RuntimeFailure], problem: str
) -> None:
    server.reply = answering(body)
    with pytest.raises(kind, match=problem) as caught:
        await run(server.url)
    assert caught.value.definite


async def test_an_answer_is_bounded(server: Server) -> None:
    server.reply = answering(completion("x" * 5000))
    with pytest.raises(OutcomeInvalid, match="response: must be at most 4096 bytes"):
        await run(server.url, response_bytes=4096)


def test_the_key_of_the_api_shows_in_no_text() -> None:
    assert "key-1" not in repr(settings_of("http://127.0.0.1/v1"))
