"""What the embedded servers need of the operating system: processes, ports, a lock, a user that isn't root."""

import contextlib
import fcntl
import json
import logging
import os
import pwd
import random
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import IO

import psutil

logger = logging.getLogger("durable_jobs.dev")

STOP_TIMEOUT = 20.0


class DevStackError(Exception):
    """The embedded servers could not do what was asked; the message says which server, and why."""


class DevStackInUseError(DevStackError):
    """Another process runs the servers of this folder; `addresses` says where they listen, once they do."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        self.folder = folder
        self.addresses = dict(addresses)
        where = "".join(f"\n  {name}: {address}" for name, address in self.addresses.items())
        super().__init__(f"a stack is already running on {folder}{where or ' (and has yet to say where it listens)'}")


# Runs in the child, in place of what would otherwise be a preexec function (unsafe beside threads): drops root, has the
# kernel end the server when its parent dies (1 is PR_SET_PDEATHSIG), then becomes the server.
_LAUNCHER = """
import ctypes, os, sys
parent, end_signal, uid, gid = map(int, sys.argv[1:5])
if uid:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, end_signal, 0, 0, 0)
if os.getppid() != parent:
    sys.exit("the parent process is gone")
os.execv(sys.argv[5], sys.argv[5:])
"""

# The kernel's signal is bound to the thread that forked, not to the process: all servers are forked by this one thread,
# so that one started from a passing thread outlives it.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="durable-jobs-servers")


def spawn(
    command: Sequence[str], log: IO[bytes], *, end_signal: signal.Signals, user: pwd.struct_passwd | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` as a child that writes to `log` and gets `end_signal` should this process die first."""
    ids = (str(user.pw_uid), str(user.pw_gid)) if user else ("0", "0")
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(end_signal)), *ids, *command]
    return _spawner.submit(
        # A session of its own: Ctrl-C at the terminal reaches the parent alone, which stops the servers in order.
        lambda: subprocess.Popen(
            launcher, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    ).result()


class ServerProcess:
    """One server, started and ended any number of times, always by the same command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        stop_signal: signal.Signals,
        user: pwd.struct_passwd | None = None,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.stop_signal = stop_signal
        self._user = user
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while the server runs, else None."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Fork the server unless it runs; `wait_until` tells when it serves."""
        if self.pid is None:
            with self.log.open("ab") as log:
                self._process = spawn(self.command, log, end_signal=self.stop_signal, user=self._user)

    def wait_until(self, ready: Callable[[], bool], timeout: float = 30.0) -> None:
        """Return once `ready()`; raise with the end of the log when the server dies or takes longer than `timeout`."""
        deadline = monotonic() + timeout
        while not ready():
            if self.pid is None:
                raise self.failure("ended while starting")
            if monotonic() > deadline:
                raise self.failure(f"did not serve within {timeout:.0f} s")
            sleep(0.02)

    def send(self, signum: signal.Signals) -> None:
        """Send `signum` if the server runs."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signum)

    def stop(self, signum: signal.Signals | None = None) -> None:
        """End the server by `signum` (its own orderly signal by default) and wait; kill it when it won't."""
        self.send(signum or self.stop_signal)
        self.join()

    def join(self) -> None:
        """Wait for a server that was told to stop; kill it when it won't."""
        if self._process is None:
            return
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not stop within %.0f s and is killed", self.name, STOP_TIMEOUT)
            self._process.kill()
            self._process.wait()

    def failure(self, what: str) -> DevStackError:
        """An error that says `what` happened and shows the end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-12:] if self.log.exists() else []
        return DevStackError("\n  ".join([f"{self.name} {what}; the end of {self.log}:", *lines]))


def end_leftover(pid: int, command: Sequence[str]) -> None:
    """End a server that outlived a killed parent: only if the process `pid` runs exactly `command`."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        process = psutil.Process(pid)
        if process.cmdline() != list(command):
            return
        logger.info("ending process %d, left over from an earlier run", pid)
        for signum in (signal.SIGINT, signal.SIGKILL):
            process.send_signal(signum)
            deadline = monotonic() + STOP_TIMEOUT
            while monotonic() < deadline:
                # A zombie has ended. It may stay one: in a container its new parent often never asks for it.
                if process.status() == psutil.STATUS_ZOMBIE:
                    return
                sleep(0.02)


class FolderLock:
    """A folder's lock. The kernel lets go of it when its holder dies, however it dies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: IO[str] | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def acquire(self) -> None:
        """Take the lock, or raise `DevStackInUseError` with what its holder has announced."""
        file = (self._folder / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            announced = file.read()
            file.close()
            raise DevStackInUseError(self._folder, json.loads(announced) if announced else {}) from None
        self._file = file
        self.announce({})

    def announce(self, addresses: Mapping[str, str]) -> None:
        """Tell whoever is refused this lock where the servers listen."""
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(json.dumps(addresses) if addresses else "")
        self._file.flush()

    def release(self) -> None:
        """Give the lock back, if held. The file stays: removing it would let two processes hold two locks."""
        if self._file is not None:
            self.announce({})
            self._file.close()
            self._file = None


def free_port(*wanted: int) -> int:
    """The first of the `wanted` ports of 127.0.0.1 that is free, else a random one.

    Random ports are drawn below the range that outgoing connections are given: a client that keeps calling a stopped
    server's port from within that range can end up connected to itself, and the server then can't have its port back.
    """
    for port in (*wanted, *random.sample(range(20000, 32000), 100)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise DevStackError("no free port on 127.0.0.1")


def unprivileged_user() -> pwd.struct_passwd | None:
    """The OS user that Postgres, which refuses to run as root, is run as; None where this process isn't root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("nobody")
    except KeyError:
        raise DevStackError("Postgres does not run as root, and there is no user 'nobody' to run it as") from None


def make_reachable(path: Path) -> None:
    """Let other OS users pass through (not list) the folders that lead to `path`, which Postgres must get at."""
    for folder in path.resolve().parents:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & stat.S_IXOTH:
            logger.warning("%s is made passable for other users (o+x), so that Postgres can run as one", folder)
            folder.chmod(mode | stat.S_IXOTH)
