"""The table is the authority: a row whose workflow is missing gets one, a workflow that wasn't told is told."""

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from durable_jobs import DurableJobs, DurableJobService, EventName, Job, JobContext, JobStatus, ProviderState
from durable_jobs.client import JobHandle
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.listener import EnqueueListener
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, eventually, trail, until, until_workflow, workflow_status
from tests.support import B, claimed, dispatched, end_in, expire, make_due, reclaimed, sql
from tests.sweeping import LANDED, NEVER, RESULT, Working, clock, summary, timed_out, uncertain

RUNNING, TERMINATED = WorkflowExecutionStatus.RUNNING, WorkflowExecutionStatus.TERMINATED


@pytest.fixture(autouse=True)
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hears of nothing that was enqueued in SQL: what is launched, the sweep launches."""
    monkeypatch.setattr(EnqueueListener, "start", lambda self: None)


async def returns(job: JobContext, request: dict[str, Any]) -> Any:
    return {"attempt": job.attempt, "generation": job.generation}


async def due_for_launch(service: DurableJobService, *job_ids: UUID) -> None:
    """Let the next look for the workflows of these rows be due since a moment ago."""
    for job_id in job_ids:
        await sql(
            service,
            "UPDATE durable_jobs.jobs SET launch_check_at = clock_timestamp() - interval '1 second' WHERE id = %(id)s",
            id=job_id,
        )


async def has_workflow(client: Client, job_id: UUID) -> bool:
    try:
        await client.get_workflow_handle(workflow_id(job_id)).describe()
    except RPCError as error:
        if error.status is not RPCStatusCode.NOT_FOUND:
            raise
        return False
    return True


async def next_check(service: DurableJobService, job_id: UUID) -> float | None:
    """Seconds until the row's next look, from its last one."""
    (row,) = await sql(
        service,
        "SELECT extract(epoch FROM launch_check_at - clock_timestamp())::float8 AS seconds"
        " FROM durable_jobs.jobs WHERE id = %(id)s",
        id=job_id,
    )
    seconds: float | None = row["seconds"]
    return seconds


async def test_rows_without_a_workflow_get_one(
    jobs: DurableJobs, temporal_client: Client, database_url: str, worker: Workers, spec: Specs, queue: str
) -> None:
    """Temporal was away at submission; the process died between commit and start; the row joined the caller's own
    transaction."""
    away = await Client.connect("127.0.0.1:9", lazy=True)
    async with await DurableJobs.connect(database_url, away) as cut_off:
        rows = [(await cut_off.create_job(spec())).id]
    rows.append((await jobs.service.create_job(spec())).job.id)
    engine = create_async_engine(jobs.service.database.url)
    async with engine.begin() as connection:
        rows.append((await jobs.create_job(spec(), connection=connection)).id)
    await engine.dispose()
    handler = Probe(returns)
    async with worker(handler, reconcile_every=NEVER):
        assert (await jobs.sweep(queue)).launches == 0  # half a minute is theirs, to be started as usual
        assert [await has_workflow(temporal_client, job_id) for job_id in rows] == [False] * 3
        await due_for_launch(jobs.service, *rows)
        assert await jobs.sweep(queue) == summary(0, launches=3)
        for job_id in rows:
            assert await jobs.handle(job_id).result(timeout=20) == {"attempt": 1, "generation": 1}
        assert (await jobs.sweep(queue)).launches == 0
    assert handler.calls == 3


async def test_a_row_that_its_caller_rolled_back_is_no_job(
    jobs: DurableJobs, database_url: str, worker: Workers, spec: Specs, queue: str
) -> None:
    engine = create_async_engine(jobs.service.database.url)
    async with engine.connect() as connection:
        await connection.begin()
        handle = await jobs.create_job(spec(), connection=connection)
        await connection.rollback()
    await engine.dispose()
    async with worker(Probe(returns), reconcile_every=NEVER):
        assert (await jobs.sweep(queue)).launches == 0
    assert (await jobs.service.list_jobs()).items == []
    assert handle.created


async def terminated(client: Client, job_id: UUID) -> str | None:
    """Terminate the job's workflow, which runs; its run id."""
    handle = client.get_workflow_handle(workflow_id(job_id))
    assert await workflow_status(client, job_id) is RUNNING
    await handle.terminate("by mistake")
    await until_workflow(client, job_id, TERMINATED)
    return (await handle.describe()).run_id


async def test_a_terminated_workflow_is_started_again(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    """While queued, while waiting for its backoff, while nobody knows what became of it."""
    service = jobs.service

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if request["kind"] == "lost":
            async with job.dispatch(f"probe:{job.id}"):
                raise ConnectionError("reset by peer")
        if request["kind"] == "fails" and job.attempt == 1:
            raise ConnectionError("refused")
        return RESULT

    async def create(kind: str) -> JobHandle:
        return await jobs.create_job(spec(payload={"kind": kind}, backoff_base_seconds=3600))

    async with worker(Working(ProviderState.pending(), script), reconcile_every=NEVER):
        failing, lost = await create("fails"), await create("lost")
        await until(service, lost.id, JobStatus.INDETERMINATE)
        await eventually(lambda: retried(service, failing.id), "it waits for its backoff")
        await service.pause_queue(queue, actor="ann", reason="so that it stays queued")
        queued = await create("returns")
        handles = [queued, failing, lost]
        runs = [await terminated(temporal_client, handle.id) for handle in handles]
        before = [await handle.job() for handle in handles]
        await due_for_launch(service, *(handle.id for handle in handles))
        assert (await jobs.sweep(queue)).launches == 3
        for handle, run, row in zip(handles, runs, before, strict=True):
            await until_workflow(temporal_client, handle.id, RUNNING)
            assert (await temporal_client.get_workflow_handle(workflow_id(handle.id)).describe()).run_id != run
            assert (await handle.job()).status is row.status
        # And they carry their jobs to the end.
        await jobs.resume_queue(queue, actor="ann", reason="over")
        await make_due(service, failing.id)
        await failing.wake()
        await lost.resolve(JobStatus.COMPLETED, {"seen": "their ledger"}, "ann", result=RESULT)
        for handle in handles:
            assert await handle.result(timeout=20) == RESULT
            await until_workflow(temporal_client, handle.id, WorkflowExecutionStatus.COMPLETED)


async def retried(service: DurableJobService, job_id: UUID) -> bool:
    return await trail(service, job_id) == [EventName.CLAIMED, EventName.RETRIED]


async def test_an_expired_lease_with_nobody_left_is_taken_over(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    """Its worker is gone, its workflow too: the sweep wakes it as soon as the lease has run out, whatever its next
    look for launching is."""
    claim = await claimed(jobs.service, spec())
    await expire(jobs.service, claim.job_id)
    async with worker(Probe(returns), reconcile_every=NEVER):
        assert await jobs.sweep(queue) == summary(skipped={"left_to_reclaim": 1})
        assert await jobs.handle(claim.job_id).result(timeout=20) == {"attempt": 2, "generation": 2}
        await until_workflow(temporal_client, claim.job_id, WorkflowExecutionStatus.COMPLETED)
    outcomes = [each.outcome for each in (await jobs.service.list_job_attempts(claim.job_id)).items]
    assert outcomes == ["lease_expired", "completed"]


class Starts:
    """Notes the jobs whose workflows are started or woken, in order; with what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[UUID] = []
        self.signals: list[UUID] = []
        real = Launcher._start

        async def start(launcher: Launcher, job: Job, **how: Any) -> None:
            (self.signals if "start_signal" in how else self.made).append(job.id)
            await real(launcher, job, **how)

        monkeypatch.setattr(Launcher, "_start", start)


async def test_in_claim_order(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Priority, then schedule, then age."""
    service = jobs.service
    await service.pause_queue(queue, actor="ann", reason="so that they stay")
    past = await clock(service) - timedelta(hours=1)
    order = [(0, None), (2, None), (-2, past), (0, past), (2, past), (0, None)]
    rows = [(await service.create_job(spec(priority=each, scheduled_at=at))).job.id for each, at in order]
    await due_for_launch(service, *rows)
    starts = Starts(monkeypatch)
    async with worker(Probe(returns), reconcile_every=NEVER):
        assert (await jobs.sweep(queue)).launches == 6
    assert starts.made == [rows[index] for index in (4, 1, 3, 0, 5, 2)]
    assert starts.signals == []


async def test_what_runs_is_left_alone(
    jobs: DurableJobs,
    temporal_client: Client,
    worker: Workers,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queued job's workflow is not started twice, nor signalled; nor is that of a job whose lease is alive."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        return RESULT

    handler = Probe(script)
    async with worker(handler, reconcile_every=NEVER):
        tomorrow = await clock(jobs.service) + timedelta(days=1)
        later, held = await jobs.create_job(spec(scheduled_at=tomorrow)), await jobs.create_job(spec())
        await gate.handler_came()
        handles = (later, held)

        async def stand() -> list[Any]:
            found = [await temporal_client.get_workflow_handle(each.workflow_id).describe() for each in handles]
            return [(each.run_id, each.history_length) for each in found]

        before = await stand()
        starts = Starts(monkeypatch)
        for _ in range(3):
            await due_for_launch(jobs.service, later.id, held.id)
            assert (await jobs.sweep(queue)).launches == 2
        assert await stand() == before
        assert (starts.made, starts.signals) == ([later.id] * 3, [])
        gate.go_on.set()
        assert await held.result(timeout=20) == RESULT
        assert await later.status() is JobStatus.QUEUED
    assert handler.calls == 1


async def test_an_uncertain_jobs_workflow_is_woken_once_for_each_look(
    jobs: DurableJobs,
    temporal_client: Client,
    worker: Workers,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [await uncertain(jobs.service, spec()), await timed_out(jobs.service, spec())]
    for job in rows:
        await jobs.service.escalate_job(job, "somebody has to look", "ann")
    await due_for_launch(jobs.service, *(job.id for job in rows))
    starts = Starts(monkeypatch)
    async with worker(Working(LANDED), reconcile_every=NEVER):
        assert (await jobs.sweep(queue)).launches == 2
        assert (await jobs.sweep(queue)).launches == 0
        for job in rows:
            assert await workflow_status(temporal_client, job.id) is RUNNING
    assert sorted(starts.signals) == sorted(job.id for job in rows)
    assert starts.made == []


async def test_a_settled_job_whose_waking_was_lost_gets_its_workflow_told(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    """Long before its own timer; once; and where no workflow runs any more, none is started for it."""
    async with worker(Working(LANDED), reconcile_every=NEVER):
        handles = [await jobs.create_job(spec()) for _ in range(3)]
        for handle in handles:
            await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
        gone = handles[2]
        await terminated(temporal_client, gone.id)
        for handle, verdict in zip(handles, (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.FAILED), strict=True):
            await jobs.service.resolve_job(handle.id, verdict, {"seen": "their ledger"}, "ann")
            seconds = await next_check(jobs.service, handle.id)
            assert seconds is not None
            assert 0 < seconds <= 30
        await due_for_launch(jobs.service, *(handle.id for handle in handles))
        assert (await jobs.sweep(queue)).launches == 3
        await until_workflow(temporal_client, handles[0].id, WorkflowExecutionStatus.COMPLETED, timeout=15)
        await until_workflow(temporal_client, handles[1].id, WorkflowExecutionStatus.FAILED, timeout=15)
        assert await workflow_status(temporal_client, gone.id) is TERMINATED
        assert [await next_check(jobs.service, handle.id) for handle in handles] == [None] * 3
        assert (await jobs.sweep(queue)).launches == 0


# When the rows are looked at: the verb itself.


async def test_each_look_comes_as_late_again_as_the_job_has_waited(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    """So that the looks double, from half a minute to an hour: at 30 s, 60 s, 120 s, …"""
    job = (await service.create_job(spec())).job
    waits = {0: 30, 29: 30, 31: 31, 60: 60, 120: 120, 1800: 1800, 3500: 3500, 3700: 3600, 864_000: 3600}
    for waited, pause in waits.items():
        await sql(
            service,
            "UPDATE durable_jobs.jobs SET created_at = clock_timestamp() - make_interval(secs => %(s)s), scheduled_at ="
            " clock_timestamp() - make_interval(secs => %(s)s), launch_check_at = clock_timestamp() - interval '1 ms'",
            s=waited,
        )
        ((taken, now),) = await service.take_due_for_launch(queue)
        assert (taken.id, taken.status) == (job.id, JobStatus.QUEUED)
        assert taken.launch_check_at is not None
        after = (taken.launch_check_at - now).total_seconds()
        assert pause <= after <= pause + (0 if pause in (30, 3600) else 5), waited
        assert await service.take_due_for_launch(queue) == []


async def test_what_is_due_and_what_is_not(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Half a minute after a row became claimable, after its claim, after it became uncertain; a settled one never."""
    now = await clock(service)
    later = (await service.create_job(spec(scheduled_at=now + timedelta(hours=1)))).job
    assert later.launch_check_at == later.scheduled_at + timedelta(seconds=30)
    queued = (await service.create_job(spec())).job
    assert queued.launch_check_at == queued.created_at + timedelta(seconds=30)
    holding = await service.get_job((await dispatched(service, spec())).job_id)
    doubtful = await uncertain(service, spec())
    for row, since in ((holding, holding.started_at), (doubtful, doubtful.finished_at)):
        assert since is not None
        assert row.launch_check_at == since + timedelta(seconds=30)
    for status in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.DEAD_LETTER):
        assert (await end_in(service, await claimed(service, spec(max_attempts=1)), status)).launch_check_at is None
    assert await service.take_due_for_launch(queue) == []
    # A retry and a requeue are looked at again.
    failed = await end_in(service, await claimed(service, spec()), JobStatus.FAILED)
    again = await service.retry_job(failed.id, "ann", "again")
    assert again.launch_check_at == again.scheduled_at + timedelta(seconds=30)
    claim = await reclaimed(service, again.id, B)
    await expire(service, claim.job_id)
    requeued = await service.requeue_job(claim.job_id, "ann", "stuck")
    assert requeued.launch_check_at == requeued.scheduled_at + timedelta(seconds=30)


async def test_due_rows_are_taken_page_by_page(service: DurableJobService, spec: Specs, queue: str) -> None:
    rows = [(await service.create_job(spec(priority=each))).job.id for each in (-1, 0, 1, 2, -2)]
    other = (await service.create_job(spec(queue="another-queue"))).job
    await due_for_launch(service, *rows, other.id)
    taken = []
    while page := await service.take_due_for_launch(queue, limit=2):
        assert len(page) <= 2
        taken += [job.id for job, _ in page]
    assert taken == [rows[index] for index in (3, 2, 1, 0, 4)]
    assert [job.id for job, _ in await service.take_due_for_launch("another-queue")] == [other.id]


async def test_cheap_when_nothing_is_due(service: DurableJobService, spec: Specs, queue: str) -> None:
    """No row is written, and those that are not due are not even read: the index answers."""
    await service.create_jobs([spec() for _ in range(2000)])
    await sql(service, "ANALYZE durable_jobs.jobs")
    written = "SELECT max(xmin::text::bigint) AS last, count(*) FROM durable_jobs.jobs"
    before = await sql(service, written)
    assert await service.take_due_for_launch(queue) == []
    assert await sql(service, written) == before
    (row,) = await sql(
        service,
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT id FROM durable_jobs.jobs"
        " WHERE queue = %(queue)s AND launch_check_at <= statement_timestamp()"
        " ORDER BY priority DESC, scheduled_at, created_at, id LIMIT 500 FOR NO KEY UPDATE SKIP LOCKED",
        queue=queue,
    )
    plan = row["QUERY PLAN"][0]["Plan"]
    assert "jobs_launch_check" in json.dumps(plan)
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= 20
    await sql(service, "DELETE FROM durable_jobs.jobs")  # their trails, which are empty, need no check


async def test_a_row_that_can_not_be_read_holds_up_no_other(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    """A number that Postgres keeps and Python won't read, written behind the service's back."""
    unreadable, sound = [(await service.create_job(spec())).job.id for _ in range(2)]
    await due_for_launch(service, unreadable, sound)
    await sql(service, "UPDATE durable_jobs.jobs SET payload = '{\"n\": 1e5000}' WHERE id = %(id)s", id=unreadable)
    assert [job.id for job, _ in await service.take_due_for_launch(queue)] == [sound]
    await sql(service, "UPDATE durable_jobs.jobs SET payload = '{\"n\": 1}' WHERE id = %(id)s", id=unreadable)
