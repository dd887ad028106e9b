"""`durable-jobs queues …`."""

from typing import Annotated

import typer

from durable_jobs.cli import tables
from durable_jobs.cli.connection import with_jobs
from durable_jobs.cli.jobs import Actor, Organization, Reason
from durable_jobs.cli.output import JsonOption, say

app = typer.Typer(no_args_is_help=True, help="See how queues stand; pause and resume them.")

Queue = Annotated[str, typer.Argument(help="The queue's name.")]
JobType = Annotated[str | None, typer.Option("--type", help="This job type alone.")]


@app.command("list")
def list_(organization: Organization = None, as_json: JsonOption = False) -> None:
    """Every queue and type with unsettled jobs: depth, age, pause, live workers."""
    found = with_jobs(as_json, lambda jobs: jobs.service.list_queues(organization=organization))
    if as_json:
        say(True, "", queues=[each.model_dump(mode="json") for each in found])
        return
    tables.queues(found)


@app.command()
def pause(
    queue: Queue,
    actor: Actor,
    reason: Reason,
    job_type: JobType = None,
    organization: Organization = None,
    as_json: JsonOption = False,
) -> None:
    """Stop the claims of a queue; attempts in hand go on."""
    changed = with_jobs(
        as_json,
        lambda jobs: jobs.service.pause_queue(queue, job_type, actor=actor, reason=reason, organization=organization),
    )
    say(as_json, f"{queue} is paused" if changed else f"{queue} was paused already", queue=queue, changed=changed)


@app.command()
def resume(
    queue: Queue,
    actor: Actor,
    reason: Reason,
    job_type: JobType = None,
    organization: Organization = None,
    as_json: JsonOption = False,
) -> None:
    """Let the claims of a queue start again, and wake its due jobs."""
    woken = with_jobs(
        as_json,
        lambda jobs: jobs.resume_queue(queue, job_type, actor=actor, reason=reason, organization=organization),
    )
    say(as_json, f"{queue} is resumed, {woken} jobs woken", queue=queue, woken=woken)
