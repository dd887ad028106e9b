"""The lease keeper: leases hold through a busy event loop, a locked row and a lost connection; attempts are told."""

import asyncio
import contextlib
import threading
import time
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from durable_jobs import DurableJobs, EventName, Job, JobContext, JobStatus, LeaseStatus
from durable_jobs.contract.errors import LeaseLost
from durable_jobs.temporal import keeper
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, Provider, eventually, execute, noticed, take_over, trail, until, until_workflow

HELD = "SELECT lease_expires_at > clock_timestamp() FROM durable_jobs.jobs WHERE id = %s"


class Watch:
    """Looks at the job's lease from a thread of its own, while the event loop is held."""

    def __init__(self, database_url: str, job_id: UUID) -> None:
        self.looks: list[bool] = []
        self.expiries: set[Any] = set()
        self._database_url, self._job_id = database_url, job_id
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        query = "SELECT lease_expires_at > clock_timestamp(), lease_expires_at FROM durable_jobs.jobs WHERE id = %s"
        with psycopg.connect(self._database_url, autocommit=True) as connection:
            while not self._stopped.wait(0.02):
                row = connection.execute(query, [self._job_id]).fetchone()
                assert row is not None
                self.looks.append(row[0])
                self.expiries.add(row[1])

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()


def burn(seconds: float) -> None:
    """Hold the event loop, as a handler does that computes."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        sum(range(1000))


async def test_a_handler_that_burns_cpu_keeps_its_lease(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str, temporal_client: Client
) -> None:
    """Case 5 of the catalogue, of the kind "leases": a busy event loop neither renews nor heartbeats; leases hold."""
    watches, provider = [], Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        with Watch(database_url, job.id) as watch:
            burn(3)
        watches.append(watch)
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(lease_seconds=1.2))
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
        # Temporal gave the attempt up, as it sent no heartbeat; the workflow goes by the row.
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
    assert len(watches[0].looks) > 20
    assert all(watches[0].looks)
    assert (handler.calls, provider.keys) == (1, [f"probe:{handle.id}"])
    # Promoted to running with one event; the renewals after it are silent.
    assert await trail(jobs.service, handle.id, beats=True) == [
        EventName.CLAIMED,
        EventName.HEARTBEAT,
        EventName.DISPATCHED,
        EventName.COMPLETED,
    ]


async def test_a_lease_ends_with_the_attempts_time_and_grace(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """A wedged handler is fenced while its process renews: at claim + timeout + grace, to the microsecond."""
    watches = []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt > 1:
            return {"attempt": job.attempt}
        with Watch(database_url, job.id) as watch:
            burn(2.5)
        watches.append(watch)
        raise AssertionError("past its time")

    async with worker(Probe(script), grace_seconds=0.5):
        handle = await jobs.create_job(spec(lease_seconds=1, timeout_seconds=1, backoff_base_seconds=0.05))
        assert await handle.result(timeout=20) == {"attempt": 2}
    (first, _) = (await jobs.service.list_job_attempts(handle.id)).items
    (watch,) = watches
    assert not watch.looks[-1]
    last = max(expiry for expiry in watch.expiries if expiry is not None)
    assert (last - first.claimed_at).total_seconds() == 1.5


async def test_a_handler_past_the_boundary_is_told_of_cancellation_within_a_tick(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    gate, told_at = Gate(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            gate.reached.set()
            await noticed(lambda: job.cancel_requested)
            told_at.append(time.monotonic())
            return {"sent": key}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=6))
        await gate.handler_came()
        asked_at = time.monotonic()
        assert await handle.cancel("not wanted", "ann") == "requested"
        # Told, not interrupted: its result completes the job.
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert told_at[0] - asked_at < 2  # a tick is a sixth of the lease: 1 s


async def test_a_handler_before_the_boundary_is_interrupted_within_a_tick(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    gate, interrupted_at = Gate(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        try:
            await gate.wait()
        except asyncio.CancelledError:
            interrupted_at.append(time.monotonic())
            raise

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=6))
        await gate.handler_came()
        asked_at = time.monotonic()
        assert await handle.cancel("not wanted", "ann") == "requested"
        await until(jobs.service, handle.id, JobStatus.CANCELLED)
    assert interrupted_at[0] - asked_at < 2


async def test_a_lost_lease_stops_a_handler_before_the_boundary(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """Case 9 of the catalogue, of the kind "leases": A loses the lease, B claims, A's renewal is refused; A stops."""
    gate, stopped = Gate(), asyncio.Event()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt > 1:
            return {"attempt": job.attempt}
        try:
            await gate.wait()
        except asyncio.CancelledError:
            stopped.set()
            raise

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        other = await take_over(jobs.service, database_url, handle.id)
        assert other.claim is not None
        async with asyncio.timeout(10):
            await stopped.wait()
        # It changed nothing: the other one still holds the job.
        assert (await handle.job()).holds(other.claim)
        # Nobody renews for the other one: its lease runs out, and the job goes round.
        assert await handle.result(timeout=20) == {"attempt": 3}
    assert await trail(jobs.service, handle.id) == [*[EventName.CLAIMED] * 3, EventName.COMPLETED]


async def test_a_lost_lease_lets_a_handler_past_the_boundary_run_on(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    gate, provider, answers = Gate(), Provider(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            answer = await provider.call(key)
            await gate.wait()
            answers.append(await job.heartbeat({"still": "here"}))
            return answer

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        assert not await take_over(jobs.service, database_url, handle.id)
        job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
        await asyncio.sleep(0.8)  # three ticks, in which an interrupt would come
        gate.go_on.set()

        async def late() -> Any:
            return (await jobs.service.list_job_attempts(job.id)).items[0].late_result

        assert await eventually(late, "the late result") == {"sent": f"probe:{job.id}"}
    assert answers == [LeaseStatus.LOST]
    job = await handle.job()
    assert job.error is not None
    assert (job.status, job.error.code) == (JobStatus.INDETERMINATE, "LEASE_EXPIRED_AFTER_DISPATCH")
    assert (job.result, handler.calls, provider.keys) == (None, 1, [f"probe:{job.id}"])
    first, second = (await jobs.service.list_job_attempts(job.id)).items
    assert (first.outcome, second.outcome, second.late_result) == ("lease_expired", JobStatus.INDETERMINATE, None)


def renewed(database_url: str, job_id: UUID) -> Any:
    """When the lease was last renewed."""
    return execute(database_url, "SELECT heartbeat_at FROM durable_jobs.jobs WHERE id = %s", job_id)[0][0]


async def until_renewed(database_url: str, job_id: UUID, times: int = 1) -> None:
    for _ in range(times):
        before = renewed(database_url, job_id)

        async def again(before: Any = before) -> bool:
            return bool(renewed(database_url, job_id) > before)

        await eventually(again, f"a renewal of {job_id}", 10)


async def test_a_locked_row_is_skipped_and_the_others_are_renewed(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    gate, at_work = Gate(), asyncio.Semaphore(0)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        at_work.release()
        await gate.wait()
        async with job.dispatch(f"probe:{job.id}") as key:
            return {"sent": key}

    async with worker(Probe(script)):
        locked, *others = await jobs.create_jobs([spec(lease_seconds=1.5) for _ in range(3)])
        for _ in range(3):
            await asyncio.wait_for(at_work.acquire(), 20)
        await until_renewed(database_url, locked.id)
        with psycopg.connect(database_url) as holder:
            holder.execute("SELECT FROM durable_jobs.jobs WHERE id = %s FOR UPDATE", [locked.id])
            stuck_at = renewed(database_url, locked.id)
            for other in others:
                # More ticks than a lease lasts: one renewal that hung on the lock would have lost them.
                await until_renewed(database_url, other.id, times=4)
                assert execute(database_url, HELD, other.id) == [(True,)]
            assert renewed(database_url, locked.id) == stuck_at
        await until_renewed(database_url, locked.id)
        gate.go_on.set()
        for handle in (locked, *others):
            assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
            assert (await handle.job()).lease_generation == 1


async def test_all_leases_are_renewed_in_one_statement(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    gate, at_work = Gate(), asyncio.Semaphore(0)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        at_work.release()
        await gate.wait()
        return {}

    async with worker(Probe(script)):
        handles = await jobs.create_jobs([spec(lease_seconds=1.5) for _ in range(6)])
        for _ in handles:
            await asyncio.wait_for(at_work.acquire(), 20)
        for handle in handles:
            await until_renewed(database_url, handle.id)
        # One transaction wrote them all.
        assert execute(database_url, "SELECT count(*), count(DISTINCT xmin::text) FROM durable_jobs.jobs") == [(6, 1)]
        gate.go_on.set()
        await asyncio.gather(*(handle.result(timeout=20) for handle in handles))


async def test_the_keeper_reconnects(jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        async with job.dispatch(f"probe:{job.id}") as key:
            return {"sent": key}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=2))
        await gate.handler_came()
        for _ in range(3):
            await until_renewed(database_url, handle.id)
            execute(
                database_url,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()",
            )
        await until_renewed(database_url, handle.id, times=2)
        assert execute(database_url, HELD, handle.id) == [(True,)]
        gate.go_on.set()
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert (await handle.job()).lease_generation == 1


async def test_what_no_attempt_runs_is_not_renewed(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """Only what the process still runs is renewed, never all rows of its worker id."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        return {}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        running = await handle.job()
        # A row of this very worker that none of its attempts runs, as after a claim whose reply never came.
        stray = await jobs.service.create_job(spec(lease_seconds=1.5))
        assert await jobs.service.claim_job(str(running.claimed_by), uuid4(), job_id=stray.job.id)
        before = renewed(database_url, stray.job.id)
        await until_renewed(database_url, handle.id, times=3)
        assert renewed(database_url, stray.job.id) == before
        gate.go_on.set()
        await handle.result(timeout=20)


async def test_an_ended_attempt_is_not_renewed(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """An attempt that gave up leaves its lease to run out: not one tick more."""
    ended = asyncio.Event()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        ended.set()
        raise LeaseLost("as far as the handler knows")

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=6))
        await asyncio.wait_for(ended.wait(), 20)
        await asyncio.sleep(1.5)  # a tick and a half
        (attempt,) = (await jobs.service.list_job_attempts(handle.id)).items
        assert renewed(database_url, handle.id) == attempt.claimed_at


async def test_a_fresh_lease_is_renewed_after_a_sixth_of_it(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """Its claim has just set it: a job of two seconds with a lease of a minute costs no renewal."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        return {}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=60))
        await gate.handler_came()
        await asyncio.sleep(2)
        (attempt,) = (await jobs.service.list_job_attempts(handle.id)).items
        assert renewed(database_url, handle.id) == attempt.claimed_at
        gate.go_on.set()
        await handle.result(timeout=20)


async def test_the_end_of_a_lost_attempt_starts_no_second_run(
    jobs: DurableJobs,
    worker: Workers,
    spec: Specs,
    temporal_client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Temporal gave the attempt up; its workflow has read the row and closed before the attempt comes to wake it."""
    real, woken = Launcher.wake, asyncio.Event()

    async def late(launcher: Launcher, job: Job) -> None:
        await until_workflow(temporal_client, job.id, WorkflowExecutionStatus.COMPLETED)
        await real(launcher, job)
        woken.set()

    monkeypatch.setattr(Launcher, "wake", late)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        burn(2.5)
        return {}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=1))
        workflow = temporal_client.get_workflow_handle(workflow_id(handle.id))
        first = (await workflow.describe()).run_id
        await handle.result(timeout=20)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), 10)
        assert (await workflow.describe()).run_id == first


async def test_the_keeper_outlives_an_error_of_any_kind(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of a container which may start no more threads; leases would be lost without it."""
    gate, provider, failed = Gate(), Provider(), threading.Event()
    answered = keeper._answered

    def no_thread(connection: psycopg.Connection) -> Any:
        if failed.is_set():
            return answered(connection)
        failed.set()
        raise RuntimeError("can't start new thread")

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        monkeypatch.setattr(keeper, "_answered", no_thread)
        await gate.wait()
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(lease_seconds=3))
        await gate.handler_came()
        with Watch(database_url, handle.id) as watch:
            await noticed(failed.is_set)
            await noticed(lambda: len(watch.expiries) > 1)
        gate.go_on.set()
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert all(watch.looks)
