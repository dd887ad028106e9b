"""The embedded stack: a Postgres and a Temporal server as child processes, for development and for tests.

    with DevStack(Path(".durable-jobs")) as stack:
        print(stack.database_url, stack.temporal_address)

Where `DURABLE_JOBS_DATABASE_URL` or `TEMPORAL_ADDRESS` is set, that server is used in place of the embedded one, and is
never stopped or restarted from here. Both embedded servers listen on 127.0.0.1 alone.

What the folder holds: `postgres/` and `temporal.db` (the data), `postgres.log` and `temporal.log` (of the latest run),
`state.json` (ports and password, so that addresses stay the same, and the processes of the latest run), `lock`.
"""

import json
import os
import secrets
import signal
import socket
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg

from durable_jobs._processes import (
    DevStackError,
    DevStackInUseError,
    FolderLock,
    ServerProcess,
    end_leftover,
    free_port,
)
from durable_jobs._servers import NAMESPACE, PostgresServer, TemporalServer

__all__ = ["DATABASE_URL_VARIABLE", "TEMPORAL_ADDRESS_VARIABLE", "DevStack", "DevStackError", "DevStackInUseError"]

DATABASE_URL_VARIABLE = "DURABLE_JOBS_DATABASE_URL"
TEMPORAL_ADDRESS_VARIABLE = "TEMPORAL_ADDRESS"

_OLDEST_POSTGRES = 15
# Wanted when free, and below the range of outgoing connections (see `free_port`).
_POSTGRES_PORT, _TEMPORAL_PORT, _UI_PORT = 15432, 7233, 8233


@dataclass
class _State:
    """What a folder remembers from one run to the next."""

    password: str = field(default_factory=lambda: secrets.token_hex(8))
    ports: dict[str, int] = field(default_factory=dict)
    processes: list[tuple[int, list[str]]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def save(self, path: Path) -> None:
        new = path.with_name(f"{path.name}.new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(asdict(self), indent=2))
        new.replace(path)


class DevStack:
    """The servers of one folder, from `start()` to `stop()`.

    `persistent=True` (development) keeps all data on disk, synced, and the same addresses from run to run.
    `persistent=False` (tests) keeps Temporal's data in memory, doesn't sync Postgres to disk, has no UI, and takes
    random ports; whoever made the folder removes it.
    With `migrate` the schema is brought up to date on start.
    """

    def __init__(self, folder: Path, *, persistent: bool = True, migrate: bool = True) -> None:
        self.folder = folder.absolute()
        self._persistent = persistent
        self._migrate = migrate
        self._lock = FolderLock(self.folder)
        self._state = _State()
        self._outside_database = os.environ.get(DATABASE_URL_VARIABLE) or None
        self._outside_temporal = os.environ.get(TEMPORAL_ADDRESS_VARIABLE) or None
        self._postgres: PostgresServer | None = None
        self._temporal: TemporalServer | None = None

    @property
    def database_url(self) -> str:
        """`postgresql://…`, of the database that the schema lives in."""
        return self._outside_database or self._own_postgres().url

    @property
    def temporal_address(self) -> str:
        """`host:port` of Temporal's front end."""
        return self._outside_temporal or self._own_temporal().address

    @property
    def ui_url(self) -> str | None:
        """Where a browser sees the workflows; None for a server that isn't ours or has no UI."""
        return None if self._outside_temporal else self._own_temporal().ui_url

    @property
    def namespace(self) -> str:
        """The Temporal namespace."""
        return (self._outside_temporal and os.environ.get("TEMPORAL_NAMESPACE")) or NAMESPACE

    @property
    def addresses(self) -> dict[str, str]:
        """All of the above that there is, by name."""
        found = {
            "database_url": self.database_url,
            "temporal_address": self.temporal_address,
            "namespace": self.namespace,
            "ui_url": self.ui_url,
        }
        return {name: address for name, address in found.items() if address}

    def start(self) -> Self:
        """Start what is not running, and return once both servers serve. On any failure nothing is left running.

        Raises `DevStackInUseError` while another process, or another `DevStack`, runs the servers of this folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.acquire()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        self._lock.announce(self.addresses)
        return self

    def stop(self) -> None:
        """Stop the servers that are ours, both at once, and give the folder back. Harmless when nothing runs."""
        for server in self._servers():
            server.send(server.stop_signal)
        for server in self._servers():
            server.join()
        if self._lock.held:
            self._remember()
            self._lock.release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise `DevStackError` if a server of ours has ended by itself."""
        for server in self._servers():
            if server.pid is None:
                raise server.failure("has ended")

    def stop_postgres(self, *, immediate: bool = False) -> None:
        """Stop Postgres; `immediate` as in a crash, leaving recovery to the next start."""
        self._own_postgres().stop(signal.SIGQUIT if immediate else None)

    def start_postgres(self) -> None:
        """Start a stopped Postgres, on its port and data, and return once it serves."""
        self._run(self._own_postgres())

    def restart_postgres(self, *, immediate: bool = False) -> None:
        """`stop_postgres`, then `start_postgres`."""
        self.stop_postgres(immediate=immediate)
        self.start_postgres()

    def stop_temporal(self, *, immediate: bool = False) -> None:
        """Stop Temporal; `immediate` kills it. Without persistence all its workflows are gone with it."""
        self._own_temporal().stop(signal.SIGKILL if immediate else None)

    def start_temporal(self) -> None:
        """Start a stopped Temporal, on its port and data, and return once it serves."""
        self._run(self._own_temporal())

    def restart_temporal(self, *, immediate: bool = False) -> None:
        """`stop_temporal`, then `start_temporal`."""
        self.stop_temporal(immediate=immediate)
        self.start_temporal()

    def _start(self) -> None:
        self._state = _State.load(self._state_file)
        for pid, command in self._state.processes:
            end_leftover(pid, command)
        for log in ("postgres.log", "temporal.log"):
            (self.folder / log).unlink(missing_ok=True)
        if not self._outside_database:
            self._postgres = PostgresServer(
                self.folder, self._port("postgres", _POSTGRES_PORT), self._state.password, durable=self._persistent
            )
        if not self._outside_temporal:
            self._temporal = TemporalServer(
                self.folder,
                self._port("temporal", _TEMPORAL_PORT),
                self._port("ui", _UI_PORT) if self._persistent else None,
                database=self.folder / "temporal.db" if self._persistent else None,
            )
        self._remember()
        # Both are forked before either is waited for: each then starts in the other's shadow.
        if self._temporal:
            self._temporal.start()
        if self._postgres:
            self._postgres.prepare()
            self._postgres.start()
        self._remember()
        if self._postgres:
            self._postgres.wait()
        else:
            _check_version(self.database_url)
        if self._migrate:
            from durable_jobs.store.migrate import migrate  # noqa: PLC0415 - a stack without a schema needs no SQLAlchemy

            try:
                migrate(self.database_url)
            except Exception as error:
                raise DevStackError(f"the schema could not be brought up to date: {error}") from error
        if self._temporal:
            self._temporal.wait()
        else:
            _check_reachable(self.temporal_address)

    def _run(self, server: PostgresServer | TemporalServer) -> None:
        server.start()
        self._remember()
        server.wait()

    def _port(self, name: str, preferred: int) -> int:
        if self._persistent:
            wanted = [self._state.ports[name], preferred] if name in self._state.ports else [preferred]
        else:
            wanted = []
        self._state.ports[name] = free_port(*wanted)
        return self._state.ports[name]

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.json"

    def _remember(self) -> None:
        self._state.processes = [(server.pid, server.command) for server in self._servers() if server.pid]
        self._state.save(self._state_file)

    def _servers(self) -> list[ServerProcess]:
        return [server for server in (self._temporal, self._postgres) if server]

    def _own_postgres(self) -> PostgresServer:
        if self._postgres is None:
            raise DevStackError(_not_ours("Postgres", self._outside_database and DATABASE_URL_VARIABLE))
        return self._postgres

    def _own_temporal(self) -> TemporalServer:
        if self._temporal is None:
            raise DevStackError(_not_ours("Temporal", self._outside_temporal and TEMPORAL_ADDRESS_VARIABLE))
        return self._temporal


def _not_ours(name: str, variable: str | None) -> str:
    return f"{name} is the server that {variable} names, not ours to touch" if variable else f"{name} was not started"


def _check_version(database_url: str) -> None:
    try:
        with psycopg.connect(database_url, connect_timeout=10) as connection:
            version = connection.info.server_version // 10000
    except psycopg.OperationalError as error:
        raise DevStackError(f"no Postgres answers at {DATABASE_URL_VARIABLE}: {error}") from error
    if version < _OLDEST_POSTGRES:
        raise DevStackError(f"PostgreSQL {_OLDEST_POSTGRES} or later is needed; {DATABASE_URL_VARIABLE} has {version}")


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise DevStackError(f"no Temporal answers at {TEMPORAL_ADDRESS_VARIABLE}={address}: {error}") from error
