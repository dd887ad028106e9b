"""Whoever uses the service while it is under fire: those who submit, cancel and wait, and the operator."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

import httpx

from durable_jobs import DurableJobs, JobHandle, JobHead, JobOutcomeError, JobSpec, JobStatus
from durable_jobs.contract.errors import NotResolvable, NotRetryable, StoreUnavailable
from durable_jobs.contract.states import SETTLED
from tests.soak.shapes import key_of

T = TypeVar("T")

OPERATOR = "olga"
SETTLED_SECONDS = 2.0
"""A killed sender's request may still lie in the provider's socket: `absent` counts when it is said twice."""

Key = tuple[str, str, str]


def asking(provider_url: str) -> httpx.AsyncClient:
    """A client of the provider, without connections that are kept: a question may not meet one that is being closed."""
    return httpx.AsyncClient(base_url=provider_url, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))


class Clients:
    """Their calls are repeated while the database is away, as the typed error asks; any other error is a problem."""

    def __init__(self, jobs: DurableJobs, provider: httpx.AsyncClient, alive: Callable[[], set[int]]) -> None:
        self.jobs = jobs
        self.provider = provider
        self.alive = alive
        self.acknowledged: dict[Key, UUID] = {}
        self.cancels: list[tuple[UUID, str]] = []
        """What each cancel was answered."""
        self.awaited: list[tuple[UUID, JobStatus, dict[str, Any] | None]] = []
        """What `result()` told those who waited: the status that it stands for, and the result."""
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    async def answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """The call's answer, however often the database was away."""
        while True:
            try:
                return await call()
            except StoreUnavailable:
                self.counts["repeated_calls"] += 1
                await asyncio.sleep(0.2)

    async def submit(self, specs: list[JobSpec], seconds: float, chance: random.Random) -> None:
        """Submit all within `seconds`, each fifth one twice, cancel some, and wait for the end of each tenth."""
        plans = [(spec, chance.uniform(0, 3), chance.random()) for spec in specs]
        async with asyncio.TaskGroup() as group:
            for number, (spec, later, luck) in enumerate(plans):
                group.create_task(self._carefully(self._one(spec, number, later, luck)))
                await asyncio.sleep(seconds / len(specs))

    async def _carefully(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self.problems.append(f"a client got {type(error).__name__}: {error}")

    async def _one(self, spec: JobSpec, number: int, later: float, luck: float) -> None:
        handle = await self._create(spec)
        if luck < 0.2:
            await asyncio.sleep(later)
            await self._create(spec)
        if spec.payload["shape"] == "cancelled":
            await asyncio.sleep(later)
            reply = await self.answered(lambda: handle.cancel("not wanted any more", "carl"))
            self.cancels.append((handle.id, reply))
        if number % 10 == 0:
            await self._await_result(handle)

    async def _create(self, spec: JobSpec) -> JobHandle:
        handle = await self.answered(lambda: self.jobs.create_job(spec))
        key = (spec.organization, spec.project, spec.idempotency_key)
        first = self.acknowledged.setdefault(key, handle.id)
        if first != handle.id:
            self.problems.append(f"{key} was acknowledged as job {first} and as job {handle.id}")
        return handle

    async def _await_result(self, handle: JobHandle) -> None:
        try:
            result = await self.answered(handle.result)
        except JobOutcomeError as error:
            self.awaited.append((handle.id, error.status, None))
        else:
            self.awaited.append((handle.id, JobStatus.COMPLETED, result))

    async def operate(self) -> None:
        """The operator's rounds: escalated jobs are resolved by what the provider says, some failed ones retried."""
        while True:
            await asyncio.sleep(1)
            try:
                uncertain = await self.list_jobs(JobStatus.INDETERMINATE, JobStatus.TIMED_OUT)
                failed = await self.list_jobs(JobStatus.FAILED)
                await asyncio.gather(
                    *(self._carefully(self._resolve(job)) for job in uncertain if job.escalated_at),
                    *(self._carefully(self._retry(job)) for job in failed if to_be_retried(job)),
                )
            except StoreUnavailable:
                continue

    async def list_jobs(self, *statuses: JobStatus) -> list[JobHead]:
        """Every job in one of these statuses, by default in any."""
        found: list[JobHead] = []
        cursor: str | None = None
        while True:
            page = await self.jobs.service.list_jobs(statuses=statuses or None, after=cursor, limit=1000)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _retry(self, job: JobHead) -> None:
        try:
            await self.jobs.handle(job.id).retry(OPERATOR, "the provider is in a better mood")
            self.counts["retried"] += 1
        except (StoreUnavailable, NotRetryable):
            pass  # looked at again in the next round: it was done, if only the answer got lost

    async def _resolve(self, job: JobHead) -> None:
        handle = self.jobs.handle(job.id)
        alive = self.alive()
        state = await self.operation(job)
        if state["state"] == "absent":
            if await self._sender(job) in alive:
                return
            await asyncio.sleep(SETTLED_SECONDS)
            state = await self.operation(job)
        evidence = {"provider": state["state"], "operation_key": job.operation_key}
        try:
            match state["state"]:
                case "succeeded":
                    await handle.resolve(JobStatus.COMPLETED, evidence, OPERATOR, result=state["result"])
                case "failed" | "absent":
                    await handle.resolve(JobStatus.FAILED, evidence, OPERATOR)
                case "unknown":
                    await handle.resolve(JobStatus.DEAD_LETTER, evidence, OPERATOR)
                case _:
                    return
        except (StoreUnavailable, NotResolvable):
            pass

    async def _sender(self, job: JobHead) -> int:
        """The process that crossed the boundary of the job's present intent."""
        attempts = (await self.answered(lambda: self.jobs.service.list_job_attempts(job.id))).items
        (sender,) = [each for each in attempts if each.operation_key == job.operation_key]
        return int(sender.worker_id.split(":")[1])

    async def operation(self, job: JobHead) -> dict[str, Any]:
        """What the provider says of the job's operation key."""
        assert job.operation_key is not None
        response = await self.provider.get(f"/operations/{quote(job.operation_key, safe='')}")
        operation: dict[str, Any] = response.raise_for_status().json()
        return operation


def is_open(job: JobHead) -> bool:
    """Whether somebody has yet to do something about this job."""
    return job.status not in SETTLED or job.follow_ups_due or (job.status is JobStatus.FAILED and to_be_retried(job))


def to_be_retried(job: JobHead) -> bool:
    """Whether the operator will try this failed job once more: the provider itself said no to it."""
    refused = job.idempotency_key.endswith(key_of("", "retried"))
    return refused and job.intent_number == 0 and not job.settled_by_operator
