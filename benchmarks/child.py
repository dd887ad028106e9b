"""One process of a measurement, a client's or a worker's: `python -m benchmarks.child`. Commands come as lines of JSON
on standard input, answers go as lines of JSON to standard output; the end of the input ends the process."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

from temporalio.client import Client

from benchmarks.shapes import SHAPES, Body, Submitter, make_submitter, make_worker
from durable_jobs.temporal.keeper import LeaseKeeper

Command = Callable[..., Awaitable[Any]]


class ClientCommands:
    """What a client's process does when told."""

    def __init__(self, submitter: Submitter) -> None:
        self._submitter = submitter
        self._prefix = uuid4().hex
        self._count = 0

    def _key(self) -> str:
        self._count += 1
        return f"{self._prefix}-{self._count}"

    async def run(self, jobs: int, submitters: int) -> float:
        """Run so many jobs from so many submitters, each waiting for its job's result; the seconds it took."""
        left = iter(range(jobs))

        async def submitter() -> None:
            for _ in left:
                await self._submitter.submit(self._key())

        began = time.perf_counter()
        await asyncio.gather(*(submitter() for _ in range(submitters)))
        return time.perf_counter() - began

    async def one(self) -> float:
        """The seconds from the submission of one job to its result."""
        began = time.perf_counter()
        await self._submitter.submit(self._key())
        return time.perf_counter() - began

    async def hold(self, jobs: int, lease_seconds: float | None = None) -> int:
        """Submit so many jobs without waiting for them."""
        slots = asyncio.Semaphore(50)
        options = {"lease_seconds": lease_seconds} if lease_seconds else {}

        async def one() -> None:
            async with slots:
                await self._submitter.submit(self._key(), wait=False, **options)

        await asyncio.gather(*(one() for _ in range(jobs)))
        return jobs

    async def history(self) -> list[str]:
        """The types of the events in one job's history."""
        id_ = await self._submitter.submit(self._key())
        handle = self._submitter.temporal.get_workflow_handle(id_)
        await handle.result()  # the row is written before the workflow closes
        history = await handle.fetch_history()
        return [event.WhichOneof("attributes") for event in history.events]


class WorkerCommands:
    """What a worker's process tells when asked."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.ticks: list[float] = []

    def watch_keeper(self) -> None:
        """Time each tick of the lease keeper, on its own thread."""
        renew = LeaseKeeper._renew

        def timed(keeper: LeaseKeeper, *arguments: Any) -> None:
            began = time.perf_counter()
            renew(keeper, *arguments)
            self.ticks.append(time.perf_counter() - began)

        LeaseKeeper._renew = timed  # type: ignore[method-assign]

    async def running(self) -> int:
        """How many bodies are at work."""
        return self._body.running

    async def renewals(self) -> list[float]:
        """The seconds of each tick of the lease keeper since the last time it was asked."""
        ticks, self.ticks = self.ticks, []
        return ticks


async def obey(commands: object) -> None:
    """Do as the lines on standard input say, one at a time, until they end."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"ready": os.getpid()}), flush=True)
    while line := await reader.readline():
        command = json.loads(line)
        do: Command = getattr(commands, command.pop("do"))
        print(json.dumps({"answer": await do(**command)}), flush=True)


async def main(arguments: argparse.Namespace) -> None:
    temporal = await Client.connect(arguments.temporal)
    async with AsyncExitStack() as stack:
        if arguments.role == "client":
            submitter = await make_submitter(arguments.shape, temporal, arguments.database, arguments.queue, stack)
            await obey(ClientCommands(submitter))
            return
        body = Body(arguments.seconds, hold=arguments.hold)
        commands = WorkerCommands(body)
        commands.watch_keeper()
        worker = await make_worker(
            arguments.shape, temporal, arguments.database, arguments.queue, arguments.slots, body, stack
        )
        async with worker:
            await obey(commands)
            if arguments.hold:
                os._exit(0)  # what it holds is never let go


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.child", description=__doc__)
    parser.add_argument("role", choices=("client", "worker"))
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--temporal", required=True)
    parser.add_argument("--database", required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--slots", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.0, help="of each job's work")
    parser.add_argument("--hold", action="store_true", help="no job ends")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(parse()))
