"""Migrations: one of many at once does the work, a killed one leaves nothing, and any schema name does."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from psycopg import sql as psycopg_sql
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from durable_jobs import Database, DurableJobService, FollowUp, JobSpec, JobStatus
from durable_jobs.contract.errors import InvalidInput, SchemaMissing, StoreUnavailable
from durable_jobs.dev import DevStack
from durable_jobs.store.migrate import checked_schema, conninfo, driver_url, migrate, newest_revision
from durable_jobs.store.tables import SCHEMA, metadata
from tests.conftest import Specs
from tests.support import ERROR, connection, until_waiting

MIGRATE = "import sys; from durable_jobs.store.migrate import migrate; print(migrate(sys.argv[1]))"
GATE = 44_000
"""The advisory lock at which a migration is held."""


@pytest.fixture
def empty_url(durable_jobs_stack: DevStack) -> Iterator[str]:
    """The URL of a database with nothing in it."""
    name = f"durable_jobs_empty_{token_hex(6)}"
    with psycopg.connect(durable_jobs_stack.database_url, autocommit=True) as server:
        server.execute(psycopg_sql.SQL("CREATE DATABASE {}").format(psycopg_sql.Identifier(name)))
        yield urlsplit(durable_jobs_stack.database_url)._replace(path=f"/{name}").geturl()
        server.execute(psycopg_sql.SQL("DROP DATABASE {} WITH (FORCE)").format(psycopg_sql.Identifier(name)))


@asynccontextmanager
async def opened(url: str, schema: str = SCHEMA) -> AsyncIterator[Database]:
    database = Database(url, schema=schema)
    try:
        yield database
    finally:
        await database.close()


def start_migrator(url: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MIGRATE, url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The process's exit code and what it wrote."""
    out, err = await asyncio.to_thread(process.communicate, timeout=60)
    return process.returncode, out.strip(), err


async def one(url: str, query: str) -> Any:
    """The one value of the query."""
    async with connection(url) as own:
        row = await (await own.execute(query)).fetchone()
    assert row is not None
    (value,) = row.values()
    return value


async def sound(url: str, schema: str = SCHEMA) -> None:
    """The newest schema is in place, and a job runs through on it."""
    async with opened(url, schema) as database:
        await database.check()
        service = DurableJobService(database)
        created = await service.create_job(
            JobSpec(
                organization="acme", project="alpha", job_type="probe", idempotency_key=uuid4().hex, payload={"n": 1}
            )
        )
        outcome = await service.claim_job("worker", uuid4(), job_id=created.job.id)
        assert outcome is not None
        assert outcome.claim is not None
        await service.complete_job(outcome.claim, {"n": 1})
        assert await service.check_trail(created.job.id) == []


async def test_of_five_migrators_at_once_one_does_the_work(empty_url: str) -> None:
    """Case 44: five processes, forced to meet: one is in the middle while the others wait, and all succeed."""
    async with connection(empty_url) as own, own.transaction():
        await own.execute("LOCK TABLE pg_catalog.pg_namespace IN SHARE MODE")  # CREATE SCHEMA waits
        processes = [start_migrator(empty_url) for _ in range(5)]
        await until_waiting(empty_url, 5)
    answers = await asyncio.gather(*map(ended, processes))
    assert [(code, out) for code, out, _ in answers] == [(0, newest_revision())] * 5, answers
    await sound(empty_url)


def test_of_five_threads_at_once_one_does_the_work(empty_url: str) -> None:
    """Case 44 within one process, as of several services that migrate when they start."""
    barrier = threading.Barrier(5)
    answers: list[str] = []

    def run() -> None:
        barrier.wait()
        answers.append(migrate(empty_url))

    threads = [threading.Thread(target=run) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [newest_revision()] * 5


def test_two_schemas_at_once_in_one_process(empty_url: str) -> None:
    """Migrations of different schemas don't wait for each other, so they must not share anything either."""
    barrier = threading.Barrier(4)
    found: dict[str, str | BaseException] = {}

    def run(schema: str) -> None:
        barrier.wait()
        try:
            found[schema] = migrate(empty_url, schema=schema)
        except BaseException as error:
            found[schema] = error

    threads = [threading.Thread(target=run, args=[f"jobs_{n}"]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {f"jobs_{n}": newest_revision() for n in range(4)}


@pytest.mark.parametrize("statement", ["CREATE TABLE", "CREATE INDEX", "CREATE TRIGGER"])
async def test_a_migration_killed_half_way_is_resumed_by_the_next(empty_url: str, statement: str) -> None:
    """Case 44: kill -9 in the middle of the DDL: nothing of it stays, and the next one runs through."""
    async with connection(empty_url) as own:
        await own.execute(
            f"""
            CREATE FUNCTION public.hold() RETURNS event_trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_advisory_xact_lock({GATE}); END $$;
            CREATE EVENT TRIGGER hold_{token_hex(4)} ON ddl_command_end WHEN TAG IN ('{statement}')
                EXECUTE FUNCTION public.hold();
            """
        )
        await own.execute("SELECT pg_advisory_lock(%s)", [GATE])
        process = start_migrator(empty_url)
        (backend,) = await until_waiting(empty_url)
        process.kill()
        assert (await ended(process))[0] == -9
        # Its session is still there, in the middle, with all its locks; the next migrator waits for it to go.
        following = asyncio.create_task(asyncio.to_thread(migrate, empty_url))
        await until_waiting(empty_url, 2)
        await own.execute("SELECT pg_terminate_backend(%s, 10000)", [backend])
        assert await one(empty_url, f"SELECT to_regclass('{SCHEMA}.jobs')::text") is None
        await own.execute("SELECT pg_advisory_unlock(%s)", [GATE])
        assert await following == newest_revision()
    await sound(empty_url)


async def test_a_migration_under_load_stops_no_job(service: DurableJobService, spec: Specs, database_url: str) -> None:
    """Case 44: migrators start beside working jobs, again and again; every verb goes on."""
    done = asyncio.Event()

    async def work() -> int:
        rounds = 0
        while not done.is_set() or not rounds:
            job = (await service.create_job(spec())).job
            outcome = await service.claim_job("worker", uuid4(), job_id=job.id)
            assert outcome is not None
            assert outcome.claim is not None
            await service.mark_provider_dispatched(outcome.claim, f"key:{job.id}", consequential=False)
            await service.complete_job(outcome.claim, {})
            rounds += 1
        return rounds

    workers = [asyncio.create_task(work()) for _ in range(3)]
    for _ in range(3):
        assert await asyncio.to_thread(migrate, database_url) == newest_revision()
    done.set()
    assert all(await asyncio.gather(*workers))


async def test_a_migrated_database_is_left_as_it_is(service: DurableJobService, spec: Specs, database_url: str) -> None:
    job = (await service.create_job(spec())).job
    assert migrate(database_url) == newest_revision()
    assert await service.get_job(job.id) == job
    await service.database.check()


def differences(url: str, schema: str) -> list[Any]:
    """What Alembic would change to make the database's tables and columns those of `store/tables.py`.

    Indexes and constraints are the migrations' own: they serve statements and rules, not reads.
    """

    def included(_object: Any, _name: str | None, kind: str, _reflected: bool, _other: Any) -> bool:
        return kind in ("table", "column")

    engine = create_engine(driver_url(url), poolclass=NullPool)
    try:
        with engine.connect() as own:
            context = MigrationContext.configure(
                own,
                opts={
                    "compare_type": True,
                    "include_schemas": True,
                    "include_name": lambda name, kind, _: kind != "schema" or name == schema,
                    "include_object": included,
                    "version_table": "schema_version",
                    "version_table_schema": schema,
                },
            )
            return list(compare_metadata(context, metadata))
    finally:
        engine.dispose()


def test_the_tables_in_python_are_those_of_the_database(database_url: str) -> None:
    assert differences(database_url, SCHEMA) == []
    # The comparison sees what it should.
    with psycopg.connect(database_url, autocommit=True) as own:
        own.execute(f"ALTER TABLE {SCHEMA}.jobs DROP COLUMN priority, ADD COLUMN extra text")
        own.execute(f"ALTER TABLE {SCHEMA}.jobs ALTER COLUMN lookup_tries TYPE bigint, ALTER queue DROP NOT NULL")
        own.execute(f"CREATE TABLE {SCHEMA}.stray (id int)")
    assert len(differences(database_url, SCHEMA)) == 5


async def test_any_schema_name_does(empty_url: str) -> None:
    """Every verb on a schema of another name, beside a schema of the usual one, of which nothing is touched."""
    schema = "tenant_jobs"
    migrate(empty_url)
    assert migrate(empty_url, schema=schema) == newest_revision()
    async with opened(empty_url, schema) as database, opened(empty_url) as other:
        await database.check()
        service = DurableJobService(database)

        def spec(**overrides: Any) -> JobSpec:
            fields = {"organization": "acme", "project": "alpha", "job_type": "probe", "payload": {"n": 1}}
            return JobSpec(**fields | {"idempotency_key": uuid4().hex} | overrides)

        async def claim() -> Any:
            outcome = await service.claim_job("worker", uuid4())
            assert outcome is not None
            return outcome.claim

        first = await service.create_job(spec(idempotency_key="k"))
        assert (await service.create_jobs([spec(idempotency_key="k")]))[0].job == first.job
        held = await claim()
        assert await service.renew_lease(held)
        assert await service.heartbeat(held, {"n": 1})
        await service.mark_provider_dispatched(held, "key", consequential=False)
        follow_up = FollowUp(name="next", job_type="probe", payload={"n": 2})
        assert len((await service.complete_job(held, {"n": 1}, [follow_up])).follow_ups) == 1
        held = await claim()
        await service.release_job(held, "shutdown")
        held = await claim()
        await service.fail_job(held, ERROR, retryable=False)
        await service.retry_job(held.job_id, "ann", "again")
        held = await claim()
        assert await service.cancel_job(held.job_id, "not wanted", "ann") == "requested"
        await service.acknowledge_cancellation(held)
        await service.create_job(spec())
        held = await claim()
        await service.mark_indeterminate(held, ERROR)
        await service.resolve_job(held.job_id, JobStatus.COMPLETED, {"looked": True}, "ann")
        await service.append_job_event(held.job_id, "admission_checked", "ann", {})
        found = (await service.list_jobs()).items
        assert len(found) == 3
        for job in found:
            assert await service.check_trail(job.id) == []
            assert (await service.list_job_attempts(job.id)).items
        assert (await DurableJobService(other).list_jobs()).items == []
    assert await one(empty_url, f"SELECT count(*) FROM {SCHEMA}.job_events") == 0
    assert await one(empty_url, f"SELECT count(*) FROM {schema}.job_events") > 10


async def test_a_missing_schema_says_what_to_do(empty_url: str) -> None:
    for schema in (SCHEMA, "other_jobs"):
        async with opened(empty_url, schema) as database:
            with pytest.raises(SchemaMissing) as missing:
                await database.check()
            assert f"{schema!r} is at nothing, not {newest_revision()}" in missing.value.message
            assert "durable-jobs migrate" in missing.value.message
    migrate(empty_url)
    async with opened(empty_url) as database:
        await database.check()
    async with opened(empty_url, "other_jobs") as database:
        with pytest.raises(SchemaMissing):
            await database.check()
    async with connection(empty_url) as own:
        await own.execute(f"UPDATE {SCHEMA}.schema_version SET version_num = '0000'")
    async with opened(empty_url) as database:
        with pytest.raises(SchemaMissing, match="is at 0000, not"):
            await database.check()


async def test_an_absent_server_is_no_missing_schema(free_tcp_port: int) -> None:
    async with opened(f"postgresql://postgres@127.0.0.1:{free_tcp_port}/nowhere") as database:
        with pytest.raises(StoreUnavailable):
            await database.check()


WRONG_NAMES = [
    "",
    "Jobs",
    "a-b",
    "a b",
    "1a",
    'x"; DROP SCHEMA public; --',
    "a.b",
    "é",
    "a\n",
    "x" * 64,
    "{s}",
    "%(id)s",
]


async def test_a_wrong_schema_name_is_refused(empty_url: str) -> None:
    for name in WRONG_NAMES:
        with pytest.raises(InvalidInput, match="schema"):
            Database(empty_url, schema=name)
        with pytest.raises(InvalidInput, match="schema"):
            migrate(empty_url, schema=name)
    assert (
        await one(empty_url, "SELECT count(*) FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema|public)'")
        == 0
    )
    for name in ("x", "_jobs", "a1_b2", "x" * 63):
        assert checked_schema(name) == name


def test_a_url_keeps_all_its_parts() -> None:
    for scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        url = make_url(driver_url(f"{scheme}://ann:p%40ss@db.example:6543/jobs?sslmode=require&application_name=x"))
        assert (url.drivername, url.username, url.password) == ("postgresql+psycopg", "ann", "p@ss")
        assert (url.host, url.port, url.database) == ("db.example", 6543, "jobs")
        assert url.query == {"sslmode": "require", "application_name": "x"}
    for wrong in ("mysql://localhost/jobs", "host=localhost dbname=jobs", "", "postgresql+asyncpg://localhost/jobs"):
        with pytest.raises(InvalidInput, match="database_url"):
            driver_url(wrong)


@pytest.mark.parametrize("password", ["ab/cd", "it's", "a b", "p%40ss", "50%25", "back\\slash", "q?x=1#y"])
def test_the_keeper_connects_as_the_pool_does(password: str) -> None:
    """The pool's URL is SQLAlchemy's to read, the keeper and the listener give it to libpq."""
    url = driver_url(f"postgresql://ann:{password}@db.example:6543/jobs?sslmode=require")
    pool = make_url(url)
    assert conninfo_to_dict(conninfo(url)) == {
        "user": "ann",
        "password": pool.password,
        "host": "db.example",
        "port": "6543",
        "dbname": "jobs",
        "sslmode": "require",
    }
    assert pool.host == "db.example"


def test_a_url_of_a_unix_socket_keeps_all_its_parts() -> None:
    """No host in the authority: the socket's folder is in the query, as libpq documents it."""
    url = make_url(driver_url("postgresql:///jobs?host=/var/run/postgresql"))
    assert (url.drivername, url.host, url.database) == ("postgresql+psycopg", None, "jobs")
    assert url.query == {"host": "/var/run/postgresql"}
