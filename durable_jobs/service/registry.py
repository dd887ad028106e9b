"""The registry of workers, and what the launch sweep takes. Leases are never judged by it, only rows are."""

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from uuid import UUID

from durable_jobs.contract.errors import DuplicateWorker, DurableJobsError, StoreUnavailable
from durable_jobs.contract.models import Job
from durable_jobs.contract.workers import WorkerRecord
from durable_jobs.service.base import ServicePart
from durable_jobs.store import registry, sweeps

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
"""Between two reports of a worker that polls."""
STALE_SECONDS = 60.0


class Registry(ServicePart):
    async def register_worker(
        self,
        worker_id: str,
        *,
        host: str,
        pid: int,
        version: str,
        queue: str,
        job_types: Sequence[str],
        organizations: Sequence[str] | None,
        slots: int | None = None,
    ) -> None:
        """Record a worker that begins to poll; `slots`: how many jobs it runs at once.

        Raises `DuplicateWorker` while one of the same id is alive.
        """
        registered = await self.database.run(
            lambda own: self._sweeps.execute(
                own,
                registry.REGISTER,
                id=worker_id,
                host=host,
                pid=pid,
                version=version,
                queue=queue,
                job_types=list(job_types),
                organizations=list(organizations) if organizations is not None else None,
                slots=slots,
                stale_seconds=STALE_SECONDS,
            ),
            control=True,
        )
        if not registered:
            raise DuplicateWorker(f"worker id {worker_id!r} is that of a live worker")

    async def stop_worker(self, worker_id: str) -> None:
        """Record that a worker stopped polling; its record is kept."""
        await self.database.run(lambda own: self._sweeps.execute(own, registry.STOP, id=worker_id), control=True)

    async def list_workers(self) -> list[WorkerRecord]:
        """Every record, stale and stopped ones as well."""
        return await self.database.run(self._sweeps.workers, control=True)

    async def count(self, queue: str, counted: Mapping[tuple[str, str], int]) -> None:
        """Add to the queue's counters, by (name, result): what monitoring reads."""
        if counted:
            await self.database.run(
                lambda own: self._sweeps.execute(own, registry.COUNT, **registry.counts(queue, counted))
            )

    async def take_due_for_launch(self, queue: str, *, limit: int = 500) -> list[tuple[Job, datetime]]:
        """The queue's next jobs whose workflow is to be looked for, in claim order, each with the database's clock.

        Each one's next check is pushed further out as it is taken: from half a minute, doubling, to an hour.
        """
        try:
            return await self.database.run(lambda own: self._sweeps.due_for_launch(own, queue, limit))
        except StoreUnavailable:
            raise
        except (DurableJobsError, ValueError) as error:  # a row that can't be written, or can't be read
            logger.warning("Queue %s: one of its due rows can't be taken, each is taken by itself: %s", queue, error)
        taken: list[tuple[Job, datetime]] = []
        for job_id in await self.database.run(lambda own: self._sweeps.due_ids(own, queue, limit)):
            try:
                taken += await self._take_one(queue, job_id)
            except StoreUnavailable:
                raise
            except (DurableJobsError, ValueError) as error:
                logger.warning("Job %s: its launch check can't be taken: %s", job_id, error)
        return taken

    async def _take_one(self, queue: str, job_id: UUID) -> list[tuple[Job, datetime]]:
        return await self.database.run(lambda own: self._sweeps.due_for_launch(own, queue, 1, only=job_id))

    async def check_launch_soon(self, job_id: UUID, seconds: float) -> None:
        """Look for the job's workflow again in so many seconds: it could not be launched now."""
        await self.database.run(
            lambda own: self._sweeps.execute(own, sweeps.CHECK_SOON, job_id=job_id, seconds=seconds)
        )

    async def list_unhosted(
        self,
        no_handler_after: float,
        *,
        organizations: Sequence[str] | None = None,
        after: UUID | None = None,
        limit: int = 100,
    ) -> list[Job]:
        """Jobs, uncertain or with an expired lease, whose queue and type no live worker has hosted for so many
        seconds."""
        return await self.database.run(
            lambda own: self._sweeps.unhosted(
                own, no_handler_after=no_handler_after, organizations=organizations, after=after, limit=limit
            )
        )

    async def list_candidate_projects(
        self, queue: str, job_types: Sequence[str], organizations: Sequence[str] | None
    ) -> list[tuple[str, str]]:
        """The (organization, project) pairs with candidates that are not escalated."""
        scope = sweeps.scope_of(queue, job_types, organizations)
        return await self.database.run(lambda own: self._sweeps.projects(own, scope))

    async def count_escalated(self, queue: str, job_types: Sequence[str], organizations: Sequence[str] | None) -> int:
        """How many uncertain jobs of this scope stand before an operator."""
        scope = sweeps.scope_of(queue, job_types, organizations)
        return await self.database.run(lambda own: self._sweeps.escalated_count(own, scope))
