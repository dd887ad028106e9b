"""Submission by each door: Python, one at a time and in bulk, SQL, and HTTP with the start of the workflow."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import httpx
import psycopg

from benchmarks.figures import Figure, spread
from benchmarks.shapes import REQUEST, spec
from benchmarks.stack import Stack
from durable_jobs import Database, DurableJobService
from durable_jobs._processes import free_port
from durable_jobs.dev import DATABASE_URL_VARIABLE, TEMPORAL_ADDRESS_VARIABLE

ENQUEUE = "SELECT durable_jobs.enqueue('acme', 'alpha', 'bench', %s, %s::jsonb, queue => 'doors')"
CONCURRENT = 10


async def measure_doors(stack: Stack, *, singles: int, bulk: int, rounds: int) -> dict[str, Any]:
    """Jobs created per second by each door, a round of each in turn."""
    url = stack.database("doors")
    rates: dict[str, list[float]] = {}
    database = Database(url, pool_size=CONCURRENT)
    try:
        service = DurableJobService(database)
        async with (
            await psycopg.AsyncConnection.connect(url, autocommit=True) as connection,
            _serving(stack, url) as client,
        ):

            async def create(key: str) -> None:
                await service.create_job(spec("doors", key))

            async def enqueue(key: str) -> None:
                await connection.execute(ENQUEUE, [key, json.dumps(REQUEST)])

            async def submit(key: str) -> None:
                answer = await client.post(
                    "/api/v1/jobs", headers={"Idempotency-Key": key}, json={"type": "bench", "payload": REQUEST}
                )
                assert answer.status_code == 201, answer.text

            async def in_bulk() -> float:
                began = time.perf_counter()
                await service.create_jobs(spec("doors", uuid4().hex) for _ in range(bulk))
                return bulk / (time.perf_counter() - began)

            doors: dict[str, Callable[[], Awaitable[float]]] = {
                "create_job, one at a time": lambda: _rate(create, singles, 1),
                f"create_job, {CONCURRENT} at a time": lambda: _rate(create, singles, CONCURRENT),
                f"create_jobs, {bulk} in one transaction": in_bulk,
                "SQL enqueue, one at a time": lambda: _rate(enqueue, singles, 1),
                f"HTTP, {CONCURRENT} at a time, workflow started": lambda: _rate(submit, singles, CONCURRENT),
            }
            for _ in range(rounds):
                for name, door in doors.items():
                    rates.setdefault(name, []).append(await door())
    finally:
        await database.close()
    figures: dict[str, Figure] = {name: spread(each) for name, each in rates.items()}
    return {"per_second": figures}


async def _rate(submit: Callable[[str], Awaitable[None]], count: int, at_once: int) -> float:
    left = iter(range(count))

    async def submitter() -> None:
        for _ in left:
            await submit(uuid4().hex)

    began = time.perf_counter()
    await asyncio.gather(*(submitter() for _ in range(at_once)))
    return count / (time.perf_counter() - began)


@asynccontextmanager
async def _serving(stack: Stack, url: str) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP API in a process of its own, and a client of it."""
    port = free_port()
    environment = os.environ | {
        DATABASE_URL_VARIABLE: url,
        TEMPORAL_ADDRESS_VARIABLE: stack.temporal.address,
        "DURABLE_JOBS_HTTP_PORT": str(port),
        "DURABLE_JOBS_HTTP_TOKENS": "off",
    }
    with (stack.folder / "http.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "durable_jobs.http", env=environment, stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            async with asyncio.timeout(30):
                while not await _answers(client):  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.1)
            yield client
    finally:
        process.terminate()
        await process.wait()


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/healthz")).is_success
    except httpx.TransportError:
        return False
