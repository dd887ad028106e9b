"""What every part of the service shares: the database, the store, and how a decided verb runs."""

from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.decisions import Change
from durable_jobs.contract.errors import FieldProblem, InvalidInput
from durable_jobs.contract.models import Job
from durable_jobs.contract.rules import json_problem, key_problem, text_problem
from durable_jobs.store.database import Database
from durable_jobs.store.jobs import JobStore
from durable_jobs.store.sweeps import SweepStore

if TYPE_CHECKING:
    from durable_jobs.service.approvals import ApprovalStore

DEFAULT_GRACE_SECONDS = 30.0


class ServicePart:
    """One part of `DurableJobService`. Each verb is one transaction, committed before it returns."""

    def __init__(
        self,
        database: Database,
        *,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        approvals: "ApprovalStore | None" = None,
    ) -> None:
        self.database = database
        self._approvals = approvals
        self.grace_seconds = grace_seconds
        """No lease reaches past its attempt's claim + timeout_seconds + this."""
        self._store = JobStore(database.schema)
        self._sweeps = SweepStore(database.schema)

    async def _decided(
        self,
        job_id: UUID,
        decide: Callable[[Job, datetime], Change],
        *,
        control: bool = False,
        organization: str | None = None,
        **audit: Any,
    ) -> Job:
        """Lock the row, decide on it, write the change; with `audit`, leave a control event beside it.

        Raises `JobNotFound`, also for another tenant's job when `organization` is given.
        """

        async def work(connection: AsyncConnection) -> Job:
            job, now = await self._store.lock(connection, job_id, organization)
            job = await self._store.apply(connection, job, decide(job, now), now)
            if audit:
                await self._store.record_control(connection, job=job, **audit)
            return job

        return await self.database.run(work, control=control)

    async def _each(
        self,
        page: Callable[..., Awaitable[list[UUID]]],
        size: int,
        act: Callable[[UUID], Awaitable[bool]],
    ) -> list[UUID]:
        """Act on every job of a listing by id, read in pages of `size`; returns those that `act` says it changed.

        `page` takes a connection and `after`, the last id of the page before.
        """
        done: list[UUID] = []
        after: UUID | None = None
        while True:
            ids = await self.database.run(partial(page, after=after), control=True)
            done += [job_id for job_id in ids if await act(job_id)]
            if len(ids) < size:
                return done
            after = ids[-1]


def require_text(**values: object) -> None:
    """Each value is text of 1 to 2,048 storable characters. Raises `InvalidInput` naming the ones that aren't."""
    problems = []
    for field, value in values.items():
        if not isinstance(value, str) or not value.strip():
            problems.append(FieldProblem(field, "must be text, not empty"))
        elif problem := text_problem(value, 2048):
            problems.append(FieldProblem(field, problem))
    if problems:
        raise InvalidInput(problems)


def require_keys(**values: str) -> None:
    """Each value is 1 to 255 printable characters. Raises `InvalidInput` naming the ones that aren't."""
    problems = [FieldProblem(field, problem) for field, value in values.items() if (problem := key_problem(value))]
    if problems:
        raise InvalidInput(problems)


def require_json(field: str, value: object) -> None:
    """`value` is a storable JSON object. Raises `InvalidInput` naming the path of what isn't."""
    if problem := json_problem(value, field):
        raise InvalidInput([problem])


def folded(job_types: Sequence[str] | None) -> list[str] | None:
    """Job types as they are stored, in lower case."""
    return None if job_types is None else [each.lower() for each in job_types]
