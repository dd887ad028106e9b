"""What operators read of the whole, and the bulk verbs of retention and recovery. Takes a connection, never commits."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.models import ApiToken
from durable_jobs.contract.workers import QueueOverview

ADD_TOKEN = """
INSERT INTO {s}.api_tokens (id, name, token_sha256, role, organization_id, projects, tenant, actor, created_at,
    expires_at)
VALUES (%(id)s, %(name)s, %(digest)s, %(role)s, %(organization)s, %(projects)s, %(tenant)s, %(actor)s,
    clock_timestamp(), %(expires_at)s) RETURNING *
"""
TOKENS = """
SELECT * FROM {s}.api_tokens WHERE (%(organization)s::text IS NULL OR organization_id = %(organization)s)
ORDER BY created_at, id
"""
TOKEN_BY_DIGEST = """
SELECT * FROM {s}.api_tokens WHERE token_sha256 = %(digest)s AND revoked_at IS NULL
    AND (expires_at IS NULL OR expires_at > statement_timestamp())
"""
REVOKE_TOKEN = """
UPDATE {s}.api_tokens SET revoked_at = COALESCE(revoked_at, clock_timestamp()) WHERE id = %(id)s
"""

# The conditions of the partial indexes of open jobs; every other job has settled.
_INDEXED = ("status = 'queued'", "status IN ('claimed', 'running')", "status IN ('indeterminate', 'timed_out')")
# A selection for each of these indexes: one over all of their statuses would read the whole table.
_OPEN = " UNION ALL ".join(
    f"""SELECT queue, job_type, status, scheduled_at, escalated_at FROM {{s}}.jobs
    WHERE {condition} AND (%(organization)s = '' OR organization_id = %(organization)s)"""
    for condition in _INDEXED
)
QUEUES = f"""
SELECT c.*, w.live_workers, EXISTS (
    SELECT FROM {{s}}.queue_controls q WHERE q.queue = c.queue AND q.job_type IN ('', c.job_type)
        AND q.organization_id IN ('', %(organization)s)) AS paused
FROM (
    SELECT j.queue, j.job_type, count(*) FILTER (WHERE j.status = 'queued') AS queued,
        count(*) FILTER (WHERE j.status = 'queued' AND j.scheduled_at <= statement_timestamp()) AS due,
        count(*) FILTER (WHERE j.status IN ('claimed', 'running')) AS active,
        count(*) FILTER (WHERE j.status IN ('indeterminate', 'timed_out')) AS unresolved,
        count(*) FILTER (WHERE j.escalated_at IS NOT NULL) AS escalated,
        extract(epoch FROM statement_timestamp() - min(j.scheduled_at)
            FILTER (WHERE j.status = 'queued' AND j.scheduled_at <= statement_timestamp()))::float8
            AS oldest_due_seconds
    FROM ({_OPEN}) j GROUP BY j.queue, j.job_type
) c CROSS JOIN LATERAL (
    SELECT count(*) AS live_workers FROM {{s}}.workers w
    WHERE w.queue = c.queue AND c.job_type = ANY(w.job_types) AND w.stopped_at IS NULL
        AND w.heartbeat_at > statement_timestamp() - make_interval(secs => %(stale_seconds)s)
        AND (%(organization)s = '' OR w.organizations IS NULL OR %(organization)s = ANY(w.organizations))
) w ORDER BY c.queue, c.job_type
"""

PAUSES = """
SELECT queue, NULLIF(job_type, '') AS job_type, NULLIF(organization_id, '') AS organization, paused_at, actor, reason
FROM {s}.queue_controls WHERE %(queue)s::text IS NULL OR queue = %(queue)s
ORDER BY queue, queue_controls.job_type, organization_id
"""

OPEN_COUNTS = f"SELECT queue, job_type, status, count(*) AS jobs FROM ({_OPEN}) j GROUP BY 1, 2, 3"
SETTLED_COUNTS = f"""
SELECT queue, job_type, status, count(*) AS jobs FROM {{s}}.jobs
WHERE NOT ({" OR ".join(_INDEXED)}) GROUP BY 1, 2, 3
"""
AGES = """
SELECT queue, job_type,
    extract(epoch FROM statement_timestamp() - min(finished_at)
        FILTER (WHERE status IN ('indeterminate', 'timed_out')))::float8 AS oldest_unresolved_seconds,
    extract(epoch FROM statement_timestamp() - min(escalated_at))::float8 AS oldest_escalated_seconds,
    count(escalated_at) AS escalated
FROM {s}.jobs WHERE status IN ('indeterminate', 'timed_out') OR escalated_at IS NOT NULL GROUP BY 1, 2
"""
EVENT_COUNTS = """
SELECT name, count(*) AS events FROM {s}.job_events
WHERE id > (SELECT COALESCE(max(id), 0) - 100000 FROM {s}.job_events)
    AND occurred_at > statement_timestamp() - interval '5 minutes'
GROUP BY 1
"""

# Settled jobs of a certain age, oldest first.
PRUNE = """
WITH old AS MATERIALIZED (
    SELECT j.id FROM {s}.jobs j
    WHERE j.status IN ('completed', 'failed', 'cancelled', 'dead_letter', 'halt_unsafe') AND j.finished_at < %(before)s
        AND j.escalated_at IS NULL AND NOT j.follow_ups_due
        AND (%(organization)s::text IS NULL OR j.organization_id = %(organization)s)
    ORDER BY j.finished_at, j.id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), events AS (DELETE FROM {s}.job_events e USING old WHERE e.job_id = old.id),
attempts AS (DELETE FROM {s}.job_attempts a USING old WHERE a.job_id = old.id)
DELETE FROM {s}.jobs j USING old WHERE j.id = old.id
"""
UNSETTLED = """
SELECT j.id FROM {s}.jobs j WHERE j.status IN ('queued', 'claimed', 'running')
    AND (%(after)s::uuid IS NULL OR j.id > %(after)s)
ORDER BY j.id LIMIT %(limit)s
"""

FACTS = """
SELECT current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('full_page_writes') AS full_page_writes,
    pg_is_in_recovery() AS in_recovery, clock_timestamp() AS now,
    (SELECT max(age(backend_xmin)) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL) AS oldest_xmin_age,
    (SELECT n_dead_tup FROM pg_stat_user_tables WHERE schemaname = '{s}' AND relname = 'jobs') AS dead_tuples,
    (SELECT n_live_tup FROM pg_stat_user_tables WHERE schemaname = '{s}' AND relname = 'jobs') AS live_tuples
"""


class OperationStore:
    """Over one schema. Takes a connection, never commits."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    async def rows(
        self, connection: AsyncConnection, template: str, parameters: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """The rows of one of this module's statements."""
        sql = template.replace("{s}", self.schema)
        return [dict(row) for row in (await connection.exec_driver_sql(sql, dict(parameters or {}))).mappings()]

    async def execute(self, connection: AsyncConnection, template: str, **parameters: Any) -> int:
        """Run one of this module's writes; returns how many rows it touched."""
        return (await connection.exec_driver_sql(template.replace("{s}", self.schema), parameters)).rowcount

    async def queues(
        self, connection: AsyncConnection, organization: str | None, stale_seconds: float
    ) -> list[QueueOverview]:
        parameters = {"organization": organization or "", "stale_seconds": stale_seconds}
        return [QueueOverview.model_validate(row) for row in await self.rows(connection, QUEUES, parameters)]

    async def tokens(self, connection: AsyncConnection, organization: str | None) -> list[ApiToken]:
        return [
            ApiToken.model_validate(row) for row in await self.rows(connection, TOKENS, {"organization": organization})
        ]

    async def unsettled(self, connection: AsyncConnection, *, after: UUID | None, limit: int) -> list[UUID]:
        """The ids of jobs that are queued, claimed or running."""
        return [row["id"] for row in await self.rows(connection, UNSETTLED, {"after": after, "limit": limit})]
