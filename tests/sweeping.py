"""A provider that a test scripts, the sweep over it, and the uncertain rows that the sweep is let loose on."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from pydantic import BaseModel

from durable_jobs import (
    DurableJobService,
    FollowUp,
    Job,
    JobContext,
    JobError,
    JobHandler,
    JobHead,
    JobSpec,
    ProviderState,
)
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.contract.summary import SweepSummary
from durable_jobs.service.reconciliation import Handled
from tests.support import ERROR, claimed, dispatched, expire, sql

NEVER = timedelta(days=365)
"""As a schedule's interval: no sweep comes by itself while a test runs."""

Answer = ProviderState[Any] | BaseException | Callable[[str, Job], Awaitable[Any]]


class Report(BaseModel):
    """What the scripted provider returns."""

    total: int


class Asked(JobHandler[dict[str, Any], Report]):
    """Answers lookups as it was told to, and keeps the keys that it was asked for. It must never be run."""

    job_type = "probe"

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.keys: list[str] = []

    async def run(self, job: JobContext, request: dict[str, Any]) -> Report:
        raise AssertionError("a sweep never dispatches")

    async def provider_state(self, operation_key: str, job: Job) -> Any:
        self.keys.append(operation_key)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer if isinstance(self.answer, ProviderState) else await self.answer(operation_key, job)


class Parent(Asked):
    """The same, of a type whose completions have follow-ups."""

    def __init__(self, answer: Answer, *names: str) -> None:
        super().__init__(answer)
        self.names = names

    def follow_ups(self, job: Job, result: Report) -> Sequence[FollowUp]:
        return [follow_up(name, total=result.total) for name in self.names]


def follow_up(name: str, **payload: Any) -> FollowUp:
    return FollowUp(name=name, job_type="child", payload={"of": name} | payload)


Script = Callable[[JobContext, dict[str, Any]], Awaitable[Any]]


async def loses_the_answer(job: JobContext, request: dict[str, Any]) -> Any:
    """Crosses the boundary, and then nobody knows what became of the call."""
    async with job.dispatch(f"probe:{job.id}"):
        raise ConnectionError("reset by peer")


class Working(Asked):
    """A handler that is run as well: by default each of its calls is lost past the boundary."""

    consequential = False

    def __init__(self, answer: Answer, script: Script = loses_the_answer) -> None:
        super().__init__(answer)
        self.script = script
        self.calls = 0

    async def run(self, job: JobContext, request: dict[str, Any]) -> Any:
        self.calls += 1
        return await self.script(job, request)


class WorkingParent(Working):
    """The same, of a type whose completions have a follow-up named mail."""

    def follow_ups(self, job: Job, result: Report) -> Sequence[FollowUp]:
        return [follow_up("mail", total=result.total)]


class Child(Working):
    """Runs the follow-ups."""

    job_type = "child"


LANDED = ProviderState.succeeded(Report(total=7))
RESULT = {"total": 7}


@dataclass
class Swept:
    """What one sweep did, and whom it told of it."""

    summary: SweepSummary
    told: list[Handled]

    @property
    def words(self) -> dict[UUID, str]:
        """The jobs that were told of, with the word for what became of each."""
        return {handled.job.id: handled.word for handled in self.told if handled.job is not None}


async def swept(
    service: DurableJobService,
    queue: str,
    *handlers: JobHandler[Any, Any],
    policy: ReconciliationPolicy | None = None,
    organizations: Sequence[str] | None = None,
) -> Swept:
    """Sweep the queue once, as a worker with these handlers would."""
    told: list[Handled] = []

    async def tell(handled: Handled) -> None:
        told.append(handled)

    lookups = {handler.job_type: handler for handler in handlers}
    summary = await service.sweep_reconciliation_candidates(
        queue, lookups, policy=policy, organizations=organizations, tell=tell
    )
    return Swept(summary, told)


def summary(looked_at: int = 1, *, before_an_operator: int = 0, **counts: Any) -> SweepSummary:
    """A summary as it is expected: `before_an_operator` is how many stood escalated as it began."""
    skipped = {"escalated": before_an_operator} | counts.pop("skipped", {})
    return SweepSummary(looked_at=looked_at, skipped=skipped, **counts)


async def uncertain(service: DurableJobService, spec: JobSpec) -> Job:
    """A job past its boundary whose outcome nobody knows; its operation key is `key:<its id>`."""
    return await service.mark_indeterminate(await dispatched(service, spec), ERROR)


async def unmarked(service: DurableJobService, spec: JobSpec) -> Job:
    """An indeterminate job without an operation key: its handler returned, and had recorded no dispatch."""
    error = JobError.of("DISPATCH_NOT_RECORDED", "a consequential handler returned without having dispatched")
    return await service.mark_indeterminate(await claimed(service, spec), error)


async def timed_out(service: DurableJobService, spec: JobSpec) -> Job:
    """A job whose handler's time ran out past the boundary."""
    return await service.mark_timed_out(await dispatched(service, spec), ERROR)


async def abandoned(service: DurableJobService, spec: JobSpec) -> Job:
    """A job whose holder vanished past the boundary: its lease has run out, its status is still running."""
    claim = await dispatched(service, spec)
    await expire(service, claim.job_id)
    return await service.get_job(claim.job_id)


async def escalated(service: DurableJobService, spec: JobSpec) -> Job:
    """An uncertain job that stands before an operator."""
    job = await service.escalate_job(await uncertain(service, spec), "somebody has to look", "ann")
    assert job is not None
    return job


async def clock(service: DurableJobService) -> datetime:
    """The database's clock."""
    (row,) = await sql(service, "SELECT clock_timestamp() AS now")
    now: datetime = row["now"]
    return now


async def aged(service: DurableJobService, job_id: UUID, **ago: float) -> None:
    """Let the job have become uncertain so much earlier, on the row and on its trail alike."""
    seconds = timedelta(**ago).total_seconds()
    await sql(
        service,
        f"""
        ALTER TABLE durable_jobs.job_events DISABLE TRIGGER append_only;
        UPDATE durable_jobs.jobs SET finished_at = finished_at - make_interval(secs => {seconds})
            WHERE id = '{job_id}';
        UPDATE durable_jobs.job_events SET occurred_at = occurred_at - make_interval(secs => {seconds})
            WHERE job_id = '{job_id}' AND name IN ('indeterminate', 'timed_out');
        ALTER TABLE durable_jobs.job_events ENABLE ALWAYS TRIGGER append_only;
        """,
    )


async def untouched_for(service: DurableJobService, job_id: UUID, **ago: float) -> None:
    """Let the row have been written for the last time so long ago."""
    await sql(
        service,
        "UPDATE durable_jobs.jobs SET updated_at = clock_timestamp() - make_interval(secs => %(ago)s)"
        " WHERE id = %(id)s",
        id=job_id,
        ago=timedelta(**ago).total_seconds(),
    )


async def audit(service: DurableJobService, **where: Any) -> list[dict[str, Any]]:
    """The control events, oldest first; `where` narrows them by their columns."""
    rows = await sql(
        service,
        "SELECT job_id, organization_id, project_id, action, actor, reason, data"
        " FROM durable_jobs.control_events ORDER BY id",
    )
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


async def many_uncertain(service: DurableJobService, specs: Sequence[JobSpec]) -> list[JobHead]:
    """What `uncertain` makes, for each of the specs, in a few statements; the oldest first."""
    await service.create_jobs(specs)
    event = """
        INSERT INTO durable_jobs.job_events (job_id, organization_id, project_id, name, status, generation,
            intent_number, attempt_count, actor, occurred_at, data)
        SELECT id, organization_id, project_id, '{name}', status, 1, 0, 1, claimed_by, {at}, {data}
        FROM durable_jobs.jobs ORDER BY id"""
    steps = [
        """UPDATE durable_jobs.jobs SET status = 'claimed', lease_generation = 1, attempt_count = 1,
            claimed_by = 'worker-a:1:aaaa', lease_id = 'worker-a:1:aaaa', claim_token = gen_random_uuid(),
            lease_expires_at = now(), heartbeat_at = now(), started_at = now()""",
        event.format(name="claimed", at="started_at", data="jsonb_build_object('claim_token', claim_token)"),
        """UPDATE durable_jobs.jobs SET status = 'running', dispatched_at = now(), dispatched_generation = 1,
            operation_key = 'key:' || id""",
        event.format(name="dispatched", at="dispatched_at", data="jsonb_build_object('operation_key', operation_key)"),
        """UPDATE durable_jobs.jobs SET status = 'indeterminate', finished_at = now(), lease_id = NULL,
            claim_token = NULL, lease_expires_at = NULL, updated_at = now(),
            error = '{"code": "BROKEN", "message": "it broke", "type": null, "traceback": null}'""",
        event.format(name="indeterminate", at="finished_at", data="jsonb_build_object('error', error)"),
        """INSERT INTO durable_jobs.job_attempts (job_id, generation, organization_id, project_id, intent_number,
            worker_id, claimed_at, dispatched_at, operation_key, ended_at, outcome, error)
        SELECT id, 1, organization_id, project_id, 0, claimed_by, started_at, dispatched_at, operation_key,
            finished_at, status, error FROM durable_jobs.jobs""",
    ]

    async def work(connection: Any) -> None:
        for step in steps:
            await connection.exec_driver_sql(step)

    await service.database.run(work)
    found: list[JobHead] = []
    cursor: str | None = None
    while True:
        page = await service.list_jobs(after=cursor, limit=1000)
        found, cursor = found + page.items, page.next_cursor
        if cursor is None:
            return found


async def poison_writes(service: DurableJobService, job_id: UUID) -> None:
    """From now on no write of this row succeeds."""
    await sql(
        service,
        f"""
        CREATE FUNCTION durable_jobs.refuse() RETURNS trigger LANGUAGE plpgsql AS $refuse$
        BEGIN RAISE EXCEPTION 'this row is poison'; END $refuse$;
        CREATE TRIGGER poison BEFORE UPDATE ON durable_jobs.jobs FOR EACH ROW WHEN (OLD.id = '{job_id}')
            EXECUTE FUNCTION durable_jobs.refuse();
        """,
    )
