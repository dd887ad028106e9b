"""The fenced statements that every job goes through, each one statement: the row, its event, its attempt row.

Every one follows one shape. `locked` takes the row's lock; only then does `judged` read the clock, since a clock read
before a lock wait passed a lease that was two seconds dead; `changed` writes if the row allows it; the trail and the
attempt follow from `changed` alone. The answer is the row as written, or none: what refused it is read under the same
lock. `{s}` stands for the schema, `%(name)s` for a parameter.
"""

from functools import cache

from durable_jobs.store.tables import jobs

EVENT_COLUMNS = """(job_id, organization_id, project_id, name, status, generation, intent_number, attempt_count, actor,
        occurred_at, data)"""

SCOPE = {
    "organizations": "j.organization_id = ANY(%(organizations)s)",
    "queues": "j.queue = ANY(%(queues)s)",
    "queue": "j.queue = %(queue)s",
    "job_types": "j.job_type = ANY(%(job_types)s)",
}
"""What narrows a scan, by the parameter that is given."""
ORDER = "j.priority DESC, j.scheduled_at, j.created_at, j.id"
"""The order of claims."""
EXPIRED = "j.status IN ('claimed', 'running') AND j.lease_expires_at <= statement_timestamp()"

# Payloads in the binary format, as the text of an array has each of their quotation marks escaped, in Python.
INSERT = """
WITH asked AS (
    SELECT * FROM unnest(
        %(id)s::uuid[], %(organization_id)s::text[], %(project_id)s::text[], %(queue)s::text[], %(job_type)s::text[],
        %(payload)b::text[], %(idempotency_key)s::text[], %(request_digest)s::text[], %(priority)s::int[],
        %(max_attempts)s::int[], %(backoff_base_seconds)s::float8[], %(lease_seconds)s::float8[],
        %(timeout_seconds)s::float8[], %(scheduled_at)s::timestamptz[]
    ) AS a(id, organization_id, project_id, queue, job_type, payload, idempotency_key, request_digest, priority,
           max_attempts, backoff_base_seconds, lease_seconds, timeout_seconds, scheduled_at)
), clock AS MATERIALIZED (SELECT clock_timestamp() AS now)
INSERT INTO {s}.jobs (
    id, organization_id, project_id, queue, job_type, payload, idempotency_key, request_digest, status, priority,
    intent_number, attempt_count, max_attempts, backoff_base_seconds, lease_seconds, timeout_seconds,
    lease_generation, scheduled_at, created_at, updated_at, lookup_tries, follow_ups_due, release_count,
    launch_check_at)
SELECT id, organization_id, project_id, queue, job_type, payload::jsonb, idempotency_key, request_digest, 'queued',
    priority, 0, 0, max_attempts, backoff_base_seconds, lease_seconds, timeout_seconds,
    0, COALESCE(scheduled_at, now), now, now, 0, false, 0,
    GREATEST(COALESCE(scheduled_at, now), now) + make_interval(secs => %(launch_check_seconds)s)
FROM asked, clock
ORDER BY organization_id COLLATE "C", project_id COLLATE "C", idempotency_key COLLATE "C"  -- unsorted ones deadlock
ON CONFLICT (organization_id, project_id, idempotency_key) DO NOTHING
RETURNING *
"""

EXISTING = """
SELECT j.* FROM {s}.jobs j
JOIN unnest(%(organization_id)s::text[], %(project_id)s::text[], %(idempotency_key)s::text[])
    AS a(organization_id, project_id, idempotency_key) USING (organization_id, project_id, idempotency_key)
"""

# By name, and no more than is judged: Postgres plans each statement anew, and wide rows cost it half a millisecond.
_HOLDER_ROW = """SELECT id, status, claimed_by, lease_generation, lease_expires_at, lease_seconds, timeout_seconds,
        cancel_requested_at, dispatched_at
    FROM {s}.jobs WHERE id = %(job_id)s FOR NO KEY UPDATE"""
_HOLDER = """g.claimed_by = %(worker_id)s AND g.lease_generation = %(generation)s
    AND g.status IN ('claimed', 'running')"""

# No attempt's lease outlives claimed_at + timeout + grace: a wedged handler is fenced while its process renews.
_RENEWED_LEASE = """LEAST(g.now + make_interval(secs => g.lease_seconds),
            t.claimed_at + make_interval(secs => g.timeout_seconds + %(grace_seconds)s))"""

MARK = """
WITH locked AS MATERIALIZED ({holder_row}),
judged AS MATERIALIZED (SELECT l.*, clock_timestamp() AS now FROM locked l),
changed AS (
    UPDATE {s}.jobs j SET status = 'running', dispatched_at = g.now, dispatched_generation = g.lease_generation,
        operation_key = %(operation_key)s, heartbeat_at = g.now, updated_at = g.now, lease_expires_at = {renewed_lease}
    FROM judged g JOIN {s}.job_attempts t ON t.job_id = g.id AND t.generation = g.lease_generation
    WHERE j.id = g.id AND {holder}
        AND g.lease_expires_at > g.now AND g.cancel_requested_at IS NULL AND g.dispatched_at IS NULL
        AND t.claimed_at + make_interval(secs => g.timeout_seconds + %(grace_seconds)s) > g.now
    RETURNING j.*, g.status AS judged_status
), attempt AS (
    UPDATE {s}.job_attempts a SET dispatched_at = c.dispatched_at, operation_key = c.operation_key
    FROM changed c WHERE a.job_id = c.id AND a.generation = c.lease_generation
), event AS (
    INSERT INTO {s}.job_events {event_columns}
    SELECT c.id, c.organization_id, c.project_id, e.name, e.status, c.lease_generation, c.intent_number,
        c.attempt_count, c.claimed_by, c.dispatched_at, e.data
    FROM changed c CROSS JOIN LATERAL (VALUES
        (1, 'admission_checked', c.judged_status, %(admission)s::jsonb),
        (2, 'dispatched', c.status, jsonb_build_object('operation_key', c.operation_key))
    ) AS e(position, name, status, data)
    WHERE e.data IS NOT NULL ORDER BY e.position
)
SELECT * FROM changed
"""

COMPLETE = """
WITH locked AS MATERIALIZED ({holder_row}),
judged AS MATERIALIZED (SELECT l.*, clock_timestamp() AS now FROM locked l),
changed AS (
    UPDATE {s}.jobs j SET status = 'completed', result = %(result)s::jsonb, error = NULL, finished_at = g.now,
        lease_id = NULL, claim_token = NULL, lease_expires_at = NULL, launch_check_at = NULL,
        escalated_at = NULL, escalation_reason = NULL, updated_at = g.now
    FROM judged g WHERE j.id = g.id AND {holder} AND g.status = 'running'
    RETURNING j.*
), attempt AS (
    UPDATE {s}.job_attempts a SET ended_at = c.finished_at, outcome = 'completed'
    FROM changed c WHERE a.job_id = c.id AND a.generation = c.lease_generation
), event AS (
    INSERT INTO {s}.job_events {event_columns}
    SELECT id, organization_id, project_id, 'completed', status, lease_generation, intent_number, attempt_count,
        claimed_by, finished_at, %(data)s::jsonb
    FROM changed
)
SELECT * FROM changed
"""

RENEW_ONE = {"skip_locked": "", "passed_over": "lost"}
RENEW_ALL = {"skip_locked": "SKIP LOCKED", "passed_over": "skipped"}
RENEW = """
WITH asked AS (
    SELECT * FROM unnest(%(job_ids)s::uuid[], %(generations)s::bigint[]) AS a(id, generation)
), locked AS MATERIALIZED (
    SELECT j.* FROM {s}.jobs j JOIN asked a ON j.id = a.id AND j.lease_generation = a.generation
    WHERE j.claimed_by = %(worker_id)s AND j.status IN ('claimed', 'running')
    FOR NO KEY UPDATE OF j {skip_locked}
), judged AS MATERIALIZED (
    SELECT l.*, clock_timestamp() AS now FROM locked l
), renewed AS (
    UPDATE {s}.jobs j SET status = 'running', heartbeat_at = g.now, updated_at = g.now,
        lease_expires_at = {renewed_lease}
    FROM judged g JOIN {s}.job_attempts t ON t.job_id = g.id AND t.generation = g.lease_generation
    WHERE j.id = g.id
    RETURNING j.id, j.cancel_requested_at, j.lease_expires_at
), event AS (
    INSERT INTO {s}.job_events {event_columns}
    SELECT id, organization_id, project_id, 'heartbeat', 'running', lease_generation, intent_number, attempt_count,
        claimed_by, now, %(data)s::jsonb
    FROM judged WHERE status = 'claimed' OR %(progress)s
)
SELECT a.id, a.generation, CASE
    WHEN r.cancel_requested_at IS NOT NULL THEN 'cancel_requested'
    WHEN r.id IS NOT NULL THEN 'held'
    -- Not renewed, yet this holder's as the statement began. Where locks are skipped: to be tried at the next tick.
    -- Where they were waited for: fenced in the meantime.
    WHEN EXISTS (SELECT FROM {s}.jobs j WHERE j.id = a.id AND j.lease_generation = a.generation
        AND j.claimed_by = %(worker_id)s AND j.status IN ('claimed', 'running')) THEN '{passed_over}'
    ELSE 'lost' END AS answer
FROM asked a LEFT JOIN renewed r ON r.id = a.id
"""

READ = """
SELECT j.*, clock_timestamp() AS now FROM {s}.jobs j
WHERE id = %(job_id)s AND organization_id = COALESCE(%(organization)s, organization_id)
"""

LOCK = """
WITH locked AS MATERIALIZED (
    SELECT * FROM {s}.jobs
    WHERE id = %(job_id)s AND organization_id = COALESCE(%(organization)s, organization_id) FOR NO KEY UPDATE)
SELECT l.*, clock_timestamp() AS now FROM locked l
"""

KEEP_LATE_RESULT = """
UPDATE {s}.job_attempts SET late_result = %(result)s::jsonb
WHERE job_id = %(job_id)s AND generation = %(generation)s AND worker_id = %(worker_id)s
    AND outcome IS DISTINCT FROM 'completed' AND late_result IS NULL
"""

RECORD_CONTROL = """
INSERT INTO {s}.control_events (job_id, organization_id, project_id, action, actor, reason, occurred_at, data)
VALUES (%(job_id)s, %(organization_id)s, %(project_id)s, %(action)s, %(actor)s, %(reason)s, clock_timestamp(),
    %(data)s::jsonb)
"""

APPEND_EVENT = """
WITH locked AS MATERIALIZED (SELECT * FROM {s}.jobs WHERE id = %(job_id)s FOR NO KEY UPDATE)
INSERT INTO {s}.job_events {event_columns}
SELECT id, organization_id, project_id, %(name)s, status, lease_generation, intent_number, attempt_count, %(actor)s,
    clock_timestamp(), %(data)s::jsonb
FROM locked RETURNING *
"""


def _job_columns(alias: str) -> str:
    return ", ".join(f"{alias}.{column.name}" for column in jobs.columns)


def filled(template: str, schema: str, **parts: str) -> str:
    """`template` with its parts, and those that all templates share, put in."""
    values = {
        **parts,
        "event_columns": EVENT_COLUMNS,
        "holder_row": _HOLDER_ROW,
        "holder": _HOLDER,
        "renewed_lease": _RENEWED_LEASE,
        **{f"job_columns_{alias}": _job_columns(alias) for alias in "cd"},
        "s": schema,
    }
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


@cache
def statement(template: str, schema: str, **parts: str) -> str:
    """The SQL of one of this module's templates for `schema`."""
    return filled(template, schema, **parts)


@cache
def change_statement(schema: str, columns: tuple[str, ...], attempt_columns: tuple[str, ...], fences: bool) -> str:
    """One decided change of a locked row: the row, its event, and the row of its generation's attempt. Where it
    `fences`, the new generation gets an attempt row too, ended as it begins."""
    sets = ", ".join(f"{name} = %({name})s" for name in columns)
    attempt_sets = ", ".join(f"{name} = %(attempt_{name})s" for name in attempt_columns)
    attempt = (
        f""", attempt AS (
        UPDATE {{s}}.job_attempts a SET {attempt_sets} FROM changed c
        WHERE a.job_id = c.id AND a.generation = %(from_generation)s
    )"""
        if attempt_columns
        else ""
    )
    fence = (
        """, fence AS (
        INSERT INTO {s}.job_attempts (job_id, generation, organization_id, project_id, intent_number, worker_id,
            claimed_at, ended_at, outcome)
        SELECT id, lease_generation, organization_id, project_id, intent_number, %(actor)s, %(now)s, %(now)s, status
        FROM changed
    )"""
        if fences
        else ""
    )
    template = f"""
WITH changed AS (
    UPDATE {{s}}.jobs j SET {sets}, updated_at = %(now)s
    WHERE j.id = %(job_id)s AND j.status = %(from_status)s AND j.lease_generation = %(from_generation)s
    RETURNING j.*
){attempt}{fence}, event AS (
    INSERT INTO {{s}}.job_events {{event_columns}}
    SELECT id, organization_id, project_id, %(event)s, status, lease_generation, intent_number, attempt_count,
        %(actor)s, %(now)s, %(data)s
    FROM changed
)
SELECT * FROM changed"""
    return filled(template, schema)
