"""`durable-jobs jobs …`: everything an operator does to a job."""

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.text import Text

from durable_jobs.cli import tables
from durable_jobs.cli.connection import with_jobs
from durable_jobs.cli.output import JsonOption, fail, say
from durable_jobs.client import DurableJobs
from durable_jobs.contract.errors import Refused
from durable_jobs.contract.models import Job, JobAttempt, JobEvent, JobHead
from durable_jobs.contract.states import JobStatus
from durable_jobs.service import RecheckFilter

app = typer.Typer(no_args_is_help=True, help="Look at jobs, and act on them.")

JobId = Annotated[UUID, typer.Argument(help="The job's id.")]
Actor = Annotated[str, typer.Option(help="Who acts; kept in the audit trail.")]
Reason = Annotated[str, typer.Option(help="Why; kept in the audit trail.")]
Organization = Annotated[str | None, typer.Option(help="This organization's jobs alone.")]
FOLLOW_SECONDS = 1.0


@app.command("list")
def list_(
    organization: Organization = None,
    project: Annotated[str | None, typer.Option()] = None,
    status: Annotated[list[JobStatus] | None, typer.Option(help="May be given more than once.")] = None,
    queue: Annotated[str | None, typer.Option()] = None,
    job_type: Annotated[str | None, typer.Option("--type")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    after: Annotated[str | None, typer.Option(help="The cursor that the page before printed.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs in their order of creation. A `!` marks those that stand before an operator.

    As JSON without payloads and results, which `show` has.
    """
    page = with_jobs(
        as_json,
        lambda jobs: jobs.service.list_jobs(
            organization=organization,
            project=project,
            statuses=status,
            queue=queue,
            job_type=job_type,
            limit=limit,
            after=after,
        ),
    )
    if as_json:
        say(True, "", jobs=[job.model_dump(mode="json") for job in page.items], next_cursor=page.next_cursor)
        return
    tables.jobs(page.items)
    if page.next_cursor:
        print(f"more: --after {page.next_cursor}")


@app.command()
def show(job_id: JobId, as_json: JsonOption = False) -> None:
    """A job's row, lease, attempts, errors and trail, and the command for each legal next step."""

    async def read(jobs: DurableJobs) -> tuple[Job, datetime, list[JobAttempt], list[JobEvent]]:
        job, now = await jobs.service.get_job_and_clock(job_id)
        attempts = await jobs.service.list_job_attempts(job_id)
        return job, now, attempts.items, await jobs.handle(job_id).events()

    job, now, attempts, events = with_jobs(as_json, read)
    steps = tables.next_steps(job, now)
    if as_json:
        dumped = {"attempts": [each.model_dump(mode="json") for each in attempts]}
        dumped["events"] = [each.model_dump(mode="json") for each in events]
        say(True, "", job=job.model_dump(mode="json"), next_steps=steps, **dumped)
        return
    out = tables.console()
    out.print(Text.assemble((str(job.id), "bold"), "  ", tables.status(job), f"  {job.job_type} on {job.queue}"))
    for line in _about(job, now):
        out.print(line, markup=False, highlight=False)
    out.print()
    tables.attempts(attempts)
    out.print()
    tables.events(events)
    if steps:
        out.print("\nnext:")
        for step in steps:
            print(f"  {step}")


def _about(job: Job, now: datetime) -> Iterator[str]:
    created = tables.age(job.created_at, now)
    yield f"of {job.organization_id}/{job.project_id}, key {job.idempotency_key!r}, created {created} ago"
    if job.lease_expires_at:
        yield f"lease: {job.lease_id}, generation {job.lease_generation}, ends {tables.age(job.lease_expires_at, now)}"
    if job.operation_key:
        yield f"sent as {job.operation_key!r}, generation {job.dispatched_generation}"
    if job.cancel_requested_at:
        yield f"cancellation requested by {job.cancel_actor}: {job.cancel_reason}"
    if job.escalated_at:
        yield f"before an operator since {tables.age(job.escalated_at, now)}: {job.escalation_reason}"
    if job.error:
        yield f"error: {job.error.code}: {job.error.message}"
    if job.reconciliation:
        yield f"reconciled: {json.dumps(job.reconciliation)}"
    if job.result is not None:
        yield f"result: {json.dumps(job.result, ensure_ascii=False)[:500]}"


@app.command()
def events(
    job_id: JobId,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job is settled.")] = False,
    as_json: JsonOption = False,
) -> None:
    """A job's trail; with --json one object for each event, on a line of its own."""

    async def tell(jobs: DurableJobs) -> None:
        cursor: str | None = None
        while True:
            job = await jobs.service.get_job(job_id)
            page = await jobs.service.list_job_events(job_id, after=cursor)
            for event in page.items:
                if as_json:
                    print(event.model_dump_json(), flush=True)
            if page.items and not as_json:
                tables.events(page.items)
            cursor = str(page.items[-1].id) if page.items else cursor
            if page.next_cursor is None and (not follow or job.status.is_settled):
                return
            if page.next_cursor is None:
                await asyncio.sleep(FOLLOW_SECONDS)

    with_jobs(as_json, tell)


@app.command()
def cancel(job_id: JobId, actor: Actor, reason: Reason, as_json: JsonOption = False) -> None:
    """Cancel a job, or ask its holder to. Prints cancelled, requested or already_terminal:<status>."""
    reply = with_jobs(as_json, lambda jobs: jobs.handle(job_id).cancel(reason, actor))
    say(as_json, reply, job_id=str(job_id), reply=reply)


@app.command()
def retry(
    job_id: JobId,
    actor: Actor,
    reason: Reason,
    accept_duplicate_risk: Annotated[
        bool, typer.Option("--accept-duplicate-risk", help="Send again although the first send may still land.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a failed job again, as a new intent with an operation key of its own. Exits with 5 when refused."""
    with_jobs(
        as_json,
        lambda jobs: jobs.handle(job_id).retry(actor, reason, accept_duplicate_risk=accept_duplicate_risk),
    )
    say(as_json, f"{job_id} is queued again", job_id=str(job_id), state="queued")


@app.command()
def requeue(job_id: JobId, actor: Actor, reason: Reason, as_json: JsonOption = False) -> None:
    """Queue an interrupted job whose lease ran out before its boundary. Exits with 5 when another verb applies."""
    with_jobs(as_json, lambda jobs: jobs.handle(job_id).requeue(actor, reason))
    say(as_json, f"{job_id} is queued again", job_id=str(job_id), state="queued")


@app.command()
def resolve(
    job_id: JobId,
    verdict: Annotated[JobStatus, typer.Argument(help="completed, failed or dead_letter.")],
    actor: Actor,
    evidence: Annotated[str, typer.Option(help="A JSON object: what the verdict rests on.")],
    result: Annotated[str | None, typer.Option(help="The result of a completed job, a JSON object.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Settle an uncertain job on your word, which is kept. Exits with 5 when it is not uncertain."""
    given = _object("evidence", evidence, as_json)
    outcome = _object("result", result, as_json) if result is not None else None
    with_jobs(as_json, lambda jobs: jobs.handle(job_id).resolve(verdict, given, actor, result=outcome))
    say(as_json, f"{job_id} is {verdict}", job_id=str(job_id), state=str(verdict))


@app.command()
def recheck(
    actor: Actor,
    reason: Reason,
    job_id: Annotated[UUID | None, typer.Argument(help="One job; or name many by the options.")] = None,
    organization: Organization = None,
    project: Annotated[str | None, typer.Option()] = None,
    queue: Annotated[str | None, typer.Option()] = None,
    job_type: Annotated[str | None, typer.Option("--type")] = None,
    escalated_after: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%dT%H:%M:%S%z"])] = None,
    escalated_before: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%dT%H:%M:%S%z"])] = None,
    as_json: JsonOption = False,
) -> None:
    """Take escalated jobs from before the operator: uncertain ones go back into the sweep, such as all of an hour in
    which the provider was down. Of one job: exits with 4 where there is none, with 5 where it is not escalated."""
    wanted = RecheckFilter(
        job_id=job_id,
        organization=organization,
        project=project,
        queue=queue,
        job_type=job_type,
        escalated_after=escalated_after,
        escalated_before=escalated_before,
    )

    async def take_back(jobs: DurableJobs) -> list[UUID]:
        taken = await jobs.service.recheck_job(wanted, actor, reason)
        if job_id is not None and not taken:
            job = await jobs.service.get_job(job_id)
            raise Refused(f"job {job.id} is {job.status}, and does not stand before an operator")
        return taken

    taken = with_jobs(as_json, take_back)
    say(as_json, f"{len(taken)} jobs no longer stand before an operator", job_ids=[str(each) for each in taken])


@app.command()
def escalated(organization: Organization = None, as_json: JsonOption = False) -> None:
    """What needs a person first: jobs that stand before an operator, in whatever status."""

    async def read(jobs: DurableJobs) -> list[JobHead]:
        found: list[JobHead] = []
        cursor: str | None = None
        while True:
            page = await jobs.service.list_jobs(organization=organization, escalated=True, after=cursor, limit=1000)
            found += page.items
            cursor = page.next_cursor
            if cursor is None:
                return sorted(found, key=lambda job: job.escalated_at or job.created_at)

    found = with_jobs(as_json, read)
    if as_json:
        say(True, "", jobs=[job.model_dump(mode="json") for job in found])
        return
    rows = (
        (job.id, tables.status(job), tables.age(job.escalated_at), job.job_type, job.escalation_reason) for job in found
    )
    tables.show(("id", "status", "since", "type", "reason"), rows, empty="nothing stands before an operator")


def _object(name: str, text: str, as_json: bool) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        fail(as_json, "INVALID_INPUT", f"{name}: is no JSON: {error}", exit_code=2)
    if not isinstance(value, dict):
        fail(as_json, "INVALID_INPUT", f"{name}: must be a JSON object", exit_code=2)
    return value
