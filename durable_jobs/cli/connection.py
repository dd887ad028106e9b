"""How a command reaches the service, and Temporal where it is there."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from temporalio.client import Client
from temporalio.envconfig import ClientConfig

from durable_jobs.cli.output import fail
from durable_jobs.client import DurableJobs
from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.service.registry import STALE_SECONDS
from durable_jobs.store.tables import SCHEMA

T = TypeVar("T")

DATABASE_URL_VARIABLE, SCHEMA_VARIABLE = "DURABLE_JOBS_DATABASE_URL", "DURABLE_JOBS_SCHEMA"
STALE_VARIABLE = "DURABLE_JOBS_WORKER_STALE_SECONDS"
NOT_FOUND_EXIT, REFUSED_EXIT, UNAVAILABLE_EXIT = 4, 5, 6


def with_jobs(as_json: bool, work: Callable[[DurableJobs], Awaitable[T]]) -> T:
    """Run `work` with a client of the servers that the environment names; report an error of the service and leave.

    Exit codes: 1 for bad input and all that has no code of its own, 4 not found, 5 refused, 6 a server is away.
    """
    url = os.environ.get(DATABASE_URL_VARIABLE)
    if not url:
        fail(as_json, "NO_DATABASE_URL", f"{DATABASE_URL_VARIABLE} is not set", exit_code=2)

    async def run() -> T:
        schema = os.environ.get(SCHEMA_VARIABLE, SCHEMA)
        async with await DurableJobs.connect(url, await temporal_client(), schema=schema) as jobs:
            return await work(jobs)

    try:
        return asyncio.run(run())
    except DurableJobsError as error:
        fail(as_json, error.code, error.message, exit_code=_exit_code(error))
    except RuntimeError as error:  # how the SDK says that it can't connect
        fail(as_json, "TEMPORAL_UNAVAILABLE", str(error), exit_code=UNAVAILABLE_EXIT)


def stale_seconds() -> float:
    """How long a worker may be silent, as the API has it: DURABLE_JOBS_WORKER_STALE_SECONDS."""
    try:
        return float(os.environ.get(STALE_VARIABLE, STALE_SECONDS))
    except ValueError:
        fail(False, "INVALID_SETTINGS", f"{STALE_VARIABLE} must be a number of seconds", exit_code=2)


async def temporal_client() -> Client:
    """A client by `temporalio.envconfig`, which connects when it is first used: most commands never use it."""
    config: dict[str, Any] = dict(ClientConfig.load_client_connect_config())
    return await Client.connect(**({"target_host": "localhost:7233"} | config | {"lazy": True}))


def _exit_code(error: DurableJobsError) -> int:
    return {404: NOT_FOUND_EXIT, 409: REFUSED_EXIT, 503: UNAVAILABLE_EXIT}.get(error.http_status, 1)
