"""Temporal goes away and comes back: clients, workers and workflows come back with it, and jobs are accepted meanwhile.

On servers of this file's own, as those of the suite are not to be stopped.
"""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from durable_jobs import DurableJobs, JobContext, JobHandle, JobSpec, JobStatus
from durable_jobs.dev import DevStack
from durable_jobs.temporal.launch import Launcher
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, Provider, eventually, execute, until, workflow_status
from tests.processes.harness import Scene
from tests.servers import scratch_servers, template_database

pytest_plugins = ["tests.processes.fixtures"]

OFTEN = timedelta(seconds=1)


@pytest.fixture(scope="module")
def durable_jobs_stack() -> Iterator[DevStack]:
    """In place of the run's own; this one's workflows outlive a restart."""
    with scratch_servers(persistent=True) as stack:
        yield stack


@pytest.fixture(scope="module")
def durable_jobs_template(durable_jobs_stack: DevStack) -> str:
    """What each test's database is a clone of."""
    return template_database(durable_jobs_stack)


async def test_temporal_goes_away_while_a_job_runs(
    jobs: DurableJobs,
    temporal_client: Client,
    spec: Specs,
    worker: Workers,
    durable_jobs_stack: DevStack,
) -> None:
    """The attempt in hand needs no Temporal; client, worker and workflows come back with it."""
    gate, provider = Gate(), Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        answer = await sent_once(job, provider)
        await gate.wait()
        return answer

    async with worker(Probe(script), reconcile_every=OFTEN):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
        awaited = asyncio.create_task(handle.result(timeout=60))
        await asyncio.to_thread(durable_jobs_stack.stop_temporal, immediate=True)
        try:
            gate.go_on.set()
            await until(jobs.service, handle.id, JobStatus.COMPLETED)
            assert await awaited == {"sent": f"probe:{handle.id}"}
        finally:
            await asyncio.to_thread(durable_jobs_stack.start_temporal)
        after = await jobs.create_job(spec())
        assert await after.result(timeout=40) == {"sent": f"probe:{after.id}"}
        for each in (handle, after):
            await workflow_closes(temporal_client, each)
    assert len(provider.keys) == 2


async def test_jobs_created_while_temporal_is_away(
    jobs: DurableJobs,
    temporal_client: Client,
    spec: Specs,
    worker: Workers,
    durable_jobs_stack: DevStack,
    database_url: str,
) -> None:
    """They are accepted, and the sweep launches them, with no further word from whoever created them."""

    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        return await sent_once(job, provider)

    async with worker(Probe(script), reconcile_every=OFTEN):
        await asyncio.to_thread(durable_jobs_stack.stop_temporal)
        try:
            one = await jobs.create_job(spec())
            handles = [one, *await jobs.create_jobs([spec() for _ in range(3)])]
            assert all(handle.created for handle in handles)
            assert not await one.launch()
            assert await one.cancel("not wanted after all", "ann") == "cancelled"
        finally:
            await asyncio.to_thread(durable_jobs_stack.start_temporal)
        # The first look comes after half a minute.
        execute(database_url, "UPDATE durable_jobs.jobs SET launch_check_at = clock_timestamp()")
        for handle in handles[1:]:
            job = await until(jobs.service, handle.id, JobStatus.COMPLETED, timeout=60)
            assert job.result == {"sent": f"probe:{handle.id}"}
            await workflow_closes(temporal_client, handle)
    assert (await one.job()).status is JobStatus.CANCELLED
    assert sorted(provider.keys) == sorted(f"probe:{handle.id}" for handle in handles[1:])


async def test_a_launch_that_failed_is_soon_tried_again(
    jobs: DurableJobs, spec: Specs, worker: Workers, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the job has waited: what Temporal refuses now, as under a rate limit, it takes in a moment."""
    failures = 0
    start = Launcher.start

    async def refused_once(self: Launcher, *arguments: Any, **named: Any) -> None:
        nonlocal failures
        if not failures:
            failures += 1
            raise RPCError("namespace rate limit exceeded", RPCStatusCode.RESOURCE_EXHAUSTED, b"")
        await start(self, *arguments, **named)

    monkeypatch.setattr(Launcher, "start", refused_once)
    job = (await jobs.service.create_job(spec())).job
    execute(
        database_url,
        "UPDATE durable_jobs.jobs SET created_at = created_at - interval '20 minutes',"
        " scheduled_at = scheduled_at - interval '20 minutes', launch_check_at = clock_timestamp()",
    )
    async with worker(Probe(done), reconcile_every=OFTEN):

        async def failed() -> bool:
            return failures > 0

        await eventually(failed, "a launch that fails")
        await asyncio.sleep(1)
        (wait,) = execute(database_url, "SELECT launch_check_at - clock_timestamp() FROM durable_jobs.jobs")
        assert wait[0] is None or wait[0] < timedelta(minutes=1)
        assert not await jobs.service.check_trail(job.id)


async def done(job: JobContext, request: dict[str, Any]) -> Any:
    return {}


async def test_a_worker_shuts_down_while_temporal_is_away(scene: Scene, durable_jobs_stack: DevStack) -> None:
    """What it has in hand is written, in time, and it ends as ever."""
    process = await scene.start_worker("hold:claimed,answered", grace_seconds=1)
    finished, past, _before = handles = await scene.jobs.create_jobs([scene.spec(lease_seconds=30) for _ in range(3)])
    for handle in handles:
        await process.holds(handle.id, "claimed")
    for handle in (finished, past):
        process.go(handle.id)
        await process.holds(handle.id, "answered")
    await asyncio.to_thread(durable_jobs_stack.stop_temporal, immediate=True)
    try:
        process.send(signal.SIGTERM)
        process.go(finished.id)
        assert await process.ended() == 0
    finally:
        await asyncio.to_thread(durable_jobs_stack.start_temporal)
    assert [await handle.status() for handle in handles] == ["completed", "indeterminate", "queued"]
    assert [await scene.provider.sends(handle.id) for handle in handles] == [1, 1, 0]


async def sent_once(job: JobContext, provider: Provider) -> Any:
    """Past the boundary, one call."""
    async with job.dispatch(f"probe:{job.id}") as key:
        return await provider.call(key)


async def workflow_closes(client: Client, handle: JobHandle) -> None:
    """Returns once the job's workflow has completed; Temporal may still be starting.

    Where the attempt's answer was lost to the outage, Temporal learns it by its heartbeat timeout, after a lease.
    """

    async def look() -> bool:
        with contextlib.suppress(RPCError):
            return await workflow_status(client, handle.id) is WorkflowExecutionStatus.COMPLETED
        return False

    lease_seconds = JobSpec.model_fields["lease_seconds"].default
    await eventually(look, f"workflow of {handle.id} completed", timeout=40 + lease_seconds)
