"""The servers of a run, the children that use them, and what both have cost so far.

Postgres syncs every commit to disk, as in production; Temporal keeps its data in memory, where it is fastest. What is
measured against bare Temporal is thereby measured at its most demanding.
"""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
import psycopg

from durable_jobs._processes import free_port
from durable_jobs._servers import PostgresServer, TemporalServer
from durable_jobs.store.migrate import migrate

SETTINGS = {"shared_preload_libraries": "pg_stat_statements", "max_wal_size": "4GB", "shared_buffers": "512MB"}
"""Beyond the defaults; the statistics cost both shapes that use Postgres the same."""


@dataclass
class Counters:
    """What a database has done so far."""

    transactions: int
    """That wrote: transaction ids given out, by the whole server."""
    commits: int
    """COMMIT statements: those of reading transactions too."""
    statements: int
    """BEGIN, SET and COMMIT apart."""
    wal_bytes: int

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(*(getattr(self, name) - getattr(before, name) for name in vars(self)))


class Stack:
    """A Postgres and a Temporal server, alone in a folder of theirs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.postgres = PostgresServer(folder, free_port(), secrets.token_hex(8), durable=True)
        self.temporal = TemporalServer(folder, free_port(), None, database=None)

    @contextmanager
    def running(self) -> Iterator[Self]:
        """The servers, until the block ends."""
        try:
            self.temporal.start()
            self.postgres.prepare()
            self._start_postgres()
            for name, value in SETTINGS.items():
                self._execute(f"ALTER SYSTEM SET {name} = '{value}'")
            self.postgres.stop()
            self._start_postgres()
            self._execute("CREATE EXTENSION pg_stat_statements")
            self.temporal.wait()
            yield self
        finally:
            self.temporal.stop()
            self.postgres.stop()

    def _start_postgres(self) -> None:
        self.postgres.start()
        self.postgres.wait()

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(statement)

    def database(self, name: str) -> str:
        """The URL of a new database with the schema."""
        self._execute(f"CREATE DATABASE {name}")
        url = urlsplit(self.postgres.url)._replace(path=f"/{name}").geturl()
        migrate(url)
        return url

    def counters(self, url: str) -> Counters:
        """What has been done so far in the database of `url`."""
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            row = connection.execute(
                "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint,"
                " COALESCE(sum(s.calls) FILTER (WHERE s.query = 'COMMIT'), 0)::bigint,"
                " COALESCE(sum(s.calls) FILTER (WHERE s.query !~ '^(BEGIN|SET|COMMIT)'), 0)::bigint,"
                " (pg_current_wal_insert_lsn() - '0/0')::bigint"
                " FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = %s",
                [urlsplit(url).path[1:]],
            ).fetchone()
        assert row is not None
        return Counters(*row)

    def statements(self, url: str, like: str) -> tuple[int, float]:
        """How often statements like this have run in the database of `url`, and for how many milliseconds in all."""
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            row = connection.execute(
                "SELECT COALESCE(sum(calls), 0)::bigint, COALESCE(sum(total_exec_time), 0)"
                " FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid"
                " WHERE d.datname = %s AND query LIKE %s",
                [urlsplit(url).path[1:], like],
            ).fetchone()
        assert row is not None
        return row[0], row[1]

    def stored_bytes(self, url: str) -> float:
        """The bytes of tables and indexes for each job in the database of `url`."""
        with psycopg.connect(url) as connection:
            row = connection.execute(
                "SELECT sum(pg_total_relation_size(c.oid))::float / (SELECT count(*) FROM durable_jobs.jobs)"
                " FROM pg_class c WHERE c.relnamespace = 'durable_jobs'::regnamespace AND c.relkind = 'r'"
            ).fetchone()
        assert row is not None
        return float(row[0])

    def cpu(self) -> dict[str, float]:
        """The CPU seconds of each server so far."""
        return {"postgres": cpu_of(self.postgres.pid), "temporal": cpu_of(self.temporal.pid)}


def cpu_of(pid: int | None) -> float:
    """The CPU seconds of a process and its children, ended ones included."""
    process = psutil.Process(pid)
    own = process.cpu_times()
    seconds = own.user + own.system + own.children_user + own.children_system
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


class Child:
    """A `benchmarks.child` process; `async with` starts it and ends it."""

    def __init__(self, stack: Stack, role: str, shape: str, database: str, queue: str, **options: Any) -> None:
        self._log = stack.folder / f"{role}-{queue}.log"
        self._command = [sys.executable, "-m", "benchmarks.child", role, shape, "--temporal", stack.temporal.address]
        self._command += ["--database", database, "--queue", queue]
        for name, value in options.items():
            self._command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 24,
                env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            )
        await self._answer()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._running
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(20):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def ask(self, do: str, **arguments: Any) -> Any:
        """Have it do a command, and return the answer."""
        stdin = self._running.stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        await stdin.drain()
        return (await self._answer())["answer"]

    async def _answer(self) -> dict[str, Any]:
        stdout = self._running.stdout
        assert stdout is not None
        line = await stdout.readline()
        if not line:
            raise RuntimeError(f"a child has ended; the end of its log:\n{self._log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None
        return self._process

    @property
    def cpu(self) -> float:
        """CPU seconds so far."""
        return cpu_of(self._running.pid)

    @property
    def memory(self) -> float:
        """Resident bytes."""
        return float(psutil.Process(self._running.pid).memory_info().rss)
