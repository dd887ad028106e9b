"""What a verb does to a job, decided on the locked row and the database's clock. Pure: no I/O.

A decision is a `Change`: the columns to write, the event to leave, and how the attempt row ends. The store writes
all three in one statement. Claiming, marking, renewing and completing, which every job goes through, are decided
inside their own SQL statements instead; see `store.statements`.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from durable_jobs.contract.backoff import doubled
from durable_jobs.contract.errors import (
    AlreadyDispatched,
    CancellationRequested,
    IllegalTransition,
    LeaseLost,
    NotReleasable,
    NotRetryable,
    Refused,
)
from durable_jobs.contract.models import Claim, Job, JobError
from durable_jobs.contract.states import TERMINAL_EVENT, EventName, JobStatus

MAX_BACKOFF_SECONDS = 3600.0
MIN_BACKOFF_SECONDS = 0.001
FREE_RELEASES = 10
LAUNCH_CHECK_SECONDS = 30
"""How long after a job becomes claimable the launch sweep first looks whether its workflow runs."""


@dataclass(frozen=True)
class Change:
    """One fenced write: the row's new columns, the event, and the end of the attempt row (None: it stays)."""

    columns: dict[str, Any]
    event: EventName
    data: dict[str, Any] = field(default_factory=dict)
    actor: str = ""
    attempt: dict[str, Any] | None = None

    @property
    def status(self) -> JobStatus:
        return JobStatus(self.columns["status"])


def backoff_seconds(base: float, attempt: int) -> float:
    """`min(base · 2^(attempt-1), 3600)`, whatever the attempt number."""
    return max(doubled(base, attempt, MAX_BACKOFF_SECONDS), MIN_BACKOFF_SECONDS)


def require_holder(job: Job, claim: Claim) -> None:
    """Raises `LeaseLost` when the claim was fenced, `IllegalTransition` when its own job has already ended."""
    if job.holds(claim):
        return
    if job.claimed_by == claim.worker_id and job.lease_generation == claim.generation:
        raise IllegalTransition(f"job {job.id} is {job.status}: its attempt has ended")
    raise LeaseLost(f"job {job.id} is at generation {job.lease_generation}, this claim is of {claim.generation}")


UNESCALATED: dict[str, Any] = {"escalated_at": None, "escalation_reason": None}
"""What brought a job before an operator was said of the state that it was in: it doesn't outlive it."""


def ended(job: Job, status: JobStatus, now: datetime, error: JobError | None, **columns: Any) -> dict[str, Any]:
    """The columns of a row that becomes terminal."""
    return {
        "status": status,
        "finished_at": now,
        "lease_id": None,
        "lease_expires_at": None,
        "claim_token": None,
        **UNESCALATED,
        "launch_check_at": now + timedelta(seconds=LAUNCH_CHECK_SECONDS) if not status.is_settled else None,
        "error": error.model_dump() if error else None,
        **columns,
    }


def land(job: Job, claim: Claim, status: JobStatus, error: JobError, now: datetime) -> Change:
    """The holder ends its job in an unsuccessful terminal status."""
    columns = ended(job, status, now, error)
    if status is JobStatus.DEAD_LETTER:
        columns |= {"dead_lettered_at": now, "dead_letter_reason": error.message}
    return Change(
        columns=columns,
        event=TERMINAL_EVENT[status],
        data={"error": error.model_dump()},
        actor=claim.worker_id,
        attempt=attempt_end(status, now, error),
    )


def attempt_end(outcome: str, now: datetime, error: JobError | None = None) -> dict[str, Any]:
    return {"outcome": outcome, "ended_at": now, "error": error.model_dump() if error else None}


def requeue(
    job: Job, *, cause: str, actor: str, now: datetime, due: datetime, attempt: dict[str, Any], **columns: Any
) -> Change:
    """Back to queued. A job whose cancellation is requested is cancelled instead."""
    if job.cancel_requested_at is not None:
        return cancelled(job, actor=actor, now=now, attempt=attempt | {"outcome": JobStatus.CANCELLED}, **columns)
    columns = {
        "status": JobStatus.QUEUED,
        "lease_id": None,
        "claimed_by": None,
        "claim_token": None,
        "lease_expires_at": None,
        **UNESCALATED,
        "scheduled_at": due,
        "launch_check_at": due + timedelta(seconds=LAUNCH_CHECK_SECONDS),
        **columns,
    }
    data = {"cause": cause, "scheduled_at": due.isoformat()}
    if "error" in columns:
        data["error"] = columns["error"]
    if "release_count" in columns:
        data["release_count"] = columns["release_count"]
    return Change(columns=columns, event=EventName.RETRIED, data=data, actor=actor, attempt=attempt)


def cancelled(job: Job, *, actor: str, now: datetime, attempt: dict[str, Any] | None, **columns: Any) -> Change:
    """The cancelled row. Its error says who asked and why; `columns` override, such as a given-back attempt."""
    error = JobError.of("CANCELLED", f"cancelled by {job.cancel_actor}: {job.cancel_reason}")
    kept = {name: value for name, value in columns.items() if name in ("attempt_count", "release_count")}
    data: dict[str, Any] = {"error": error.model_dump()}
    if "release_count" in kept:
        data["release_count"] = kept["release_count"]
    return Change(
        columns=ended(job, JobStatus.CANCELLED, now, error, **kept),
        event=EventName.CANCELLED,
        data=data,
        actor=actor,
        attempt=attempt,
    )


def fail(job: Job, claim: Claim, error: JobError, *, retryable: bool, now: datetime) -> Change:
    """A failure, as the boundary decides.

    A definite no is `failed` on both sides. Otherwise, past the marker it is `indeterminate`: the send may have
    landed. Before it: back to the queue after a backoff counted from now, or `dead_letter` with the attempts spent.

    Raises `LeaseLost` or `IllegalTransition`.
    """
    require_holder(job, claim)
    if not retryable:
        return land(job, claim, JobStatus.FAILED, error, now)
    if job.dispatched_at is not None:
        return land(job, claim, JobStatus.INDETERMINATE, error, now)
    end = attempt_end(JobStatus.QUEUED, now, error)
    if job.cancel_requested_at is not None:
        return cancelled(job, actor=claim.worker_id, now=now, attempt=end | {"outcome": JobStatus.CANCELLED})
    if job.attempt_count >= job.max_attempts:
        return land(job, claim, JobStatus.DEAD_LETTER, error, now)
    due = now + timedelta(seconds=backoff_seconds(job.backoff_base_seconds, job.attempt_count))
    return requeue(job, cause="backoff", actor=claim.worker_id, now=now, due=due, attempt=end, error=error.model_dump())


def release(job: Job, claim: Claim, *, cause: str, now: datetime) -> Change:
    """Give the job back unharmed; the attempt isn't counted, ten times at most, then it is.

    Raises `NotReleasable` past the boundary, `LeaseLost` or `IllegalTransition`.
    """
    require_holder(job, claim)
    if job.dispatched_at is not None:
        raise NotReleasable(f"job {job.id} crossed its boundary at generation {job.dispatched_generation}")
    free = job.release_count < FREE_RELEASES
    if not free and job.cancel_requested_at is None and job.attempt_count >= job.max_attempts:
        error = JobError.of("RELEASED_TOO_OFTEN", f"released {job.release_count} times before; last cause: {cause}")
        return land(job, claim, JobStatus.DEAD_LETTER, error, now)
    return requeue(
        job,
        cause=cause,
        actor=claim.worker_id,
        now=now,
        due=now,
        attempt=attempt_end("released", now),
        attempt_count=job.attempt_count - 1 if free else job.attempt_count,
        release_count=job.release_count + 1,
    )


def acknowledge_cancellation(
    job: Job, claim: Claim, *, provider_confirmed: dict[str, Any] | None, now: datetime
) -> Change:
    """The holder yields to a requested cancellation.

    Without a marker: `cancelled`. Past it: `cancelled` only on the provider's own confirmation, which is kept as
    evidence; else `indeterminate`, as the call may still land.

    Raises `IllegalTransition` when no cancellation was requested, or `LeaseLost`.
    """
    require_holder(job, claim)
    if job.cancel_requested_at is None:
        raise IllegalTransition(f"job {job.id}: no cancellation was requested")
    if job.dispatched_at is not None and provider_confirmed is None:
        error = JobError.of("CANCELLED_AFTER_DISPATCH", "cancellation came past the boundary; the call may still land")
        return land(job, claim, JobStatus.INDETERMINATE, error, now)
    change = cancelled(job, actor=claim.worker_id, now=now, attempt=attempt_end(JobStatus.CANCELLED, now))
    if provider_confirmed is not None:
        change.data["provider_confirmed"] = provider_confirmed
    return change


@dataclass(frozen=True)
class CancelReply:
    """What `cancel_job` answers: `cancelled`, `requested`, or `already_terminal:<status>`."""

    reply: str
    columns: dict[str, Any] | None = None
    change: Change | None = None


def cancel(job: Job, *, reason: str, actor: str, now: datetime) -> CancelReply:
    """Queued: cancelled at once. Claimed or running: plants the flag for the holder. The first request stands."""
    if job.status.is_terminal:
        return CancelReply(f"already_terminal:{job.status}")
    if job.cancel_requested_at is not None:
        return CancelReply("requested")
    flag = {"cancel_requested_at": now, "cancel_reason": reason, "cancel_actor": actor}
    if job.status is not JobStatus.QUEUED:
        return CancelReply("requested", columns=flag)
    change = cancelled(job.model_copy(update=flag), actor=actor, now=now, attempt=None)
    change.columns.update(flag)
    return CancelReply("cancelled", change=change)


def retry(job: Job, *, actor: str, reason: str, accept_duplicate_risk: bool, now: datetime) -> Change:
    """A new intent for a job that failed with certainty: queued, attempts from the start, a key of its own.

    Where an operator's word, not the provider's, made it `failed`, the first send may still land beside the second:
    only with `accept_duplicate_risk`, which is recorded. Marker, flag, escalation and lookup state move to the
    attempt row.

    Raises `NotRetryable`.
    """
    if job.status is not JobStatus.FAILED:
        raise NotRetryable(f"job {job.id} is {job.status}: only a failed job may be retried")
    if job.settled_by_operator and not accept_duplicate_risk:
        raise NotRetryable(
            f"job {job.id} was failed by an operator's word: its send may still land; "
            "accept_duplicate_risk=True sends again"
        )
    cleared: dict[str, Any] = dict.fromkeys(_MOVED_BY_RETRY) | {"lookup_tries": 0}
    moved = {name: value for name, value in job.model_dump(mode="json", include=set(_MOVED_BY_RETRY)).items() if value}
    change = requeue(
        job.model_copy(update={"cancel_requested_at": None}),
        cause="retry",
        actor=actor,
        now=now,
        due=now,
        attempt={"superseded": moved},
        **cleared,
        error=None,
        started_at=None,
        finished_at=None,
        intent_number=job.intent_number + 1,
        attempt_count=0,
        release_count=0,
    )
    change.data.update(reason=reason, accept_duplicate_risk=accept_duplicate_risk and job.settled_by_operator)
    return change


_MOVED_BY_RETRY = (
    "dispatched_at",
    "dispatched_generation",
    "operation_key",
    "cancel_requested_at",
    "cancel_reason",
    "cancel_actor",
    "escalated_at",
    "escalation_reason",
    "reconciled_at",
    "reconciliation",
    "reconcile_after",
    "lookup_tries",
)


def escalate(job: Job, *, reason: str, actor: str, now: datetime, evidence: dict[str, Any] | None = None) -> Change:
    """Put the job before an operator, with what it rests on; its status stays."""
    return Change(
        columns={"status": job.status, "escalated_at": now, "escalation_reason": reason},
        event=EventName.ESCALATED,
        data={"reason": reason, **({"evidence": evidence} if evidence else {})},
        actor=actor,
    )


def mark_refusal(job: Job, claim: Claim, now: datetime) -> Refused | None:
    """Why the boundary mark was refused on this row; None: it would be accepted."""
    try:
        require_holder(job, claim)
    except Refused as refusal:
        return refusal
    if job.dispatched_at is not None:
        return AlreadyDispatched(f"job {job.id} crossed its boundary at generation {job.dispatched_generation}")
    if job.cancel_requested_at is not None:
        return CancellationRequested(f"job {job.id}: cancellation was requested by {job.cancel_actor}")
    if job.lease_expires_at is None or job.lease_expires_at <= now:
        return LeaseLost(f"job {job.id}: the lease of generation {claim.generation} ran out at {job.lease_expires_at}")
    return None
