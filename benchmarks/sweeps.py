"""The sweeps: uncertain jobs resolved by lookups, and missing workflows launched beside bare Temporal's starts."""

import asyncio
import time
from typing import Any
from uuid import uuid4

from temporalio.client import Client

from benchmarks.figures import spread
from benchmarks.fill import fill
from benchmarks.shapes import REQUEST
from benchmarks.stack import Stack
from durable_jobs import Database, DurableJobService, Job, JobContext, JobHandler, ProviderState, ReconciliationPolicy
from durable_jobs.temporal._plugin import SWEEP_POOL_SIZE
from durable_jobs.temporal.escalation import Escalations
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.sweeps import LAUNCH_CONCURRENCY, SweepActivities


class Lookup(JobHandler[dict[str, Any], dict[str, Any]]):
    """A provider that answers each lookup with success after so many seconds."""

    job_type = "bench"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at_once = 0
        self.most_at_once = 0

    async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("a sweep dispatches nothing")

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[dict[str, Any]]:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self._seconds:
                await asyncio.sleep(self._seconds)
            return ProviderState.succeeded({"answer": "Titan"})
        finally:
            self._at_once -= 1


def _activities(
    service: DurableJobService, temporal: Client, lookup: Lookup, policy: ReconciliationPolicy
) -> SweepActivities:
    """What a worker's sweeps are made of."""
    return SweepActivities(service, Launcher(temporal), {"bench": lookup}, None, policy, Escalations(None))


async def measure_sweep(stack: Stack, *, candidates: int, milliseconds: tuple[int, ...]) -> dict[str, Any]:
    """Candidates resolved per second as a worker's sweep does it, with what it tells Temporal after each."""
    temporal = await Client.connect(stack.temporal.address)
    policy = ReconciliationPolicy()
    figures: dict[str, Any] = {"candidates": candidates, "concurrency": policy.lookup_concurrency}
    for each in milliseconds:
        url, queue = stack.database(f"sweep_{each}"), f"sweep-{each}"
        fill(url, candidates, "indeterminate", queue=queue, projects=10)
        lookup = Lookup(each / 1000)
        database = Database(url, pool_size=SWEEP_POOL_SIZE)
        try:
            service = DurableJobService(database)
            activities = _activities(service, temporal, lookup, policy)
            before = stack.cpu()["postgres"], time.process_time()
            began = time.perf_counter()
            summary = await service.sweep_reconciliation_candidates(
                queue, {"bench": lookup}, policy=policy, tell=activities._tell
            )
            seconds = time.perf_counter() - began
        finally:
            await database.close()
        assert summary.resolved["completed"] == candidates, summary
        figures[f"lookups_{each}_ms"] = {
            "per_second": candidates / seconds,
            "most_at_once": lookup.most_at_once,
            "cpu_ms_worker": 1000 * (time.process_time() - before[1]) / candidates,
            "cpu_ms_postgres": 1000 * (stack.cpu()["postgres"] - before[0]) / candidates,
        }
    return figures


async def measure_launch(stack: Stack, *, rows: int, rounds: int) -> dict[str, Any]:
    """Rows without workflows launched per second, beside bare starts of as many workflows at the same concurrency."""
    temporal = await Client.connect(stack.temporal.address)
    url = stack.database("launch")
    share = rows // rounds
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    database = Database(url, pool_size=SWEEP_POOL_SIZE)
    try:
        service = DurableJobService(database)
        activities = _activities(service, temporal, Lookup(0), ReconciliationPolicy())
        for number in range(rounds):
            queue = f"launch-{number}"
            fill(url, share, "queued", queue=queue)
            began = time.perf_counter()
            launched = await activities.launch_due(queue)
            rates["ours"].append(launched / (time.perf_counter() - began))
            assert launched == share
            rates["bare"].append(await _starts(temporal, share))
    finally:
        await database.close()
    ratios = [mine / bare for mine, bare in zip(rates["ours"], rates["bare"], strict=True)]
    return {"rows": rows, "per_second": {name: spread(each) for name, each in rates.items()}, "ratio": spread(ratios)}


async def _starts(temporal: Client, count: int) -> float:
    left = iter(range(count))

    async def starter() -> None:
        for _ in left:
            await temporal.start_workflow("BenchBare", REQUEST, id=uuid4().hex, task_queue="bench-starts")

    began = time.perf_counter()
    await asyncio.gather(*(starter() for _ in range(LAUNCH_CONCURRENCY)))
    return count / (time.perf_counter() - began)
