"""Whole jobs, each shape beside the others: throughput, latency, CPU, history, what Postgres does; and more workers."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from benchmarks.figures import Figure, spread
from benchmarks.shapes import SHAPES
from benchmarks.stack import Child, Stack

SUBMITTERS, SLOTS = 50, 100
ACTIONS = {
    "workflow_execution_started_event_attributes",
    "activity_task_scheduled_event_attributes",
    "timer_started_event_attributes",
    "workflow_execution_signaled_event_attributes",
    "marker_recorded_event_attributes",
    "upsert_workflow_search_attributes_event_attributes",
}
"""The events that Temporal Cloud's price list counts as actions."""


class Pair:
    """The client's and the worker's process of one shape."""

    def __init__(self, stack: Stack, shape: str, url: str) -> None:
        self._stack = stack
        self.url = url
        self.client = Child(stack, "client", shape, url, f"bench-{shape}")
        self.worker = Child(stack, "worker", shape, url, f"bench-{shape}", slots=SLOTS)

    def _cpu(self) -> dict[str, float]:
        return {"client": self.client.cpu, "worker": self.worker.cpu, **self._stack.cpu()}

    async def run(self, jobs: int, submitters: int) -> dict[str, float]:
        """So many jobs: jobs per second, and per job milliseconds of CPU and what Postgres did."""
        cpu, counters = self._cpu(), self._stack.counters(self.url)
        seconds = await self.client.ask("run", jobs=jobs, submitters=submitters)
        spent, done = self._cpu(), self._stack.counters(self.url) - counters
        figures = {"jobs_per_second": jobs / seconds}
        figures |= {f"cpu_ms_{name}": 1000 * (spent[name] - cpu[name]) / jobs for name in cpu}
        figures["cpu_ms_own"] = figures["cpu_ms_client"] + figures["cpu_ms_worker"]
        figures["cpu_ms_all"] = sum(figures[f"cpu_ms_{name}"] for name in cpu)
        return figures | {f"pg_{name}": value / jobs for name, value in vars(done).items()}


@asynccontextmanager
async def pairs(stack: Stack) -> AsyncIterator[dict[str, Pair]]:
    """Every shape's processes, all there at once: those that aren't asked wait on Temporal."""
    async with AsyncExitStack() as exits:
        found = {}
        for shape in SHAPES:
            pair = found[shape] = Pair(stack, shape, stack.database(f"bench_{shape}"))
            await exits.enter_async_context(pair.worker)
            await exits.enter_async_context(pair.client)
        yield found


async def measure_jobs(stack: Stack, *, jobs: int, rounds: int, samples: int) -> dict[str, Any]:
    """Throughput in rounds, then latency on the idle system, the shapes in another order each time."""
    async with pairs(stack) as found:
        for pair in found.values():
            await pair.run(SUBMITTERS, SUBMITTERS)
        rounds_of: dict[str, list[dict[str, float]]] = {shape: [] for shape in SHAPES}
        for _ in range(rounds):
            for shape in random.sample(SHAPES, len(SHAPES)):
                rounds_of[shape].append(await found[shape].run(jobs, SUBMITTERS))
        seconds = await _latencies(found, samples)
        stored = stack.stored_bytes(found["ours"].url)
        histories = {shape: await pair.client.ask("history") for shape, pair in found.items()}
    shapes: dict[str, dict[str, Any]] = {}
    for shape, measured in rounds_of.items():
        figures: dict[str, Any] = {name: spread([each[name] for each in measured]) for name in measured[0]}
        figures["latency_ms"] = spread([1000 * each for each in seconds[shape]])
        figures["history_events"] = len(histories[shape])
        figures["actions"] = sum(event in ACTIONS for event in histories[shape])
        shapes[shape] = figures
    shapes["ours"]["stored_bytes"] = stored
    return {"shapes": shapes, "ratios": _ratios(rounds_of, seconds)}


async def _latencies(found: dict[str, Pair], samples: int) -> dict[str, list[float]]:
    """One job at a time, at random gaps: at fixed ones the pollers' rhythm decides the figure."""
    seconds: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    for _ in range(samples):
        for shape in random.sample(SHAPES, len(SHAPES)):
            await asyncio.sleep(random.uniform(0.02, 0.3))
            seconds[shape].append(await found[shape].client.ask("one"))
    return seconds


def _ratios(rounds_of: dict[str, list[dict[str, float]]], seconds: dict[str, list[float]]) -> dict[str, Figure]:
    """Each shape against bare, round by round, so that what else the machine does cancels out."""
    ratios = {}
    for shape in SHAPES[1:]:
        for name in ("jobs_per_second", "cpu_ms_own", "cpu_ms_all"):
            both = zip(rounds_of[shape], rounds_of["bare"], strict=True)
            ratios[f"{shape}_{name}"] = spread([mine[name] / bare[name] for mine, bare in both])
        mine, bare = spread(seconds[shape]), spread(seconds["bare"])
        ratios[f"{shape}_latency_p50"] = spread([mine["median"] / bare["median"]])
        ratios[f"{shape}_latency_p99"] = spread([mine["p99"] / bare["p99"]])
    return ratios


async def measure_scaling(stack: Stack, *, jobs: int, workers: tuple[int, ...]) -> dict[str, Any]:
    """Jobs of 200 ms on workers of 4 slots each, thus 20 a second for each worker, until the cores are full."""
    url, queue = stack.database("bench_scaling"), "bench-scaling"
    rates: dict[str, Any] = {}
    async with AsyncExitStack() as exits:
        client = await exits.enter_async_context(Child(stack, "client", "ours", url, queue))
        running: list[Child] = []
        for count in workers:
            while len(running) < count:
                worker = Child(stack, "worker", "ours", url, queue, slots=4, seconds=0.2)
                running.append(await exits.enter_async_context(worker))
            await client.ask("run", jobs=4 * count, submitters=4 * count)
            before = {**stack.cpu(), "workers": sum(each.cpu for each in running)}
            seconds = await client.ask("run", jobs=jobs * count, submitters=8 * count)
            spent = {**stack.cpu(), "workers": sum(each.cpu for each in running)}
            rates[str(count)] = {
                "jobs_per_second": jobs * count / seconds,
                "ceiling": 20.0 * count,
                "cores_used": {name: (spent[name] - before[name]) / seconds for name in spent},
            }
    return {"workers": rates}
