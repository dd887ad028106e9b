"""What workers count, from their heartbeats to Prometheus: claims, reclaims, refusals, sweeps, the keeper's lag."""

import asyncio
from typing import Any

import psycopg
import pytest

from durable_jobs import DurableJobs, JobContext, JobStatus
from durable_jobs.dev import DevStack
from durable_jobs.temporal.tally import Counted, Tally
from tests.conftest import Specs, Workers
from tests.http_api import calling, settings_for
from tests.probes import Gate, Probe, eventually, take_over
from tests.support import claimed, expire, sql
from tests.sweeping import LANDED, NEVER, RESULT, Working, timed_out, uncertain
from tests.test_http_health import samples


async def counters(jobs: DurableJobs, queue: str) -> dict[tuple[str, str], int]:
    rows = await sql(jobs.service, "SELECT name, result, value FROM durable_jobs.counters WHERE queue = %(q)s", q=queue)
    return {(row["name"], row["result"]): row["value"] for row in rows}


async def test_a_worker_counts_what_monitoring_reads(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str, queue: str, durable_jobs_stack: DevStack
) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if request.get("stalls") and job.attempt == 1:
            await gate.wait()
        job.nothing_sent()
        return RESULT

    abandoned = await claimed(jobs.service, spec())
    await expire(jobs.service, abandoned.job_id)
    for _ in range(2):
        await uncertain(jobs.service, spec())
    await timed_out(jobs.service, spec())
    async with worker(Working(LANDED, script), reconcile_every=NEVER):
        stalled = await jobs.create_job(spec(payload={"stalls": True}, lease_seconds=6))
        await gate.handler_came()
        other = await take_over(jobs.service, database_url, stalled.id)
        assert other.claim is not None
        gate.go_on.set()
        await jobs.sweep(queue)
        await jobs.handle(abandoned.job_id).result(timeout=20)

        await jobs.service.complete_job(other.claim, RESULT)
    found = await counters(jobs, queue)
    assert found[Counted.CLAIMS, ""] == 2
    assert found[Counted.RECLAIMS, ""] == 1
    assert found[Counted.STALE_REFUSALS, ""] == 1
    assert found["sweeps", ""] == 1
    assert (found["sweep_results", "completed"], found["sweep_results", "escalated"]) == (2, 1)
    async with calling(settings_for(database_url, durable_jobs_stack)) as client:
        scraped = samples((await client.get("/metrics")).text)
    assert scraped["claims_total", queue] == 2
    assert scraped["reclaims_total", queue] == scraped["stale_refusals_total", queue] == 1
    assert scraped["sweeps_total", queue] == 1
    assert scraped["sweep_results_total", queue, "completed"] == 2


async def done(job: JobContext, request: dict[str, Any]) -> Any:
    job.nothing_sent()
    return RESULT


async def test_a_landing_counts_as_a_reclaim(jobs: DurableJobs, worker: Workers, spec: Specs, queue: str) -> None:
    claim = await claimed(jobs.service, spec())
    await jobs.service.mark_provider_dispatched(claim, f"probe:{claim.job_id}", consequential=False)
    await expire(jobs.service, claim.job_id)
    async with worker(Working(LANDED), reconcile_every=NEVER):
        await jobs.handle(claim.job_id).wake()

        async def landed() -> bool:
            return (await jobs.service.get_job(claim.job_id)).status is JobStatus.INDETERMINATE

        await eventually(landed, "the landing")
    assert await counters(jobs, queue) == {(Counted.RECLAIMS, ""): 1}


async def test_counts_of_a_worker_that_could_not_write_them_are_written_later(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("durable_jobs.temporal.keeper.HEARTBEAT_SECONDS", 0.2)
    given_back = asyncio.Event()
    give_back = Tally.give_back

    def noted(tally: Tally, counts: Any) -> None:
        give_back(tally, counts)
        loop.call_soon_threadsafe(given_back.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(Tally, "give_back", noted)
    await sql(jobs.service, "ALTER TABLE durable_jobs.counters RENAME TO away")
    async with worker(Working(LANDED, done), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        await handle.result(timeout=20)
        async with asyncio.timeout(20):
            await given_back.wait()
        await sql(jobs.service, "ALTER TABLE durable_jobs.away RENAME TO counters")

        async def counted() -> bool:
            return await counters(jobs, queue) == {(Counted.CLAIMS, ""): 1}

        await eventually(counted, "the claim in the counters")


async def test_the_registry_tells_the_slots_and_how_late_renewals_are(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    database_url: str,
    queue: str,
    durable_jobs_stack: DevStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A renewal that waits a second for its table is a second late, whatever the machine is doing beside it."""
    monkeypatch.setattr("durable_jobs.temporal.keeper.HEARTBEAT_SECONDS", 0.3)
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        return RESULT

    async with worker(Probe(script), reconcile_every=NEVER):
        handle = await jobs.create_job(spec(lease_seconds=6))
        await gate.handler_came()

        async def late() -> bool:
            (record,) = await jobs.service.list_workers()
            return record.keeper_lag_seconds >= 1

        with psycopg.connect(database_url) as blocker:
            blocker.execute("LOCK TABLE durable_jobs.jobs IN SHARE MODE")

            async def waits() -> bool:
                asked = "SELECT count(*) AS n FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %(q)s"
                return bool((await sql(jobs.service, asked, q="%lease_expires_at%"))[0]["n"])

            await eventually(waits, "a renewal that waits")
            await asyncio.sleep(1.0)
        await eventually(late, "a heartbeat that tells the lag")
        (record,) = await jobs.service.list_workers()
        assert record.slots == 100
        async with calling(settings_for(database_url, durable_jobs_stack)) as client:
            scraped = samples((await client.get("/metrics")).text)
        assert scraped["worker_slots", queue] == 100
        assert ("keeper_lag_seconds", queue) in scraped
        gate.go_on.set()
        await handle.result(timeout=20)
