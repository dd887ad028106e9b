"""Tables and lines for people, within 100 columns."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from durable_jobs.cli.connection import stale_seconds
from durable_jobs.contract.models import Job, JobAttempt, JobEvent, JobHead
from durable_jobs.contract.rules import encode_json
from durable_jobs.contract.states import JobStatus
from durable_jobs.contract.verbs import legal_verbs
from durable_jobs.contract.workers import QueueOverview, QueuePause, WorkerRecord, WorkerState

WIDTH = 100
_WHY = '--actor NAME --reason "…"'

_COLOURS = {
    JobStatus.COMPLETED: "green",
    JobStatus.FAILED: "red",
    JobStatus.DEAD_LETTER: "red",
    JobStatus.HALT_UNSAFE: "red",
    JobStatus.INDETERMINATE: "yellow",
    JobStatus.TIMED_OUT: "yellow",
}


def console() -> Console:
    """At most 100 columns wide; without colours where the output is no terminal."""
    terminal = Console()
    return Console(width=min(terminal.width, WIDTH) if terminal.is_terminal else WIDTH)


def show(headings: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """One table, or the line `empty`."""
    table = Table(box=None, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading in ("id", "status"))
    for row in rows:
        # Cells hold what tenants wrote: never markup, colours are given as `Text`.
        table.add_row(*(cell if isinstance(cell, Text) else Text("" if cell is None else str(cell)) for cell in row))
    console().print(table if table.row_count else empty)


def status(job: JobHead) -> Text:
    word = Text(str(job.status), style=_COLOURS.get(job.status, ""))
    return word.append(" !", style="bold") if job.escalated_at else word


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago, or until when, in one word."""
    if moment is None:
        return ""
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    text = duration(abs(seconds))
    return text if seconds >= 0 else f"in {text}"


def duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def jobs(found: Iterable[JobHead]) -> None:
    rows = (
        (
            job.id,
            status(job),
            job.job_type,
            f"{job.organization_id}/{job.project_id}",
            job.attempt_count,
            age(job.created_at),
        )
        for job in found
    )
    show(("id", "status", "type", "project", "tries", "age"), rows, empty="no jobs")


def events(found: Iterable[JobEvent]) -> None:
    rows = (
        (
            event.occurred_at.strftime("%m-%d %H:%M:%S.%f")[:-3],
            event.name,
            event.generation,
            event.actor,
            encode_json(event.shown_data)[:160],
        )
        for event in found
    )
    show(("when (UTC)", "event", "gen", "by", "data"), rows, empty="no events")


def attempts(found: Iterable[JobAttempt]) -> None:
    rows = (
        (
            attempt.generation,
            attempt.intent_number,
            attempt.worker_id,
            attempt.claimed_at.strftime("%m-%d %H:%M:%S"),
            "yes" if attempt.dispatched_at else "no",
            attempt.outcome or "running",
            attempt.error.code if attempt.error else "",
        )
        for attempt in found
    )
    show(("gen", "intent", "worker", "claimed (UTC)", "sent", "outcome", "error"), rows, empty="no attempts")


def queues(found: Iterable[QueueOverview]) -> None:
    rows = (
        (
            each.queue,
            each.job_type,
            each.queued,
            each.active,
            each.unresolved,
            each.escalated,
            duration(each.oldest_due_seconds) if each.oldest_due_seconds is not None else "",
            each.live_workers or Text("none", style="red"),
            "paused" if each.paused else "",
        )
        for each in found
    )
    headings = ("queue", "type", "queued", "active", "unresolved", "escalated", "oldest due", "workers", "")
    show(headings, rows, empty="no unsettled jobs")


def pause(each: QueuePause) -> tuple[str, str]:
    """A pause that stands, and the command that lifts it."""
    named = f" --type {each.job_type}" if each.job_type else ""
    named += f" --organization {each.organization}" if each.organization else ""
    said = f"paused by {each.actor}, {age(each.paused_at)} ago: {each.reason}"
    return said, f"durable-jobs queues resume {each.queue}{named} {_WHY}"


def workers(found: Iterable[WorkerRecord]) -> None:
    rows = (
        (each.id, health(each), each.queue, ", ".join(each.job_types), _load(each), age(each.heartbeat_at, each.now))
        for each in found
    )
    show(("id", "health", "queue", "types", "running", "heartbeat"), rows, empty="no worker was ever here")


def _load(worker: WorkerRecord) -> str:
    return f"{worker.running} of {worker.slots}" if worker.slots else str(worker.running)


def health(worker: WorkerRecord) -> WorkerState:
    return worker.state(stale_seconds())


def next_steps(job: Job, now: datetime) -> list[str]:
    """The command for each legal next step of the job."""
    legal = legal_verbs(job, now)
    risk = " --accept-duplicate-risk" if job.settled_by_operator else ""
    options = {
        "cancel": _WHY,
        "requeue": _WHY,
        "resolve": 'completed|failed|dead_letter --actor NAME --evidence \'{"seen": "…"}\'',
        "recheck": _WHY,
        "retry": _WHY + risk,
    }
    return [f"durable-jobs jobs {verb} {job.id} {given}" for verb, given in options.items() if verb in legal]
