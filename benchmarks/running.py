"""Many jobs running at once in one worker: its memory, and what keeping their leases costs."""

import asyncio
from typing import Any

from benchmarks.figures import spread
from benchmarks.stack import Child, Stack

LEASE_SECONDS = 12
TICK_SECONDS = LEASE_SECONDS / 6


async def measure_running(stack: Stack, *, jobs: int, ticks: int) -> dict[str, Any]:
    """A worker of ours and a bare one with so many jobs in hand, each waiting on its provider."""
    figures: dict[str, Any] = {"jobs": jobs}
    for shape in ("bare", "ours"):
        url, queue = stack.database(f"running_{shape}"), f"running-{shape}"
        worker = Child(stack, "worker", shape, url, queue, slots=jobs + 50, hold=True)
        async with worker, Child(stack, "client", shape, url, queue) as client:
            await asyncio.sleep(2)
            empty = worker.memory
            lease = {"lease_seconds": LEASE_SECONDS} if shape == "ours" else {}
            await client.ask("hold", jobs=jobs, **lease)
            while await worker.ask("running") < jobs:  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.2)
            figures[f"memory_{shape}"] = {
                "empty_mb": empty / 2**20,
                "full_mb": worker.memory / 2**20,
                "kb_per_job": (worker.memory - empty) / 2**10 / jobs,
            }
            if shape == "ours":
                figures["renewals"] = await _renewals(stack, worker, url, ticks)
    return figures


async def _renewals(stack: Stack, worker: Child, url: str, ticks: int) -> dict[str, Any]:
    await asyncio.sleep(TICK_SECONDS)
    like = "%a(id, generation)%renewed AS%"
    await worker.ask("renewals")
    calls, total = stack.statements(url, like)
    await asyncio.sleep(TICK_SECONDS * ticks)
    seconds = await worker.ask("renewals")
    calls_then, total_then = stack.statements(url, like)
    statements = calls_then - calls
    return {
        "ticks": len(seconds),
        "statements": statements,
        "statements_per_tick": statements / len(seconds),
        "tick_ms": spread([1000 * each for each in seconds]),
        "server_ms": (total_then - total) / statements,
        "tick_seconds": TICK_SECONDS,
    }
