"""Hears of jobs that were enqueued in SQL, and launches them within a second.

LISTEN needs a session of its own, so it wants Postgres itself, not PgBouncer in transaction mode. A lost listener costs
latency, never a job: the scheduled launch sweep is the floor.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable

from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.store.database import CONNECT_ARGS, WholeConnection
from durable_jobs.store.migrate import conninfo

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.05
"""How long notifications are gathered before one look at the table serves them all."""
LONGEST_PAUSE_SECONDS = 30.0


class EnqueueListener:
    """Calls `launch` when a job was enqueued on `queue`, and after each reconnection, for what may have been missed."""

    def __init__(self, database_url: str, schema: str, queue: str, launch: Callable[[], Awaitable[int]]) -> None:
        self._conninfo = conninfo(database_url)
        self._channel = f"{schema}_enqueued"
        self._payload = hashlib.md5(queue.encode(), usedforsecurity=False).hexdigest()
        self._launch = launch
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        pause = 1.0
        while True:
            try:
                async with await WholeConnection.connect(self._conninfo, autocommit=True, **CONNECT_ARGS) as connection:
                    await connection.execute(f'LISTEN "{self._channel}"')
                    await self._launch_now()
                    pause = 1.0
                    async for notification in connection.notifies():
                        if notification.payload == self._payload:
                            await asyncio.sleep(GATHER_SECONDS)
                            await self._launch_now()
            except Exception as error:
                logger.info("Not listening for enqueued jobs, tried again in %g s: %r", pause, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _launch_now(self) -> None:
        try:
            await self._launch()
        except DurableJobsError as error:
            logger.info("Enqueued jobs are left to the launch sweep: %s", error)
