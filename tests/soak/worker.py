"""The soak's worker process: `python -m tests.soak.worker`. It works until SIGTERM.

DURABLE_JOBS_DATABASE_URL, TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE   the servers
SOAK_PROVIDER_URL                                                 the provider
SOAK_GRACE_SECONDS                                                how long handlers may run on after SIGTERM
"""

import asyncio
import ctypes
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from pydantic import BaseModel
from temporalio.client import Client
from temporalio.worker import Worker

from durable_jobs import DurableJobsPlugin, FollowUp, HaltUnsafe, Job, JobContext, JobHandler, ProviderState
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from examples.research.handler import ResearchProvider, ResearchReport, ResearchRequest
from examples.research.worker import connect_temporal
from tests.soak.shapes import CHILD, QUEUE, operation_key

RECONCILE_EVERY = timedelta(seconds=5)
SLOTS = 20


class Ask(BaseModel, extra="forbid"):
    """The payload of every job."""

    shape: str
    question: str


class Note(BaseModel):
    """The result of a job without a call."""

    question: str
    shape: str


class Plain(JobHandler[Ask, Note]):
    """Calls nobody."""

    job_type = "soak-plain"
    consequential = False

    async def run(self, job: JobContext, request: Ask) -> Note:
        await asyncio.sleep(random.uniform(0, 0.5))
        return Note(question=request.question, shape=request.shape)


class Call(JobHandler[Ask, ResearchReport]):
    """Calls the provider once under the job's operation key, unless its shape says that it doesn't get there."""

    job_type = "soak-call"
    consequential = False

    def __init__(self, provider: ResearchProvider) -> None:
        self.provider = provider

    async def run(self, job: JobContext, request: Ask) -> ResearchReport:
        await asyncio.sleep(random.uniform(0, 0.3))
        if request.shape == "hopeless" or (request.shape == "stumbling" and job.attempt == 1):
            raise ValueError("stumbled before the boundary")
        if request.shape == "halting":
            raise HaltUnsafe("not to be moved on")
        if request.shape == "cancelled":
            await asyncio.sleep(random.uniform(0, 1))
        async with job.dispatch(operation_key(request.shape, job.id)) as key:
            if request.shape == "hesitant":
                await asyncio.sleep(random.uniform(2, 5))
            return await self.provider.run(ResearchRequest(question=request.question), key=key)

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[ResearchReport]:
        return await self.provider.state(operation_key)

    def follow_ups(self, job: Job, result: ResearchReport) -> Sequence[FollowUp]:
        if job.payload["shape"] != "parent":
            return ()
        fields = {"lease_seconds": job.lease_seconds, "backoff_base_seconds": 0.2, "max_attempts": 50}
        payload = {"shape": CHILD, "question": job.payload["question"]}
        return [
            FollowUp(name="note", job_type=Plain.job_type, payload=payload, **fields),
            FollowUp(name="call", job_type=Call.job_type, payload=payload, **fields),
        ]


def die_with_parent() -> None:
    """Have the kernel kill this process, were it stopped at the time, once its parent is gone (1: PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)


def tell_where() -> None:
    """Write to the log where each task stands."""
    for task in asyncio.all_tasks():
        task.print_stack(limit=12)


async def all_of_it_runs() -> None:
    """The plugin starts after `async with` has begun; its keeper is the last but one of what it starts."""
    while not any(thread.name == "durable-jobs-lease-keeper" for thread in threading.enumerate()):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def work(
    client: Client, queue: str, handlers: Sequence[JobHandler[Any, Any]], reconcile_every: timedelta, **options: Any
) -> None:
    """Works until SIGTERM, then lets the attempts in hand come to their end; `options` are the Temporal worker's."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, tell_where)
    plugin = DurableJobsPlugin(
        os.environ["DURABLE_JOBS_DATABASE_URL"],
        handlers,
        grace_seconds=float(os.environ["SOAK_GRACE_SECONDS"]),
        reconcile_every=reconcile_every,
        reconciliation=ReconciliationPolicy(lookup_timeout=5),
    )
    async with Worker(client, task_queue=queue, plugins=[plugin], max_concurrent_activities=SLOTS, **options):
        await all_of_it_runs()
        print("polling", flush=True)
        await stop.wait()
        print("stopping", flush=True)


async def main() -> None:
    """The soak's own handlers, on its own queue."""
    provider = ResearchProvider(os.environ["SOAK_PROVIDER_URL"])
    client = await connect_temporal()
    try:
        await work(client, QUEUE, [Plain(), Call(provider)], RECONCILE_EVERY)
    finally:
        await provider.aclose()
    print("stopped", flush=True)


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(main())
