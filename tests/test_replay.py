"""Stored histories replay: workflow code that would strand the jobs in flight is caught here.

After a deliberate change of the workflow's shape (a new workflow type, for what is deployed already), record anew:

    DURABLE_JOBS_RECORD_HISTORIES=1 python -m pytest tests/test_replay.py
"""

import base64
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHistory
from temporalio.service import RPCError
from temporalio.worker import Replayer, Worker
from temporalio.workflow import NondeterminismError

from durable_jobs import DurableJobs, DurableJobService, DurableJobsPlugin, JobContext, JobFailed, JobHandle, JobStatus
from durable_jobs.temporal.job_workflow import JobWorkflow
from durable_jobs.temporal.messages import CancelAsk, JobOutcome, JobStart, JobView, workflow_id
from durable_jobs.temporal.schedule import schedule_id
from tests.conftest import Specs
from tests.probes import Gate, Probe, eventually, noticed, until, until_workflow

HISTORIES = Path(__file__).parent / "histories"
RECORDING = os.environ.get("DURABLE_JOBS_RECORD_HISTORIES") == "1"

SECRET = "words-of-the-tenant"
"""In every payload, result, message and reason here; in no history."""


@dataclass
class Stage:
    """What a shape plays on."""

    jobs: DurableJobs
    spec: Specs
    client: Client
    hosting: Callable[[Probe], AbstractAsyncContextManager[None]]

    first_run: str = ""

    async def create(self, **overrides: Any) -> JobHandle:
        handle = await self.jobs.create_job(self.spec(**({"payload": {"text": SECRET}} | overrides)))
        self.first_run = (await self.client.get_workflow_handle(workflow_id(handle.id)).describe()).run_id
        return handle

    async def cancel_in_temporal(self, handle: JobHandle) -> None:
        await self.client.get_workflow_handle(workflow_id(handle.id)).cancel()


Shape = Callable[[Stage], Awaitable[JobHandle]]
SHAPES: dict[str, tuple[Shape, WorkflowExecutionStatus]] = {}


def shape(closes_as: WorkflowExecutionStatus) -> Callable[[Shape], Shape]:
    def register(play: Shape) -> Shape:
        SHAPES[play.__name__] = (play, closes_as)
        return play

    return register


async def _sends(job: JobContext, request: dict[str, Any]) -> Any:
    async with job.dispatch(f"probe:{job.id}"):
        return {"text": SECRET}


@shape(WorkflowExecutionStatus.COMPLETED)
async def completed(stage: Stage) -> JobHandle:
    async with stage.hosting(Probe(_sends)):
        handle = await stage.create()
        await handle.result(timeout=30)
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.COMPLETED)
    return handle


@shape(WorkflowExecutionStatus.FAILED)
async def failed(stage: Stage) -> JobHandle:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        raise JobFailed(SECRET, retryable=False, code="NO")

    async with stage.hosting(Probe(script)):
        handle = await stage.create()
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.FAILED)
    return handle


@shape(WorkflowExecutionStatus.COMPLETED)
async def backoff_then_completed(stage: Stage) -> JobHandle:
    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if job.attempt < 3:
            raise ValueError(SECRET)
        return await _sends(job, request)

    async with stage.hosting(Probe(script)):
        handle = await stage.create(backoff_base_seconds=0.1)
        await handle.result(timeout=30)
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.COMPLETED)
    return handle


async def _breaks(job: JobContext, request: dict[str, Any]) -> Any:
    async with job.dispatch(f"probe:{job.id}"):
        raise ValueError(SECRET)


@shape(WorkflowExecutionStatus.RUNNING)
async def indeterminate(stage: Stage) -> JobHandle:
    async with stage.hosting(Probe(_breaks)):
        handle = await stage.create()
        await until(stage.jobs.service, handle.id, JobStatus.INDETERMINATE)
        await handle.wake()
        await _waits(stage, handle)
    return handle


@shape(WorkflowExecutionStatus.COMPLETED)
async def indeterminate_then_resolved(stage: Stage) -> JobHandle:
    async with stage.hosting(Probe(_breaks)):
        handle = await stage.create()
        await until(stage.jobs.service, handle.id, JobStatus.INDETERMINATE)
        await _waits(stage, handle)
        await handle.resolve(JobStatus.COMPLETED, {"seen": SECRET}, "ann", result={"text": SECRET})
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.COMPLETED)
    return handle


@shape(WorkflowExecutionStatus.CANCELED)
async def cancelled(stage: Stage) -> JobHandle:
    async with stage.hosting(Probe(_sends)):
        handle = await stage.create(scheduled_at=datetime.now(UTC) + timedelta(hours=1))
        await handle.cancel(SECRET, "ann")
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.CANCELED)
    return handle


@shape(WorkflowExecutionStatus.CANCELED)
async def cancelled_in_temporal(stage: Stage) -> JobHandle:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()

    async with stage.hosting(Probe(script)):
        handle = await stage.create(lease_seconds=1.5)
        await gate.handler_came()
        await stage.cancel_in_temporal(handle)
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.CANCELED)
    return handle


@shape(WorkflowExecutionStatus.COMPLETED)
async def cancelled_in_temporal_past_the_boundary(stage: Stage) -> JobHandle:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            gate.reached.set()
            await noticed(lambda: job.cancel_requested)
            return {"text": SECRET}

    async with stage.hosting(Probe(script)):
        handle = await stage.create(lease_seconds=1.5)
        await gate.handler_came()
        await stage.cancel_in_temporal(handle)
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.COMPLETED)
    return handle


class _OfAnotherType(Probe):
    job_type = "other"


@shape(WorkflowExecutionStatus.COMPLETED)
async def not_hosted_then_hosted(stage: Stage) -> JobHandle:
    async with stage.hosting(_OfAnotherType(_sends)):
        handle = await stage.create()
        await _waits(stage, handle)
    async with stage.hosting(Probe(_sends)):
        await handle.wake()
        await handle.result(timeout=30)
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.COMPLETED)
    return handle


@shape(WorkflowExecutionStatus.COMPLETED)
async def attempt_lost_by_temporal(stage: Stage) -> JobHandle:
    """The handler holds the event loop: no heartbeat reaches Temporal, which gives the attempt up."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        ends = time.monotonic() + 2.5
        while time.monotonic() < ends:
            sum(range(1000))
        return await _sends(job, request)

    async with stage.hosting(Probe(script)):
        handle = await stage.create(lease_seconds=1)
        await until_workflow(stage.client, handle.id, WorkflowExecutionStatus.COMPLETED)
    return handle


async def _waits(stage: Stage, handle: JobHandle) -> None:
    """Returns once the workflow waits on a timer."""

    async def timer() -> bool:
        history = await stage.client.get_workflow_handle(workflow_id(handle.id)).fetch_history()
        return any(event.HasField("timer_started_event_attributes") for event in history.events)

    await eventually(timer, "the workflow's wait")


@pytest_asyncio.fixture
async def stage(
    service: DurableJobService, spec: Specs, temporal_client: Client, database_url: str, queue: str
) -> AsyncIterator[Stage]:
    """Workers that keep no workflow in memory: each task replays the history from its beginning."""
    target = temporal_client.service_client.config.target_host
    client = await Client.connect(target, namespace=temporal_client.namespace, identity="a worker of the test")

    @asynccontextmanager
    async def hosting(handler: Probe) -> AsyncIterator[None]:
        plugin = DurableJobsPlugin(database_url, [handler], grace_seconds=1)
        async with Worker(client, task_queue=queue, plugins=[plugin], max_cached_workflows=0):
            yield

    async with await DurableJobs.connect(database_url, client) as jobs:
        yield Stage(jobs, spec, client, hosting)
    with suppress(RPCError):
        await temporal_client.get_schedule_handle(schedule_id(queue)).delete()


def payloads_of(history: str) -> list[str]:
    """Every payload in a history's JSON, in the clear."""
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for name, child in node.items():
                if name == "data" and isinstance(child, str):
                    found.append(base64.b64decode(child).decode())
                else:
                    walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(json.loads(history))
    return found


def without_stacks(node: Any) -> Any:
    """Where our own code lay on the machine that recorded it is of no use to anybody."""
    if isinstance(node, dict):
        return {name: without_stacks(child) for name, child in node.items() if name != "stackTrace"}
    return [without_stacks(child) for child in node] if isinstance(node, list) else node


def assert_nothing_of_a_tenants(history: str) -> None:
    """Only ids, codes, statuses and times, in fields that are known; of names, those to find a job by."""
    assert SECRET not in history
    for text in payloads_of(history):
        assert SECRET not in text
        payload = json.loads(text)
        if isinstance(payload, dict) and "activity_type" not in payload:  # the SDK's own note on a local activity
            assert payload.keys() <= FIELDS


FIELDS = {field.name for message in (JobStart, JobView, CancelAsk, JobOutcome) for field in fields(message)}


def plugin() -> DurableJobsPlugin:
    return DurableJobsPlugin("postgresql://nobody@localhost/nothing", [Probe(_sends)])


def replayers() -> list[Replayer]:
    return [Replayer(workflows=[], plugins=[plugin()]), Replayer(workflows=[JobWorkflow])]


@pytest.mark.parametrize("name", SHAPES)
async def test_runs_without_a_cache_and_replays(stage: Stage, name: str) -> None:
    """State that the workflow keeps outside its history would show at the first task that starts from nothing."""
    play, closes_as = SHAPES[name]
    handle = await play(stage)
    workflow = stage.client.get_workflow_handle(workflow_id(handle.id), run_id=stage.first_run)
    assert (await workflow.describe()).status is closes_as
    history = await workflow.fetch_history()
    for replayer in replayers():
        await replayer.replay_workflow(history)
    recorded = history.to_json()
    assert_nothing_of_a_tenants(recorded)
    assert any(str(handle.id) in text for text in payloads_of(recorded))
    if RECORDING:
        HISTORIES.mkdir(exist_ok=True)
        (HISTORIES / f"{name}.json").write_text(json.dumps(without_stacks(json.loads(recorded)), indent=1) + "\n")


def stored() -> list[Path]:
    return sorted(HISTORIES.glob("*.json"))


def history_in(path: Path, *, become: tuple[str, str] = ("", "")) -> WorkflowHistory:
    """The stored history, with one word of it become another."""
    return WorkflowHistory.from_json("durable-job/stored", path.read_text().replace(*become))


def test_every_shape_is_stored() -> None:
    assert {path.stem for path in stored()} == set(SHAPES)


@pytest.mark.parametrize("path", stored(), ids=lambda path: path.stem)
async def test_a_stored_history_replays(path: Path) -> None:
    history = history_in(path)
    for replayer in replayers():
        await replayer.replay_workflow(history)


@pytest.mark.parametrize("path", stored(), ids=lambda path: path.stem)
def test_a_stored_history_holds_nothing_of_a_tenants(path: Path) -> None:
    assert_nothing_of_a_tenants(path.read_text())


async def test_a_history_of_another_workflow_does_not_replay() -> None:
    """The replays can fail."""
    changed = history_in(HISTORIES / "completed.json", become=("durable_jobs.run_attempt", "another"))
    for replayer in replayers():
        with pytest.raises(NondeterminismError):
            await replayer.replay_workflow(changed)
