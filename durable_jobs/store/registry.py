"""The registry of workers, and what workers count: templates, `{s}` standing for the schema."""

from collections.abc import Mapping
from typing import Any

REGISTER = """
INSERT INTO {s}.workers AS w (id, host, pid, version, queue, job_types, organizations, slots, running, started_at,
    heartbeat_at)
VALUES (%(id)s, %(host)s, %(pid)s, %(version)s, %(queue)s, %(job_types)s, %(organizations)s, %(slots)s, 0,
    clock_timestamp(), clock_timestamp())
ON CONFLICT (id) DO UPDATE SET host = EXCLUDED.host, pid = EXCLUDED.pid, version = EXCLUDED.version,
    queue = EXCLUDED.queue, job_types = EXCLUDED.job_types, organizations = EXCLUDED.organizations,
    slots = EXCLUDED.slots, running = 0, keeper_lag_seconds = 0,
    started_at = clock_timestamp(), heartbeat_at = clock_timestamp(), stopped_at = NULL
    WHERE w.stopped_at IS NOT NULL OR w.heartbeat_at < clock_timestamp() - make_interval(secs => %(stale_seconds)s)
"""
COUNT = """
INSERT INTO {s}.counters AS c (queue, name, result, value)
SELECT %(queue)s, t.name, t.result, t.value
FROM unnest(%(names)s::text[], %(results)s::text[], %(values)s::bigint[]) AS t (name, result, value)
ORDER BY t.name, t.result
ON CONFLICT (queue, name, result) DO UPDATE SET value = c.value + EXCLUDED.value
"""
BEAT = """
UPDATE {s}.workers SET heartbeat_at = clock_timestamp(), running = %(running)s,
    keeper_lag_seconds = %(keeper_lag_seconds)s
WHERE id = %(id)s
"""
STOP = "UPDATE {s}.workers SET stopped_at = clock_timestamp(), running = 0 WHERE id = %(id)s"
WORKERS = "SELECT *, clock_timestamp() AS now FROM {s}.workers ORDER BY started_at, id"
COUNTERS = "SELECT queue, name, result, value FROM {s}.counters ORDER BY queue, name, result"


def counts(queue: str, counted: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """The parameters of `COUNT`: what to add to the queue's counters, by (name, result)."""
    return {
        "queue": queue,
        "names": [name for name, _ in counted],
        "results": [result for _, result in counted],
        "values": list(counted.values()),
    }
