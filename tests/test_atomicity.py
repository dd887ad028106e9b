"""One transaction for each verb: the row, its event, its attempt and its audit change together, or not at all.

Case 45, the kind: whatever breaks between a state write and its event, for each verb, leaves the row equal to the fold
of its events.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs import Database, DurableJobService, FollowUp, JobStatus
from durable_jobs.contract.errors import DurableJobsError, IllegalTransition, RetryTransaction, StoreUnavailable
from durable_jobs.contract.models import Claim
from tests.conftest import Specs
from tests.support import (
    ERROR,
    A,
    B,
    claimed,
    connection,
    dispatched,
    expire,
    names,
    running,
    snapshot,
    sql,
    unchecked,
    until_waiting,
)

Setup = Callable[[DurableJobService, Specs], Awaitable[UUID]]
Act = Callable[[DurableJobService, UUID], Awaitable[Any]]
GATE = 45_000
"""The advisory lock at which a verb is held."""


def holder(job_id: UUID) -> Claim:
    return Claim(job_id=job_id, worker_id=A, generation=1)


def begins(begin: Callable[..., Awaitable[Claim]], *, flag: bool = False, expired: bool = False, **spec: Any) -> Setup:
    async def setup(service: DurableJobService, specs: Specs) -> UUID:
        job_id = (await begin(service, specs(**spec))).job_id
        if flag:
            await service.cancel_job(job_id, "not wanted", "ann")
        if expired:
            await expire(service, job_id)
        return job_id

    return setup


async def queued(service: DurableJobService, specs: Specs) -> UUID:
    return (await service.create_job(specs())).job.id


async def failed(service: DurableJobService, specs: Specs) -> UUID:
    claim = await dispatched(service, specs())
    return (await service.fail_job(claim, ERROR, retryable=False)).id


async def uncertain(service: DurableJobService, specs: Specs) -> UUID:
    claim = await dispatched(service, specs())
    return (await service.mark_indeterminate(claim, ERROR)).id


async def with_follow_up_conflict(service: DurableJobService, specs: Specs) -> UUID:
    claim = await running(service, specs())
    await service.create_job(specs(idempotency_key=f"{claim.job_id}:next", payload={"another": "request"}))
    return claim.job_id


def claim(service: DurableJobService, job_id: UUID) -> Awaitable[Any]:
    return service.claim_job(B, uuid4(), job_id=job_id)


def complete(service: DurableJobService, job_id: UUID) -> Awaitable[Any]:
    return service.complete_job(holder(job_id), {"n": 1}, [FollowUp(name="next", job_type="probe", payload={"n": 2})])


def fail(retryable: bool) -> Act:
    return lambda service, job_id: service.fail_job(holder(job_id), ERROR, retryable)


def cancel(service: DurableJobService, job_id: UUID) -> Awaitable[Any]:
    return service.cancel_job(job_id, "not wanted", "ann")


def acknowledge(service: DurableJobService, job_id: UUID) -> Awaitable[Any]:
    return service.acknowledge_cancellation(holder(job_id))


VERBS: dict[str, tuple[str, Setup, Act, JobStatus]] = {
    # The verb: the event that it leaves, what comes before it, the verb itself, the status to which it leads.
    "claim": ("claimed", queued, claim, JobStatus.CLAIMED),
    "reclaim": ("claimed", begins(running, expired=True), claim, JobStatus.CLAIMED),
    "reclaim past the marker": ("indeterminate", begins(dispatched, expired=True), claim, JobStatus.INDETERMINATE),
    "reclaim under a flag": ("cancelled", begins(running, flag=True, expired=True), claim, JobStatus.CANCELLED),
    "reclaim of the last attempt": (
        "dead_lettered",
        begins(running, expired=True, max_attempts=1),
        claim,
        JobStatus.DEAD_LETTER,
    ),
    "renew": ("heartbeat", begins(claimed), lambda s, j: s.renew_lease(holder(j)), JobStatus.RUNNING),
    "heartbeat": ("heartbeat", begins(running), lambda s, j: s.heartbeat(holder(j), {"n": 1}), JobStatus.RUNNING),
    "mark": (
        "dispatched",
        begins(claimed),
        lambda s, j: s.mark_provider_dispatched(holder(j), "key", consequential=False),
        JobStatus.RUNNING,
    ),
    "complete": ("completed", begins(running), complete, JobStatus.COMPLETED),
    "complete a claimed job, its promotion": ("heartbeat", begins(claimed), complete, JobStatus.COMPLETED),
    "complete a claimed job, its end": ("completed", begins(claimed), complete, JobStatus.COMPLETED),
    "complete with a conflict": ("escalated", with_follow_up_conflict, complete, JobStatus.COMPLETED),
    "fail": ("failed", begins(running), fail(False), JobStatus.FAILED),
    "fail with backoff": ("retried", begins(running), fail(True), JobStatus.QUEUED),
    "fail in the last attempt": ("dead_lettered", begins(running, max_attempts=1), fail(True), JobStatus.DEAD_LETTER),
    "fail past the marker": ("indeterminate", begins(dispatched), fail(True), JobStatus.INDETERMINATE),
    "fail under a flag": ("cancelled", begins(running, flag=True), fail(True), JobStatus.CANCELLED),
    "mark indeterminate": (
        "indeterminate",
        begins(running),
        lambda s, j: s.mark_indeterminate(holder(j), ERROR),
        JobStatus.INDETERMINATE,
    ),
    "mark halt unsafe": (
        "halt_unsafe",
        begins(running),
        lambda s, j: s.mark_halt_unsafe(holder(j), ERROR),
        JobStatus.HALT_UNSAFE,
    ),
    "mark timed out": (
        "timed_out",
        begins(running),
        lambda s, j: s.mark_timed_out(holder(j), ERROR),
        JobStatus.TIMED_OUT,
    ),
    "release": ("retried", begins(running), lambda s, j: s.release_job(holder(j), "shutdown"), JobStatus.QUEUED),
    "cancel": ("cancelled", queued, cancel, JobStatus.CANCELLED),
    "acknowledge": ("cancelled", begins(running, flag=True), acknowledge, JobStatus.CANCELLED),
    "acknowledge past the marker": (
        "indeterminate",
        begins(dispatched, flag=True),
        acknowledge,
        JobStatus.INDETERMINATE,
    ),
    "retry": ("retried", failed, lambda s, j: s.retry_job(j, "ann", "again"), JobStatus.QUEUED),
    "requeue": (
        "retried",
        begins(running, expired=True),
        lambda s, j: s.requeue_job(j, "ann", "the worker is gone"),
        JobStatus.QUEUED,
    ),
    "resolve": (
        "reconciled",
        uncertain,
        lambda s, j: s.resolve_job(j, JobStatus.COMPLETED, {"looked": True}, "ann", result={"n": 1}),
        JobStatus.COMPLETED,
    ),
}


async def on_event(service: DurableJobService, name: str, body: str) -> None:
    """Run `body`, in plpgsql, before each event of this name is inserted."""
    await sql(
        service,
        f"""
        CREATE OR REPLACE FUNCTION meddle() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN IF NEW.name = '{name}' THEN {body} END IF; RETURN NEW; END $$;
        CREATE OR REPLACE TRIGGER meddle BEFORE INSERT ON durable_jobs.job_events
            FOR EACH ROW EXECUTE FUNCTION meddle();
        """,
    )


async def leave_alone(service: DurableJobService) -> None:
    await sql(service, "DROP TRIGGER meddle ON durable_jobs.job_events")


@asynccontextmanager
async def gate(database_url: str) -> AsyncIterator[psycopg.AsyncConnection[dict[str, Any]]]:
    """Hold whoever comes to the gate."""
    async with connection(database_url) as own:
        await own.execute("SELECT pg_advisory_lock(%s)", [GATE])
        yield own


async def kill_at_the_gate(database_url: str) -> None:
    """Wait for a session at the gate, and kill it."""
    (pid,) = await until_waiting(database_url)
    async with connection(database_url) as own:
        await own.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])


HOLD = f"PERFORM pg_advisory_xact_lock({GATE});"


async def test_no_change_without_its_event(service: DurableJobService, spec: Specs) -> None:
    """Case 45: the event's insert fails; for each verb nothing at all has changed, and the verb then works."""
    for verb, (event, setup, act, status) in VERBS.items():
        job_id = await setup(service, spec)
        before = await snapshot(service, job_id)
        jobs = len((await service.list_jobs(limit=1000)).items)
        await on_event(service, event, "RAISE EXCEPTION 'the trail is full';")
        with pytest.raises(DurableJobsError, match="the trail is full"):
            await act(service, job_id)
        await leave_alone(service)
        assert await snapshot(service, job_id) == before, verb
        assert len((await service.list_jobs(limit=1000)).items) == jobs, verb
        await act(service, job_id)
        assert (await service.get_job(job_id)).status is status, verb
        assert await service.check_trail(job_id) == [], verb


async def test_a_session_killed_on_the_way_changed_nothing_and_is_run_again(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Case 45: the server ends the session between the state write and the event; for each verb the second try alone
    counts."""
    for verb, (event, setup, act, status) in VERBS.items():
        job_id = await setup(service, spec)
        before = await snapshot(service, job_id)
        await on_event(service, event, HOLD)
        async with gate(database_url):
            acting = asyncio.create_task(act(service, job_id))
            await kill_at_the_gate(database_url)
            await until_waiting(database_url)  # it is there again, of itself
            assert await snapshot(service, job_id) == before, verb
        await acting
        await leave_alone(service)
        job = await service.get_job(job_id)
        assert job.status is status, verb
        assert await service.check_trail(job_id) == [], verb
        found = await names(service, job_id)
        assert found.count(event) == len([e for e in before["job_events"] if e["name"] == event]) + 1, verb
        assert job.lease_generation - before["jobs"][0]["lease_generation"] in (0, 1), verb


async def test_a_session_killed_every_time_is_a_typed_error(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Case 45: five tries, then the caller is told; the row is as it was."""
    claim = await running(service, spec())
    before = await snapshot(service, claim.job_id)
    await on_event(service, "completed", HOLD)
    async with gate(database_url):
        acting = asyncio.create_task(service.complete_job(claim, {}))
        for _ in range(5):
            await kill_at_the_gate(database_url)
        with pytest.raises(StoreUnavailable) as away:
            await acting
    assert away.value.retryable
    await leave_alone(service)
    assert await snapshot(service, claim.job_id) == before
    assert (await service.complete_job(claim, {})).job.status is JobStatus.COMPLETED


@asynccontextmanager
async def held_at_commit(service: DurableJobService, database_url: str) -> AsyncIterator[None]:
    """Hold every transaction that leaves an event at its COMMIT."""
    await sql(
        service,
        f"""
        CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {HOLD} RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON durable_jobs.job_events DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION hold();
        """,
    )
    async with gate(database_url):
        yield
    await sql(service, "DROP TRIGGER hold ON durable_jobs.job_events")


async def test_a_session_killed_in_its_commit_is_not_run_again(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Case 45: nobody can tell whether it took effect, so the caller is told that; a repeat is safe, by the fence."""
    claim = await running(service, spec())
    before = await snapshot(service, claim.job_id)
    async with held_at_commit(service, database_url):
        acting = asyncio.create_task(service.complete_job(claim, {"n": 1}))
        await kill_at_the_gate(database_url)
        # Run again it would be held again, for the five seconds that a lock may take.
        with pytest.raises(StoreUnavailable):
            async with asyncio.timeout(4):
                await acting
    assert await snapshot(service, claim.job_id) == before
    await service.complete_job(claim, {"n": 1})
    with pytest.raises(IllegalTransition):
        await service.complete_job(claim, {"n": 1})
    assert await names(service, claim.job_id) == ["claimed", "heartbeat", "completed"]


async def test_a_caller_that_gives_up_leaves_all_or_nothing(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Case 45: the caller's task is cancelled in the middle; its connection goes back whole."""
    claim = await running(service, spec())
    before = await snapshot(service, claim.job_id)
    await on_event(service, "completed", HOLD)
    async with gate(database_url):
        acting = asyncio.create_task(service.complete_job(claim, {}))
        await until_waiting(database_url)
        acting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acting
    await leave_alone(service)
    assert await snapshot(service, claim.job_id) == before
    assert (await service.complete_job(claim, {})).job.status is JobStatus.COMPLETED


@asynccontextmanager
async def table(service: DurableJobService) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """A table `marks` to write to, and the count of its rows."""
    await sql(service, "CREATE TABLE marks (id int)")

    async def count() -> int:
        (row,) = await sql(service, "SELECT count(*) FROM marks")
        return int(row["count"])

    yield count


async def mark(own: AsyncConnection) -> None:
    await own.exec_driver_sql("INSERT INTO marks VALUES (1)")


async def raise_in_sql(own: AsyncConnection, state: str) -> None:
    await own.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'raised' USING ERRCODE = '{state}'; END $$")


async def test_a_lost_race_is_run_again(service: DurableJobService) -> None:
    async with table(service) as count:
        for done, state in enumerate(("40001", "40P01")):
            tries = 0

            async def work(own: AsyncConnection, state: str = state) -> str:
                nonlocal tries
                tries += 1
                await mark(own)
                if tries < 5:
                    await raise_in_sql(own, state)
                return "done"

            assert await service.database.run(work) == "done"
            assert (tries, await count()) == (5, done + 1)
            tries = -1
            with pytest.raises(RetryTransaction):
                await service.database.run(work)
            assert (tries, await count()) == (4, done + 1)


async def test_a_real_deadlock_is_run_again(service: DurableJobService, spec: Specs) -> None:
    claims = [await claimed(service, spec()) for _ in range(2)]
    barrier, met = asyncio.Barrier(2), 0

    def lock(*order: Claim) -> Callable[[AsyncConnection], Awaitable[None]]:
        async def work(own: AsyncConnection) -> None:
            nonlocal met
            first, second = order
            await own.exec_driver_sql(f"UPDATE durable_jobs.jobs SET priority = 1 WHERE id = '{first.job_id}'")
            if met < 2:  # both hold what the other needs; the second time each goes its way
                met += 1
                await barrier.wait()
            await own.exec_driver_sql(f"UPDATE durable_jobs.jobs SET priority = 2 WHERE id = '{second.job_id}'")

        return work

    await asyncio.gather(service.database.run(lock(*claims)), service.database.run(lock(*reversed(claims))))
    assert met == 2


async def test_any_other_refusal_is_not_run_again(service: DurableJobService) -> None:
    async with table(service) as count:
        for state in ("P0001", "23505", "22012", "DJ001", "DJ002"):
            tries = 0

            async def work(own: AsyncConnection, state: str = state) -> None:
                nonlocal tries
                tries += 1
                await mark(own)
                await raise_in_sql(own, state)

            with pytest.raises(IllegalTransition if state == "DJ001" else DurableJobsError) as refused:
                await service.database.run(work)
            assert (tries, await count(), refused.value.retryable) == (1, 0, False)


async def test_what_the_work_raises_undoes_it(service: DurableJobService) -> None:
    async with table(service) as count:

        async def work(own: AsyncConnection) -> None:
            await mark(own)
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await service.database.run(work)
        assert await count() == 0


async def test_transactions_have_their_settings(service: DurableJobService, database_url: str) -> None:
    """Local ones, so that nothing leaks through a pooler; synchronous commit on, whatever the server's default."""
    (database,) = await sql(service, "SELECT current_database() AS name")
    await sql(service, f"ALTER DATABASE {database['name']} SET synchronous_commit = off")
    settings = ["synchronous_commit", "lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout"]

    async def read(own: AsyncConnection) -> list[str]:
        shown = [await own.exec_driver_sql(f"SHOW {name}") for name in (*settings, "transaction_isolation")]
        return [str(each.scalar()) for each in shown]

    async with unchecked(database_url) as fresh:
        for control in (False, True):
            found = await fresh.database.run(read, control=control)
            assert found == ["on", "5s", "30s", "30s", "read committed"]
    async with connection(database_url) as own:
        shown = await (await own.execute("SHOW synchronous_commit")).fetchone()
        assert shown == {"synchronous_commit": "off"}


async def test_control_verbs_get_through_when_the_jobs_use_every_connection(database_url: str, spec: Specs) -> None:
    """The small pool of their own: a stuck fleet must not keep an operator out."""
    database = Database(database_url, pool_size=2)
    service = DurableJobService(database, grace_seconds=5)
    try:
        claim = await running(service, spec())
        free = asyncio.Event()
        busy = asyncio.Barrier(3)

        async def occupy(_: AsyncConnection) -> None:
            await busy.wait()
            await free.wait()

        tasks = [asyncio.create_task(database.run(occupy)) for _ in range(2)]
        await busy.wait()
        async with asyncio.timeout(5):
            assert await service.cancel_job(claim.job_id, "not wanted", "ann") == "requested"
        free.set()
        await asyncio.gather(*tasks)
    finally:
        await database.close()


async def test_a_database_that_only_reads_is_unavailable(service: DurableJobService, spec: Specs) -> None:
    """As after a failover to a standby: the same write is to be tried again, not given up."""
    job = (await service.create_job(spec())).job

    async def work(own: AsyncConnection) -> None:
        await own.exec_driver_sql("SET TRANSACTION READ ONLY")
        await own.exec_driver_sql(f"UPDATE durable_jobs.jobs SET priority = 1 WHERE id = '{job.id}'")

    with pytest.raises(StoreUnavailable) as away:
        await service.database.run(work)
    assert away.value.retryable


async def test_a_lock_or_a_statement_that_takes_too_long_is_unavailable(
    service: DurableJobService, database_url: str
) -> None:
    async def slow(own: AsyncConnection) -> None:
        await own.exec_driver_sql("SET LOCAL statement_timeout = '10ms'")
        await own.exec_driver_sql("SELECT pg_sleep(10)")

    async def locked(own: AsyncConnection) -> None:
        await own.exec_driver_sql("SET LOCAL lock_timeout = '10ms'")
        await own.exec_driver_sql("LOCK TABLE durable_jobs.jobs IN ACCESS EXCLUSIVE MODE")

    async with connection(database_url) as own, own.transaction():
        await own.execute("LOCK TABLE durable_jobs.jobs IN ROW EXCLUSIVE MODE")
        for work in (slow, locked):
            with pytest.raises(StoreUnavailable):
                await service.database.run(work)


async def test_a_session_that_sat_idle_too_long_is_unavailable(service: DurableJobService, database_url: str) -> None:
    async def idle(own: AsyncConnection) -> None:
        pid = (await own.exec_driver_sql("SELECT pg_backend_pid()")).scalar()
        await own.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = '1ms'")
        async with connection(database_url) as other, asyncio.timeout(20):
            gone = "SELECT FROM pg_stat_activity WHERE pid = %s"
            while True:
                if (await (await other.execute(gone, [pid])).fetchone()) is None:
                    break
                await asyncio.sleep(0.005)  # polling: the server ends the session by itself
        await own.exec_driver_sql("SELECT 1")

    with pytest.raises(StoreUnavailable):
        await service.database.run(idle)


async def test_an_absent_server_is_unavailable(spec: Specs, free_tcp_port: int) -> None:
    async with unchecked(f"postgresql://postgres@127.0.0.1:{free_tcp_port}/nowhere") as service:
        with pytest.raises(StoreUnavailable):
            await service.create_job(spec())


async def test_a_driver_error_tells_nothing_of_a_tenants_data(service: DurableJobService, spec: Specs) -> None:
    """What is logged and answered must hold neither statement, nor parameters, nor rows."""
    secret = "the-tenants-secret"
    job = (await service.create_job(spec(payload={"secret": secret}, organization=secret))).job
    for statement in (
        f"UPDATE durable_jobs.jobs SET finished_at = now() WHERE id = '{job.id}'",
        f"INSERT INTO durable_jobs.jobs SELECT * FROM durable_jobs.jobs WHERE id = '{job.id}'",
        f"""SELECT '{{"{secret}": "\\u0000"}}'::jsonb""",
    ):

        async def work(own: AsyncConnection, statement: str = statement) -> None:
            await own.exec_driver_sql(statement)

        with pytest.raises(DurableJobsError) as refused:
            await service.database.run(work)
        assert secret not in str(refused.value)
