"""Fixtures of the tests that kill, stop and replace processes: `pytest_plugins = ["tests.processes.fixtures"]`."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.service import RPCError

from durable_jobs import DurableJobs, DurableJobService, JobSpec
from durable_jobs._processes import ServerProcess
from durable_jobs.dev import DevStack
from durable_jobs.temporal.schedule import schedule_id
from examples.research.handler import ResearchProvider
from tests.conftest import Specs, Workers
from tests.processes.harness import Provider, Scene, WorkerProcess
from tests.processes.worker import NEVER, Probe


@pytest.fixture(scope="session")
def provider_url() -> Iterator[str]:
    """The address of a provider process, the same for the whole run: operation keys are unique to their job."""
    with tempfile.TemporaryDirectory(prefix="durable-jobs-provider-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "examples.research.provider", "--database", str(folder / "ledger.sqlite3")]
        server = ServerProcess("provider", command, folder / "log", stop_signal=signal.SIGTERM)
        server.start()
        try:
            server.wait_until(lambda: "listening on" in server.log.read_text())
            yield server.log.read_text().split()[-1]
        finally:
            server.stop(signal.SIGKILL)


@pytest_asyncio.fixture
async def scene(
    durable_jobs_stack: DevStack,
    database_url: str,
    temporal_client: Client,
    jobs: DurableJobs,
    service: DurableJobService,
    worker: Workers,
    spec: Specs,
    queue: str,
    provider_url: str,
) -> AsyncIterator[Scene]:
    """The processes' surroundings; every process is ended with the test, however it went."""
    environment = os.environ | {
        "DURABLE_JOBS_DATABASE_URL": database_url,
        "TEMPORAL_ADDRESS": durable_jobs_stack.temporal_address,
        "TEMPORAL_NAMESPACE": temporal_client.namespace,
        "PROBE_QUEUE": queue,
        "PROBE_PROVIDER_URL": provider_url,
    }
    started: list[WorkerProcess] = []

    async def start_worker(fault: str = "", grace_seconds: float = 2, **extra: str) -> WorkerProcess:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.processes.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment | {"PROBE_FAULT": fault, "PROBE_GRACE_SECONDS": str(grace_seconds)} | extra,
            # A session of its own: nothing that is sent to the group of the tests reaches it, nor the other way round.
            start_new_session=True,
        )
        started.append(WorkerProcess(process))
        await started[-1].says("is polling")
        return started[-1]

    def research(**overrides: Any) -> JobSpec:
        payload = {"question": "How do mountains form?", "mode": "quick"}
        return spec(**({"payload": payload, "lease_seconds": 1, "backoff_base_seconds": 0.1} | overrides))

    caller = ResearchProvider(provider_url)
    async with httpx.AsyncClient(base_url=provider_url) as http:
        provider = Provider(http)
        await provider.works(seconds=0)
        try:
            yield Scene(
                jobs=jobs,
                service=service,
                temporal=temporal_client,
                queue=queue,
                provider=provider,
                spec=research,
                start_worker=start_worker,
                second_worker=lambda: worker(Probe(caller), reconcile_every=NEVER),
            )
        finally:
            for process in started:
                await process.close()
            await caller.aclose()
            with suppress(RPCError):
                await temporal_client.get_schedule_handle(schedule_id(queue)).delete()
