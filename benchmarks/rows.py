"""The verbs that scan, against the number of rows: claims and reads, each table beside the others."""

import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

from benchmarks.figures import Figure, spread
from benchmarks.fill import fill
from benchmarks.stack import Stack
from durable_jobs import Database, DurableJobService, JobStatus

FEW = 1000
QUEUE = "rows"


async def measure_rows(stack: Stack, *, sizes: tuple[int, ...], terminal: int, calls: int) -> dict[str, Any]:
    """The claim of the next job with so many rows queued, and with a thousand beside `terminal` completed ones; reads
    with a thousand rows in all, and with the completed ones. Milliseconds of a verb, commit included."""
    tables = {f"{size} queued": stack.database(f"rows_{size}") for size in sizes}
    beside = f"{FEW} queued beside {terminal} completed"
    tables[beside] = stack.database("rows_terminal")
    for size, url in zip(sizes, tables.values(), strict=False):
        fill(url, size, "queued", queue=QUEUE)
    fill(tables[beside], terminal, "completed", queue="done", projects=20)
    fill(tables[beside], FEW, "queued", queue=QUEUE)
    async with AsyncExitStack() as exits:
        services = {}
        for name, url in tables.items():
            database = Database(url, pool_size=1, control_pool_size=1)
            exits.push_async_callback(database.close)
            services[name] = DurableJobService(database)
        claims = await _beside({name: _claim(each) for name, each in services.items()}, calls)
        few, many = services[f"{sizes[0]} queued"], services[beside]
        reads = {}
        for name, read in READS.items():
            both = await _beside({"few": read(few), "many": read(many)}, calls)
            reads[name] = {**both, "ratio": both["many"]["median"] / both["few"]["median"]}
    first = claims[f"{sizes[0]} queued"]["median"]
    return {
        "claim_ms": claims,
        "claim_ratios": {name: figure["median"] / first for name, figure in claims.items()},
        "reads_ms": reads,
        "terminal_rows": terminal,
    }


def _claim(service: DurableJobService) -> Callable[[], Awaitable[Any]]:
    async def claim() -> None:
        claimed = await service.claim_job("bench", uuid4(), queues=[QUEUE])
        assert claimed, "the queue has run dry"

    return claim


async def _beside(calls: dict[str, Callable[[], Awaitable[Any]]], times: int) -> dict[str, Figure]:
    """Each of `calls` in turn, so many times: milliseconds."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(times + 5):
        for name, call in calls.items():
            began = time.perf_counter()
            await call()
            if number >= 5:
                seconds[name].append(1000 * (time.perf_counter() - began))
    return {name: spread(each) for name, each in seconds.items()}


Read = Callable[[DurableJobService], Callable[[], Awaitable[Any]]]
_SCOPE = {"organization": "acme", "project": "p0"}
READS: dict[str, Read] = {
    "find_by_idempotency_key": lambda it: lambda: it.find_by_idempotency_key("acme", "p0", f"{QUEUE}-500"),
    "list_jobs of a project": lambda it: lambda: it.list_jobs(**_SCOPE, limit=100),
    "list_jobs of an organization": lambda it: lambda: it.list_jobs(organization="acme", limit=100),
    "list_jobs queued, of a project": lambda it: lambda: it.list_jobs(**_SCOPE, statuses=[JobStatus.QUEUED], limit=100),
    "list_jobs queued, of an organization": lambda it: (
        lambda: it.list_jobs(organization="acme", statuses=[JobStatus.QUEUED], limit=100)
    ),
    "list_jobs running, of an organization": lambda it: (
        lambda: it.list_jobs(organization="acme", statuses=[JobStatus.RUNNING], limit=100)
    ),
    "find_reconciliation_candidates": lambda it: (
        lambda: it.find_reconciliation_candidates("acme", "p0", queue=QUEUE, limit=100)
    ),
    "take_due_for_launch": lambda it: lambda: it.take_due_for_launch("another queue"),
}
