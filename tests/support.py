"""Rows, leases and locks, forced from outside the verbs: what the tests of the service and the store share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import dict_row

from durable_jobs import Database, DurableJobService, Job, JobError, JobSpec, JobStatus
from durable_jobs.contract.models import Claim
from durable_jobs.contract.states import EventName

A, B = "worker-a:1:aaaa", "worker-b:2:bbbb"
"""Two workers."""

ERROR = JobError.of("BROKEN", "it broke")


@asynccontextmanager
async def unchecked(database_url: str) -> AsyncIterator[DurableJobService]:
    """The verbs, as the fixture `service` has them, without the check of every job's trail at the end."""
    database = Database(database_url, pool_size=20)
    try:
        yield DurableJobService(database, grace_seconds=5)
    finally:
        await database.close()


async def all_jobs(service: DurableJobService) -> list[Job]:
    """Every job of a small database, payload and result included, in the order of creation."""
    return [await service.get_job(job.id) for job in (await service.list_jobs(limit=1000)).items]


async def sql(service: DurableJobService, statement: str, **parameters: Any) -> list[dict[str, Any]]:
    """Run plain SQL in a transaction of its own."""

    async def work(connection: Any) -> list[dict[str, Any]]:
        result = await connection.exec_driver_sql(statement, parameters)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []

    return await service.database.run(work)


async def expire(service: DurableJobService, job_id: UUID) -> None:
    """Move the job's lease into the past."""
    await sql(
        service,
        "UPDATE durable_jobs.jobs SET lease_expires_at = clock_timestamp() - interval '1 second' WHERE id = %(id)s",
        id=job_id,
    )


async def make_due(service: DurableJobService, job_id: UUID) -> None:
    """Let a job that waits for its backoff be due since a moment ago, on the row and on its trail alike."""
    await sql(
        service,
        """
        ALTER TABLE durable_jobs.job_events DISABLE TRIGGER append_only;
        WITH due AS (
            UPDATE durable_jobs.jobs SET scheduled_at = clock_timestamp() - interval '1 second' WHERE id = %(id)s
            RETURNING id, scheduled_at
        )
        UPDATE durable_jobs.job_events e SET data = data || jsonb_build_object('scheduled_at', due.scheduled_at)
        FROM due WHERE e.job_id = due.id AND e.id = (
            SELECT max(id) FROM durable_jobs.job_events WHERE job_id = due.id AND name = 'retried');
        ALTER TABLE durable_jobs.job_events ENABLE ALWAYS TRIGGER append_only;
        """.replace("%(id)s", f"'{job_id}'::uuid"),
    )


async def claimed(service: DurableJobService, spec: JobSpec, worker: str = A) -> Claim:
    """Create the job and claim it."""
    return await reclaimed(service, (await service.create_job(spec)).job.id, worker)


async def reclaimed(service: DurableJobService, job_id: UUID, worker: str = A) -> Claim:
    """Claim an existing job, which must be claimable."""
    outcome = await service.claim_job(worker, uuid4(), job_id=job_id)
    assert outcome is not None
    assert outcome.claim is not None, outcome.refusal
    return outcome.claim


async def running(service: DurableJobService, spec: JobSpec, worker: str = A) -> Claim:
    """Create the job, claim it and promote it to running."""
    claim = await claimed(service, spec, worker)
    assert await service.renew_lease(claim)
    return claim


async def dispatched(service: DurableJobService, spec: JobSpec, worker: str = A) -> Claim:
    """Create the job, claim it and cross its boundary."""
    claim = await claimed(service, spec, worker)
    await service.mark_provider_dispatched(claim, f"key:{claim.job_id}", consequential=False)
    return claim


TERMINAL_BY_VERB = (
    JobStatus.COMPLETED,
    JobStatus.FAILED,
    JobStatus.CANCELLED,
    JobStatus.DEAD_LETTER,
    JobStatus.INDETERMINATE,
    JobStatus.HALT_UNSAFE,
    JobStatus.TIMED_OUT,
)


async def end_in(service: DurableJobService, claim: Claim, status: JobStatus) -> Job:
    """Let the holder end its job, which must have one attempt and no marker, in this terminal status."""
    match status:
        case JobStatus.COMPLETED:
            await service.complete_job(claim, {"ok": True})
        case JobStatus.FAILED:
            await service.fail_job(claim, ERROR, retryable=False)
        case JobStatus.CANCELLED:
            await service.cancel_job(claim.job_id, "not wanted", "ann")
            await service.acknowledge_cancellation(claim)
        case JobStatus.DEAD_LETTER:
            await service.fail_job(claim, ERROR, retryable=True)
        case JobStatus.INDETERMINATE:
            await service.mark_indeterminate(claim, ERROR)
        case JobStatus.HALT_UNSAFE:
            await service.mark_halt_unsafe(claim, ERROR)
        case JobStatus.TIMED_OUT:
            await service.mark_timed_out(claim, ERROR)
    job = await service.get_job(claim.job_id)
    assert job.status is status
    return job


HolderVerb = Callable[[DurableJobService, Claim], Any]

HOLDER_VERBS: dict[str, HolderVerb] = {
    "mark_provider_dispatched": lambda s, c: s.mark_provider_dispatched(
        c, f"late:{c.job_id}:{c.generation}", consequential=False
    ),
    "complete_job": lambda s, c: s.complete_job(c, {"late": True}),
    "fail_job retryable": lambda s, c: s.fail_job(c, ERROR, retryable=True),
    "fail_job": lambda s, c: s.fail_job(c, ERROR, retryable=False),
    "mark_indeterminate": lambda s, c: s.mark_indeterminate(c, ERROR),
    "mark_halt_unsafe": lambda s, c: s.mark_halt_unsafe(c, ERROR),
    "mark_timed_out": lambda s, c: s.mark_timed_out(c, ERROR),
    "release_job": lambda s, c: s.release_job(c, "shutdown"),
    "acknowledge_cancellation": lambda s, c: s.acknowledge_cancellation(c),
}
"""Every verb that a holder ends or changes its job by."""


async def names(service: DurableJobService, job_id: UUID) -> list[EventName]:
    """The names of the job's trail, in order."""
    return [event.name for event in (await service.list_job_events(job_id)).items]


async def snapshot(service: DurableJobService, job_id: UUID) -> dict[str, Any]:
    """All that the database holds of a job: the row, its trail, its attempts, its control events."""
    rows = {"jobs": "id", "job_events": "job_id", "job_attempts": "job_id", "control_events": "job_id"}
    found = {}
    for table, column in rows.items():
        statement = f"SELECT to_jsonb(t) AS row FROM durable_jobs.{table} t WHERE {column} = %(id)s ORDER BY t"
        found[table] = [row["row"] for row in await sql(service, statement, id=job_id)]
    return found


@asynccontextmanager
async def connection(database_url: str) -> AsyncIterator[psycopg.AsyncConnection[dict[str, Any]]]:
    """A session of its own, beside the service's pools."""
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True, row_factory=dict_row) as own:
        yield own


@asynccontextmanager
async def row_locked(database_url: str, job_id: UUID) -> AsyncIterator[psycopg.AsyncConnection[dict[str, Any]]]:
    """Hold the lock of the job's row, in a transaction of another session that is committed at the end."""
    async with connection(database_url) as own, own.transaction():
        await own.execute("SELECT FROM durable_jobs.jobs WHERE id = %s FOR UPDATE", [job_id])
        yield own


async def until_waiting(database_url: str, sessions: int = 1) -> list[int]:
    """Return once this many sessions of the database wait for a lock; their process ids."""
    async with connection(database_url) as own, asyncio.timeout(20):
        while True:
            waiting = await own.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            )
            pids = [row["pid"] for row in await waiting.fetchall()]
            if len(pids) >= sessions:
                return pids
            await asyncio.sleep(0.005)  # polling: a lock that somebody waits for tells nobody else


async def until_lease_is_dead(database_url: str, job_id: UUID) -> None:
    """Return once the job's lease has run out on the database's clock."""
    async with connection(database_url) as own, asyncio.timeout(20):
        while True:
            found = await own.execute(
                "SELECT lease_expires_at < clock_timestamp() AS dead FROM durable_jobs.jobs WHERE id = %s", [job_id]
            )
            row = await found.fetchone()
            assert row is not None
            if row["dead"]:
                return
            await asyncio.sleep(0.02)  # polling: time passes by itself
