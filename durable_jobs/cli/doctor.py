"""`durable-jobs doctor`: what is wrong, and what to do about it."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Literal

import typer
from rich.text import Text
from temporalio.service import RPCError, RPCStatusCode

from durable_jobs.cli import tables
from durable_jobs.cli.connection import stale_seconds, with_jobs
from durable_jobs.cli.output import JsonOption, say
from durable_jobs.client import DurableJobs
from durable_jobs.contract.workers import QueueOverview, QueuePause, WorkerRecord, WorkerState
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.messages import SEARCH_ATTRIBUTES
from durable_jobs.temporal.schedule import schedule_id

UNHEALTHY_EXIT = 7
SKEW_SECONDS = 5.0
LONG_DUE_SECONDS = 600.0
OLD_SNAPSHOT = 1_000_000
"""Transactions: an old snapshot held elsewhere broke the flatness of claims."""

Level = Literal["ok", "warning", "bad"]


@dataclass(frozen=True)
class Finding:
    check: str
    level: Level
    found: str
    do: str = ""


def doctor(as_json: JsonOption = False) -> None:
    """Check schema, clocks, durability, Temporal, queues, workers and stuck jobs.

    Exits with 7 when something is bad; warnings alone leave it at 0.
    """
    findings = with_jobs(as_json, examine)
    bad = any(finding.level == "bad" for finding in findings)
    if as_json:
        say(True, "", healthy=not bad, findings=[asdict(finding) for finding in findings])
    else:
        colours = {"ok": "green", "warning": "yellow", "bad": "red"}
        rows = ((each.check, Text(each.level, style=colours[each.level]), each.found, each.do) for each in findings)
        tables.show(("check", "", "found", "what to do"), rows, empty="")
    if bad:
        raise typer.Exit(UNHEALTHY_EXIT)


async def examine(jobs: DurableJobs) -> list[Finding]:
    """All findings. The schema's version was checked by connecting."""
    service = jobs.service
    facts = await service.database_facts()
    workers, queues = await service.list_workers(), await service.list_queues(stale_seconds=stale_seconds())
    pauses = await service.list_pauses()
    findings = [Finding("schema", "ok", "the newest revision"), *_of_database(facts)]
    findings += await _of_temporal(jobs, workers)
    return findings + _of_queues(queues, workers) + _of_pauses(pauses) + _of_workers(workers)


def _of_database(facts: dict[str, object]) -> list[Finding]:
    skew = abs((datetime.now(UTC) - facts["now"]).total_seconds())  # type: ignore[operator]
    settings = {name: facts[name] for name in ("fsync", "full_page_writes", "synchronous_commit")}
    off = [name for name, value in settings.items() if value == "off" and name != "synchronous_commit"]
    dead, live, xmin = (int(facts[name] or 0) for name in ("dead_tuples", "live_tuples", "oldest_xmin_age"))  # type: ignore[call-overload]
    standby = bool(facts["in_recovery"])
    return [
        _judged(
            "clocks",
            skew < SKEW_SECONDS,
            f"this machine and the database differ by {skew:.1f} s",
            "set the clock; leases are judged by the database's alone",
        ),
        _judged(
            "durability",
            not off,
            ", ".join(f"{name}={value}" for name, value in settings.items()),
            f"switch {', '.join(off)} on: a committed boundary may be lost",
            otherwise="bad",
        ),
        _judged(
            "primary",
            not standby,
            "a standby" if standby else "the primary",
            "connect to the primary",
            otherwise="bad",
        ),
        _judged(
            "old snapshots",
            xmin <= OLD_SNAPSHOT,
            f"the oldest is {xmin} transactions old",
            "end the session that holds it: claims slow down",
        ),
        _judged(
            "dead rows",
            dead <= max(10_000, live),
            f"{dead} dead beside {live} live in jobs",
            "let autovacuum run more often on the table",
        ),
    ]


def _judged(check: str, fine: bool, found: str, do: str, *, otherwise: Level = "warning") -> Finding:
    return Finding(check, "ok", found) if fine else Finding(check, otherwise, found, do)


async def _of_temporal(jobs: DurableJobs, workers: list[WorkerRecord]) -> list[Finding]:
    try:
        launcher = Launcher(jobs.temporal)
        indexed = await launcher.indexed()
        missing, paused = [], []
        for queue in sorted({each.queue for each in workers if tables.health(each) is WorkerState.HEALTHY}):
            try:
                described = await jobs.temporal.get_schedule_handle(schedule_id(queue)).describe()
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise
                missing.append(queue)
            else:
                paused += [queue] if described.schedule.state.paused else []
    except (RPCError, RuntimeError) as error:
        return [Finding("Temporal", "bad", f"not reachable: {error}", "check TEMPORAL_ADDRESS; accepted jobs wait")]
    return [
        Finding("Temporal", "ok", f"namespace {jobs.temporal.namespace}"),
        _judged(
            "search attributes",
            indexed,
            "present" if indexed else "missing",
            f"create {', '.join(SEARCH_ATTRIBUTES)} (Keyword); optional",
        ),
        _judged(
            "schedules",
            not missing,
            f"missing for {', '.join(missing)}" if missing else "present for every live queue",
            "restart a worker of the queue: it makes the schedule",
            otherwise="bad",
        ),
        *(
            Finding(
                f"schedule of {queue}",
                "bad",
                "paused: nothing is reconciled, and no lost workflow launched",
                f"temporal schedule toggle --unpause --schedule-id {schedule_id(queue)}",
            )
            for queue in paused
        ),
    ]


def _of_queues(queues: list[QueueOverview], workers: list[WorkerRecord]) -> list[Finding]:
    findings = []
    for each in queues:
        name = f"queue {each.queue}, {each.job_type}"
        ever = any(worker.queue == each.queue and each.job_type in worker.job_types for worker in workers)
        if not each.live_workers:
            found = "no live worker" if ever else "no worker ever hosted it"
            findings.append(Finding(name, "bad", found, "start a worker that hosts this type on this queue"))
        if each.escalated:
            do = "durable-jobs jobs escalated"
            findings.append(Finding(name, "bad", f"{each.escalated} jobs stand before an operator", do))
        if not each.paused and each.oldest_due_seconds and each.oldest_due_seconds > LONG_DUE_SECONDS:
            waited = tables.duration(each.oldest_due_seconds)
            findings.append(
                Finding(name, "warning", f"a job has been due for {waited}", "add workers, or look for what holds them")
            )
    return findings or [Finding("queues", "ok", "nothing waits for long, nothing needs an operator")]


def _of_pauses(pauses: list[QueuePause]) -> list[Finding]:
    return [Finding(f"queue {each.queue}", "warning", *tables.pause(each)) for each in pauses]


def _of_workers(workers: list[WorkerRecord]) -> list[Finding]:
    stale = [each for each in workers if tables.health(each) is WorkerState.STALE and not each.is_gone]
    live = sum(tables.health(each) is WorkerState.HEALTHY for each in workers)
    if not stale:
        return [_judged("workers", live > 0, f"{live} healthy", "start a worker")]
    names = ", ".join(each.id for each in stale[:3])
    return [
        Finding("workers", "warning", f"{len(stale)} stopped reporting: {names}", "they crashed or lost the database")
    ]
