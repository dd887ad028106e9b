"""Processes whose clocks are ten minutes off, by Debian's `libfaketime`: the database's clock alone counts."""

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from durable_jobs import DurableJobService
from durable_jobs.contract.models import ClaimRefusal
from tests.probes import OTHER_WORKER
from tests.processes.harness import Scene, until

pytest_plugins = ["tests.processes.fixtures"]

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no libfaketime: Debian's package is faketime")
ten_minutes_off = pytest.mark.parametrize("offset", ["+10m", "-10m"])

SUBMIT = """
import asyncio, os, sys, time
from durable_jobs import Database, DurableJobService, JobSpec

async def main():
    database = Database(os.environ["DURABLE_JOBS_DATABASE_URL"])
    spec = JobSpec(organization="acme", project="alpha", queue=sys.argv[1], job_type="probe", idempotency_key="skewed",
                   payload={"question": "How do mountains form?", "mode": "quick"})
    print((await DurableJobService(database).create_job(spec)).job.id, time.time())
    await database.close()

asyncio.run(main())
"""


def skewed(offset: str) -> dict[str, str]:
    """The environment of a process whose wall clock is that far off; its monotonic clock is right."""
    return {"LD_PRELOAD": str(LIBRARY), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def off_by(offset: str, told: float) -> bool:
    """Whether a process's wall clock was really off: else the test shows nothing."""
    difference = told - datetime.now(UTC).timestamp()
    return difference > 300 if offset.startswith("+") else difference < -300


@ten_minutes_off
async def test_a_job_of_a_client_is_due_at_once(
    service: DurableJobService, database_url: str, queue: str, offset: str
) -> None:
    before = await service.database_clock()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SUBMIT,
        queue,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"DURABLE_JOBS_DATABASE_URL": database_url} | skewed(offset),
    )
    output, _ = await asyncio.wait_for(process.communicate(), 30)
    job_id, told = output.decode().split()
    assert off_by(offset, float(told))
    job = await service.get_job(UUID(job_id))
    after = await service.database_clock()
    assert before <= job.created_at == job.scheduled_at <= after
    outcome = await service.claim_job("worker:1:a", uuid4(), job_id=job.id)
    assert outcome


@ten_minutes_off
async def test_a_workers_lease_holds(scene: Scene, service: DurableJobService, offset: str) -> None:
    """Its keeper renews it for three leases, and nobody else gets the job; every time on the row is the database's."""
    before = await service.database_clock()
    first = await scene.start_worker("hold:claimed", **skewed(offset))
    handle = await scene.create()
    await first.holds(handle.id, "claimed")
    claimed = (await handle.job()).heartbeat_at
    assert claimed is not None

    async def three_leases_later() -> bool:
        outcome = await service.claim_job(OTHER_WORKER, uuid4(), job_id=handle.id)
        assert outcome is not None
        assert outcome.refusal is ClaimRefusal.HELD
        beat = (await handle.job()).heartbeat_at
        return beat is not None and beat - claimed > timedelta(seconds=3)

    await until("the lease is renewed for three leases", three_leases_later)
    first.go(handle.id)
    job = await scene.row_reaches(handle.id, "completed")
    assert await first.terminate() == 0
    after = await service.database_clock()
    assert job.lease_generation == 1
    times = [job.created_at, job.started_at, job.dispatched_at, job.finished_at]
    assert [before, *times, after] == sorted(time for time in [before, *times, after] if time is not None)
    assert await scene.provider.sends(handle.id) == 1


@ten_minutes_off
async def test_a_worker_waits_for_the_schedule(scene: Scene, service: DurableJobService, offset: str) -> None:
    """Neither ten minutes early nor ten minutes late; and a backoff counts from the database's clock as well."""
    now = await service.database_clock()
    worker = await scene.start_worker(**skewed(offset))
    due = now + timedelta(seconds=4)
    handle = await scene.create(scheduled_at=due)
    job = await scene.row_reaches(handle.id, "completed")
    assert await worker.terminate() == 0
    assert job.started_at is not None
    assert due <= job.started_at < due + timedelta(minutes=5)
