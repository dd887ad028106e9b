"""Holds a history, and the tables that it left, against what the service promises. Pure.

What it asks for: one effect for each operation key; a generation that only grows; no settled status rewritten; the
trail equal to the row; every acknowledged creation present, and one id for each key; of a cancel and a completion
exactly one, and both callers told so; and nobody who reads later sees less than was seen, or acknowledged, before.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from durable_jobs.contract.models import Job, JobEvent
from durable_jobs.contract.states import SETTLED, UNRESOLVED, JobStatus
from durable_jobs.contract.trail import differences
from tests.proof.history import Operation
from tests.soak.checks import Found, Row, trail_problems

RESOLVED = {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.DEAD_LETTER}


def violations(history: Sequence[Operation], found: Found) -> Iterator[str]:
    """A line for each promise that was broken. `found` are the tables after the last call, and the provider's count of
    the calls that it accepted."""
    rows = {str(job_id): job for job_id, job in found.jobs.items()}
    yield from _effects(found)
    yield from _creations(history, rows)
    yield from _rows(found)
    by_job: dict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        if job_id := (operation.answer or {}).get("id") or operation.arguments.get("id"):
            by_job[job_id].append(operation)
    attempts = {str(job_id): of_job for job_id, of_job in found.attempts.items()}
    events = {str(job_id): of_job for job_id, of_job in found.events.items()}
    for job_id, operations in by_job.items():
        row = rows.get(job_id)
        if row is None:
            if any(operation.answer for operation in operations):
                yield f"job {job_id} was told of, and is not there"
            continue
        for problem in _of_job(operations, row, attempts.get(job_id, []), events.get(job_id, [])):
            yield f"job {job_id} ({row['status']}): {problem}"


def _effects(found: Found) -> Iterator[str]:
    for key, sends in found.sends.items():
        if sends > 1:
            yield f"operation key {key} had its effect {sends} times"


def _rows(found: Found) -> Iterator[str]:
    """Each row is the fold of its trail, whose generation only grows and whose settled statuses stay."""
    for job_id, row in found.jobs.items():
        events = [JobEvent.model_validate(event) for event in found.events[job_id]]
        for problem in (*differences(Job.model_validate(row), events), *trail_problems(found.events[job_id])):
            yield f"job {job_id}: {problem}"


def _creations(history: Sequence[Operation], rows: dict[str, Row]) -> Iterator[str]:
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in history:
        if operation.operation in ("create", "find"):
            by_key[":".join(operation.arguments["key"])].append(operation)
    seen: dict[str, str] = {}
    for job_id, row in rows.items():
        key = ":".join((row["organization_id"], row["project_id"], row["idempotency_key"]))
        if seen.setdefault(key, job_id) != job_id:
            yield f"key {key} has two jobs"
    for key, operations in by_key.items():
        for problem in _of_key(operations, seen.get(key)):
            yield f"key {key}: {problem}"


def _of_key(operations: list[Operation], present: str | None) -> Iterator[str]:
    creations = [each for each in operations if each.operation == "create"]
    acknowledged = [each for each in creations if each.answer]
    ids = {each.answer["id"] for each in acknowledged if each.answer}
    if len(ids) > 1:
        yield f"acknowledged as several jobs: {sorted(ids)}"
    if ids and present not in ids:
        yield f"acknowledged as {sorted(ids)}, and the table has {present}"
    if sum(bool(each.answer and each.answer["created"]) for each in acknowledged) > 1:
        yield "created more than once"
    if len({each.arguments["variant"] for each in acknowledged}) > 1:
        yield "acknowledged for two different requests"
    for each in creations:
        others = {other.arguments["variant"] for other in creations} - {each.arguments["variant"]}
        if each.error == "IdempotencyKeyConflict" and not others:
            yield f"{each.client} was told of a conflict, and nobody asked for anything else"
    known = min((each.end for each in acknowledged), default=float("inf"))
    for each in operations:
        if each.operation == "find" and each.answer and each.answer["id"] is None and each.start > known:
            yield f"{each.client} did not find it after it was acknowledged"
        elif each.operation == "find" and each.answer and each.answer["id"] not in (None, present):
            yield f"{each.client} found {each.answer['id']}"


def _of_job(operations: list[Operation], row: Row, attempts: list[Row], events: list[Row]) -> Iterator[str]:
    for each in operations:
        if each.error == "JobNotFound":
            yield f"{each.client}'s {each.operation} did not find it"
    final = Seen(float("inf"), float("inf"), row["status"], row["lease_generation"], row["intent_number"], "the table")
    yield from _real_time([*_seen(operations), final])
    yield from _claims(operations, attempts)
    yield from _outcomes(operations, row, attempts)
    yield from _cancels(operations, row, events)


@dataclass(frozen=True)
class Seen:
    """The row, at some moment between `start` and `end`."""

    start: float
    end: float
    status: str
    generation: int
    intent: int
    who: str


def _seen(operations: Iterable[Operation]) -> Iterator[Seen]:
    """What the answers say of the row."""
    for each in operations:
        answer = each.answer or {}
        if {"status", "generation", "intent"} <= answer.keys():
            who = f"{each.client}'s {each.operation}"
            yield Seen(each.start, each.end, answer["status"], answer["generation"], answer["intent"], who)


def _real_time(seen: list[Seen]) -> Iterator[str]:
    """Whoever began after another had ended sees no less: each is held against all that ended before it began."""
    ended = sorted(seen, key=lambda each: each.end)
    before, generation, intent = 0, 0, 0
    status: dict[int, str] = {}
    for each in sorted(seen, key=lambda each: each.start):
        while before < len(ended) and ended[before].end < each.start:
            past, before = ended[before], before + 1
            generation, intent = max(generation, past.generation), max(intent, past.intent)
            if past.status in SETTLED or (past.status in UNRESOLVED and status.get(past.intent) not in SETTLED):
                status[past.intent] = past.status
        if each.generation < generation or each.intent < intent:
            seen_there = f"generation {each.generation} and intent {each.intent}"
            yield f"{each.who} saw {seen_there} after {generation} and {intent}"
        last = status.get(each.intent)
        if last in SETTLED and each.status != last:
            yield f"{each.who} saw {each.status} after {last}, which is settled"
        if last in UNRESOLVED and each.status not in {last, *RESOLVED}:
            yield f"{each.who} saw {each.status} after {last}"


def _claims(operations: list[Operation], attempts: list[Row]) -> Iterator[str]:
    """A generation is one holder's, granted to one token alone; its attempt is on the table."""
    tokens: dict[int, str] = {}
    holders = {attempt["generation"]: attempt["worker_id"] for attempt in attempts}
    for each in operations:
        if each.operation != "claim" or not each.answer or not each.answer["granted"]:
            continue
        generation, token = each.answer["generation"], each.arguments["token"]
        if tokens.setdefault(generation, token) != token:
            yield f"generation {generation} was granted twice, the second time to {each.client}"
        if holders.get(generation) != each.arguments["worker"]:
            yield f"generation {generation} was granted to {each.client}, and the table has {holders.get(generation)}"


def _outcomes(operations: list[Operation], row: Row, attempts: list[Row]) -> Iterator[str]:
    """A mark that was granted stands, and is the only one of its intent; so does a completion."""
    by_generation = {attempt["generation"]: attempt for attempt in attempts}
    marks: dict[int, int] = {}
    completed: set[int] = set()
    for each in operations:
        answer, arguments = each.answer, each.arguments
        if each.operation == "mark" and answer:
            attempt = by_generation.get(arguments["generation"], {})
            if attempt.get("operation_key") != arguments["operation_key"]:
                yield f"{each.client}'s mark was granted, and its attempt has none"
            if marks.setdefault(answer["intent"], arguments["generation"]) != arguments["generation"]:
                yield f"two marks of intent {answer['intent']} were granted, the second one to {each.client}"
        if each.operation == "complete" and answer:
            completed.add(arguments["generation"])
            if row["status"] != "completed" or row["result"] != arguments["result"]:
                yield f"{each.client}'s completion was acknowledged, and is not what the table has"
        if each.operation == "complete" and each.error in ("LeaseLost", "IllegalTransition"):
            won = by_generation.get(arguments["generation"], {}).get("outcome") == "completed"
            sure = not any(
                other.unknown and (other.operation, other.arguments) == (each.operation, arguments)
                for other in operations
            )
            repeated = any(
                other.answer and other.operation == "complete" and other.end < each.start for other in operations
            )
            if won and sure and not repeated:
                yield f"{each.client}'s completion was refused, and yet it stands"
    if len(completed) > 1:
        yield f"completions of generations {sorted(completed)} were acknowledged"


def _cancels(operations: list[Operation], row: Row, events: list[Row]) -> Iterator[str]:
    """Of a cancel and a completion exactly one, and both are told which."""
    statuses = {event["status"] for event in events}
    completed = any(each.operation == "complete" and each.answer for each in operations)
    for each in operations:
        reply = (each.answer or {}).get("reply")
        if reply is None:
            if each.operation == "acknowledge" and each.answer and each.answer["status"] == "cancelled" and completed:
                yield f"{each.client} acknowledged its cancellation, and its completion was acknowledged as well"
        elif reply == "cancelled" and (row["status"] != "cancelled" or completed):
            yield f"{each.client} was told that it is cancelled, and a completion won"
        elif reply.startswith("already_terminal:") and reply.partition(":")[2] not in statuses:
            yield f"{each.client} was told {reply}, and it never was that"


def summary(history: Sequence[Operation], seconds: float) -> dict[str, Any]:
    """Of what, how many, and at which rate in the first `seconds`, under faults."""
    began = min((each.start for each in history), default=0.0)
    kinds = Counter(each.operation for each in history)
    return {
        "operations": len(history),
        "per_second": round(sum(each.start < began + seconds for each in history) / seconds, 1),
        "clients": len({each.client for each in history}),
        "unknown": sum(each.unknown for each in history),
        "refused": sum(each.error is not None and not each.unknown for each in history),
        "by_operation": dict(sorted(kinds.items())),
    }
