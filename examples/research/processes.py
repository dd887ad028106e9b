"""The demo's own child processes, each with a log file, all ended with the demo."""

import asyncio
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_SECONDS = 20


class DemoError(Exception):
    """The demo can't go on; the message says why."""


class Child:
    """One running process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._log = log

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    async def prints(self, pattern: str, seconds: float = 20) -> str:
        """Waits until the process has printed the pattern, and returns its first group."""
        for _ in range(int(seconds / 0.05)):
            if found := re.search(pattern, self._log.read_text("utf-8", "replace")):
                return found[1]
            self.check()
            await asyncio.sleep(0.05)
        raise self._error("is not ready")

    def check(self) -> None:
        """Raises when the process has ended by itself."""
        if not self.runs:
            raise self._error(f"ended by itself with exit code {self._process.returncode}")

    def kill_at_once(self) -> None:
        """SIGKILL, without waiting for the end."""
        if self.runs:
            self._process.kill()

    def freeze(self) -> None:
        """SIGSTOP: the process stands still, until `thaw` or its end."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL: the process gets no chance to tell anybody."""
        self.kill_at_once()
        await self._process.wait()

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL when that takes too long; returns the exit code."""
        if self.runs:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                await self.kill()
        assert self._process.returncode is not None
        return self._process.returncode

    def _error(self, what: str) -> DemoError:
        end = self._log.read_text("utf-8", "replace")[-3000:]
        return DemoError(f"the {self.name} (process {self.pid}) {what}; the end of its log:\n{end}")


class Children:
    """Starts modules of this interpreter as processes; leaving the context stops those that still run, last first."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self.environment = dict(environment)
        self._children: list[Child] = []

    async def start(self, name: str, module: str, *arguments: str) -> Child:
        """Starts `python -m module`; what it prints goes to its log file."""
        log = self._folder / f"{len(self._children)}-{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                # A session of its own: Ctrl-C at the terminal reaches the demo alone, which stops them in order.
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raises when a process has ended by itself. Those that were killed on purpose are dropped first."""
        for child in self._children:
            child.check()

    async def kill(self, child: Child) -> None:
        self._children.remove(child)
        await child.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for child in reversed(self._children):
                await child.stop()
        finally:
            # Whoever interrupts even the stopping gets the short way.
            for child in self._children:
                child.kill_at_once()
