"""Postgres goes away and comes back: verbs and workers come back by themselves, and nothing is lost or done twice.

On servers of this file's own, as those of the suite are not to be stopped.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psycopg
import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from durable_jobs import (
    Database,
    DurableJobs,
    DurableJobService,
    DurableJobsPlugin,
    EventName,
    Job,
    JobContext,
    JobHandle,
    JobStatus,
    LeaseStatus,
    ProviderState,
)
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.dev import DevStack
from tests.conftest import Specs
from tests.probes import Gate, Probe, Provider, Script, eventually, execute, noticed, trail
from tests.servers import scratch_servers, template_database

T = TypeVar("T")

CLAIMED, DISPATCHED, COMPLETED = EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED
SLOTS = 8
JOBS = 60


@pytest.fixture(scope="module")
def durable_jobs_stack() -> Iterator[DevStack]:
    """In place of the run's own."""
    with scratch_servers(persistent=False) as stack:
        yield stack


@pytest.fixture(scope="module")
def durable_jobs_template(durable_jobs_stack: DevStack) -> str:
    """What each test's database is a clone of."""
    return template_database(durable_jobs_stack)


@pytest.fixture
def provider() -> Provider:
    return Provider()


class Caller(Probe):
    """Its provider can be asked what became of a key."""

    def __init__(self, provider: Provider, script: Script) -> None:
        super().__init__(script)
        self.provider = provider

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[Any]:
        known = operation_key in self.provider.keys
        return ProviderState.succeeded({"sent": operation_key}) if known else ProviderState.absent()


async def test_a_connection_that_is_not_wanted_any_more_is_made_and_closed(database_url: str) -> None:
    """Left half open, it would hold a process of the server's for a minute, its authentication_timeout."""
    asked, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    server = urlsplit(database_url)

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(server.hostname, server.port)

        async def answer() -> None:
            while data := await answers.read(4096):
                await go_on.wait()
                writer.write(data)

        answering = asyncio.create_task(answer())
        while data := await reader.read(4096):
            requests.write(data)
            asked.set()
        ended.set()
        for each in (requests, writer):
            each.close()
        await answering

    async with await asyncio.start_server(slowly, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        database = Database(database_url.replace(f":{server.port}/", f":{port}/"))
        checking = asyncio.create_task(database.check())
        await asked.wait()
        checking.cancel()
        await asyncio.sleep(0)
        go_on.set()
        async with asyncio.timeout(20):
            await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await checking
        await database.close()


Slots = Callable[[Script], contextlib.AbstractAsyncContextManager[Worker]]


@pytest.fixture
def slots(database_url: str, temporal_client: Client, queue: str, provider: Provider) -> Slots:
    """`async with slots(script):` a worker with a few slots, whose sweep comes every second."""

    @asynccontextmanager
    async def run(script: Script) -> AsyncIterator[Worker]:
        handlers = [Caller(provider, script)]
        often = timedelta(seconds=1)
        plugin = DurableJobsPlugin(database_url, handlers, grace_seconds=2, reconcile_every=often)
        async with Worker(
            temporal_client, task_queue=queue, plugins=[plugin], max_concurrent_activities=SLOTS
        ) as running:
            yield running

    return run


async def sent_once(job: JobContext, provider: Provider) -> Any:
    """Past the boundary, one call."""
    async with job.dispatch(f"probe:{job.id}") as key:
        return await provider.call(key)


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """The call's answer, repeated while the database is away, as the typed error asks."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StoreUnavailable):
                return await call()
            await asyncio.sleep(0.1)


def end_sessions(database_url: str) -> None:
    """Kill every session of the server, but the one that does it."""
    execute(
        database_url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'",
    )


async def test_postgres_stops_as_every_slot_writes_its_outcome(
    jobs: DurableJobs, spec: Specs, slots: Slots, provider: Provider, durable_jobs_stack: DevStack
) -> None:
    """Case 40 of the catalogue, of the kind "Postgres": outcomes are retried, and the slots come back."""
    gate, at_work = Gate(), asyncio.Semaphore(0)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        answer = await sent_once(job, provider)
        at_work.release()
        await gate.wait()
        return answer

    async with slots(script):
        handles = await jobs.create_jobs([spec() for _ in range(SLOTS)])
        for _ in handles:
            await asyncio.wait_for(at_work.acquire(), 20)
        await asyncio.to_thread(durable_jobs_stack.stop_postgres, immediate=True)
        gate.go_on.set()
        await asyncio.sleep(5)  # the length of the outage
        with pytest.raises(StoreUnavailable):
            await handles[0].job()
        await asyncio.to_thread(durable_jobs_stack.start_postgres)
        handles += await jobs.create_jobs([spec() for _ in range(2 * SLOTS)])
        results = await asyncio.gather(*(handle.result(timeout=30) for handle in handles))
    assert results == [{"sent": f"probe:{handle.id}"} for handle in handles]
    assert sorted(provider.keys) == sorted(f"probe:{handle.id}" for handle in handles)
    for handle in handles:
        assert await trail(jobs.service, handle.id) == [CLAIMED, DISPATCHED, COMPLETED]
        assert (await handle.job()).lease_generation == 1


@pytest.mark.parametrize("way", ["restarted at once", "sessions killed"])
async def test_postgres_breaks_again_and_again(
    jobs: DurableJobs, spec: Specs, slots: Slots, provider: Provider, durable_jobs_stack: DevStack, way: str
) -> None:
    """Case 41 of the catalogue, of the kind "Postgres": every job settles, and none has its effect twice."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        return await sent_once(job, provider)

    async def submit(number: int) -> JobHandle:
        one = spec(idempotency_key=f"job-{number}", lease_seconds=10)
        return await answered(lambda: jobs.create_job(one))

    async def break_it() -> None:
        for sent in range(5, JOBS, 10):

            async def so_many(sent: int = sent) -> bool:
                return len(provider.keys) >= sent

            await eventually(so_many, f"{sent} calls", timeout=60)
            if way == "restarted at once":
                await asyncio.to_thread(durable_jobs_stack.restart_postgres, immediate=True)
            else:
                await asyncio.to_thread(end_sessions, durable_jobs_stack.database_url)

    async with slots(script):
        breaking = asyncio.create_task(break_it())
        handles = await asyncio.gather(*(submit(number) for number in range(JOBS)))
        await breaking
        results = await asyncio.gather(*(handle.result(timeout=60) for handle in handles))
    assert results == [{"sent": f"probe:{handle.id}"} for handle in handles]
    assert sorted(provider.keys) == sorted(f"probe:{handle.id}" for handle in handles)
    assert len((await jobs.service.list_jobs(limit=100)).items) == JOBS


@contextmanager
def read_only(server_url: str) -> Iterator[None]:
    """The whole server accepts no writes, as one that was made a standby."""
    with psycopg.connect(server_url, autocommit=True, options="-c default_transaction_read_only=off") as connection:
        try:
            connection.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            connection.execute("SELECT pg_reload_conf()")
            yield
        finally:
            connection.execute("ALTER SYSTEM RESET default_transaction_read_only")
            connection.execute("SELECT pg_reload_conf()")


def is_read_only(database_url: str) -> bool:
    return execute(database_url, "SHOW default_transaction_read_only") == [("on",)]


async def test_a_read_only_database(
    jobs: DurableJobs,
    spec: Specs,
    slots: Slots,
    provider: Provider,
    durable_jobs_stack: DevStack,
    database_url: str,
) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        answer = await sent_once(job, provider)
        await gate.wait()
        return answer

    async with slots(script):
        handle = await jobs.create_job(spec(lease_seconds=20))
        await gate.handler_came()
        with read_only(durable_jobs_stack.database_url):

            async def reloaded() -> bool:
                return is_read_only(database_url)

            await eventually(reloaded, "a server that is read-only")
            refused = spec()
            with pytest.raises(StoreUnavailable):
                await jobs.create_job(refused)
            with pytest.raises(StoreUnavailable):
                await handle.cancel("not wanted", "ann")
            assert (await handle.job()).status is JobStatus.RUNNING  # it can be read all the same
            gate.go_on.set()
            await asyncio.sleep(1.5)  # its outcome is refused several times over
        assert await handle.result(timeout=30) == {"sent": f"probe:{handle.id}"}
        after = await answered(lambda: jobs.create_job(refused))
        assert after.created
        assert await after.result(timeout=30) == {"sent": f"probe:{after.id}"}
    assert await trail(jobs.service, handle.id) == [CLAIMED, DISPATCHED, COMPLETED]
    assert (await handle.job()).lease_generation == 1


async def test_the_keeper_waits_between_its_tries(
    jobs: DurableJobs,
    spec: Specs,
    slots: Slots,
    provider: Provider,
    durable_jobs_stack: DevStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A database that comes back is not met by a storm of connections."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        answer = await sent_once(job, provider)
        await gate.wait()
        return answer

    async with slots(script):
        handle = await jobs.create_job(spec(lease_seconds=6))
        await gate.handler_came()
        await asyncio.to_thread(durable_jobs_stack.stop_postgres, immediate=True)
        await asyncio.sleep(3)  # three ticks
        failures = [each for each in caplog.records if each.name == "durable_jobs.temporal.keeper"]
        await asyncio.to_thread(durable_jobs_stack.start_postgres)
        gate.go_on.set()
        assert await handle.result(timeout=30) == {"sent": f"probe:{handle.id}"}
    assert 1 <= len(failures) <= 10


async def test_an_exhausted_pool(database_url: str, spec: Specs) -> None:
    """Too many at once are told so, by the typed error, and the next one is served."""
    database = Database(database_url, pool_size=1)
    database._jobs.sync_engine.pool._timeout = 0.5  # type: ignore[attr-defined]  # ten seconds would prove no more
    service, busy, done = DurableJobService(database), asyncio.Event(), asyncio.Event()

    async def hog(connection: Any) -> None:
        busy.set()
        await done.wait()

    hogging = asyncio.create_task(database.run(hog))
    try:
        await asyncio.wait_for(busy.wait(), 10)
        with pytest.raises(StoreUnavailable):
            await service.create_job(spec())
        # Operators get through: their verbs have a pool of their own.
        assert await service.pause_queue("idle-queue", actor="ann", reason="to see whether it works")
        done.set()
        await hogging
        assert (await service.create_job(spec())).created
    finally:
        hogging.cancel()
        await database.close()


async def test_connections_that_die_idle(service: DurableJobService, spec: Specs, database_url: str) -> None:
    """Every pooled connection is dead, and no caller notices."""
    created = (await service.create_job(spec())).job
    for _ in range(3):
        await asyncio.gather(*(service.get_job(created.id) for _ in range(20)))  # as many connections as the pool has
        await asyncio.to_thread(end_sessions, database_url)
        assert {job.id for job in await asyncio.gather(*(service.get_job(created.id) for _ in range(20)))} == {
            created.id
        }
        await asyncio.to_thread(end_sessions, database_url)
        assert (await service.create_job(spec())).created
        await asyncio.to_thread(end_sessions, database_url)
        assert await service.pause_queue("idle-queue", actor="ann", reason="to see whether it works")
        assert await service.resume_queue("idle-queue", actor="ann", reason="it does")


async def test_connections_that_lead_to_a_standby_are_given_up(
    spec: Specs, database_url: str, durable_jobs_stack: DevStack
) -> None:
    """The address names a primary again, yet the sessions of before still lead to what only reads."""
    database = Database(database_url, pool_size=3)
    service = DurableJobService(database)

    async def only_reads(connection: Any) -> None:
        await connection.exec_driver_sql("SET default_transaction_read_only = on")

    try:
        await asyncio.gather(*(database.run(only_reads) for _ in range(3)))
        with pytest.raises(StoreUnavailable):
            await service.create_job(spec())
        assert (await service.create_job(spec())).created
        assert all(each.created for each in await asyncio.gather(*(service.create_job(spec()) for _ in range(6))))
    finally:
        await database.close()


@pytest.mark.parametrize("code", ["58030", "XX000", "53100", "57P03"])
async def test_what_is_the_servers_own_trouble_is_worth_another_try(service: DurableJobService, code: str) -> None:
    """An outcome is written again until the lease is gone: after a disk that failed, too."""

    async def breaks(connection: Any) -> None:
        await connection.exec_driver_sql(f"DO $$ BEGIN RAISE 'broken' USING ERRCODE = '{code}'; END $$")

    with pytest.raises(StoreUnavailable) as raised:
        await service.database.run(breaks)
    assert raised.value.retryable


async def test_progress_that_can_not_be_recorded_ends_no_call(
    jobs: DurableJobs, spec: Specs, slots: Slots, provider: Provider, durable_jobs_stack: DevStack
) -> None:
    gate, said = Gate(), []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            await gate.wait()
            said.append(await job.heartbeat({"at": "half"}))
            return await provider.call(key)

    async with slots(script):
        handle = await jobs.create_job(spec(lease_seconds=30))
        await gate.handler_came()
        await asyncio.to_thread(durable_jobs_stack.stop_postgres, immediate=True)
        gate.go_on.set()
        await noticed(lambda: bool(said))
        await asyncio.to_thread(durable_jobs_stack.start_postgres)
        assert await handle.result(timeout=30) == {"sent": f"probe:{handle.id}"}
    assert said == [LeaseStatus.HELD]


async def test_connections_found_dead_again_and_again(spec: Specs, database_url: str) -> None:
    """The pool gives up after two connections that others have just found dead: whoever waits for one is served."""
    database = Database(database_url, pool_size=2)
    service, finds = DurableJobService(database), iter([True] * 3)

    class Restless(set[Any]):
        def __contains__(self, engine: object) -> bool:
            return next(finds, False)

    database._stale = Restless()
    try:
        assert (await service.create_job(spec())).created
        assert next(finds, None) is None
    finally:
        await database.close()
