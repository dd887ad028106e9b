"""The application's worker process: `python worker.py`, by `DURABLE_JOBS_*`, `GOVERNANCE_*` and Temporal's settings.

Hosts every handler, workflow and activity that `activities` and `workflows` list, on every queue of the settings
(DURABLE_JOBS_WORKER_QUEUES, by default the default queue and those of DURABLE_JOBS_TYPE_QUEUES), until SIGTERM or
Ctrl-C; then the attempts in hand run on through the grace period. It is `durable-jobs worker --app worker:app`, with
its options and exit codes; the same reference as DURABLE_JOBS_WORKER_APP runs it beside the API.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from activities.hosting import application
from activities.settings import AppSettings
from durable_jobs.cli import main
from durable_jobs.hosting import Hosted
from durable_jobs.settings import Settings
from workflows import PRODUCT


@asynccontextmanager
async def app() -> AsyncIterator[Hosted]:
    """What the worker hosts, by the environment. Raises `InvalidSettings`, `SchemaMissing`, `StoreUnavailable`."""
    settings = Settings.from_environment()
    async with application(
        AppSettings.from_environment(),
        settings.database_url,
        schema=settings.database_schema,
        pool_size=settings.pool_size,
    ) as hosted:
        yield Hosted(hosted.handlers, PRODUCT, hosted.activities)


if __name__ == "__main__":
    sys.argv[1:1] = ["worker", "--app", "worker:app"]
    main()
