"""The example's worker process: `python -m examples.research.worker`.

DURABLE_JOBS_DATABASE_URL   the job table
TEMPORAL_ADDRESS, ...       the Temporal server, as in every Temporal tool
RESEARCH_PROVIDER_URL       the provider
RESEARCH_RECONCILE_SECONDS  how often uncertain jobs are swept; 60 by default
"""

import asyncio
import os
import signal
from collections.abc import Mapping
from datetime import timedelta

from temporalio.client import Client
from temporalio.envconfig import ClientConfig
from temporalio.worker import Worker

from durable_jobs import DurableJobsPlugin
from examples.research.handler import QUEUE, Research, ResearchProvider

PROVIDER_URL_VARIABLE = "RESEARCH_PROVIDER_URL"
RECONCILE_SECONDS_VARIABLE = "RESEARCH_RECONCILE_SECONDS"


async def connect_temporal(environment: Mapping[str, str] = os.environ) -> Client:
    """A client for the server that the environment, or Temporal's own configuration file, names."""
    config = ClientConfig.load_client_connect_config(override_env_vars=dict(environment))
    return await Client.connect(**{"target_host": "localhost:7233", **config})


async def main() -> None:
    """Works until SIGTERM or Ctrl-C, then lets the attempts in hand come to their end."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    provider = ResearchProvider(os.environ[PROVIDER_URL_VARIABLE])
    plugin = DurableJobsPlugin(
        os.environ["DURABLE_JOBS_DATABASE_URL"],
        handlers=[Research(provider)],
        reconcile_every=timedelta(seconds=float(os.environ.get(RECONCILE_SECONDS_VARIABLE, "60"))),
    )
    client = await connect_temporal()
    try:
        async with Worker(client, task_queue=QUEUE, plugins=[plugin], max_concurrent_activities=8):
            print(f"research worker {os.getpid()} is polling {QUEUE}", flush=True)
            await stop.wait()
    finally:
        await provider.aclose()


if __name__ == "__main__":
    asyncio.run(main())
