"""The application's worker process: `python worker.py`, by `DURABLE_JOBS_*`, `GOVERNANCE_*` and Temporal's settings.

Hosts every handler, workflow and activity that `activities` and `workflows` list, on every queue of the settings
(DURABLE_JOBS_WORKER_QUEUES, by default the default queue and those of DURABLE_JOBS_TYPE_QUEUES), until SIGTERM or
Ctrl-C; then the attempts in hand run on through the grace period.
"""

import asyncio
import logging
import signal
import sys

from activities.hosting import application
from activities.settings import AppSettings
from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.hosting import run_worker
from durable_jobs.settings import InvalidSettings, Settings
from workflows import PRODUCT


async def main() -> None:
    """Raises `InvalidSettings`; `StoreUnavailable`, `SchemaMissing` or Temporal's errors at the start."""
    settings, app = Settings.from_environment(), AppSettings.from_environment()
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with application(app, settings.database_url, pool_size=settings.pool_size) as hosted:
        types = ", ".join(each.job_type for each in hosted.handlers)
        print(
            f"hosting {types} on {', '.join(settings.queues)}",
            flush=True,
        )
        await run_worker(settings, stop, hosted.handlers, workflows=PRODUCT, activities=hosted.activities)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(main())
    except InvalidSettings as error:
        sys.exit(f"worker: {error.message}")
    except (DurableJobsError, RuntimeError) as error:
        sys.exit(f"worker: a server is away: {error}")
