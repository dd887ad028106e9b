"""Creating the follow-ups of a completed job, on every path to completed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.decisions import escalate
from durable_jobs.contract.errors import IdempotencyKeyConflict, InvalidInput
from durable_jobs.contract.models import CreatedJob, Job
from durable_jobs.contract.rules import storable_text
from durable_jobs.contract.specs import FollowUp, JobSpec
from durable_jobs.service.base import ServicePart
from durable_jobs.service.creation import create_all


class FollowUps(ServicePart):
    async def _follow_up(
        self,
        connection: AsyncConnection,
        parent: Job,
        follow_ups: Sequence[FollowUp],
        problem: str | None,
        actor: str,
    ) -> tuple[Job, list[CreatedJob]]:
        """Create the follow-ups of a completed job in this transaction; escalate the job over what went wrong.

        A conflict, or the `problem` that kept the follow-ups from being named, never undoes the completion.
        """
        specs: list[JobSpec] = []
        try:
            specs = [each.spec(parent) for each in follow_ups]
        except InvalidInput as error:
            problem = f"FOLLOW_UPS_FAILED: {error.message}"
        answers = await create_all(self._store, connection, specs)
        conflicts = [answer.message for answer in answers if isinstance(answer, IdempotencyKeyConflict)]
        if conflicts:
            problem = f"FOLLOW_UP_CONFLICT: {'; '.join(conflicts)}"
        if problem:
            job, now = await self._store.lock(connection, parent.id)
            change = escalate(job, reason=storable_text(problem, 2048), actor=actor, now=now)
            parent = await self._store.apply(connection, job, change, now)
        return parent, [answer for answer in answers if isinstance(answer, CreatedJob)]

    async def list_follow_ups_due(
        self, scope: Mapping[str, Any], *, after: Job | None = None, limit: int = 100
    ) -> list[Job]:
        """Completed jobs whose follow-ups were left to a worker that has their handler, by id."""
        position = after.id if after else None
        return await self.database.run(
            lambda own: self._sweeps.follow_ups_due(own, scope=scope, after=position, limit=limit)
        )

    async def create_follow_ups_due(
        self, parent: Job, name_them: Callable[[Job], tuple[list[FollowUp], str | None]], actor: str
    ) -> tuple[Job, list[Job]]:
        """Create the follow-ups that a resolution left due, once; returns the parent and the new jobs."""

        async def work(connection: AsyncConnection) -> tuple[Job, list[Job]]:
            job, now = await self._store.lock(connection, parent.id)
            if not job.follow_ups_due:
                return job, []
            follow_ups, problem = name_them(job)
            await self._store.set_columns(connection, job, {"follow_ups_due": False}, now)
            job, created = await self._follow_up(connection, job, follow_ups, problem, actor)
            return job, [each.job for each in created if each.created]

        return await self.database.run(work)
