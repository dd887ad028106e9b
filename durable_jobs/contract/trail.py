"""The fold of a job's event trail, to be held against its row. Pure.

The row equals the fold in every column but these: lease expiry, heartbeat and update times, the cancellation flag,
and the bookkeeping of launches, lookups and due follow-ups.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.models import Job, JobEvent
from durable_jobs.contract.rules import encode_json
from durable_jobs.contract.states import EventName, JobStatus

MAX_RESULT_IN_EVENT_BYTES = 64 * 1024

_UNCLAIMED: dict[str, Any] = {"lease_id": None, "claim_token": None}
_UNESCALATED: dict[str, Any] = {"escalated_at": None, "escalation_reason": None}
_INITIAL: dict[str, Any] = (
    _UNCLAIMED
    | _UNESCALATED
    | {
        "status": JobStatus.QUEUED,
        "intent_number": 0,
        "attempt_count": 0,
        "lease_generation": 0,
        "claimed_by": None,
        "started_at": None,
        "finished_at": None,
        "dispatched_at": None,
        "dispatched_generation": None,
        "operation_key": None,
        "result": None,
        "error": None,
        "dead_lettered_at": None,
        "dead_letter_reason": None,
        "reconciled_at": None,
        "reconciliation": None,
        "release_count": 0,
    }
)
_KEEP_ESCALATION = {
    EventName.ESCALATED,
    EventName.HEARTBEAT,
    EventName.DISPATCHED,
    EventName.ADMISSION_CHECKED,
    EventName.EXECUTION_CONTROL_SHADOW,
}
"""All other events leave a job in another state than that in which it was escalated."""
_NEW_INTENT = {
    "started_at": None,
    "finished_at": None,
    "dispatched_at": None,
    "dispatched_generation": None,
    "operation_key": None,
    "error": None,
    "reconciled_at": None,
    "reconciliation": None,
    "release_count": 0,
}


def result_in_event(result: dict[str, Any]) -> dict[str, Any]:
    """What a `completed` event carries: the result, or above 64 KiB its digest and its size in bytes.

    The digest is that of requests, over the RFC 8785 form: `jsonb` reorders keys and rewrites numbers.
    """
    size = len(encode_json(result).encode())
    if size <= MAX_RESULT_IN_EVENT_BYTES:
        return {"result": result}
    return {"result_sha256": request_digest(result), "result_bytes": size}


def fold(events: Sequence[JobEvent]) -> dict[str, Any]:
    """The columns that the trail, in order, says the row has."""
    row = dict(_INITIAL)
    for event in events:
        new_intent = event.intent_number != row["intent_number"]
        row |= {
            "status": event.status,
            "intent_number": event.intent_number,
            "attempt_count": event.attempt_count,
            "lease_generation": event.generation,
        }
        row |= _effect(event, row, new_intent)
        if event.status.is_terminal:
            row |= _UNCLAIMED
        if event.name not in _KEEP_ESCALATION:
            row |= _UNESCALATED
    return row


def _effect(event: JobEvent, row: dict[str, Any], new_intent: bool) -> dict[str, Any]:
    data, at = event.data, event.occurred_at
    match event.name:
        case EventName.CLAIMED:
            holder = {"claimed_by": event.actor, "lease_id": event.actor, "claim_token": data["claim_token"]}
            return holder | {"started_at": row["started_at"] or at}
        case EventName.DISPATCHED:
            return {
                "dispatched_at": at,
                "dispatched_generation": event.generation,
                "operation_key": data["operation_key"],
            }
        case EventName.COMPLETED:
            return {"finished_at": at, "error": None} | _result(data)
        case EventName.FAILED | EventName.INDETERMINATE | EventName.HALT_UNSAFE | EventName.TIMED_OUT:
            return {"finished_at": at, "error": data["error"]}
        case EventName.CANCELLED:
            released = {"release_count": data["release_count"]} if "release_count" in data else {}
            return {"finished_at": at, "error": data["error"]} | released
        case EventName.DEAD_LETTERED:
            reason = data["error"]["message"]
            return {"finished_at": at, "error": data["error"], "dead_lettered_at": at, "dead_letter_reason": reason}
        case EventName.RETRIED:
            changed = _NEW_INTENT if new_intent else {}
            kept = {name: data[name] for name in ("error", "release_count") if name in data}
            due = {"scheduled_at": datetime.fromisoformat(data["scheduled_at"])}
            return _UNCLAIMED | {"claimed_by": None} | changed | kept | due
        case EventName.ESCALATED:
            if data.get("cleared"):
                return _UNESCALATED
            return {"escalated_at": at, "escalation_reason": data["reason"]}
        case EventName.RECONCILED:
            settled = {"reconciled_at": at, "reconciliation": data["reconciliation"], "error": data["error"]}
            if event.status is JobStatus.COMPLETED:
                return settled | _result(data)
            if event.status is JobStatus.DEAD_LETTER:
                return settled | {"dead_lettered_at": at, "dead_letter_reason": data["error"]["message"]}
            return settled
    return {}


def _result(data: dict[str, Any]) -> dict[str, Any]:
    return {"result": data["result"]} if "result" in data else {"result": (data["result_sha256"],)}


def differences(job: Job, events: Sequence[JobEvent]) -> list[str]:
    """Where the row and the fold of its trail disagree, a line each; empty when they agree."""
    actual = job.model_dump() | {"claim_token": str(job.claim_token) if job.claim_token else None}
    found = []
    for column, expected in fold(events).items():
        value = actual[column]
        if column == "result" and isinstance(expected, tuple) and value is not None:
            value = (request_digest(value),)
        if value != expected:
            found.append(f"{column}: the row has {value!r}, its trail says {expected!r}")
    return found
