"""Connections and transactions: pools, per-transaction settings, and what a driver's error means."""

import asyncio
import os
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar, Self, TypeVar, cast

import psycopg
from psycopg.rows import dict_row
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError, InvalidRequestError, TimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from durable_jobs.contract.errors import (
    DurableJobsError,
    IllegalTransition,
    InvalidInput,
    OperationKeyConflict,
    RetryTransaction,
    SchemaMissing,
    StoreUnavailable,
)
from durable_jobs.store.migrate import checked_schema, driver_url, newest_revision
from durable_jobs.store.tables import SCHEMA

T = TypeVar("T")

BEGIN = """
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL synchronous_commit = on;
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = '30s';
SET LOCAL idle_in_transaction_session_timeout = '30s'
"""
"""One round trip in place of the driver's own BEGIN. Local settings, as PgBouncer in transaction mode keeps no session
state; synchronous_commit, as with it off a committed boundary was gone after a crash."""

CONNECT_ARGS: dict[str, Any] = {
    "prepare_threshold": None,  # PgBouncer 1.18 knows no protocol-level prepared statements: see _let_prepare
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # milliseconds: a peer that vanished without a FIN is noticed
    "application_name": "durable_jobs",
}

ANSWER_SECONDS = 35.0
"""How long one round trip may take: longer than any statement may, so that a server which is there has answered."""

PATIENCE_SECONDS = 40.0
"""How long a broken connection is followed by another try: once more after a server that was there and did not answer,
not five times."""

PREPARE_ON_ASK = 1_000_000
"""On a direct connection a statement is prepared where `fetch` is asked to, and never for being frequent."""
_CHANGED_PLAN = "0A000"
"""A migration changed what a prepared statement returns."""
_FOREIGN_PLANS = {"26000", "42P05"}
"""The server knows no such statement, or another one of its name: a pooler deals out its sessions after all."""
_READ_ONLY = "25006"
"""Of a connection that leads to a standby: so do the others of its time, also once the address names a primary."""
_OWN = "durable_jobs_own"
"""Marks the connections of our own pools, as an execution option."""
_DIRECT = "durable_jobs_direct"
"""Whether a pooled connection is one to the server itself, in its `info`."""
_STALE = {_CHANGED_PLAN, _READ_ONLY, *_FOREIGN_PLANS}
"""The connection is sound, and of no more use."""
_LOST_RACES = {"40001", "40P01"}
_UNAVAILABLE = {_READ_ONLY, "25P03", "55P03"}
"""A server that only reads, a session that sat idle for too long, a lock that was not to be had."""
_UNAVAILABLE_CLASSES = {"08", "53", "57", "58", "XX"}
"""Of connections, resources, an operator's intervention, the server's own system, and what it can't explain."""
_TRIES = 5


def hang_up(connection: "psycopg.Connection[Any] | psycopg.AsyncConnection[Any]") -> None:
    """End a connection under whoever waits for its answer; that is told so by the driver's own error."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as peer:
        peer.shutdown(socket.SHUT_RDWR)


class WholeConnection(psycopg.AsyncConnection[Any]):
    """Made to its end, behind the back of whoever doesn't want it any more, and closed: half open, it would hold a
    process of the server's until the authentication_timeout, a minute, and with it whoever waits for all of these, such
    as DROP DATABASE."""

    _unwanted: ClassVar[set["asyncio.Task[Any]"]] = set()

    @classmethod
    async def connect(cls, *arguments: Any, **named: Any) -> Self:
        connecting = asyncio.create_task(super().connect(*arguments, **named))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            cls._unwanted.add(connecting)
            connecting.add_done_callback(cls._hang_up)
            raise

    @classmethod
    def _hang_up(cls, connecting: "asyncio.Task[Self]") -> None:
        cls._unwanted.discard(connecting)
        if not connecting.cancelled() and connecting.exception() is None:
            connecting.result().pgconn.finish()

    @classmethod
    async def none_unwanted(cls) -> None:
        """Returns once this loop makes no connection that nobody wants."""
        loop = asyncio.get_running_loop()
        if unwanted := {each for each in cls._unwanted if each.get_loop() is loop}:
            await asyncio.wait(unwanted)


class AnsweringConnection(WholeConnection):
    """Hangs up on a server that says nothing. TCP by itself notices a host that vanished, but not a pooler or a sidecar
    that stalls, whose kernel acknowledges what nobody forwards: such a connection waited for ever."""

    async def wait(self, *arguments: Any, **named: Any) -> Any:
        patience = asyncio.get_running_loop().call_later(ANSWER_SECONDS, hang_up, self)
        try:
            return await super().wait(*arguments, **named)
        finally:
            patience.cancel()


class Database:
    """A pool for the work of jobs and a small one of its own for control verbs, over one Postgres database.

    `run` owns the transaction: it begins, hands the connection to `work`, and commits. A lost race (40001, 40P01) or
    a connection that broke before COMMIT was sent is run again; one that broke during COMMIT raises
    `StoreUnavailable`, since nobody can tell whether it took effect.
    """

    def __init__(self, database_url: str, *, schema: str = SCHEMA, pool_size: int = 10, control_pool_size: int = 2):
        self.url = driver_url(database_url)
        self.schema = checked_schema(schema)
        self._stale: set[AsyncEngine] = set()
        self._may_prepare = True
        self._jobs = self._engine(pool_size)
        self._control = self._engine(control_pool_size)

    def _engine(self, size: int) -> AsyncEngine:
        engine = create_async_engine(
            self.url,
            isolation_level="AUTOCOMMIT",  # so that BEGIN is ours to send
            pool_size=size,
            max_overflow=0,
            pool_timeout=10,
            connect_args={**CONNECT_ARGS, "async_creator_fn": AnsweringConnection.connect},
            hide_parameters=True,  # an error's text must not carry a tenant's payload into a log
            execution_options={"schema_translate_map": {SCHEMA: self.schema}, _OWN: True},
        )

        @event.listens_for(engine.sync_engine, "checkout")
        def checkout(connection: Any, record: Any, proxy: Any) -> None:
            # One connection was found dead: so are the others of that time, in all likelihood.
            if engine in self._stale:
                self._stale.discard(engine)
                raise InvalidatePoolError

        return engine

    async def run(self, work: Callable[[AsyncConnection], Awaitable[T]], *, control: bool = False) -> T:
        """Run `work` in one transaction and commit it.

        Raises what `work` raises (after rolling back), with driver errors translated; `StoreUnavailable` when the
        database is away, out of connections, read-only, or a lock or statement took too long.
        """
        engine = self._control if control else self._jobs
        patience = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        for attempt in range(1, _TRIES + 1):
            connected = committing = broken = False
            try:
                async with engine.connect() as connection:
                    connected = True
                    driver = _driver(connection)
                    try:
                        if _DIRECT not in connection.info:
                            connection.info[_DIRECT] = self._may_prepare and await _let_prepare(driver)
                        await driver.execute(BEGIN)
                        answer = await work(connection)
                        committing = True
                        await driver.commit()
                    except BaseException as error:
                        if broken := await _give_up(connection, driver, error):
                            self._stale.add(engine)
                        raise
                    return answer
            except (DBAPIError, psycopg.Error) as error:
                state = sqlstate(error)
                self._may_prepare = self._may_prepare and state not in _FOREIGN_PLANS
                in_time = asyncio.get_running_loop().time() < patience
                again = state in _LOST_RACES or (broken and not committing and in_time and state != _READ_ONLY)
                if not again or attempt == _TRIES:
                    raise translated(error) from error
            except InvalidRequestError as error:
                # The pool gave up handing out connections, as others found each of them dead in the same moment.
                if connected:
                    raise
                if attempt == _TRIES:
                    raise StoreUnavailable(f"no connection: {error}") from error
            except UnicodeEncodeError as error:
                raise InvalidInput.at("(whole)", "holds a lone surrogate, which the database can't") from error
            except (TimeoutError, OSError) as error:
                raise StoreUnavailable(f"no connection: {error}") from error
            await asyncio.sleep(random.uniform(0, 0.02 * 2**attempt))
        raise AssertionError("unreachable")

    async def check(self) -> None:
        """Raises `SchemaMissing` unless the newest schema is in place, or `StoreUnavailable`."""

        async def work(connection: AsyncConnection) -> str | None:
            present = await connection.exec_driver_sql(f"SELECT to_regclass('{self.schema}.schema_version')")
            if present.scalar() is None:
                return None
            found = await connection.exec_driver_sql(f"SELECT version_num FROM {self.schema}.schema_version")
            return str(found.scalar())

        found, newest = await self.run(work, control=True), newest_revision()
        if found != newest:
            raise SchemaMissing(
                f"schema {self.schema!r} is at {found or 'nothing'}, not {newest}: run `durable-jobs migrate`"
            )

    async def close(self) -> None:
        await self._jobs.dispose()
        await self._control.dispose()
        await WholeConnection.none_unwanted()


async def fetch(
    connection: AsyncConnection, sql: str, parameters: Mapping[str, Any], *, prepare: bool = False
) -> list[dict[str, Any]]:
    """The rows of a statement. In a transaction of our own it goes straight to the driver, at half the cost; in a
    caller's through SQLAlchemy, which has to know of it to commit it.

    `prepare` is for what every job goes through: where no pooler stands between, it is planned once per connection.
    """
    if connection.sync_connection is None or _OWN not in connection.sync_connection.get_execution_options():
        return [dict(row) for row in (await connection.exec_driver_sql(sql, dict(parameters))).mappings()]
    cursor = _driver(connection).cursor(row_factory=dict_row)
    await cursor.execute(sql.encode(), parameters, prepare=prepare)
    return await cursor.fetchall()


def _driver(connection: AsyncConnection) -> psycopg.AsyncConnection[Any]:
    assert connection.sync_connection is not None
    return cast("psycopg.AsyncConnection[Any]", connection.sync_connection.connection.driver_connection)


async def _let_prepare(driver: psycopg.AsyncConnection[Any]) -> bool:
    """Allow prepared statements where the server itself answers. A pooler such as PgBouncer deals out sessions for each
    transaction, and process ids of its own: there none are used."""
    row = await (await driver.execute("SELECT pg_backend_pid()")).fetchone()
    direct = row is not None and row[0] == driver.info.backend_pid
    driver.prepare_threshold = PREPARE_ON_ASK if direct else None
    return direct


async def _give_up(connection: AsyncConnection, driver: psycopg.AsyncConnection[Any], error: BaseException) -> bool:
    """Roll back, or where the connection is of no more use have the pool forget it; whether it is so."""
    stale = isinstance(error, psycopg.Error | DBAPIError) and sqlstate(error) in _STALE
    try:
        await driver.rollback()
    except psycopg.Error:
        stale = True
    if stale:
        await connection.invalidate()
    return stale or driver.closed


def sqlstate(error: DBAPIError | psycopg.Error) -> str | None:
    cause = _cause(error)
    return cause.sqlstate if isinstance(cause, psycopg.Error) else None


def _cause(error: DBAPIError | psycopg.Error) -> BaseException | None:
    return error.orig if isinstance(error, DBAPIError) else error


def translated(error: DBAPIError | psycopg.Error) -> DurableJobsError:
    """The typed error for a driver's, without its statement and parameters, which hold tenants' data."""
    state = sqlstate(error)
    cause = _cause(error)
    constraint = cause.diag.constraint_name if isinstance(cause, psycopg.Error) else None
    if state in _LOST_RACES:
        return RetryTransaction()
    if constraint == "job_attempts_operation_key":
        return OperationKeyConflict()
    if state == "DJ001":
        return IllegalTransition(str(cause.diag.message_primary) if isinstance(cause, psycopg.Error) else None)
    away = state is None and isinstance(cause, psycopg.OperationalError | psycopg.InterfaceError)
    invalidated = isinstance(error, DBAPIError) and error.connection_invalidated
    if invalidated or away or state in _UNAVAILABLE or (state or "")[:2] in _UNAVAILABLE_CLASSES:
        return StoreUnavailable(f"{type(cause).__name__} {state or ''}: {_told(cause)}".strip())
    if isinstance(cause, psycopg.DataError):
        return InvalidInput.at("(whole)", f"holds what the database can't: {_told(cause)}")
    return DurableJobsError(f"the database refused a statement: {type(cause).__name__} {state}: {_told(cause)}")


def _told(cause: BaseException | None) -> str:
    """What the server said, without its detail and context, which hold rows."""
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        return cause.diag.message_primary
    return str(cause)
