"""What the sweeps and the operators' bulk verbs read and write. Takes a connection, never commits."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.models import Job
from durable_jobs.contract.workers import WorkerRecord
from durable_jobs.store.database import fetch
from durable_jobs.store.jobs import job_of
from durable_jobs.store.registry import WORKERS
from durable_jobs.store.statements import EXPIRED, ORDER, SCOPE

_SHARED = {"unresolved": "j.status IN ('indeterminate', 'timed_out')", "expired": EXPIRED, "order": ORDER}
"""The parts that the templates below have in common."""

PROJECTS = """
SELECT DISTINCT organization_id, project_id FROM (
    SELECT j.organization_id, j.project_id FROM {s}.jobs j WHERE {unresolved} AND j.escalated_at IS NULL AND {scope}
    UNION ALL
    SELECT j.organization_id, j.project_id FROM {s}.jobs j WHERE {expired} AND {scope}
) found ORDER BY organization_id, project_id
"""

CANDIDATES = """
SELECT *, clock_timestamp() AS now FROM (
    (SELECT j.* FROM {s}.jobs j WHERE {unresolved} AND {project} AND {scope} AND {after}
     ORDER BY j.created_at, j.id LIMIT %(limit)s)
    UNION ALL
    (SELECT j.* FROM {s}.jobs j WHERE {expired} AND {project} AND {scope} AND {after}
     ORDER BY j.created_at, j.id LIMIT %(limit)s)
) found ORDER BY created_at, id LIMIT %(limit)s
"""

ESCALATED_COUNT = "SELECT count(*) FROM {s}.jobs j WHERE {unresolved} AND j.escalated_at IS NOT NULL AND {scope}"

# Nobody alive hosts them, and nobody has for a while: whichever worker sweeps puts them before an operator.
UNHOSTED = """
SELECT j.* FROM {s}.jobs j
WHERE ({unresolved} OR {expired}) AND j.escalated_at IS NULL
    AND (%(organizations)s::text[] IS NULL OR j.organization_id = ANY(%(organizations)s))
    AND j.updated_at <= statement_timestamp() - make_interval(secs => %(no_handler_after)s)
    AND (%(after)s::uuid IS NULL OR j.id > %(after)s)
    AND NOT EXISTS (
        SELECT FROM {s}.workers w
        WHERE w.queue = j.queue AND j.job_type = ANY(w.job_types)
            AND (w.organizations IS NULL OR j.organization_id = ANY(w.organizations))
            AND w.heartbeat_at > statement_timestamp() - make_interval(secs => %(no_handler_after)s))
ORDER BY j.id LIMIT %(limit)s
"""

# Each check comes as late again as the job has waited so far, from half a minute to an hour. A settled job is looked
# at once more, as the word of its end may have been lost.
DUE_FOR_LAUNCH = """
WITH due AS MATERIALIZED (
    SELECT j.id FROM {s}.jobs j WHERE j.queue = %(queue)s AND j.launch_check_at <= statement_timestamp()
        AND j.id = COALESCE(%(only)s, j.id)
    ORDER BY {order} LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
), clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
UPDATE {s}.jobs j SET launch_check_at = CASE
    WHEN j.status IN ('queued', 'claimed', 'running', 'indeterminate', 'timed_out') THEN c.now + LEAST(
        GREATEST(c.now - GREATEST(j.scheduled_at, j.created_at, j.finished_at), interval '30 seconds'),
        interval '1 hour')
    END
FROM due d, clock c WHERE j.id = d.id RETURNING j.*, c.now
"""

DUE_IDS = """
SELECT j.id FROM {s}.jobs j WHERE j.queue = %(queue)s AND j.launch_check_at <= statement_timestamp()
ORDER BY {order} LIMIT %(limit)s
"""

# A launch that failed is tried again as soon as that.
CHECK_SOON = """
UPDATE {s}.jobs SET launch_check_at = clock_timestamp() + make_interval(secs => %(seconds)s)
WHERE id = %(job_id)s AND (launch_check_at IS NOT NULL OR finished_at IS NOT NULL)
"""

FOLLOW_UPS_DUE = """
SELECT j.* FROM {s}.jobs j WHERE j.follow_ups_due AND {scope} AND (%(after)s::uuid IS NULL OR j.id > %(after)s)
ORDER BY j.id LIMIT %(limit)s
"""

BY_OPERATION_KEY = """
SELECT j.id FROM {s}.jobs j JOIN {s}.job_attempts a ON a.job_id = j.id
WHERE a.organization_id = %(organization)s AND a.project_id = %(project)s AND a.operation_key = %(operation_key)s
    AND j.operation_key = a.operation_key
"""

ESCALATED = """
SELECT j.id FROM {s}.jobs j WHERE j.escalated_at IS NOT NULL AND {filter}
    AND (%(after)s::uuid IS NULL OR j.id > %(after)s)
ORDER BY j.id LIMIT %(limit)s
"""

CLAIMABLE = """
SELECT j.* FROM {s}.jobs j WHERE j.queue = %(queue)s
    AND (j.status = 'queued' AND j.scheduled_at <= statement_timestamp() OR {expired})
    AND (%(job_type)s = '' OR j.job_type = %(job_type)s)
    AND (%(organization)s::text IS NULL OR j.organization_id = %(organization)s)
    AND (%(priority)s::int IS NULL OR (-j.priority, j.scheduled_at, j.created_at, j.id)
        > (-%(priority)s::int, %(scheduled_at)s::timestamptz, %(created_at)s::timestamptz, %(id)s::uuid))
ORDER BY {order} LIMIT %(limit)s
"""

PAUSE = """
INSERT INTO {s}.queue_controls (queue, job_type, organization_id, paused_at, actor, reason)
VALUES (%(queue)s, %(job_type)s, %(organization)s, clock_timestamp(), %(actor)s, %(reason)s)
ON CONFLICT (queue, job_type, organization_id) DO NOTHING
"""
RESUME = """
DELETE FROM {s}.queue_controls
WHERE queue = %(queue)s AND job_type = %(job_type)s AND organization_id = %(organization)s
"""


class SweepStore:
    """Reads and bookkeeping over one schema. Takes a connection, never commits."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    async def _rows(
        self, connection: AsyncConnection, template: str, parameters: Mapping[str, Any], **parts: str
    ) -> list[dict[str, Any]]:
        return await fetch(connection, self.sql(template, **parts), parameters)

    async def execute(self, connection: AsyncConnection, template: str, **parameters: Any) -> int:
        """Run one of this module's writes; returns how many rows it touched."""
        return (await connection.exec_driver_sql(self.sql(template), parameters)).rowcount

    def sql(self, template: str, **parts: str) -> str:
        """The SQL of one of this module's templates."""
        for name, value in (_SHARED | parts | {"s": self.schema}).items():
            template = template.replace("{" + name + "}", value)
        return template

    async def projects(self, connection: AsyncConnection, scope: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The (organization, project) pairs that have candidates, escalated ones apart."""
        rows = await self._rows(connection, PROJECTS, _given(scope), scope=_scope(scope))
        return [(row["organization_id"], row["project_id"]) for row in rows]

    async def candidates(
        self,
        connection: AsyncConnection,
        organization: str,
        project: str,
        *,
        scope: Mapping[str, Any],
        escalated: bool,
        after: tuple[datetime, UUID] | None,
        limit: int,
    ) -> list[tuple[Job, datetime]]:
        """One page of a project's candidates, oldest first, each with the database's clock."""
        parameters = {"organization": organization, "project": project, "limit": limit, **_given(scope)}
        if after is not None:
            parameters |= {"after_created": after[0], "after_id": after[1]}
        later = "(j.created_at, j.id) > (%(after_created)s, %(after_id)s)" if after else "true"
        rows = await self._rows(
            connection,
            CANDIDATES if escalated else CANDIDATES.replace("{unresolved}", "{unresolved} AND j.escalated_at IS NULL"),
            parameters,
            project="j.organization_id = %(organization)s AND j.project_id = %(project)s",
            scope=_scope(scope),
            after=later,
        )
        return [(job_of(row), row["now"]) for row in rows]

    async def escalated_count(self, connection: AsyncConnection, scope: Mapping[str, Any]) -> int:
        (row,) = await self._rows(connection, ESCALATED_COUNT, _given(scope), scope=_scope(scope))
        return int(row["count"])

    async def unhosted(
        self,
        connection: AsyncConnection,
        *,
        no_handler_after: float,
        organizations: Sequence[str] | None,
        after: UUID | None,
        limit: int,
    ) -> list[Job]:
        """Uncertain jobs that no worker has hosted for so many seconds, by id."""
        tenants = list(organizations) if organizations is not None else None
        parameters = {"no_handler_after": no_handler_after, "organizations": tenants, "after": after, "limit": limit}
        return [job_of(row) for row in await self._rows(connection, UNHOSTED, parameters)]

    async def due_ids(self, connection: AsyncConnection, queue: str, limit: int) -> list[UUID]:
        """The next jobs whose workflow is to be looked for; takes none."""
        return [row["id"] for row in await self._rows(connection, DUE_IDS, {"queue": queue, "limit": limit})]

    async def due_for_launch(
        self, connection: AsyncConnection, queue: str, limit: int, only: UUID | None = None
    ) -> list[tuple[Job, datetime]]:
        """Take the next jobs whose workflow is to be looked for, in claim order, and push their next check out."""
        rows = await self._rows(connection, DUE_FOR_LAUNCH, {"queue": queue, "limit": limit, "only": only})
        taken = [(job_of(row), row["now"]) for row in rows]
        return sorted(taken, key=lambda each: (-each[0].priority, each[0].scheduled_at, each[0].created_at, each[0].id))

    async def follow_ups_due(
        self, connection: AsyncConnection, *, scope: Mapping[str, Any], after: UUID | None, limit: int
    ) -> list[Job]:
        """Completed jobs whose follow-ups were left to a worker that has their handler."""
        parameters = {"after": after, "limit": limit, **_given(scope)}
        return [job_of(row) for row in await self._rows(connection, FOLLOW_UPS_DUE, parameters, scope=_scope(scope))]

    async def by_operation_key(
        self, connection: AsyncConnection, organization: str, project: str, operation_key: str
    ) -> UUID | None:
        """The job whose present intent has this key."""
        parameters = {"organization": organization, "project": project, "operation_key": operation_key}
        rows = await self._rows(connection, BY_OPERATION_KEY, parameters)
        return rows[0]["id"] if rows else None

    async def escalated(
        self, connection: AsyncConnection, wanted: Mapping[str, Any], *, after: UUID | None, limit: int
    ) -> list[UUID]:
        """The ids of escalated jobs that match `wanted`; see `RecheckFilter`."""
        given = _given(wanted)
        clauses = [_FILTERS[name] for name in given]
        parameters = {"after": after, "limit": limit, **given}
        rows = await self._rows(connection, ESCALATED, parameters, filter=" AND ".join(clauses) or "true")
        return [row["id"] for row in rows]

    async def claimable(
        self,
        connection: AsyncConnection,
        queue: str,
        job_type: str,
        *,
        organization: str | None,
        after: Job | None,
        limit: int,
    ) -> list[Job]:
        """A page of the queue's due jobs in claim order, after `after`."""
        position = {
            name: getattr(after, name) if after else None for name in ("priority", "scheduled_at", "created_at", "id")
        }
        parameters = {"queue": queue, "job_type": job_type, "organization": organization, "limit": limit, **position}
        return [job_of(row) for row in await self._rows(connection, CLAIMABLE, parameters)]

    async def workers(self, connection: AsyncConnection) -> list[WorkerRecord]:
        """Every record of the registry, the oldest first."""
        return [WorkerRecord.model_validate(row) for row in await self._rows(connection, WORKERS, {})]


_FILTERS = {
    "job_id": "j.id = %(job_id)s",
    "organization": "j.organization_id = %(organization)s",
    "project": "j.project_id = %(project)s",
    "queue": "j.queue = %(queue)s",
    "job_type": "j.job_type = %(job_type)s",
    "escalated_after": "j.escalated_at >= %(escalated_after)s",
    "escalated_before": "j.escalated_at < %(escalated_before)s",
}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _scope(scope: Mapping[str, Any]) -> str:
    return " AND ".join(SCOPE[name] for name in _given(scope)) or "true"


def scope_of(queue: str | None, job_types: Sequence[str] | None, organizations: Sequence[str] | None) -> dict[str, Any]:
    """A scope as the reads above take it; None is no limit."""
    types = list(job_types) if job_types is not None else None
    tenants = list(organizations) if organizations is not None else None
    return {"queue": queue, "job_types": types, "organizations": tenants}
