"""Tables filled in bulk, by SQL alone: a million rows through the verbs would take the whole run."""

import psycopg

INSERT = """
INSERT INTO durable_jobs.jobs (
    id, organization_id, project_id, queue, job_type, payload, idempotency_key, request_digest, status, priority,
    intent_number, attempt_count, max_attempts, backoff_base_seconds, lease_seconds, timeout_seconds,
    lease_generation, claimed_by, scheduled_at, created_at, started_at, finished_at, updated_at, dispatched_at,
    dispatched_generation, operation_key, result, error, lookup_tries, follow_ups_due, release_count, launch_check_at)
SELECT durable_jobs.new_job_id(), 'acme', %(project)s || i %% %(projects)s, %(queue)s, 'bench',
    jsonb_build_object('number', i), %(queue)s || '-' || i, repeat('0', 64), %(status)s, i %% 5 - 2,
    0, t.attempt, 3, 30, 60, 3600,
    t.attempt, CASE WHEN t.attempt = 1 THEN 'filler' END, born, born, CASE WHEN t.attempt = 1 THEN born END,
    CASE WHEN t.attempt = 1 THEN born END, born, CASE WHEN t.attempt = 1 THEN born END,
    NULLIF(t.attempt, 0), CASE WHEN t.attempt = 1 THEN 'bench:' || %(queue)s || i END,
    CASE WHEN %(status)s = 'completed' THEN '{"answer": "Titan"}'::jsonb END,
    CASE WHEN %(status)s = 'indeterminate'
        THEN '{"code": "HANDLER_ERROR", "message": "the connection broke"}'::jsonb END,
    0, false, 0, CASE WHEN %(status)s <> 'completed' THEN born END
FROM generate_series(1, %(rows)s) i,
    LATERAL (SELECT clock_timestamp() - interval '1 hour' + i * interval '1 microsecond' AS born) b,
    LATERAL (SELECT (%(status)s <> 'queued')::int AS attempt) t
"""
ATTEMPTS = """
INSERT INTO durable_jobs.job_attempts (job_id, generation, organization_id, project_id, intent_number, worker_id,
    claimed_at, dispatched_at, operation_key, ended_at, outcome)
SELECT id, 1, organization_id, project_id, 0, 'filler', created_at, created_at, operation_key, created_at, status
FROM durable_jobs.jobs WHERE queue = %(queue)s AND status = 'indeterminate'
"""
GUARD = "ALTER TABLE durable_jobs.jobs {act} TRIGGER guard_insert"


def fill(url: str, rows: int, status: str, *, queue: str, projects: int = 1) -> None:
    """So many rows of this status, `queued`, `completed` or `indeterminate`, then statistics as autovacuum takes them.

    The guard that has every job begin queued is off for the filling alone.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(GUARD.format(act="DISABLE"))
        parameters = {"rows": rows, "status": status, "queue": queue, "project": "p", "projects": projects}
        connection.execute(INSERT, parameters)
        connection.execute(GUARD.format(act="ENABLE ALWAYS"))
        if status == "indeterminate":
            connection.execute(ATTEMPTS, parameters)
        connection.execute("VACUUM ANALYZE durable_jobs.jobs")
