"""The worker process of a crash run: the soak's, with points round its drivers, and handlers that keep to a time.

It is forked from a server process that has imported everything, so that a run costs no start of an interpreter:
`start(environment, log)`. The environment is the soak's, and

CRASH_QUEUE, CRASH_RECONCILE_SECONDS   where to work, and how often to sweep
CRASH_POINT                            what is to happen where, see `points`; nothing by default
"""

import asyncio
import multiprocessing
import os
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner

from durable_jobs import JobContext
from examples.research.handler import ResearchProvider, ResearchReport, ResearchRequest
from examples.research.worker import connect_temporal
from tests.crash import points
from tests.crash.shapes import BY_SHAPE, LATER_LINGERS
from tests.soak.shapes import operation_key
from tests.soak.worker import Ask, Call, Note, Plain, die_with_parent, work

STICKY = timedelta(seconds=0.5)
"""Else Temporal keeps the workflows of a killed worker waiting for it for another ten seconds."""


class Signed(Note):
    """The result of a job without a call, and who got it."""

    generation: int


async def _linger(job: JobContext, shape: str) -> None:
    """Time for what the story has in store; later generations leave some to whoever was stopped before them."""
    story = BY_SHAPE.get(shape)  # none: a follow-up
    if story and (job.generation == 1 or story.always):
        await asyncio.sleep(story.lingers)
    elif job.generation > 1:
        await asyncio.sleep(LATER_LINGERS)


class TimedPlain(Plain):
    """Calls nobody."""

    async def run(self, job: JobContext, request: Ask) -> Note:
        await _linger(job, request.shape)
        return Signed(question=request.question, shape=request.shape, generation=job.generation)


class TimedCall(Call):
    """Calls the provider once, after as long as its story wants."""

    async def run(self, job: JobContext, request: Ask) -> ResearchReport:
        await _linger(job, request.shape)
        if request.shape == "hopeless" or (request.shape == "stumbling" and job.attempt == 1):
            raise ValueError("stumbled before the boundary")
        async with job.dispatch(operation_key(request.shape, job.id)) as key:
            return await self.provider.run(ResearchRequest(question=request.question), key=key)


async def _main() -> None:
    wanted = os.environ.get(points.POINT_VARIABLE)
    points.install(points.Target.parse(wanted) if wanted else None)
    provider = ResearchProvider(os.environ["SOAK_PROVIDER_URL"])
    config = (await connect_temporal()).config()
    config["interceptors"] = [points.TellRole()]
    every = timedelta(seconds=float(os.environ["CRASH_RECONCILE_SECONDS"]))
    await work(
        Client(**config),
        os.environ["CRASH_QUEUE"],
        [TimedPlain(), TimedCall(provider)],
        every,
        sticky_queue_schedule_to_start_timeout=STICKY,
        # Half of the time that a worker takes to start; what it guards against is no crash.
        workflow_runner=UnsandboxedWorkflowRunner(),
    )


def _run(environment: Mapping[str, str], log: str) -> None:
    die_with_parent()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    asyncio.run(_main())


_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def start(environment: Mapping[str, str], log: Path) -> ForkServerProcess:
    """A new worker process; its log begins empty."""
    log.touch()
    process = _FORKS.Process(target=_run, args=(dict(environment), str(log)), daemon=True)
    process.start()
    return process
