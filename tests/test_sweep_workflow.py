"""The sweep on Temporal: its schedule, its summary, whom it wakes and tells, and what it leaves of follow-ups."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleOverlapPolicy,
    ScheduleUpdate,
    WorkflowExecutionStatus,
)
from temporalio.runtime import MetricBuffer, Runtime, TelemetryConfig
from temporalio.service import RPCError
from temporalio.worker import Worker

from durable_jobs import DurableJobs, DurableJobsPlugin, EventName, Job, JobContext, JobStatus, ProviderState
from durable_jobs.client import JobHandle
from durable_jobs.contract.errors import InvalidInput, JobDeadLetteredError, JobFailedError, JobOutcomeError
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.contract.summary import SweepSummary
from durable_jobs.temporal import messages
from durable_jobs.temporal.listener import EnqueueListener
from durable_jobs.temporal.schedule import reconciliation_queue, schedule_id
from tests.conftest import Specs, Workers
from tests.probes import Gate, eventually, trail, until, until_workflow, workflow_status
from tests.sweeping import (
    LANDED,
    NEVER,
    RESULT,
    Asked,
    Child,
    Working,
    WorkingParent,
    escalated,
    follow_up,
    summary,
    timed_out,
    uncertain,
)

RUNNING = WorkflowExecutionStatus.RUNNING


@pytest.fixture(autouse=True)
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hears of nothing that was enqueued in SQL: what is launched, the sweep launches."""
    monkeypatch.setattr(EnqueueListener, "start", lambda self: None)


async def schedule_every(client: Client, queue: str, every: timedelta) -> Schedule:
    """The queue's schedule, once the worker that starts has made it what it is to be."""

    async def look() -> Schedule | None:
        try:
            schedule = (await client.get_schedule_handle(schedule_id(queue)).describe()).schedule
        except RPCError:
            return None
        return schedule if [interval.every for interval in schedule.spec.intervals] == [every] else None

    schedule: Schedule = await eventually(look, f"the schedule of {queue}, every {every}")
    return schedule


async def test_the_plugin_makes_the_schedule(temporal_client: Client, worker: Workers, queue: str) -> None:
    async with worker(Asked(LANDED)):
        schedule = await schedule_every(temporal_client, queue, timedelta(minutes=1))
    action = schedule.action
    assert isinstance(action, ScheduleActionStartWorkflow)
    assert (action.workflow, action.task_queue) == (messages.RECONCILIATION_TYPE, f"{queue}.reconciliation")
    assert action.run_timeout == timedelta(minutes=15)
    assert schedule.policy.overlap is ScheduleOverlapPolicy.SKIP
    assert schedule.policy.catchup_window == timedelta(minutes=10)
    assert not schedule.state.paused


async def test_a_second_start_updates_the_schedule_and_keeps_an_operators_pause(
    temporal_client: Client, database_url: str, queue: str
) -> None:
    @asynccontextmanager
    async def hosting(every: timedelta) -> AsyncIterator[None]:
        plugin = DurableJobsPlugin(database_url, [Asked(LANDED)], reconcile_every=every, grace_seconds=1)
        async with Worker(temporal_client, task_queue=queue, plugins=[plugin]):
            yield

    handle = temporal_client.get_schedule_handle(schedule_id(queue))

    def older(present: Any) -> ScheduleUpdate:
        schedule = present.description.schedule
        schedule.policy.overlap = ScheduleOverlapPolicy.ALLOW_ALL
        schedule.policy.catchup_window = timedelta(days=365)
        return ScheduleUpdate(schedule=schedule)

    async with hosting(NEVER):
        await schedule_every(temporal_client, queue, NEVER)
        await handle.pause(note="their outage")
        await handle.update(older)
    async with hosting(2 * NEVER):
        schedule = await schedule_every(temporal_client, queue, 2 * NEVER)
        assert (schedule.state.paused, schedule.state.note) == (True, "their outage")
        assert schedule.policy.overlap is ScheduleOverlapPolicy.SKIP
        assert schedule.policy.catchup_window == timedelta(minutes=10)
        await handle.unpause()
    async with hosting(NEVER):
        assert not (await schedule_every(temporal_client, queue, NEVER)).state.paused
    await handle.delete()


class AskedOfMany(Working):
    """Knows one job's fate, and that another is still at work; of the rest it knows nothing."""

    def __init__(self) -> None:
        super().__init__(LANDED)
        self.landed: Job | None = None
        self.pending: Job | None = None

    async def provider_state(self, operation_key: str, job: Job) -> Any:
        if self.landed is not None and job.id == self.landed.id:
            return LANDED
        if self.pending is not None and job.id == self.pending.id:
            return ProviderState.pending()
        return ProviderState.unknown("no such ledger")


async def test_the_summary_is_the_result_of_the_workflow(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    """Asked for at once, and by the schedule: an operator reads it in the Temporal UI."""
    handler = AskedOfMany()
    handler.landed, handler.pending = [await uncertain(jobs.service, spec()) for _ in range(2)]
    for make in (uncertain, timed_out, escalated):
        await make(jobs.service, spec())
    async with worker(handler, reconcile_every=NEVER):
        first = await jobs.sweep(queue)
        assert first == summary(4, before_an_operator=1, resolved={"completed": 1}, escalated=2, skipped={"pending": 1})
        await temporal_client.get_schedule_handle(schedule_id(queue)).trigger()

        async def closed() -> list[Any]:
            query = f"TaskQueue = '{reconciliation_queue(queue)}' AND ExecutionStatus = 'Completed'"
            found = [each async for each in temporal_client.list_workflows(query)]
            return found if len(found) == 2 else []

        found = await eventually(closed, "both sweeps are closed")
        results = [
            await temporal_client.get_workflow_handle(each.id, run_id=each.run_id, result_type=SweepSummary).result()
            for each in sorted(found, key=lambda each: each.start_time)
        ]
    assert {each.workflow_type for each in found} == {messages.RECONCILIATION_TYPE}
    assert results == [first, summary(before_an_operator=3, skipped={"pending": 1})]


async def until_uncertain(jobs: DurableJobs, client: Client, spec: Specs, **overrides: Any) -> JobHandle:
    """A job that its handler ran, whose outcome is unknown, and whose workflow waits for the truth."""
    handle = await jobs.create_job(spec(**overrides))
    await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
    assert await workflow_status(client, handle.id) is RUNNING
    return handle


ENDINGS: dict[str, tuple[Any, JobStatus, type[JobOutcomeError] | None, WorkflowExecutionStatus]] = {
    "succeeded": (LANDED, JobStatus.FAILED, None, WorkflowExecutionStatus.COMPLETED),
    "failed": (ProviderState.failed("no"), JobStatus.FAILED, JobFailedError, WorkflowExecutionStatus.FAILED),
    "dead letter": (
        ProviderState.failed("no"),
        JobStatus.DEAD_LETTER,
        JobDeadLetteredError,
        WorkflowExecutionStatus.FAILED,
    ),
}


@pytest.mark.parametrize(("answer", "verdict", "error", "status"), ENDINGS.values(), ids=ENDINGS)
async def test_a_resolution_wakes_the_jobs_workflow(
    jobs: DurableJobs,
    temporal_client: Client,
    worker: Workers,
    spec: Specs,
    queue: str,
    answer: ProviderState[Any],
    verdict: JobStatus,
    error: type[JobOutcomeError] | None,
    status: WorkflowExecutionStatus,
) -> None:
    """It closes as the job ended, long before its own timer (half a minute at first); the wait for a result ends."""
    policy = ReconciliationPolicy(on_provider_failure=verdict)
    async with worker(Working(answer), reconcile_every=NEVER, reconciliation=policy):
        handle = await until_uncertain(jobs, temporal_client, spec)
        waiting = asyncio.create_task(handle.result(timeout=30))
        await jobs.sweep(queue)
        if error is None:
            assert await waiting == RESULT
        else:
            with pytest.raises(error):
                await waiting
        await until_workflow(temporal_client, handle.id, status, timeout=15)


async def test_an_operators_word_closes_the_workflow(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs
) -> None:
    async with worker(Working(LANDED), reconcile_every=NEVER):
        handle = await until_uncertain(jobs, temporal_client, spec)
        waiting = asyncio.create_task(handle.result(timeout=30))
        await handle.resolve(JobStatus.COMPLETED, {"seen": "their ledger"}, "ann", result=RESULT)
        assert await waiting == RESULT
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED, timeout=15)


async def test_an_escalated_job_keeps_its_workflow_waiting(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    async with worker(Working(ProviderState.unknown("?")), reconcile_every=NEVER):
        handle = await until_uncertain(jobs, temporal_client, spec)
        assert (await jobs.sweep(queue)).escalated == 1
        assert await workflow_status(temporal_client, handle.id) is RUNNING
        assert await handle.status() is JobStatus.INDETERMINATE


# What an escalation does beyond its column.


async def test_an_escalation_calls_the_hook_once(jobs: DurableJobs, worker: Workers, spec: Specs, queue: str) -> None:
    told: list[Job] = []
    job = await uncertain(jobs.service, spec())
    await uncertain(jobs.service, spec(project="beta"))
    handler = AskedOfMany()
    handler.landed = job
    async with worker(handler, reconcile_every=NEVER, on_escalation=told.append):
        await jobs.sweep(queue)
        await jobs.sweep(queue)
    (told_of,) = told
    row = await jobs.service.get_job(told_of.id)
    assert (told_of.project_id, told_of.escalated_at) == ("beta", row.escalated_at)
    assert told_of.escalation_reason == row.escalation_reason


async def test_a_hook_that_fails_stops_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Job] = []
    rows = [await uncertain(jobs.service, spec()) for _ in range(3)]

    async def fails(job: Job) -> None:
        tried.append(job)
        raise ConnectionError("the pager is down")

    handler = AskedOfMany()
    handler.landed = rows[2]
    async with worker(handler, reconcile_every=NEVER, on_escalation=fails):
        assert await jobs.sweep(queue) == summary(3, resolved={"completed": 1}, escalated=2)
    assert {job.id for job in tried} == {rows[0].id, rows[1].id}
    assert (await jobs.service.get_job(rows[0].id)).escalated_at is not None
    logged = [record.getMessage() for record in caplog.records if "escalation hook failed" in record.getMessage()]
    assert len(logged) == 2


async def test_a_hook_that_hangs_holds_no_sweep_up(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A webhook has ten seconds; half a second here, if the limit is that one's."""
    monkeypatch.setattr("durable_jobs.temporal.escalation.HOOK_TIMEOUT_SECONDS", 0.5)
    await uncertain(jobs.service, spec())

    async def hangs(job: Job) -> None:
        await asyncio.Event().wait()

    async with worker(Working(ProviderState.unknown("?")), reconcile_every=NEVER, on_escalation=hangs):
        try:
            async with asyncio.timeout(6):
                await jobs.sweep(queue)
        except TimeoutError:
            raise AssertionError("the sweep waits for the hook") from None


async def test_the_default_hook_is_the_log(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = await timed_out(jobs.service, spec())
    async with worker(Asked(LANDED), reconcile_every=NEVER):
        await jobs.sweep(queue)
    logged = [record for record in caplog.records if str(job.id) in record.getMessage()]
    assert [record.levelno for record in logged] == [logging.ERROR]
    reason = (await jobs.service.get_job(job.id)).escalation_reason
    assert logged[0].getMessage() == f"Job {job.id} of acme/alpha needs an operator: {reason}"


@asynccontextmanager
async def web_server(status: int) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server that answers every POST with this status, and keeps what was posted."""
    posted: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].split("\r\n")[0])
        assert head.startswith("post /alarm ")
        assert "content-type: application/json" in head
        posted.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {status} Done\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/alarm", posted


@pytest.mark.parametrize("status", [204, 500])
async def test_a_webhook_is_told_the_facts_and_nothing_of_the_payload(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    await uncertain(jobs.service, spec(payload={"secret": "of the tenant's"}))
    handler = Working(ProviderState.unknown("?"))
    async with (
        web_server(status) as (url, posted),
        worker(handler, reconcile_every=NEVER, on_escalation=url),
    ):
        assert (await jobs.sweep(queue)).escalated == 1
    (job,) = (await jobs.service.list_jobs()).items
    assert job.escalated_at is not None
    (facts,) = posted
    assert facts == {
        "id": str(job.id),
        "organization_id": "acme",
        "project_id": "alpha",
        "queue": queue,
        "job_type": "probe",
        "status": "indeterminate",
        "operation_key": job.operation_key,
        "escalated_at": facts["escalated_at"],
        "escalation_reason": job.escalation_reason,
    }
    failed = [record for record in caplog.records if "escalation hook failed" in record.getMessage()]
    assert len(failed) == (1 if status == 500 else 0)


async def test_a_webhook_that_nobody_answers_stops_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str
) -> None:
    await timed_out(jobs.service, spec())
    async with web_server(204) as (url, _):
        pass
    async with worker(Asked(LANDED), reconcile_every=NEVER, on_escalation=url):
        assert (await jobs.sweep(queue)).escalated == 1


async def test_an_escalation_counts_in_a_metric(
    jobs: DurableJobs, temporal_client: Client, database_url: str, spec: Specs, queue: str
) -> None:
    metrics = MetricBuffer(10_000)
    client = await Client.connect(
        temporal_client.service_client.config.target_host,
        namespace=temporal_client.namespace,
        runtime=Runtime(telemetry=TelemetryConfig(metrics=metrics)),
    )
    for _ in range(2):
        await timed_out(jobs.service, spec())
    plugin = DurableJobsPlugin(database_url, [Asked(LANDED)], reconcile_every=NEVER, grace_seconds=1)
    async with Worker(client, task_queue=queue, plugins=[plugin]):
        assert (await jobs.sweep(queue)).escalated == 2
    counted = [each for each in metrics.retrieve_updates() if each.metric.name == "durable_jobs_escalated"]
    assert sum(each.value for each in counted) == 2
    assert {(each.attributes["queue"], each.attributes["job_type"]) for each in counted} == {(queue, "probe")}
    await temporal_client.get_schedule_handle(schedule_id(queue)).delete()


def test_a_hook_must_be_a_callable_or_a_url(database_url: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        DurableJobsPlugin(database_url, [], on_escalation="ftp://pager")
    assert [problem.field for problem in refused.value.problems] == ["on_escalation"]


# Jobs in full swing.


async def test_saturated_job_slots_do_not_starve_the_sweep(
    jobs: DurableJobs, temporal_client: Client, database_url: str, spec: Specs, queue: str
) -> None:
    gate = Gate()

    async def holds_the_slot(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        job.nothing_sent()
        return RESULT

    handler = Working(LANDED, holds_the_slot)
    plugin = DurableJobsPlugin(database_url, [handler], reconcile_every=NEVER, grace_seconds=1)
    waiting = await uncertain(jobs.service, spec())
    async with Worker(temporal_client, task_queue=queue, plugins=[plugin], max_concurrent_activities=1):
        blocking = await jobs.create_job(spec())
        await gate.handler_came()
        queued = await jobs.create_job(spec())  # only now: of two at once either may get the slot
        async with asyncio.timeout(20):
            assert await jobs.sweep(queue) == summary(resolved={"completed": 1})
        assert (await jobs.service.get_job(waiting.id)).status is JobStatus.COMPLETED
        assert not gate.go_on.is_set()
        assert await queued.status() is JobStatus.QUEUED
        gate.go_on.set()
        for handle in (blocking, queued):
            assert await handle.result(timeout=20) == RESULT
    await temporal_client.get_schedule_handle(schedule_id(queue)).delete()


# Follow-ups, on every path to completed.


async def answers(job: JobContext, request: dict[str, Any]) -> Any:
    async with job.dispatch(f"probe:{job.id}"):
        if request.get("lost"):
            raise ConnectionError("reset by peer")
        return RESULT


async def child_runs(job: JobContext, request: dict[str, Any]) -> Any:
    return {"total": request["total"]}


async def by_the_worker(jobs: DurableJobs, handle: JobHandle) -> None:
    await handle.result(timeout=20)


async def by_the_sweep(jobs: DurableJobs, handle: JobHandle) -> None:
    await until(jobs.service, handle.id, JobStatus.INDETERMINATE)


async def by_a_webhook(jobs: DurableJobs, handle: JobHandle) -> None:
    job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
    assert job.operation_key is not None
    landed: ProviderState[Any] = ProviderState.succeeded(RESULT)
    where = {"organization": job.organization_id, "project": job.project_id}
    await jobs.service.record_provider_state(job.operation_key, landed, {"event": 1}, "webhook", **where)


async def by_an_operator(jobs: DurableJobs, handle: JobHandle) -> None:
    await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
    await handle.resolve(JobStatus.COMPLETED, {"seen": "their ledger"}, "ann", result=RESULT)


PATHS: list[Callable[[DurableJobs, JobHandle], Awaitable[None]]] = [
    by_the_worker,
    by_the_sweep,
    by_a_webhook,
    by_an_operator,
]


async def test_follow_ups_appear_once_on_each_path_to_completed(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    parents, child = WorkingParent(LANDED, answers), Child(LANDED, child_runs)
    async with worker(parents, child, reconcile_every=NEVER):
        handles = []
        for path in PATHS:
            handles.append(await jobs.create_job(spec(payload={"lost": path is not by_the_worker})))
            await path(jobs, handles[-1])
        swept = await jobs.sweep(queue)
        assert (swept.resolved, swept.follow_ups) == ({"completed": 1}, 2)
        for handle in handles:
            assert await handle.result(timeout=20) == RESULT
            key = f"{handle.id}:{follow_up('mail').name}"
            created = await jobs.service.find_by_idempotency_key("acme", "alpha", key)
            assert created is not None
            assert (created.job_type, created.payload) == ("child", {"of": "mail", "total": 7})
            assert await jobs.handle(created.id).result(timeout=20) == RESULT
            await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
        again = await jobs.sweep(queue)
        assert (again.resolved, again.follow_ups) == ({}, 0)
    assert len((await jobs.service.list_jobs()).items) == 2 * len(PATHS)
    assert (parents.calls, child.calls) == (len(PATHS), len(PATHS))


@pytest.mark.parametrize("path", PATHS)
async def test_a_conflicting_follow_up_escalates_its_parent_and_undoes_nothing(
    jobs: DurableJobs,
    temporal_client: Client,
    worker: Workers,
    spec: Specs,
    queue: str,
    path: Callable[[DurableJobs, JobHandle], Awaitable[None]],
) -> None:
    told: list[Job] = []
    created = (await jobs.service.create_job(spec(payload={"lost": path is not by_the_worker}))).job
    other = spec(idempotency_key=f"{created.id}:mail", queue="another-queue")
    theirs = (await jobs.service.create_job(other)).job
    handle = jobs.handle(created.id)
    async with worker(WorkingParent(LANDED, answers), reconcile_every=NEVER, on_escalation=told.append):
        await handle.launch()
        await path(jobs, handle)
        assert (await jobs.sweep(queue)).follow_ups == 0
        assert await handle.result(timeout=20) == RESULT
        await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)
    job = await handle.job()
    assert job.status is JobStatus.COMPLETED
    assert job.escalation_reason is not None
    assert job.escalation_reason.startswith(f"FOLLOW_UP_CONFLICT: idempotency key '{job.id}:mail' belongs to job ")
    assert (await handle.events())[-1].name is EventName.ESCALATED
    assert [each.id for each in told] == [job.id]
    assert await jobs.service.get_job(theirs.id) == theirs
    assert len((await jobs.service.list_jobs()).items) == 2


async def test_follow_ups_that_are_none_undo_no_completion_of_the_workers(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    class Careless(Working):
        def follow_ups(self, job: Job, result: Any) -> Any:
            return [{"name": "mail"}]

    async with worker(Careless(LANDED, answers), reconcile_every=NEVER):
        handle = await jobs.create_job(spec(lease_seconds=1))
        job = await until(jobs.service, handle.id, JobStatus.COMPLETED, JobStatus.INDETERMINATE)
    assert (job.status, job.result) == (JobStatus.COMPLETED, RESULT)
    assert await trail(jobs.service, job.id) == [EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED]
