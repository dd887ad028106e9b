"""Prometheus metrics, read from Postgres at each scrape: they are the same from whichever process is asked."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from fastapi import Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.contract.workers import QueueOverview, WorkerRecord, WorkerState
from durable_jobs.http.state import Api

logger = logging.getLogger(__name__)

FRESH_SECONDS = 5.0
"""Counting is work for Postgres: scrapes within this time share one count."""
SETTLED_SHARE = 0.02
"""Of the time, so much at most is spent on counting settled jobs: all that ever ran, in a table that may be large."""
RECOUNT_SECONDS = 30.0
"""After a count that failed."""
SETTLED_PATIENCE_SECONDS = 2.0
"""How long a scrape waits for that count before it gives the last one. Prometheus gives a scrape ten by default."""

_QUEUE = ("queue", "job_type")


class Scrape:
    """The metrics, and when they were read."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")
        self._registry = CollectorRegistry()
        self._settled: list[dict[str, Any]] = []
        self._count_at = float("-inf")
        self._counting: asyncio.Task[None] | None = None

    async def response(self, api: Api, accept: str) -> Response:
        """Raises `StoreUnavailable`."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            if clock() - self._read_at > FRESH_SECONDS:
                if self._counting is None and clock() >= self._count_at:
                    self._counting = asyncio.create_task(self._count(api))
                if self._counting is not None:
                    await asyncio.wait({self._counting}, timeout=SETTLED_PATIENCE_SECONDS)
                self._registry = await _read(api, self._settled)
                self._read_at = clock()
        encode, content_type = choose_encoder(accept)
        return Response(encode(self._registry), headers={"Content-Type": content_type})

    async def _count(self, api: Api) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            self._settled = await api.service.count_settled_jobs()
            self._count_at = clock() + (clock() - began) / SETTLED_SHARE
        except DurableJobsError as error:
            logger.warning("Settled jobs were not counted, the last count stands: %s", error)
            self._count_at = clock() + RECOUNT_SECONDS
        finally:
            self._counting = None


async def _read(api: Api, settled: list[dict[str, Any]]) -> CollectorRegistry:
    stale_seconds = api.settings.worker_stale_seconds
    counts = await api.service.metrics()
    queues = await api.service.list_queues(stale_seconds=stale_seconds)
    workers = await api.service.list_workers()
    registry = CollectorRegistry(auto_describe=False)
    up = _gauge("up", "1: Postgres answered.", (), [((), 1.0)])
    counts["jobs"] += settled
    families = [up, *_jobs(counts), *_counters(counts["counters"]), *_queues(queues), *_workers(workers, stale_seconds)]
    registry.register(_Families(families))
    return registry


class _Families(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _gauge(
    name: str, about: str, labels: Iterable[str], samples: Iterable[tuple[Iterable[str], float | None]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"durable_jobs_{name}", about, labels=list(labels))
    for values, value in samples:
        if value is not None:
            family.add_metric(list(values), value)
    return family


def _jobs(counts: dict[str, list[dict[str, Any]]]) -> Iterator[Metric]:
    yield _gauge(
        "jobs",
        "Jobs by queue, type and state.",
        (*_QUEUE, "state"),
        (((row["queue"], row["job_type"], row["status"]), row["jobs"]) for row in counts["jobs"]),
    )
    ages = {
        "oldest_unresolved_seconds": "How long ago the oldest uncertain job ended.",
        "oldest_escalated_seconds": "How long the oldest escalated job has stood before an operator.",
        "escalated": "Jobs that stand before an operator.",
    }
    for name, about in ages.items():
        rows = (((row["queue"], row["job_type"]), row[name]) for row in counts["ages"])
        yield _gauge(name, about, _QUEUE, rows)
    events = (((row["name"],), row["events"]) for row in counts["events"])
    yield _gauge("events_5m", "Events on the trails in the last five minutes, by name.", ("event",), events)


def _counters(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    """What workers count, over all that ever ran: a stopped worker's counts stay."""
    about = {
        "claims": "Claims by attempts.",
        "reclaims": "Claims, and landings, of jobs whose lease had run out.",
        "stale_refusals": "Attempts that were refused, since their claim had been fenced.",
        "sweeps": "Sweeps that ran to their end.",
    }
    for name, text in about.items():
        family = CounterMetricFamily(f"durable_jobs_{name}", text, labels=["queue"])
        for row in rows:
            if row["name"] == name:
                family.add_metric([row["queue"]], row["value"])
        yield family
    results = CounterMetricFamily(
        "durable_jobs_sweep_results", "What sweeps did, by result.", labels=["queue", "result"]
    )
    for row in rows:
        if row["name"] == "sweep_results":
            results.add_metric([row["queue"], row["result"]], row["value"])
    yield results


def _queues(queues: list[QueueOverview]) -> Iterator[Metric]:
    fields = {
        "due": "Queued jobs that are due.",
        "oldest_due_seconds": "How long the oldest due job has been due.",
        "paused": "1 where the deployer has paused the queue or the type on it.",
        "live_workers": "Workers that host the type on the queue and are healthy.",
    }
    for name, about in fields.items():
        rows = (((each.queue, each.job_type), getattr(each, name)) for each in queues)
        yield _gauge(f"queue_{name}", about, _QUEUE, rows)


def _workers(workers: list[WorkerRecord], stale_seconds: float) -> Iterator[Metric]:
    states = Counter((each.queue, str(each.state(stale_seconds))) for each in workers if not each.is_gone)
    yield _gauge("workers", "Workers heard of within a day, by queue and state.", ("queue", "state"), states.items())
    running: Counter[tuple[str]] = Counter()
    slots: Counter[tuple[str]] = Counter()
    lags: dict[tuple[str], float] = {}
    for each in workers:
        if each.state(stale_seconds) is WorkerState.HEALTHY:
            running[(each.queue,)] += each.running
            slots[(each.queue,)] += each.slots or 0
            lags[(each.queue,)] = max(lags.get((each.queue,), 0.0), each.keeper_lag_seconds)
    yield _gauge(
        "attempts_in_hand", "Attempts that healthy workers run, at their last heartbeats.", ("queue",), running.items()
    )
    yield _gauge("worker_slots", "Attempts that healthy workers can run at once.", ("queue",), slots.items())
    yield _gauge(
        "keeper_lag_seconds", "How late the healthy workers' lease renewals are, the latest.", ("queue",), lags.items()
    )
