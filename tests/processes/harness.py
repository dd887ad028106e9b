"""What the tests that kill, stop and replace processes have in common: the processes, and waiting for them."""

import asyncio
import re
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import UUID

import httpx
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.worker import Worker

from durable_jobs import DurableJobs, DurableJobService, EventName, Job, JobAttempt, JobHandle, JobSpec
from durable_jobs.temporal.messages import workflow_id
from tests.processes.worker import operation_key

PATIENCE = 30.0
"""Seconds that anything awaited here may take; most of it takes a few."""


async def until(what: str, look: Callable[[], Awaitable[Any]], patience: float = PATIENCE) -> Any:
    """Look until there is something to be seen, and return it. Raises `AssertionError` after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not (seen := await look()):
        assert time.monotonic() < deadline, f"not within {patience:g} s: {what}"
        await asyncio.sleep(0.03)
    return seen


class Provider:
    """The provider process, which counts every call that it accepts."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def operation(self, job_id: UUID) -> dict[str, Any]:
        response = await self.http.get(f"/operations/{quote(operation_key(job_id), safe='')}")
        operation: dict[str, Any] = response.raise_for_status().json()
        return operation

    async def sends(self, job_id: UUID) -> int:
        """How many calls the provider accepted under the job's operation key."""
        return int((await self.operation(job_id))["sends"])

    async def reaches(self, job_id: UUID, state: str) -> None:
        """Returns once the job's operation is in `state`."""

        async def look() -> bool:
            return (await self.operation(job_id))["state"] == state

        await until(f"the provider has {operation_key(job_id)} {state}", look)

    async def works(self, seconds: float, *, fails: UUID | None = None) -> None:
        """From now on each call takes so long, and succeeds, but for that of the job `fails`."""
        rules: list[dict[str, Any]] = [{"seconds": seconds}]
        if fails is not None:
            rules.insert(0, {"seconds": seconds, "outcome": "fail", "contains": operation_key(fails)})
        (await self.http.put("/rules", json=rules)).raise_for_status()


class WorkerProcess:
    """One process of `tests.processes.worker`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())

    async def says(self, pattern: str, times: int = 1) -> None:
        """Returns once that many lines match the whole pattern."""

        async def look() -> bool:
            if sum(bool(re.fullmatch(pattern, line)) for line in self.lines) >= times:
                return True
            assert not self._reading.done(), f"ended without {pattern!r}: {self}"
            return False

        try:
            await until(f"{times} times {pattern!r}", look)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self}") from None

    async def holds(self, job_id: UUID, point: str) -> None:
        """Returns once the job's attempt stays at `point`."""
        await self.says(f"{job_id} holds at {point}")

    async def tells(self, job_id: UUID, what: str) -> None:
        """Returns once the held attempt has heard of `what`."""
        await self.says(f"{job_id} is told {what}")

    def go(self, job_id: UUID) -> None:
        """Let the job's held attempt go on; to be said once for each hold."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{job_id}\n".encode())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def terminate(self) -> int:
        """SIGTERM; waits for the process, and returns its exit code."""
        self.send(signal.SIGTERM)
        return await self.ended()

    async def kill(self) -> None:
        """SIGKILL: the process gets no chance to tell anybody."""
        self.send(signal.SIGKILL)
        assert await self.ended() == -signal.SIGKILL

    async def ended(self) -> int:
        """Waits for the process, and returns its exit code; a signal's number comes negative."""
        try:
            async with asyncio.timeout(PATIENCE):
                code = await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"does not end: {self}") from None
        await self._reading
        return code

    async def close(self) -> None:
        """However the test went, leave no process behind, not even a stopped one."""
        with suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        await self.ended()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def __str__(self) -> str:
        return f"worker {self.process.pid} printed\n" + "\n".join(self.lines)


@dataclass(frozen=True)
class Scene:
    """All that a test of processes plays with, on a queue and a database of its own."""

    jobs: DurableJobs
    service: DurableJobService
    temporal: Client
    queue: str
    provider: Provider
    spec: Callable[..., JobSpec]
    """Makes the `JobSpec` of one question to the provider, with a lease so short that it is soon taken over."""
    start_worker: Callable[..., Awaitable[WorkerProcess]]
    """`await scene.start_worker("kill:claimed")`: a worker process, with what is to happen to it."""
    second_worker: Callable[[], AbstractAsyncContextManager[Worker]]
    """`async with scene.second_worker():` a healthy worker on the same queue, in the test's own process."""

    async def create(self, **overrides: Any) -> JobHandle:
        return await self.jobs.create_job(self.spec(**overrides))

    async def row_reaches(self, job_id: UUID, status: str) -> Job:
        """The row, once it has come to `status`. Fails where it ends in another."""

        async def look() -> Job | None:
            job = await self.service.get_job(job_id)
            assert job.status == status or not job.status.is_terminal, f"{job.status}, not {status}: {job.error}"
            return job if job.status == status else None

        job: Job = await until(f"job {job_id} is {status}", look)
        return job

    async def workflow_reaches(self, job_id: UUID, status: WorkflowExecutionStatus) -> None:
        """Returns once the newest run of the job's workflow has that status."""

        async def look() -> bool:
            return (await self.temporal.get_workflow_handle(workflow_id(job_id)).describe()).status is status

        await until(f"the workflow of job {job_id} is {status.name}", look)

    async def trail(self, job_id: UUID) -> list[tuple[str, int]]:
        """The job's events, as name and generation; heartbeats, which come with the time, left out."""
        events = (await self.service.list_job_events(job_id)).items
        return [(str(event.name), event.generation) for event in events if event.name is not EventName.HEARTBEAT]

    async def attempts(self, job_id: UUID) -> list[JobAttempt]:
        return (await self.service.list_job_attempts(job_id)).items

    async def outcomes(self, job_id: UUID) -> list[str | None]:
        """How the attempt of each generation ended."""
        return [attempt.outcome for attempt in await self.attempts(job_id)]
