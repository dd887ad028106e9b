"""Commands on the whole: workers, sweep, prune, quarantine."""

from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from durable_jobs.cli import tables
from durable_jobs.cli.connection import with_jobs
from durable_jobs.cli.jobs import Actor, Organization, Reason
from durable_jobs.cli.output import JsonOption, say
from durable_jobs.client import DurableJobs


def workers(as_json: JsonOption = False) -> None:
    """Every worker that was ever here: healthy, stale or stopped; stale records are kept for diagnosis."""
    found = with_jobs(as_json, lambda jobs: jobs.service.list_workers())
    if as_json:
        say(True, "", workers=[{**each.model_dump(mode="json"), "health": tables.health(each)} for each in found])
        return
    tables.workers(found)


def sweep(queue: Annotated[str, typer.Argument(help="The queue's name.")], as_json: JsonOption = False) -> None:
    """Sweep a queue now: resolve uncertain jobs, launch missing workflows. Needs a live worker of the queue."""
    summary = asdict(with_jobs(as_json, lambda jobs: jobs.sweep(queue)))
    resolved = ", ".join(f"{count} {word}" for word, count in summary["resolved"].items()) or "none resolved"
    text = f"looked at {summary['looked_at']}: {resolved}, {summary['escalated']} escalated"
    say(as_json, text, **summary)


def prune(
    older_than_days: Annotated[float, typer.Option(min=0, help="Settled for longer than this.")],
    organization: Organization = None,
    batch: Annotated[int, typer.Option(min=1, max=10_000)] = 1000,
    as_json: JsonOption = False,
) -> None:
    """Delete settled jobs with their trails, in batches; never an unsettled or an escalated one.

    Their idempotency keys are free again. Needs the retention role that `durable-jobs migrate --roles` makes.
    """
    before = datetime.now(UTC) - timedelta(days=older_than_days)

    async def work(jobs: DurableJobs) -> int:
        total = 0
        while deleted := await jobs.service.prune(before, organization=organization, limit=batch):
            total += deleted
        return total

    deleted = with_jobs(as_json, work)
    say(as_json, f"{deleted} jobs deleted that were settled before {before:%Y-%m-%d %H:%M} UTC", deleted=deleted)


def quarantine(
    since: Annotated[
        datetime, typer.Option(formats=["%Y-%m-%dT%H:%M:%S%z"], help="Such as 2026-11-30T12:00:00+00:00.")
    ],
    actor: Actor,
    reason: Reason,
    as_json: JsonOption = False,
) -> None:
    """After a restore or an unsafe failover: call every job uncertain that may have been dispatched since then.

    To be run before workers and clients start again.
    """
    done = with_jobs(as_json, lambda jobs: jobs.service.quarantine(since, actor=actor, reason=reason))
    say(as_json, f"{len(done)} jobs are indeterminate now", job_ids=[str(each) for each in done])
