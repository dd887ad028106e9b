"""The shapes of one and the same work: bare Temporal, ours, and the naive one with an activity per statement.

The handler's body, the worker's options and the split into a client's and a worker's process are the same for all. Ours
and the naive one submit a consequential job, as all are by default, with its identity. Our workflow says itself that it
needs no sandbox; `open` is bare Temporal whose worker does without one, which no product's should.
"""

import asyncio
import os
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from benchmarks.bare import BareWorkflow
from benchmarks.naive import NaiveWorkflow
from durable_jobs import (
    Database,
    DurableJobs,
    DurableJobService,
    DurableJobsPlugin,
    ExecutionInput,
    JobContext,
    JobHandler,
    JobSpec,
)
from durable_jobs.contract.envelope import raw_payload
from durable_jobs.contract.models import Claim
from durable_jobs.temporal.messages import workflow_id

SHAPES = ("bare", "ours", "naive", "open")
REQUEST = {"question": "Which moons have an atmosphere?", "mode": "deep", "sources": ["astronomy", "physics"]}
NEVER = timedelta(days=365)
"""Between two sweeps: none is to run beside a measurement."""


class Body:
    """What a job's work is, whatever carries it: by default nothing, so that all that is measured is overhead."""

    def __init__(self, seconds: float = 0.0, *, hold: bool = False) -> None:
        self._seconds = seconds
        self._released = asyncio.Event()
        self.running = 0
        if not hold:
            self._released.set()

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self.running += 1
        try:
            await self._released.wait()
            if self._seconds:
                await asyncio.sleep(self._seconds)
            return {"answer": f"Titan, for one: {request['question']}", "confidence": 0.9}
        finally:
            self.running -= 1


def spec(queue: str, key: str, **overrides: Any) -> JobSpec:
    """A consequential job of the benchmark."""
    fields = {
        "organization": "acme",
        "project": "alpha",
        "queue": queue,
        "job_type": "bench",
        "idempotency_key": key,
        "payload": REQUEST,
        "execution": ExecutionInput(tenant="acme", actor="bench", trace="0" * 31 + "1"),
    }
    return JobSpec(**fields | overrides)


def handler(body: Body) -> JobHandler[Any, Any]:
    """The body as a product writes it."""

    class Bench(JobHandler[dict[str, Any], dict[str, Any]]):
        job_type = "bench"

        async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
            async with job.dispatch(f"bench:{job.id}"):
                return await body(request)

    return Bench()


class NaiveActivities:
    """Claim, mark, run and complete, each by the service's own verb and each an activity."""

    def __init__(self, service: DurableJobService, body: Body) -> None:
        self._service = service
        self._body = body
        self._worker_id = f"naive:{os.getpid()}"

    @activity.defn(name="bench_claim")
    async def claim(self, job_id: str) -> dict[str, Any]:
        outcome = await self._service.claim_job(self._worker_id, uuid4(), job_id=UUID(job_id))
        assert outcome is not None
        assert outcome.claim is not None
        assert outcome.job is not None
        return {"claim": outcome.claim.model_dump(mode="json"), "request": raw_payload(outcome.job.payload)}

    @activity.defn(name="bench_mark")
    async def mark(self, claim: dict[str, Any]) -> None:
        await self._service.mark_provider_dispatched(Claim(**_claim(claim)), f"bench:{claim['job_id']}")

    @activity.defn(name="bench_run")
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        return await self._body(request)

    @activity.defn(name="bench_complete")
    async def complete(self, ended: dict[str, Any]) -> str:
        completion = await self._service.complete_job(Claim(**_claim(ended["claim"])), ended["result"])
        return str(completion.job.status)

    def all(self) -> list[Any]:
        return [self.claim, self.mark, self.run, self.complete]


def _claim(claim: dict[str, Any]) -> dict[str, Any]:
    return {**claim, "job_id": UUID(claim["job_id"])}


async def make_worker(
    shape: str, temporal: Client, url: str, queue: str, slots: int, body: Body, stack: AsyncExitStack
) -> Worker:
    """A worker of the shape; what it needs is closed with `stack`."""
    if shape in ("bare", "open"):

        @activity.defn(name="bench_run")
        async def run(request: dict[str, Any]) -> dict[str, Any]:
            return await body(request)

        return Worker(
            temporal,
            task_queue=queue,
            workflows=[BareWorkflow],
            activities=[run],
            max_concurrent_activities=slots,
            workflow_runner=SandboxedWorkflowRunner() if shape == "bare" else UnsandboxedWorkflowRunner(),
        )
    if shape == "naive":
        database = Database(url)
        stack.push_async_callback(database.close)
        activities = NaiveActivities(DurableJobService(database), body).all()
        return Worker(
            temporal,
            task_queue=queue,
            workflows=[NaiveWorkflow],
            activities=activities,
            max_concurrent_activities=slots,
        )
    plugin = DurableJobsPlugin(url, handlers=[handler(body)], reconcile_every=NEVER)
    return Worker(temporal, task_queue=queue, plugins=[plugin], max_concurrent_activities=slots)


class Submitter(ABC):
    """Submits jobs of one shape from a process of their own."""

    def __init__(self, temporal: Client, queue: str) -> None:
        self.temporal = temporal
        self.queue = queue

    async def submit(self, key: str, *, wait: bool = True, **options: Any) -> str:
        """Submit one job and wait for its result; returns its workflow's id."""
        id_, result = await self._start(key, **options)
        if wait:
            await result()
        return id_

    @abstractmethod
    async def _start(self, key: str, **options: Any) -> tuple[str, Any]: ...


class BareSubmitter(Submitter):
    async def _start(self, key: str, **options: Any) -> tuple[str, Any]:
        handle = await self.temporal.start_workflow("BenchBare", REQUEST, id=key, task_queue=self.queue)
        return handle.id, handle.result


class OurSubmitter(Submitter):
    def __init__(self, temporal: Client, queue: str, jobs: DurableJobs) -> None:
        super().__init__(temporal, queue)
        self.jobs = jobs

    async def _start(self, key: str, **options: Any) -> tuple[str, Any]:
        handle = await self.jobs.create_job(spec(self.queue, key, **options))
        return handle.workflow_id, handle.result


class NaiveSubmitter(OurSubmitter):
    async def _start(self, key: str, **options: Any) -> tuple[str, Any]:
        created = await self.jobs.service.create_job(spec(self.queue, key, **options))
        id_ = workflow_id(created.job.id)
        handle = await self.temporal.start_workflow("BenchNaive", str(created.job.id), id=id_, task_queue=self.queue)
        return id_, handle.result


async def make_submitter(shape: str, temporal: Client, url: str, queue: str, stack: AsyncExitStack) -> Submitter:
    """A submitter of the shape; what it needs is closed with `stack`."""
    if shape in ("bare", "open"):
        return BareSubmitter(temporal, queue)
    jobs = await stack.enter_async_context(await DurableJobs.connect(url, temporal))
    return (OurSubmitter if shape == "ours" else NaiveSubmitter)(temporal, queue, jobs)
