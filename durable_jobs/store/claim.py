"""The claim, one statement: by id, or of the next eligible job; and where the reclaim of an expired lease lands.

Of the same shape as the fenced statements of `store.statements`.
"""

from functools import cache

from durable_jobs.store.statements import EXPIRED, ORDER, SCOPE, filled

_DECIDE_CLAIM = """
judged AS MATERIALIZED (
    SELECT l.*, clock_timestamp() AS now FROM locked l
), decided AS MATERIALIZED (
    SELECT j.*, CASE
        WHEN NOT ({scope}) THEN 'out_of_scope'
        WHEN j.status IN ('claimed', 'running') AND j.claimed_by = %(worker_id)s AND j.claim_token = %(claim_token)s
            THEN 'repeated'
        WHEN j.status = 'queued' AND j.scheduled_at > j.now THEN 'not_due'
        WHEN j.status = 'queued' AND {paused} THEN 'paused'
        WHEN j.status = 'queued' THEN 'claim'
        WHEN j.status NOT IN ('claimed', 'running') THEN 'settled'
        WHEN j.lease_expires_at > j.now THEN 'held'
        -- A reclaim fences, the boundary forbids: past it the handler must not run again.
        WHEN j.dispatched_at IS NOT NULL THEN 'indeterminate'
        WHEN j.cancel_requested_at IS NOT NULL THEN 'cancelled'
        WHEN j.attempt_count >= j.max_attempts THEN 'dead_letter'
        WHEN {paused} THEN 'paused'
        ELSE 'claim'
    END AS decision
    FROM judged j
), landed AS MATERIALIZED (
    SELECT d.id, CASE d.decision
        WHEN 'indeterminate' THEN jsonb_build_object('code', 'LEASE_EXPIRED_AFTER_DISPATCH', 'message',
            'the lease of generation ' || d.lease_generation || ' ran out past the boundary; the call may have landed')
        WHEN 'cancelled' THEN jsonb_build_object('code', 'CANCELLED', 'message',
            'cancelled by ' || d.cancel_actor || ': ' || d.cancel_reason)
        WHEN 'dead_letter' THEN jsonb_build_object('code', 'ATTEMPTS_SPENT', 'message',
            'the lease of generation ' || d.lease_generation || ' ran out in attempt ' || d.attempt_count
            || ', the last')
        END || '{"type": null, "traceback": null}'::jsonb AS error
    FROM decided d
), changed AS (
    UPDATE {s}.jobs j SET
        status = CASE d.decision WHEN 'claim' THEN 'claimed' ELSE d.decision END,
        attempt_count = d.attempt_count + (d.decision = 'claim')::int,
        lease_generation = d.lease_generation + 1,
        claimed_by = CASE d.decision WHEN 'claim' THEN %(worker_id)s ELSE d.claimed_by END,
        lease_id = CASE d.decision WHEN 'claim' THEN %(worker_id)s END,
        claim_token = CASE d.decision WHEN 'claim' THEN %(claim_token)s END,
        lease_expires_at = CASE d.decision WHEN 'claim' THEN d.now + make_interval(secs => d.lease_seconds) END,
        heartbeat_at = CASE d.decision WHEN 'claim' THEN d.now ELSE d.heartbeat_at END,
        started_at = CASE d.decision WHEN 'claim' THEN COALESCE(d.started_at, d.now) ELSE d.started_at END,
        finished_at = CASE d.decision WHEN 'claim' THEN NULL ELSE d.now END,
        error = CASE d.decision WHEN 'claim' THEN d.error ELSE l.error END,
        escalated_at = NULL, escalation_reason = NULL,
        dead_lettered_at = CASE d.decision WHEN 'dead_letter' THEN d.now END,
        dead_letter_reason = CASE d.decision WHEN 'dead_letter' THEN l.error ->> 'message' END,
        launch_check_at = CASE WHEN d.decision IN ('claim', 'indeterminate')
            THEN d.now + make_interval(secs => %(launch_check_seconds)s) END,
        updated_at = d.now
    FROM decided d JOIN landed l USING (id)
    WHERE j.id = d.id AND d.decision IN ('claim', 'indeterminate', 'cancelled', 'dead_letter')
    RETURNING j.*, d.decision, d.now, d.status AS previous_status, d.lease_generation AS previous_generation
), fenced AS (
    UPDATE {s}.job_attempts a SET ended_at = c.now, outcome = 'lease_expired'
    FROM changed c WHERE a.job_id = c.id AND a.generation = c.previous_generation AND a.ended_at IS NULL
), attempt AS (
    INSERT INTO {s}.job_attempts (job_id, generation, organization_id, project_id, intent_number, worker_id, claimed_at,
        ended_at, outcome, error)
    SELECT id, lease_generation, organization_id, project_id, intent_number, %(worker_id)s, now,
        finished_at, CASE WHEN decision <> 'claim' THEN status END, CASE WHEN decision <> 'claim' THEN error END
    FROM changed
), event AS (
    INSERT INTO {s}.job_events {event_columns}
    SELECT id, organization_id, project_id,
        CASE decision WHEN 'claim' THEN 'claimed' WHEN 'dead_letter' THEN 'dead_lettered' ELSE decision END,
        status, lease_generation, intent_number, attempt_count, %(worker_id)s, now,
        CASE decision WHEN 'claim' THEN jsonb_build_object('claim_token', claim_token)
            ELSE jsonb_build_object('error', error, 'cause', 'reclaim') END
    FROM changed
)
SELECT * FROM (
    SELECT CASE WHEN c.decision = 'claim' AND c.previous_status <> 'queued' THEN 'reclaim' ELSE c.decision END
        AS decision, {job_columns_c}
    FROM changed c
    UNION ALL
    SELECT d.decision, {job_columns_d} FROM decided d WHERE NOT EXISTS (SELECT FROM changed)
) answer
"""

# What nearly every claim by id is: of a queued row that is due. The statement that decides on all other rows costs the
# database more than twice as much, most of it planning; it is asked where this one finds nothing.
_CLAIM_QUEUED = """
WITH locked AS MATERIALIZED (
    SELECT j.id, j.scheduled_at FROM {s}.jobs j
    WHERE j.id = %(job_id)s AND j.status = 'queued' AND {scope} FOR NO KEY UPDATE
), judged AS MATERIALIZED (
    SELECT l.*, clock_timestamp() AS now FROM locked l
), changed AS (
    UPDATE {s}.jobs j SET status = 'claimed', attempt_count = j.attempt_count + 1,
        lease_generation = j.lease_generation + 1, claimed_by = %(worker_id)s, lease_id = %(worker_id)s,
        claim_token = %(claim_token)s, lease_expires_at = g.now + make_interval(secs => j.lease_seconds),
        heartbeat_at = g.now, started_at = COALESCE(j.started_at, g.now), escalated_at = NULL, escalation_reason = NULL,
        launch_check_at = g.now + make_interval(secs => %(launch_check_seconds)s), updated_at = g.now
    FROM judged g WHERE j.id = g.id AND g.scheduled_at <= g.now AND NOT {paused}
    RETURNING j.*
), attempt AS (
    INSERT INTO {s}.job_attempts (job_id, generation, organization_id, project_id, intent_number, worker_id, claimed_at)
    SELECT id, lease_generation, organization_id, project_id, intent_number, claimed_by, updated_at FROM changed
), event AS (
    INSERT INTO {s}.job_events {event_columns}
    SELECT id, organization_id, project_id, 'claimed', status, lease_generation, intent_number, attempt_count,
        claimed_by, updated_at, jsonb_build_object('claim_token', claim_token)
    FROM changed
)
SELECT 'claim' AS decision, c.* FROM changed c
"""

_CLAIM_BY_ID = "WITH locked AS MATERIALIZED (SELECT * FROM {s}.jobs WHERE id = %(job_id)s FOR NO KEY UPDATE),"

# The head of each branch is looked at without a lock, so that no row is locked but the one that is claimed. Scans
# compare with statement_timestamp(): clock_timestamp() forced a sequential scan.
_CLAIM_NEXT = """
WITH repeated AS MATERIALIZED (
    SELECT * FROM {s}.jobs WHERE claim_token = %(claim_token)s AND claimed_by = %(worker_id)s
        AND status IN ('claimed', 'running') FOR NO KEY UPDATE
), expired_head AS (
    SELECT j.priority, j.scheduled_at, j.created_at, j.id FROM {s}.jobs j WHERE {expired} ORDER BY {order} LIMIT 1
), queued_head AS (
    SELECT j.priority, j.scheduled_at, j.created_at, j.id FROM {s}.jobs j WHERE {queued} ORDER BY {order} LIMIT 1
), expired AS MATERIALIZED (
    SELECT j.* FROM {s}.jobs j WHERE {expired} AND NOT EXISTS (SELECT FROM repeated) AND EXISTS (
        SELECT FROM expired_head e WHERE NOT EXISTS (
            SELECT FROM queued_head q
            WHERE (-q.priority, q.scheduled_at, q.created_at, q.id)
                < (-e.priority, e.scheduled_at, e.created_at, e.id)))
    ORDER BY {order} LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
), queued AS MATERIALIZED (
    SELECT j.* FROM {s}.jobs j
    WHERE {queued} AND NOT EXISTS (SELECT FROM repeated) AND NOT EXISTS (SELECT FROM expired)
    ORDER BY {order} LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
), passed_over AS MATERIALIZED (
    -- The queued rows ahead were all locked by others.
    SELECT j.* FROM {s}.jobs j
    WHERE {expired} AND NOT EXISTS (SELECT FROM repeated) AND NOT EXISTS (SELECT FROM expired)
        AND NOT EXISTS (SELECT FROM queued)
    ORDER BY {order} LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED
), locked AS MATERIALIZED (
    SELECT * FROM repeated UNION ALL SELECT * FROM expired UNION ALL SELECT * FROM queued
    UNION ALL SELECT * FROM passed_over
),"""
_PAUSED = """EXISTS (SELECT FROM {s}.queue_controls q WHERE q.queue = j.queue AND q.job_type IN ('', j.job_type)
            AND q.organization_id IN ('', j.organization_id))"""
_QUEUED = "j.status = 'queued' AND j.scheduled_at <= statement_timestamp() AND {scope} AND NOT {paused}"
_EXPIRED = EXPIRED + " AND j.cancel_requested_at IS NULL AND {scope} AND NOT {paused}"


@cache
def claim_statements(schema: str, by_id: bool, filters: frozenset[str]) -> tuple[str, ...]:
    """The claim, by id or of the next eligible job, narrowed by `filters` (names of parameters that are given): the
    statements to try in turn until one answers."""
    scope = " AND ".join(SCOPE[name] for name in sorted(filters)) or "true"
    queued, expired = _QUEUED.replace("{scope}", scope), _EXPIRED.replace("{scope}", scope)
    parts = {"scope": scope, "queued": queued, "expired": expired, "order": ORDER, "paused": _PAUSED}
    templates = (_CLAIM_QUEUED, _CLAIM_BY_ID + _DECIDE_CLAIM) if by_id else (_CLAIM_NEXT + _DECIDE_CLAIM,)
    return tuple(filled(template, schema, **parts) for template in templates)
