"""Runs an agent's program as a process of its own: no network, bounded in every resource, gone with its worker.

Linux only. How it is shut in stands in `launcher.py`. Every failure is definite: the process is dead before `run`
returns or raises, and it had no way to act on anything outside.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from activities.runtime import launcher
from activities.runtime.errors import (
    IsolationUnavailable,
    OutcomeInvalid,
    RuntimeCrashed,
    RuntimeRefused,
    RuntimeTimedOut,
)
from activities.runtime.models import AgentRef, RuntimeOutcome, RuntimeRequest, read_object, read_outcome

MIB = 1024 * 1024
MAX_STDERR = 1024
"""How much of the end of stderr an error quotes, in bytes; the rest is read and dropped."""
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")


class AgentProgram(BaseModel):
    """A stand-alone Python program: one JSON object on stdin, one on stdout, exit code 0."""

    model_config = ConfigDict(frozen=True)

    agent: AgentRef
    path: Path


class SubprocessSettings(BaseModel):
    """The limits of one run, and how it is shut in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    isolation: Literal["full", "filter"] = "full"
    """`full`: namespaces, Landlock and the system call filter; refused where the kernel denies one of them.
    `filter`, for hosts that forbid namespaces (a container's default profile does): the filter alone keeps it off the
    network, with Landlock where the kernel has it; its files are bounded one by one, not in sum."""
    wall_seconds: float = Field(default=30, gt=0, le=3600)
    cpu_seconds: int = Field(default=20, ge=1, le=3600)
    memory_bytes: int = Field(default=512 * MIB, ge=64 * MIB)
    """Of address space."""
    file_bytes: int = Field(default=16 * MIB, ge=0)
    """The largest file; where isolation is `full`, also the size of the working folder."""
    open_files: int = Field(default=64, ge=16)
    output_bytes: int = Field(default=MIB, ge=1024)


class SubprocessAdapter:
    """A `RuntimeAdapter` over the programs that it is given."""

    def __init__(self, programs: Iterable[AgentProgram], settings: SubprocessSettings | None = None) -> None:
        self._programs = {program.agent: program.path for program in programs}
        self._settings = settings or SubprocessSettings()
        self._python = os.path.realpath(sys.executable)

    async def run(self, request: RuntimeRequest, *, key: str) -> RuntimeOutcome:
        """One run in a fresh process and a fresh folder.

        Raises `RuntimeRefused` (unknown agent, or it declined), `IsolationUnavailable`, `RuntimeTimedOut`,
        `RuntimeCrashed`, `OutcomeInvalid`. Cancelled, it kills the process before it lets go.
        """
        path = self._programs.get(request.agent)
        if path is None:
            raise RuntimeRefused(f"agent: {request.agent.name} {request.agent.version} is not hosted here")
        try:
            # What runs is a copy of the bytes that the digest is of, whatever becomes of the file meanwhile.
            program = await asyncio.to_thread(path.read_bytes)
        except OSError as error:
            raise RuntimeRefused(f"agent: its program can't be read: {error.strerror}") from None
        with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
            work = _lay_out(Path(folder), program)
            output = await self._run(work, request.encoded(key=key))
        value = read_object(output, "stdout")
        return read_outcome(value, request, build=f"sha256:{hashlib.sha256(program).hexdigest()}")

    async def _run(self, work: Path, text: bytes) -> bytes:
        limit = self._settings.wall_seconds
        async with _process(self._python, self._plan(work)) as (process, status):
            try:
                async with asyncio.timeout(limit), asyncio.TaskGroup() as tasks:
                    tasks.create_task(_write(process, text))
                    output = tasks.create_task(_read(process, self._settings.output_bytes))
                    errors = tasks.create_task(_tail(process))
                    code = await process.wait()
            except TimeoutError:
                raise RuntimeTimedOut(f"killed after {limit:g} s", retryable=True) from None
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            if problem := os.read(status, 1024):
                raise IsolationUnavailable(f"isolation {self._settings.isolation}: {problem.decode(errors='replace')}")
        if code == -signal.SIGXCPU:
            raise RuntimeTimedOut(f"used up its {self._settings.cpu_seconds} s of processor time")
        if code != 0:
            said = errors.result().decode(errors="replace")
            # SIGKILL is the kernel's, short of memory, or an operator's: it says nothing of the program.
            raise RuntimeCrashed(f"{_ending(code)}; stderr ends: {said}", retryable=code == -signal.SIGKILL)
        return output.result()

    def _plan(self, work: Path) -> launcher.Plan:
        program = work.parent / "program.py"
        prefix = sys.base_prefix
        own = [prefix] if prefix != "/usr" else [self._python]
        return {
            "worker_pid": os.getpid(),
            "status_fd": -1,
            "namespaces": self._settings.isolation == "full",
            "work": str(work),
            # -I: neither the environment nor the folder adds to the import path; -S: no site-packages; -B: no .pyc.
            "command": [self._python, "-I", "-S", "-B", str(program)],
            "environment": {"HOME": str(work), "TMPDIR": str(work), "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            "readable": [*own, *SYSTEM_LIBRARIES, str(program)],
            "cpu_seconds": self._settings.cpu_seconds,
            "memory_bytes": self._settings.memory_bytes,
            "file_bytes": self._settings.file_bytes,
            "open_files": self._settings.open_files,
        }


def _lay_out(folder: Path, program: bytes) -> Path:
    """The working folder, with the program beside it, where the agent can't write."""
    file = folder / "program.py"
    file.write_bytes(program)
    file.chmod(stat.S_IRUSR)
    work = folder / "work"
    work.mkdir(mode=0o700)
    return work


@contextlib.asynccontextmanager
async def _process(python: str, plan: launcher.Plan) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A started process, leader of its own group, and the pipe of its status; dead and reaped at the end."""
    status, status_end = os.pipe()
    try:
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, "-I", "-S", "-B", launcher.__file__, json.dumps(plan | {"status_fd": status_end})),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"LANG": "C.UTF-8"},
                pass_fds=(status_end,),
                start_new_session=True,
            )
        finally:
            os.close(status_end)
        try:
            yield process, status
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            await _reap(process)
    finally:
        os.close(status)


async def _reap(process: asyncio.subprocess.Process) -> None:
    """Waits for a killed process, and empties its pipes so that they close; a cancellation meanwhile waits too."""
    assert process.stdin
    assert process.stdout
    assert process.stderr
    process.stdin.close()
    reaping = asyncio.gather(process.wait(), _drain(process.stdout), _drain(process.stderr))
    try:
        await asyncio.shield(reaping)
    except asyncio.CancelledError:
        await reaping
        raise


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


async def _write(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stdin
    # An agent may answer without having read all of it.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(text)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, limit: int) -> bytes:
    assert process.stdout
    read = bytearray()
    while chunk := await process.stdout.read(65536):
        read += chunk
        if len(read) > limit:
            raise OutcomeInvalid(f"stdout: must be at most {limit} bytes")
    return bytes(read)


async def _tail(process: asyncio.subprocess.Process) -> bytes:
    assert process.stderr
    end = b""
    while chunk := await process.stderr.read(65536):
        end = (end + chunk)[-MAX_STDERR:]
    return end


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
