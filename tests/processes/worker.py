"""The worker process of the tests: `python -m tests.processes.worker`. It prints what it does, a line each.

Its one handler calls the provider under the job's operation key. On the way every attempt passes these points, and at
those that PROBE_FAULT names, as `kill:<point>` or `hold:<point>,<point>`, the process ends itself with SIGKILL, or the
attempt stays until its job's id arrives as a line on standard input:

    before_claim    the attempt has begun, and the claim is about to be asked for (kill only)
    claimed         the claim is granted, the dispatch boundary lies ahead
    dispatched      past the boundary, nothing is sent yet
    answered        the provider has answered, the outcome is not written
    recorded        the outcome is committed, Temporal has not heard of it (kill only)

DURABLE_JOBS_DATABASE_URL, TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE   the servers
PROBE_QUEUE, PROBE_PROVIDER_URL, PROBE_GRACE_SECONDS              where to work, whom to call, how to shut down
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.worker import Worker

from durable_jobs import DurableJobService, DurableJobsPlugin, Job, JobContext, JobHandler, ProviderState
from examples.research.handler import ResearchProvider, ResearchReport, ResearchRequest
from examples.research.worker import connect_temporal

NEVER = timedelta(days=365)
"""Between two sweeps: each one is asked for by the test."""


def operation_key(job_id: object) -> str:
    """What the probe sends the job's one call under."""
    return f"probe:{job_id}"


def say(text: str) -> None:
    """Print a line at once: the process may be about to die."""
    print(text, flush=True)


class Faults:
    """What is to happen at the points that an attempt passes; nothing by default."""

    def __init__(self, plan: str = "") -> None:
        self._act, _, points = plan.partition(":")
        self._points = points.split(",")
        self.let_go: Counter[str] = Counter()
        """How many holds of each job are to end."""

    async def at(self, point: str, job: JobContext | None = None) -> None:
        """An attempt has come to `point`."""
        if point not in self._points:
            return
        if self._act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        assert job is not None, f"nothing can be held at {point}"
        say(f"{job.id} holds at {point}")
        told = set[str]()
        while not self.let_go[str(job.id)]:
            for what in sorted(_what_it_is_told(job) - told):
                told.add(what)
                say(f"{job.id} is told {what}")
            await asyncio.sleep(0.02)
        self.let_go[str(job.id)] -= 1


def _what_it_is_told(job: JobContext) -> set[str]:
    """What the job's context tells a handler, and what Temporal tells its activity."""
    told = {what for what in ("cancel_requested", "shutting_down") if getattr(job, what)}
    if details := activity.cancellation_details():
        told |= {f"by Temporal: {reason}" for reason, given in asdict(details).items() if given}
    return told


class Probe(JobHandler[ResearchRequest, ResearchReport]):
    """Calls the provider once."""

    job_type = "probe"
    consequential = False

    def __init__(self, provider: ResearchProvider, faults: Faults | None = None) -> None:
        self._provider = provider
        self._faults = faults or Faults()

    async def run(self, job: JobContext, request: ResearchRequest) -> ResearchReport:
        try:
            await self._faults.at("claimed", job)
            async with job.dispatch(operation_key(job.id)) as key:
                await self._faults.at("dispatched", job)
                report = await self._provider.run(request, key=key)
                await self._faults.at("answered", job)
        except BaseException as error:
            say(f"{job.id} ends with {type(error).__name__}")
            raise
        return report

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[ResearchReport]:
        return await self._provider.state(operation_key)


def _watch_service(faults: Faults) -> None:
    """Print the answer to every claim of this process, and put the outermost points round the service's verbs."""
    claim_job, complete_job = DurableJobService.claim_job, DurableJobService.complete_job

    async def watched_claim(self: DurableJobService, *args: Any, **kwargs: Any) -> Any:
        await faults.at("before_claim")
        outcome = await claim_job(self, *args, **kwargs)
        if outcome is not None and outcome.job is not None:
            answer = f"claims generation {outcome.claim.generation}" if outcome.claim else f"is {outcome.refusal}"
            say(f"{outcome.job.id} {answer}")
        return outcome

    async def watched_complete(self: DurableJobService, *args: Any, **kwargs: Any) -> Any:
        completion = await complete_job(self, *args, **kwargs)
        await faults.at("recorded")
        return completion

    DurableJobService.claim_job = watched_claim  # type: ignore[method-assign]
    DurableJobService.complete_job = watched_complete  # type: ignore[method-assign]


async def main() -> None:
    """Works until SIGTERM, or until whoever started it is gone."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    faults = Faults(os.environ.get("PROBE_FAULT", ""))
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def on_input() -> None:
        lines = os.read(sys.stdin.fileno(), 65536)
        if not lines:
            os._exit(1)
        faults.let_go.update(lines.decode().split())

    loop.add_reader(sys.stdin, on_input)
    _watch_service(faults)
    provider = ResearchProvider(os.environ["PROBE_PROVIDER_URL"])
    plugin = DurableJobsPlugin(
        os.environ["DURABLE_JOBS_DATABASE_URL"],
        [Probe(provider, faults)],
        grace_seconds=float(os.environ["PROBE_GRACE_SECONDS"]),
        reconcile_every=NEVER,
    )
    client = await connect_temporal()
    async with Worker(
        client,
        task_queue=os.environ["PROBE_QUEUE"],
        plugins=[plugin],
        # Else Temporal keeps the workflows of a killed worker waiting for it for another ten seconds.
        sticky_queue_schedule_to_start_timeout=timedelta(seconds=0.5),
    ):
        say("is polling")
        await stop.wait()
    await provider.aclose()


if __name__ == "__main__":
    asyncio.run(main())
