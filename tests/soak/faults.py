"""The worker processes of a soak, and what is done to them and to the servers, by a plan drawn from the seed."""

import asyncio
import contextlib
import random
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from durable_jobs.dev import DevStack

POLLING_SECONDS = 60.0
"""How long a worker may take from its start until it polls, while the servers are up."""
ENDING_SECONDS = 25.0
"""How long one may take to end after SIGTERM: its grace period, and the writing of its outcomes."""

WEIGHTS = {
    "kill_worker": 5,
    "stop_worker": 4,
    "roll_worker": 4,
    "restart_postgres": 4,
    "kill_backends": 3,
    "restart_temporal": 1,
    "kill_temporal": 1,
}


@dataclass(frozen=True)
class Fault:
    """One step of the plan: `pick` chooses the worker, `seconds` is how long it is stopped, or Temporal away."""

    at: float
    kind: str
    pick: int
    seconds: float


def draw_plan(chance: random.Random, seconds: float) -> list[Fault]:
    """Faults every few seconds until `seconds`, the same for the same state of `chance`."""
    kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
    plan: list[Fault] = []
    at = chance.uniform(3, 5)
    while at < seconds:
        (kind,) = chance.choices(kinds, weights)
        # Past the longest lease: the keeper of a stopped worker wakes up to leases that are lost.
        away = chance.uniform(5.5, 9) if kind == "stop_worker" else chance.uniform(0, 2.5)
        plan.append(Fault(at, kind, chance.randrange(1_000_000), away))
        at += chance.uniform(2.5, 5.5)
    return plan


class WorkerProcess:
    """One process of `tests.soak.worker`, and its log."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.pid = process.pid
        self.name = log.stem
        self.resuming: asyncio.Task[None] | None = None
        """While it is stopped: who lets it go on."""
        self._process = process
        self._log = log
        self._polled = False

    @property
    def runs(self) -> bool:
        return self._process.returncode is None

    @property
    def polls(self) -> bool:
        """Whether it has come so far as to poll."""
        self._polled = self._polled or "polling" in self._log.read_text("utf-8", "replace").splitlines()
        return self._polled

    def tell_where(self) -> None:
        """Have it write to its log where each of its tasks stands."""
        self._send(signal.SIGUSR1)

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP, and after so long SIGCONT."""
        self.resuming = asyncio.create_task(self._stopped(seconds))

    async def _stopped(self, seconds: float) -> None:
        self._send(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._send(signal.SIGCONT)
            self.resuming = None

    async def kill(self) -> None:
        """SIGKILL: the process gets no chance to tell anybody."""
        self._send(signal.SIGKILL)
        await self._process.wait()

    async def end(self) -> int:
        """SIGTERM, and SIGKILL when that takes too long; returns the exit code."""
        if self.resuming:
            await asyncio.wait({self.resuming})
        self._send(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), ENDING_SECONDS)
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


@dataclass
class Fleet:
    """Keeps a number of worker processes alive, as a supervisor would, and does to them and the servers what is due."""

    folder: Path
    environment: Mapping[str, str]
    stack: DevStack
    size: int
    workers: list[WorkerProcess] = field(default_factory=list)
    """Those that are to be alive."""
    started: list[WorkerProcess] = field(default_factory=list)
    """All that there ever were."""
    counts: Counter[str] = field(default_factory=Counter)
    ended_while_starting: int = 0
    problems: list[str] = field(default_factory=list)

    async def start(self) -> None:
        """Returns once all workers poll."""
        for _ in range(self.size):
            await self._start_one()
        await self.all_polling()

    async def _start_one(self) -> None:
        log = self.folder / f"worker-{len(self.started) + 1}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tests.soak.worker",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self.environment),
                start_new_session=True,  # Ctrl-C reaches the soak alone
            )
        worker = WorkerProcess(process, log)
        self.started.append(worker)
        self.workers.append(worker)

    async def supervise(self) -> None:
        """Replace workers that end by themselves; only one that has yet to poll may, when a server is away."""
        while True:
            await asyncio.sleep(0.5)
            for worker in [each for each in self.workers if not each.runs]:
                self.workers.remove(worker)
                if worker.polls:
                    self.problems.append(f"{worker} ended by itself")
                else:
                    self.ended_while_starting += 1
                await self._start_one()

    async def all_polling(self) -> None:
        """Returns once every worker polls, or after `POLLING_SECONDS`: then each one that doesn't is a problem."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLLING_SECONDS):
                while not all(worker.polls for worker in self.workers):  # noqa: ASYNC110 - a log file tells nobody
                    await asyncio.sleep(0.1)
        for worker in self.workers:
            if not worker.polls:
                worker.tell_where()
                self.problems.append(f"{worker} does not poll after {POLLING_SECONDS:g} s, with all servers up")

    def alive(self) -> set[int]:
        """The process ids of the workers that may still send."""
        return {worker.pid for worker in self.started if worker.runs}

    async def inject(self, fault: Fault) -> None:
        """Do what the plan says, and return once the servers are up again; a stopped worker goes on by itself."""
        self.counts[fault.kind] += 1
        match fault.kind:
            case "kill_worker":
                worker = self._pick(fault)
                self.workers.remove(worker)
                await worker.kill()
                await self._start_one()
            case "stop_worker":
                self._pick(fault).stop_for(fault.seconds)
            case "roll_worker":
                await self.roll(self._pick(fault))
            case "restart_postgres":
                await asyncio.to_thread(self.stack.restart_postgres, immediate=True)
            case "kill_backends":
                await asyncio.to_thread(kill_backends, self.stack.database_url)
            case "restart_temporal" | "kill_temporal":
                immediate = fault.kind == "kill_temporal"
                await asyncio.to_thread(self.stack.stop_temporal, immediate=immediate)
                await asyncio.sleep(fault.seconds)
                await asyncio.to_thread(self.stack.start_temporal)

    def _pick(self, fault: Fault) -> WorkerProcess:
        """A worker that polls and isn't stopped, if there is one: a fault should strike work."""
        ready = [each for each in self.workers if each.polls and not each.resuming]
        chosen = ready or self.workers
        return chosen[fault.pick % len(chosen)]

    async def roll(self, worker: WorkerProcess) -> None:
        """Start the next one, then SIGTERM: what a deployment does. It has to end by itself, with exit code 0."""
        self.workers.remove(worker)
        await self._start_one()
        polled = worker.polls
        if (code := await worker.end()) != 0 and polled:
            self.problems.append(f"{worker} ended with {code} after SIGTERM")

    async def calm_down(self) -> None:
        """The faults are over: let everybody go on, then replace each worker, so that no sender of before is left."""
        for worker in self.workers:
            if worker.resuming:
                await asyncio.wait({worker.resuming})
        await self.all_polling()
        for worker in list(self.workers):
            await self.roll(worker)
        await self.all_polling()

    async def aclose(self) -> None:
        """End all workers, the short way."""
        for worker in self.started:
            if worker.resuming:
                worker.resuming.cancel()
            if worker.runs:
                await worker.kill()


def kill_backends(database_url: str) -> None:
    """Terminate every session of the server but this one."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        )
