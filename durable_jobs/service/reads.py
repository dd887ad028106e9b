"""Reading jobs, their trails and their attempts; listings are keyset-paginated."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from durable_jobs.contract.errors import InvalidInput, UnknownEvent
from durable_jobs.contract.models import Job, JobAttempt, JobEvent, JobHead, Page
from durable_jobs.contract.states import EventName, JobStatus
from durable_jobs.contract.trail import differences
from durable_jobs.service.base import ServicePart, require_json, require_text

MAX_PAGE = 1000
_KEYS = 500

INFORMATIVE = frozenset({EventName.HEARTBEAT, EventName.ADMISSION_CHECKED, EventName.EXECUTION_CONTROL_SHADOW})
"""The events that change no column; every other is left by its own verb, with the change that it records."""


class Reads(ServicePart):
    async def get_job(self, job_id: UUID, *, organization: str | None = None) -> Job:
        """The job's row. Raises `JobNotFound`, also for another tenant's job when `organization` is given."""
        return await self.database.run(lambda own: self._store.get(own, job_id, organization))

    async def get_job_and_clock(self, job_id: UUID) -> tuple[Job, datetime]:
        """The job's row and the database's clock, to judge what is due. Raises `JobNotFound`."""
        return await self.database.run(lambda own: self._store.get_with_clock(own, job_id))

    async def find_by_idempotency_key(self, organization: str, project: str, idempotency_key: str) -> Job | None:
        """The one job under this key, or None."""
        found = await self.database.run(
            lambda own: self._store.existing(own, [(organization, project, idempotency_key)])
        )
        return found[0] if found else None

    async def find_by_idempotency_keys(
        self, organization: str, project: str, idempotency_keys: Sequence[str]
    ) -> dict[str, Job]:
        """The jobs under these keys, by key; a key that has none is left out."""
        asked = [(organization, project, key) for key in idempotency_keys]
        found: dict[str, Job] = {}
        for first in range(0, len(asked), _KEYS):
            page = asked[first : first + _KEYS]
            jobs = await self.database.run(partial(self._store.existing, keys=page))
            found |= {job.idempotency_key: job for job in jobs}
        return found

    async def list_jobs(
        self,
        *,
        organization: str | None = None,
        project: str | None = None,
        statuses: Sequence[JobStatus] | None = None,
        queue: str | None = None,
        job_type: str | None = None,
        escalated: bool | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> Page[JobHead]:
        """Jobs in their order of creation, without payloads and results, which may be large.

        `escalated` ones stand before an operator, in whatever status. `after` is the previous page's `next_cursor`.
        Raises `InvalidInput`.
        """
        limit = _limit(limit)
        jobs = await self.database.run(
            lambda own: self._store.list_jobs(
                own,
                organization=organization,
                project=project,
                statuses=statuses,
                queue=queue,
                job_type=job_type.lower() if job_type is not None else None,
                escalated=escalated,
                after=_cursor(after, UUID),
                limit=limit + 1,
            )
        )
        return _page(jobs, limit, "id")

    async def list_job_events(
        self, job_id: UUID, *, organization: str | None = None, after: str | None = None, limit: int = MAX_PAGE
    ) -> Page[JobEvent]:
        """The job's trail, in its order.

        Raises `InvalidInput`; `JobNotFound`, also for another tenant's job when `organization` is given.
        """
        limit = _limit(limit)
        events = await self.database.run(
            lambda own: self._store.list_events(
                own, job_id, organization=organization, after=_cursor(after, int) or 0, limit=limit + 1
            )
        )
        if not events and after is None:
            await self.get_job(job_id, organization=organization)
        return _page(events, limit, "id")

    async def list_job_attempts(
        self, job_id: UUID, *, organization: str | None = None, after: str | None = None, limit: int = MAX_PAGE
    ) -> Page[JobAttempt]:
        """The job's attempts, by generation. Raises as `list_job_events`."""
        limit = _limit(limit)
        attempts = await self.database.run(
            lambda own: self._store.list_attempts(
                own, job_id, organization=organization, after=_cursor(after, int) or 0, limit=limit + 1
            )
        )
        if not attempts and after is None:
            await self.get_job(job_id, organization=organization)
        return _page(attempts, limit, "generation")

    async def append_job_event(self, job_id: UUID, name: str, actor: str, data: Mapping[str, Any]) -> JobEvent:
        """Append an event that changes nothing: `heartbeat`, `admission_checked`, `execution_control_shadow`.

        The other names of the vocabulary record a change of the row and are left by the verb that makes it.

        Raises `UnknownEvent`, `InvalidInput`, `JobNotFound`.
        """
        if name not in set(EventName):
            raise UnknownEvent.at("name", f"{name!r} is none of {', '.join(EventName)}")
        if name not in INFORMATIVE:
            raise UnknownEvent.at("name", f"{name!r} records a change of the job: the verb that makes it leaves it")
        require_text(actor=actor)
        data = dict(data)
        require_json("data", data)
        return await self.database.run(lambda own: self._store.append_event(own, job_id, EventName(name), actor, data))

    async def check_trail(self, job_id: UUID) -> list[str]:
        """Where the row and the fold of its trail disagree, a line each; empty when the job is sound."""

        async def work(connection: Any) -> list[str]:
            job, _ = await self._store.lock(connection, job_id)
            events: list[JobEvent] = []
            while page := await self._store.list_events(
                connection, job_id, after=events[-1].id if events else 0, limit=MAX_PAGE
            ):
                events += page
            return differences(job, events)

        return await self.database.run(work)


def _limit(limit: int) -> int:
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidInput.at("limit", f"must be 1 to {MAX_PAGE}")
    return limit


def _cursor(after: str | None, kind: Any) -> Any:
    try:
        cursor = None if after is None else kind(after)
        if isinstance(cursor, int) and not 0 <= cursor < 2**63:
            raise ValueError
        return cursor
    except ValueError:
        raise InvalidInput.at("after", "is no cursor of this listing") from None


def _page(items: list[Any], limit: int, key: str) -> Page[Any]:
    kept = items[:limit]
    return Page(items=kept, next_cursor=str(getattr(kept[-1], key)) if len(items) > limit else None)
