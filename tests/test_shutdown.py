"""Shutdown and deploys: a worker process ends only once its outcomes are written, and a rolling restart loses nothing.

Case 8 of the catalogue, of the kind "leases and stale workers". What becomes of one job within the grace and at its
end is told in `test_stale_process.py`.
"""

import asyncio
import contextlib
import gc
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.worker import Worker

from durable_jobs import DurableJobsPlugin, JobHandle
from durable_jobs.dev import DevStack
from durable_jobs.temporal.schedule import reconciliation_queue
from tests.probes import eventually, outage
from tests.processes.harness import Scene, WorkerProcess
from tests.support import row_locked
from tests.test_happy_path import Sends

pytest_plugins = ["tests.processes.fixtures"]

GRACE_SECONDS = 1.0
BLOCKED_SECONDS = 4.0
"""How long outcomes can't be written: well past the grace period."""

Blocked = Callable[[DevStack, str, list[JobHandle]], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def rows_locked(stack: DevStack, database_url: str, handles: list[JobHandle]) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as locks:
        for handle in handles:
            await locks.enter_async_context(row_locked(database_url, handle.id))
        yield


@asynccontextmanager
async def database_away(stack: DevStack, database_url: str, handles: list[JobHandle]) -> AsyncIterator[None]:
    with outage(stack.database_url, database_url):
        yield


@pytest.mark.parametrize("blocked", [rows_locked, database_away])
async def test_the_process_ends_once_every_outcome_is_written(
    blocked: Blocked, scene: Scene, durable_jobs_stack: DevStack, database_url: str
) -> None:
    process = await scene.start_worker("hold:claimed,answered", grace_seconds=GRACE_SECONDS)
    finished, past, _before = handles = await scene.jobs.create_jobs([scene.spec(lease_seconds=30) for _ in range(3)])
    for handle in handles:
        await process.holds(handle.id, "claimed")
    for handle in (finished, past):
        process.go(handle.id)
        await process.holds(handle.id, "answered")

    async with blocked(durable_jobs_stack, database_url, handles):
        process.send(signal.SIGTERM)
        process.go(finished.id)  # one returns within the grace, two are overtaken by its end
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(BLOCKED_SECONDS):
                await process.process.wait()
    assert await process.ended() == 0
    jobs = [await handle.job() for handle in handles]
    assert [job.status for job in jobs] == ["completed", "indeterminate", "queued"]
    assert [job.error and job.error.code for job in jobs] == [None, "WORKER_SHUTDOWN", None]
    assert [job.lease_generation for job in jobs] == [1, 1, 1]
    assert [await scene.outcomes(handle.id) for handle in handles] == [["completed"], ["indeterminate"], ["released"]]
    assert [await scene.provider.sends(handle.id) for handle in handles] == [1, 1, 0]


def test_an_event_loop_that_ends_takes_its_worker_with_it(
    durable_jobs_stack: DevStack, database_url: str, queue: str
) -> None:
    """A program whose main function returns, or fails, beside a worker that it never shut down: it ends."""
    running: list[asyncio.Task[None]] = []

    async def main() -> None:
        temporal = await Client.connect(durable_jobs_stack.temporal_address)
        plugin = DurableJobsPlugin(database_url, [Sends()], grace_seconds=1)
        running.append(asyncio.create_task(Worker(temporal, task_queue=queue, plugins=[plugin]).run()))
        asked = DescribeTaskQueueRequest(
            namespace=temporal.namespace, task_queue=TaskQueue(name=reconciliation_queue(queue))
        )

        async def polls() -> bool:
            return bool((await temporal.workflow_service.describe_task_queue(asked)).pollers)

        await eventually(polls, "the worker of the sweeps")

    asyncio.run(main())
    gc.collect()  # or connections that were being made go on holding backends, and the database can't be dropped
    assert running[0].cancelled()


async def test_a_rolling_restart_loses_and_repeats_nothing(scene: Scene) -> None:
    """Two processes, each replaced by a new one while jobs keep coming."""
    await scene.provider.works(seconds=0.3)
    workers = [await scene.start_worker(grace_seconds=15) for _ in range(2)]
    handles: list[JobHandle] = []
    restarted = asyncio.Event()

    async def work_on() -> None:
        """One of several who want one job after the other done."""
        while not restarted.is_set() or len(handles) < 40:
            handles.append(handle := await scene.create(lease_seconds=5))
            assert await handle.result(timeout=60)

    async def restart() -> None:
        for old in list(workers):
            await until_busy(old)
            workers.append(await scene.start_worker(grace_seconds=15))
            assert await old.terminate() == 0
        restarted.set()

    await asyncio.gather(restart(), *(work_on() for _ in range(6)))
    assert {await scene.provider.sends(handle.id) for handle in handles} == {1}
    # Nor was any attempt begun in vain: what a worker had in hand, it brought to its end.
    assert Counter([tuple(await scene.outcomes(handle.id)) for handle in handles]) == {("completed",): len(handles)}
    holders = {(await handle.job()).claimed_by for handle in handles}
    assert {int(str(holder).split(":")[1]) for holder in holders} >= {old.process.pid for old in workers[:2]}
    assert len(holders) > 2


async def until_busy(worker: WorkerProcess) -> None:
    """Returns once the process has claimed some jobs."""
    await worker.says(r".* claims generation \d+", times=3)
