"""`durable-jobs queues …`."""

from typing import Annotated

import typer

from durable_jobs.cli import tables
from durable_jobs.cli.connection import stale_seconds, with_jobs
from durable_jobs.cli.jobs import Actor, Organization, Reason
from durable_jobs.cli.output import JsonOption, say
from durable_jobs.client import DurableJobs
from durable_jobs.contract.workers import QueuePause

app = typer.Typer(no_args_is_help=True, help="See how queues stand; pause and resume them.")

Queue = Annotated[str, typer.Argument(help="The queue's name.")]
JobType = Annotated[str | None, typer.Option("--type", help="This job type alone.")]


@app.command("list")
def list_(organization: Organization = None, as_json: JsonOption = False) -> None:
    """Every queue and type with unsettled jobs: depth, age, pause, live workers."""
    found = with_jobs(
        as_json, lambda jobs: jobs.service.list_queues(organization=organization, stale_seconds=stale_seconds())
    )
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
    """Lift this very pause, wake the due jobs, and tell which pauses still stand on the queue."""

    async def lift(jobs: DurableJobs) -> tuple[bool, int, list[QueuePause]]:
        changed = await jobs.service.resume_queue(
            queue, job_type, actor=actor, reason=reason, organization=organization
        )
        woken = await jobs.wake_due(queue, job_type, organization=organization)
        return changed, woken, await jobs.service.list_pauses(queue)

    changed, woken, standing = with_jobs(as_json, lift)
    lines = [f"{queue} is resumed, {woken} jobs woken" if changed else f"no such pause stood on {queue}"]
    for each in standing:
        said, command = tables.pause(each)
        lines += [f"still {said}", f"  {command}"]
    dumped = [each.model_dump(mode="json") for each in standing]
    say(as_json, "\n".join(lines), queue=queue, changed=changed, woken=woken, still_paused=dumped)
