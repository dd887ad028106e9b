"""What all crash runs share, servers and provider, and what each has of its own: a database, a queue, its processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from uuid import uuid4

import httpx
from temporalio.client import Client
from temporalio.service import RPCError

from durable_jobs import DurableJobs, JobHead
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.dev import DATABASE_URL_VARIABLE, TEMPORAL_ADDRESS_VARIABLE
from durable_jobs.temporal.schedule import schedule_id
from tests.crash import points, worker
from tests.crash.shapes import GRACE_SECONDS, RECONCILE_SECONDS, STORIES
from tests.probes import execute
from tests.processes.harness import until
from tests.soak.clients import Clients, asking
from tests.soak.shapes import provider_rules

ENDING_SECONDS = 25.0
"""How long a worker may take to end after SIGTERM."""
POLLING_SECONDS = 60.0
"""How long one may take from its start until it polls."""


_LOOK_NOW = """
UPDATE durable_jobs.jobs SET launch_check_at = clock_timestamp() WHERE id IN (
    SELECT id FROM durable_jobs.jobs WHERE launch_check_at IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED)
"""
"""A worker that was stopped within a transaction holds its job's lock."""


@dataclass(frozen=True)
class Stage:
    """The servers of all runs. `template` is the name of a database with the schema and no rows."""

    database_url: str
    template: str
    temporal: Client
    provider_url: str
    folder: Path

    async def set_provider(self) -> None:
        """Tell the provider what to do with the calls of each story."""
        async with httpx.AsyncClient(base_url=self.provider_url) as http:
            rules = provider_rules([story.shape for story in STORIES])
            (await http.put("/rules", json=rules)).raise_for_status()


class CrashWorker:
    """One worker process, and its log."""

    def __init__(self, process: ForkServerProcess, log: Path) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.log = log
        self._process = process

    @property
    def text(self) -> str:
        return self.log.read_text("utf-8", "replace")

    @property
    def runs(self) -> bool:
        return self._process.is_alive()

    @property
    def polls(self) -> bool:
        return "polling" in self.text

    @property
    def stopped(self) -> bool:
        """Whether it has stopped itself; true also once it goes on."""
        return "stops at " in self.text

    @property
    def came_to_its_point(self) -> bool:
        return self.stopped or "dies at " in self.text

    @property
    def code(self) -> int | None:
        """The exit code; a signal's number comes negative."""
        return self._process.exitcode

    def send(self, number: signal.Signals) -> None:
        if self.runs:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def ended(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.runs:  # noqa: ASYNC110 - the process is a child of the fork server, and tells nobody else
                    await asyncio.sleep(0.02)
        return not self.runs

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.ended(ENDING_SECONDS)

    async def terminate(self) -> int | None:
        """SIGTERM; the exit code, None where it does not end."""
        self.send(signal.SIGTERM)
        return self.code if await self.ended(ENDING_SECONDS) else None


@dataclass
class Scene:
    """One run's own."""

    stage: Stage
    name: str
    database_url: str
    jobs: DurableJobs
    clients: Clients
    workers: list[CrashWorker] = field(default_factory=list)

    @property
    def queue(self) -> str:
        return self.name

    def environment(self) -> Mapping[str, str]:
        return {
            DATABASE_URL_VARIABLE: self.database_url,
            TEMPORAL_ADDRESS_VARIABLE: self.stage.temporal.service_client.config.target_host,
            "TEMPORAL_NAMESPACE": self.stage.temporal.namespace,
            "SOAK_PROVIDER_URL": self.stage.provider_url,
            "SOAK_GRACE_SECONDS": str(GRACE_SECONDS),
            "CRASH_QUEUE": self.queue,
            "CRASH_RECONCILE_SECONDS": str(RECONCILE_SECONDS),
        }

    async def start_worker(self, target: points.Target | None = None) -> CrashWorker:
        """Returns once it polls, or has ended before, or is stopped."""
        environment = {**self.environment(), points.POINT_VARIABLE: str(target or "")}
        log = self.stage.folder / f"{self.name}-{len(self.workers) + 1}.log"
        started = CrashWorker(await asyncio.to_thread(worker.start, environment, log), log)
        self.workers.append(started)

        async def came_so_far() -> bool:
            return started.polls or started.stopped or not started.runs

        await until(f"worker {started.pid} polls", came_so_far, POLLING_SECONDS)
        return started

    async def all_jobs(self) -> list[JobHead]:
        """Every job of the run, the oldest first."""
        return await self.clients.answered(self.clients.list_jobs)

    async def job(self) -> JobHead:
        """The one that the story is about, the oldest."""
        return (await self.all_jobs())[0]

    async def let_time_pass(self) -> None:
        """The next look at a launched or unlaunched workflow is due now, rather than in half a minute."""
        await asyncio.to_thread(execute, self.database_url, _LOOK_NOW)


async def _connected(database_url: str, temporal: Client) -> DurableJobs:
    """A machine under load may take longer than a connection's time to answer."""
    for _ in range(10):
        with suppress(StoreUnavailable):
            return await DurableJobs.connect(database_url, temporal, pool_size=4)
    return await DurableJobs.connect(database_url, temporal, pool_size=4)


@asynccontextmanager
async def scene(stage: Stage) -> AsyncIterator[Scene]:
    """A run's own; what it started is ended with it."""
    name = f"crash-{uuid4().hex[:12]}"
    database = name.replace("-", "_")
    await asyncio.to_thread(execute, stage.database_url, f"CREATE DATABASE {database} TEMPLATE {stage.template}")
    url = stage.database_url.rpartition("/")[0] + f"/{database}"
    try:
        async with (
            asking(stage.provider_url) as http,
            await _connected(url, stage.temporal) as jobs,
        ):

            def alive() -> set[int]:
                return {each.pid for each in present.workers if each.runs}

            present = Scene(stage, name, url, jobs, Clients(jobs, http, alive))
            try:
                yield present
            finally:
                for each in present.workers:
                    await each.kill()
                with suppress(RPCError):
                    await stage.temporal.get_schedule_handle(schedule_id(present.queue)).delete()
    finally:
        await asyncio.to_thread(execute, stage.database_url, f"DROP DATABASE IF EXISTS {database} WITH (FORCE)")
