"""`durable-jobs jobs …`: everything an operator does to a job."""

import asyncio
import json
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import typer

from durable_jobs.cli import tables
from durable_jobs.cli.connection import with_jobs
from durable_jobs.cli.output import JsonOption, fail, say
from durable_jobs.client import DurableJobs
from durable_jobs.contract.models import Job, JobAttempt, JobEvent
from durable_jobs.contract.states import UNRESOLVED, JobStatus
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
    """List jobs in their order of creation. A `!` marks those that stand before an operator."""
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
    out.print(f"[bold]{job.id}[/]  {tables.status(job)}  {job.job_type} on {job.queue}")
    created = tables.age(job.created_at, now)
    out.print(f"of {job.organization_id}/{job.project_id}, key {job.idempotency_key!r}, created {created} ago")
    if job.lease_expires_at:
        ends = tables.age(job.lease_expires_at, now)
        out.print(f"lease: {job.lease_id}, generation {job.lease_generation}, ends {ends}")
    if job.operation_key:
        out.print(f"sent as {job.operation_key!r}, generation {job.dispatched_generation}")
    if job.cancel_requested_at:
        out.print(f"cancellation requested by {job.cancel_actor}: {job.cancel_reason}")
    if job.escalated_at and job.escalation_reason:
        out.print(f"[bold]before an operator[/] since {tables.age(job.escalated_at, now)}: {job.escalation_reason}")
    if job.error:
        out.print(f"error: {job.error.code}: {job.error.message}", markup=False)
    if job.reconciliation:
        out.print(f"reconciled: {json.dumps(job.reconciliation)}", markup=False)
    if job.result is not None:
        out.print(f"result: {json.dumps(job.result, ensure_ascii=False)[:500]}", markup=False)
    out.print()
    tables.attempts(attempts)
    out.print()
    tables.events(events)
    if steps:
        out.print("\nnext:")
        for step in steps:
            print(f"  {step}")


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
    """Send escalated jobs back into the sweep, such as all of an hour in which the provider was down."""
    wanted = RecheckFilter(
        job_id=job_id,
        organization=organization,
        project=project,
        queue=queue,
        job_type=job_type,
        escalated_after=escalated_after,
        escalated_before=escalated_before,
    )
    sent = with_jobs(as_json, lambda jobs: jobs.service.recheck_job(wanted, actor, reason))
    say(as_json, f"{len(sent)} jobs go back into the sweep", job_ids=[str(each) for each in sent])


@app.command()
def escalated(organization: Organization = None, as_json: JsonOption = False) -> None:
    """What needs a person first: uncertain jobs that stand before an operator."""

    async def read(jobs: DurableJobs) -> list[Job]:
        found: list[Job] = []
        cursor: str | None = None
        while True:
            page = await jobs.service.list_jobs(
                organization=organization, statuses=sorted(UNRESOLVED), after=cursor, limit=1000
            )
            found += [job for job in page.items if job.escalated_at]
            cursor = page.next_cursor
            if cursor is None:
                return sorted(found, key=lambda job: job.escalated_at or job.created_at)

    found = with_jobs(as_json, read)
    if as_json:
        say(True, "", jobs=[job.model_dump(mode="json") for job in found])
        return
    rows = ((job.id, tables.age(job.escalated_at), job.job_type, job.escalation_reason) for job in found)
    tables.show(("id", "since", "type", "reason"), rows, empty="nothing stands before an operator")


def _object(name: str, text: str, as_json: bool) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        fail(as_json, "INVALID_INPUT", f"{name}: is no JSON: {error}", exit_code=2)
    if not isinstance(value, dict):
        fail(as_json, "INVALID_INPUT", f"{name}: must be a JSON object", exit_code=2)
    return value
