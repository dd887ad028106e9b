"""The invariants of the service, held against what a run left in the tables and at the provider."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote
from uuid import UUID

import httpx
import psycopg
from psycopg.rows import dict_row

from durable_jobs import DurableJobService
from durable_jobs.contract.states import SETTLED, UNRESOLVED, JobStatus
from tests.soak.shapes import BY_HAND, CHILD, operation_key

Row = dict[str, Any]

CHILDREN = ("note", "call")
REACHED = {
    "plain": {"completed"},
    CHILD: {"completed"},
    "cancelled": {"completed", "cancelled"},
    "refused": {"failed"},
    "lost-no": {"failed"},
    "forgotten": {"dead_letter"},
    "hopeless": {"dead_letter"},
    "halting": {"halt_unsafe"},
    BY_HAND: {"completed", "cancelled"},
}
"""How the jobs of a shape may end, `completed` where it isn't said; or, past a boundary whose call never left its
sender, `failed` by the operator."""


ONCE = {"claimed", "dispatched", "retried", "reconciled", "dead_lettered"} | (SETTLED | UNRESOLVED) - {"dead_letter"}
"""The events that are the one transition of their name in a generation."""


@dataclass
class Found:
    """All that a run left."""

    jobs: dict[UUID, Row]
    events: dict[UUID, list[Row]] = field(default_factory=lambda: defaultdict(list))
    attempts: dict[UUID, list[Row]] = field(default_factory=lambda: defaultdict(list))
    sends: Mapping[str, int] = field(default_factory=dict)
    """Calls that the provider accepted, by operation key."""
    operations: Mapping[str, Row] = field(default_factory=dict)
    """What the provider says of each of these keys."""


def read_tables(database_url: str) -> Found:
    """Everything there is in the tables."""
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        found = Found({row["id"]: row for row in connection.execute("SELECT * FROM durable_jobs.jobs ORDER BY id")})
        for row in connection.execute("SELECT * FROM durable_jobs.job_events ORDER BY id"):
            found.events[row["job_id"]].append(row)
        for row in connection.execute("SELECT * FROM durable_jobs.job_attempts ORDER BY generation"):
            found.attempts[row["job_id"]].append(row)
    return found


async def ask_provider(found: Found, http: httpx.AsyncClient, mine: Callable[[str], bool] = lambda key: True) -> None:
    """Adds what the provider recorded under the keys that are `mine`, by default all that it knows."""
    sends = (await http.get("/stats")).raise_for_status().json()["sends"]
    found.sends = {key: count for key, count in sends.items() if mine(key)}
    found.operations = {
        key: (await http.get(f"/operations/{quote(key, safe='')}")).raise_for_status().json() for key in found.sends
    }


def violations(found: Found, reached: Mapping[str, set[str]] = REACHED) -> Iterator[str]:
    """What each job, its trail, its attempts and the provider have against each other, a line each."""
    yield from _keys(found)
    for job in found.jobs.values():
        for problem in _of_job(job, found, reached):
            yield f"job {job['id']} ({job['payload']['shape']}, {job['status']}): {problem}"
    yield from _calls(found)


def _keys(found: Found) -> Iterator[str]:
    seen: dict[tuple[str, str, str], UUID] = {}
    for job in found.jobs.values():
        key = (job["organization_id"], job["project_id"], job["idempotency_key"])
        if seen.setdefault(key, job["id"]) != job["id"]:
            yield f"two jobs under {key}: {seen[key]} and {job['id']}"


def _of_job(job: Row, found: Found, reached: Mapping[str, set[str]]) -> Iterator[str]:
    events, attempts = found.events[job["id"]], found.attempts[job["id"]]
    if job["status"] not in SETTLED:
        yield f"is not settled; escalated: {job['escalation_reason']}"
    if job["follow_ups_due"]:
        yield "its follow-ups are still due"
    for row in (*events, *attempts):
        if (row["organization_id"], row["project_id"]) != (job["organization_id"], job["project_id"]):
            yield f"has a row of another tenant: {row}"
    yield from trail_problems(events)
    yield from _attempts(job, attempts)
    yield from _outcome(job, found, reached)
    yield from _follow_ups(job, found)


def trail_problems(events: list[Row]) -> Iterator[str]:
    generation, intent, status = 0, 0, "queued"
    marked = set[int]()
    seen = set[tuple[str, int]]()
    for event in events:
        name, after = event["name"], event["status"]
        grows = event["generation"] > generation
        if event["generation"] < generation or (name == "claimed" and not grows):
            yield f"generation {generation} is followed by {name} at {event['generation']}"
        if event["intent_number"] != intent and (name, event["data"].get("cause")) != ("retried", "retry"):
            yield f"intent {intent} becomes {event['intent_number']} by {name}"
        if after != status and status in SETTLED and (status, event["data"].get("cause")) != ("failed", "retry"):
            yield f"{status}, which is settled, becomes {after} by {name}"
        if after != status and status in UNRESOLVED and name != "reconciled":
            yield f"{status}, which is uncertain, becomes {after} by {name}"
        if name == "claimed" and event["intent_number"] in marked:
            yield f"generation {event['generation']} is claimed past the boundary of its intent"
        if name == "dispatched":
            marked.add(event["intent_number"])
        if name in ONCE and (name, event["generation"]) in seen:
            yield f"generation {event['generation']} has two events {name}"
        seen.add((name, event["generation"]))
        generation, intent, status = event["generation"], event["intent_number"], after


def _attempts(job: Row, attempts: list[Row]) -> Iterator[str]:
    if [each["generation"] for each in attempts] != sorted({each["generation"] for each in attempts}):
        yield "two attempts of one generation"
    for intent in range(job["intent_number"] + 1):
        crossed = [each["generation"] for each in attempts if each["intent_number"] == intent and each["dispatched_at"]]
        if len(crossed) > 1:
            yield f"intent {intent} crossed its boundary in generations {crossed}"
    if unended := [each["generation"] for each in attempts if each["ended_at"] is None]:
        yield f"attempts of generations {unended} have not ended"


def _outcome(job: Row, found: Found, reached: Mapping[str, set[str]]) -> Iterator[str]:
    status, shape = job["status"], job["payload"]["shape"]
    by = (job["reconciliation"] or {}).get("by")
    key = job["operation_key"]
    sends = found.sends.get(key, 0) if key else 0
    said = found.operations[key]["state"] if sends else "absent"
    unsent = key is not None and not sends and status == "failed" and by == "operator"
    if status in SETTLED and status not in reached.get(shape, {"completed"}) and not unsent:
        yield f"does not end so: {job['error']}, reconciled by {by}, {sends} sends, the provider says {said}"
    if status in ("failed", "cancelled", "dead_letter") and sends and by != "operator" and said != "failed":
        yield f"the provider accepted its call and says {said}; reconciled by {by}"
    if status == "completed" and key and not sends:
        yield "completed past its boundary, and the provider knows of no call"
    if status == "completed" and sends and job["result"] != found.operations[key].get("result"):
        yield f"its result is not what the provider recorded: {job['result']}"


def _follow_ups(job: Row, found: Found) -> Iterator[str]:
    if job["payload"]["shape"] != "parent":
        return
    prefix = f"{job['id']}:"
    present = [each for each in found.jobs.values() if each["idempotency_key"].startswith(prefix)]
    names = sorted(each["idempotency_key"].removeprefix(prefix) for each in present)
    if names != (sorted(CHILDREN) if job["status"] == "completed" else []):
        yield f"has follow-ups {names}"
    for each in present:
        if (each["organization_id"], each["project_id"]) != (job["organization_id"], job["project_id"]):
            yield f"its follow-up {each['id']} is of another tenant"


def _calls(found: Found) -> Iterator[str]:
    """Every call that the provider accepted was announced by a marker, and is the one of its intent."""
    announced = {
        each["operation_key"]: each
        for attempts in found.attempts.values()
        for each in attempts
        if each["dispatched_at"]
    }
    for key, sends in found.sends.items():
        if sends != 1:
            yield f"{key} was sent {sends} times"
        attempt = announced.get(key)
        if attempt is None:
            yield f"{key} was sent, and no attempt has a marker for it"
            continue
        job, intent = found.jobs[attempt["job_id"]], attempt["intent_number"]
        wanted = operation_key(job["payload"]["shape"], job["id"]) + (f":retry-{intent}" if intent else "")
        if key != wanted:
            yield f"{key} was sent for intent {intent} of job {job['id']}, whose key is {wanted}"


def told_to_clients(
    found: Found,
    acknowledged: Mapping[tuple[str, str, str], UUID],
    cancels: list[tuple[UUID, str]],
    awaited: list[tuple[UUID, JobStatus, Row | None]],
) -> Iterator[str]:
    """Where the tables contradict what clients were told."""
    for key, job_id in acknowledged.items():
        job = found.jobs.get(job_id)
        if job is None or (job["organization_id"], job["project_id"], job["idempotency_key"]) != key:
            yield f"{key} was acknowledged as job {job_id}, and is not there"
    for job_id, reply in cancels:
        status = found.jobs[job_id]["status"]
        ended = reply.removeprefix("already_terminal:") if reply != "requested" else "requested"
        if ended not in (status, "requested", *UNRESOLVED):
            yield f"job {job_id}: its cancel was answered {reply}, and it is {status}"
    for job_id, told, result in awaited:
        job = found.jobs[job_id]
        if told == "failed" and job["intent_number"]:
            continue  # told before the operator's retry
        if (told, result) != (job["status"], job["result"] if told == "completed" else None):
            yield f"job {job_id}: who waited was told {told}, and it is {job['status']}"


async def trails_that_differ(service: DurableJobService, found: Found) -> list[str]:
    """Where a job's row is not the fold of its events."""
    lines = []
    for job_id in found.jobs:
        lines += [f"job {job_id}: {difference}" for difference in await service.check_trail(job_id)]
    return lines
