"""The suite's event trails, held against the model of spec/: each must be a behaviour of it.

With DURABLE_JOBS_TRAILS naming a directory, the fixture `service` records there what each test's jobs left on their
trails. `make trails` does that for the whole suite, checks them all, and writes the distinct ones to trails.json, which
`test_spec.py` checks in each run of the suite.

    python -m tests.spec_trails DIRECTORY
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from durable_jobs import DurableJobService, JobHead
from durable_jobs.contract.models import JobEvent
from durable_jobs.contract.states import EventName
from spec.check import tlc

STORED = Path(__file__).with_name("trails.json")
Trail = dict[str, Any]
"""`limit`, the job's max_attempts as far as it matters, and `events`: of each its name with its cause, and the row's
status, generation, intent and attempts after it."""

EXCLUDED = {
    "tests/test_operator_verbs.py::test_recheck_sends_back_what_each_filter_names": "escalates by hand",
    "tests/test_outcomes.py::test_backoff_of_a_row": "sets attempt_count by hand, to the end of its range",
}
"""Tests whose trails are none of the service's own, by the beginning of their id, and why."""

NO_PART_OF_THE_MODEL = frozenset({EventName.ADMISSION_CHECKED, EventName.EXECUTION_CONTROL_SHADOW})
"""They change nothing of the row; admission isn't modelled."""


class OutsideTheModel(Exception):
    """The trail is of a verb that the model leaves out."""


def trail_of(job: JobHead, events: Sequence[JobEvent]) -> Trail:
    """What the model shows of a trail. Repeated heartbeats are one. Raises `OutsideTheModel`."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event.name in NO_PART_OF_THE_MODEL:
            continue
        shown = {
            "name": _named(event),
            "status": str(event.status),
            "gen": event.generation,
            "intent": event.intent_number,
            "attempts": event.attempt_count,
        }
        if shown["name"] != EventName.HEARTBEAT or shown not in kept[-1:]:
            kept.append(shown)
    # A limit beyond what the trail can reach decides nothing of it.
    reached = max((event["attempts"] for event in kept), default=0)
    return {"limit": min(job.max_attempts, reached + 1), "events": kept}


def _named(event: JobEvent) -> str:
    """The event's name in the model, which tells causes apart."""
    cause = event.data.get("cause")
    if cause == "quarantine":
        raise OutsideTheModel("quarantine")
    match event.name:
        case EventName.RETRIED:
            return f"retried:{cause if cause in ('backoff', 'retry', 'requeue') else 'release'}"
        case EventName.RECONCILED:
            return f"reconciled:{event.data['reconciliation']['by']}"
        case EventName.ESCALATED:
            return "escalated:cleared" if event.data.get("cleared") else "escalated"
    return f"{event.name}:{cause}" if cause in ("reclaim", "sweep") else str(event.name)


async def record(service: DurableJobService, test: str) -> None:
    """Append the trails of all the jobs in the test's database to this process's file, where recording is asked for."""
    directory = os.environ.get("DURABLE_JOBS_TRAILS")
    if not directory or any(test.startswith(each) for each in EXCLUDED):
        return
    lines = []
    cursor: str | None = None
    while True:
        page = await service.list_jobs(after=cursor, limit=1000)
        for job in page.items:
            try:
                trail = trail_of(job, await _events(service, job))
            except OutsideTheModel:
                continue
            if trail["events"]:
                lines.append(json.dumps({"test": test, **trail}))
        cursor = page.next_cursor
        if cursor is None:
            break
    _append(Path(directory), lines)


def _append(directory: Path, lines: Sequence[str]) -> None:
    """To a file of this process's own: tests run in several."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{os.getpid()}.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


async def _events(service: DurableJobService, job: JobHead) -> list[JobEvent]:
    events: list[JobEvent] = []
    cursor: str | None = None
    while True:
        page = await service.list_job_events(job.id, after=cursor, limit=1000)
        events += page.items
        cursor = page.next_cursor
        if cursor is None:
            return events


def refused(trails: Sequence[Trail]) -> list[int]:
    """The positions of the trails that are no behaviour of the model, by one run of TLC."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "Recorded.tla").write_text(
            "---- MODULE Recorded ----\nEXTENDS Integers, Sequences\n"
            f"Recordings == <<{', '.join(_tla(trail) for trail in trails)}>>\n====\n"
        )
        module = Path(scratch, "Run.tla")
        module.write_text("---- MODULE Run ----\nEXTENDS Trails\n====\n")
        said = tlc(module, _config(trails), workers=1, heap_mib=2048)
    assert "Model checking completed. No error has been found." in said, said[-3000:]
    accepted = {int(number) for number in re.findall(r'<<"accepted", (\d+)>>', said)}
    return [at for at in range(len(trails)) if at + 1 not in accepted]


def _config(trails: Sequence[Trail]) -> str:
    """Only a holder leaves events, so that one worker and one attempt at a time make every trail."""
    events = [event for trail in trails for event in trail["events"]]
    attempts = max(trail["limit"] for trail in trails)
    generations = max(event["gen"] for event in events) + attempts + 20
    return "\n".join(
        [
            "SPECIFICATION TrailSpec",
            "CONSTANTS",
            "Workers = {w1}",
            "Slots = {a1}",
            "None = None",
            f"MaxGen = {generations}",
            f"MaxIntent = {max(event['intent'] for event in events)}",
            "Limits <- RecordedLimits",
            "FreeReleases = 10",
            "Mishaps = 0",
            "Unhosted = TRUE",
            "Live = FALSE",
            'Mutant = ""',
            "VIEW TrailView",
        ]
    )


def _tla(trail: Trail) -> str:
    events = ", ".join(
        "[" + ", ".join(f"{key} |-> {json.dumps(value)}" for key, value in event.items()) + "]"
        for event in trail["events"]
    )
    return f"[limit |-> {trail['limit']}, events |-> <<{events}>>]"


def distinct(directory: Path) -> dict[str, set[str]]:
    """The recorded trails as JSON, each with the tests that left it."""
    found: dict[str, set[str]] = {}
    for path in directory.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            trail = json.loads(line)
            test = trail.pop("test")
            found.setdefault(json.dumps(trail), set()).add(test)
    return found


def main() -> int:
    found = distinct(Path(sys.argv[1]))
    texts = sorted(found, key=lambda text: (len(text), text))
    strangers = refused([json.loads(text) for text in texts])
    for at in strangers:
        print(f"no behaviour of the model: {texts[at]}\n    of {', '.join(sorted(found[texts[at]]))}")
    print(f"{len(texts)} distinct trails of {len(set().union(*found.values()))} tests, {len(strangers)} refused")
    if not strangers:
        STORED.write_text("[\n" + ",\n".join(texts) + "\n]\n")
    return 1 if strangers else 0


if __name__ == "__main__":
    sys.exit(main())
