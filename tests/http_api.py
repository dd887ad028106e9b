"""The API on a socket of its own, in this process, and what the tests of it share."""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from durable_jobs import DurableJobService
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DATABASE_URL_VARIABLE, DevStack
from durable_jobs.http import create_app
from durable_jobs.settings import Settings

SUBMISSION = {"type": "evaluation", "payload": {"dataset_id": "support-agent", "policy_id": "production-ai-policy"}}
"""The request of the second seed."""

JOBS = "/api/v1/jobs"


def settings_for(database_url: str, stack: DevStack, **overrides: Any) -> Settings:
    """Settings over this test's database and the run's Temporal server."""
    temporal = {"TEMPORAL_ADDRESS": stack.temporal_address, "TEMPORAL_NAMESPACE": stack.namespace}
    environment = temporal | os.environ | {DATABASE_URL_VARIABLE: database_url}
    return Settings.from_environment(environment, **({"http_tokens": "off"} | overrides))


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """This ASGI application on a free port of 127.0.0.1; its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)  # so that a request that comes before the server is up waits for it
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[str]:
    """The API with these settings; its base URL."""
    async with served(create_app(settings)) as url:
        yield url


@asynccontextmanager
async def calling(settings: Settings, token: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API with these settings."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with serving(settings) as url, httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        yield client


async def raw(
    url: str, lines: list[bytes], body: bytes = b"", *, host: bytes | None = None, sized: bool = True
) -> httpx.Response:
    """Send these lines as a request's head, byte for byte, and read the answer: no client's checks in between."""
    address, port = url.removeprefix("http://").split(":")
    added = [b"Host: " + (f"{address}:{port}".encode() if host is None else host), b"Connection: close"]
    if sized:
        added.append(b"Content-Length: %d" % len(body))
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(address, int(port))
        writer.write(b"\r\n".join([lines[0], *added, *lines[1:], b"", body]))
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    start, *headers = head.split(b"\r\n")
    pairs = [tuple(header.split(b": ", 1)) for header in headers]
    return httpx.Response(int(start.split()[1]), headers=pairs, content=content)


async def token(
    service: DurableJobService, role: TokenRole = TokenRole.OPERATOR, organization: str = "acme", **scope: Any
) -> str:
    """The secret of a new token."""
    _, secret = await service.create_token(f"{role} of {organization}", role, organization, **scope)
    return secret


async def submit(client: httpx.AsyncClient, key: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
    """Submit a job, by default the seed's; the answer's JSON."""
    answer = await client.post(JOBS, json=body or SUBMISSION, headers={"Idempotency-Key": key, **headers})
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def problem_of(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem details of a refusal, which must be whole and give nothing away."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = answer.json()
    assert problem.keys() == {"type", "title", "status", "detail", "code", "retryable", "errors"}
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["type"] == "urn:durable-jobs:problem:" + code.lower().replace("_", "-")
    assert all(error.keys() == {"field", "problem"} for error in problem["errors"])
    told = json.dumps(problem)
    assert len(told) < 60_000
    assert not any(leak in told for leak in ("Traceback", 'File \\"', "psycopg", "SELECT ", "INSERT ", ".py"))
    return problem


def fields(problem: dict[str, Any]) -> list[str]:
    """The fields that a refusal names."""
    return [error["field"] for error in problem["errors"]]
