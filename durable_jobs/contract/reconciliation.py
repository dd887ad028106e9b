"""How an uncertain job is resolved: the design's section 9 as pure decisions. Evidence decides, never a guess.

Each decision is made on the locked row at the database's clock, and says what to write: a `Change`, or columns of
lookup bookkeeping that leave no event.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from durable_jobs.contract.backoff import doubled
from durable_jobs.contract.decisions import (
    LAUNCH_CHECK_SECONDS,
    UNESCALATED,
    Change,
    attempt_end,
    cancelled,
    ended,
    escalate,
    requeue,
)
from durable_jobs.contract.errors import NotRequeueable, NotResolvable
from durable_jobs.contract.models import Job, JobError
from durable_jobs.contract.provider import ProviderAnswer, ProviderState
from durable_jobs.contract.rules import storable_text
from durable_jobs.contract.states import ACTIVE, TERMINAL_EVENT, UNRESOLVED, EventName, JobStatus
from durable_jobs.contract.trail import result_in_event

VERDICTS = (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.DEAD_LETTER)


@dataclass(frozen=True)
class ReconciliationPolicy:
    """What a deployer may set; times in seconds. Defaults are the design's, section 9."""

    on_provider_failure: JobStatus = JobStatus.FAILED
    """`failed` or `dead_letter`."""
    pending_deadline: float = 24 * 3600
    """How long a call may be pending, from when the job became uncertain or was last rechecked."""
    lookup_deadline: float = 6 * 3600
    """How long lookups that raise, hang or answer rubbish are tried again."""
    lookup_timeout: float = 30
    """How long one lookup may take."""
    lookup_concurrency: int = 32
    no_handler_after: float = 15 * 60
    """How long no live worker hosted the job's queue and type before it is escalated."""


class Action(StrEnum):
    """What a sweep does with a candidate before any lookup."""

    SKIP_ESCALATED = "escalated"
    SKIP_RENEWED = "renewed"
    SKIP_SETTLED = "settled"
    SKIP_BACKING_OFF = "backing_off"
    LEAVE_TO_RECLAIM = "left_to_reclaim"
    FENCE = "fence"
    ESCALATE = "escalate"
    LOOK_UP = "look_up"


def classify(job: Job, now: datetime) -> tuple[Action, str]:
    """The action for a candidate as it stands at `now`, with the reason where it is to be escalated."""
    if job.status in ACTIVE:
        if job.lease_expires_at is not None and job.lease_expires_at > now:
            return Action.SKIP_RENEWED, ""
        fenced = job.dispatched_at is not None or job.cancel_requested_at is not None
        return (Action.FENCE if fenced else Action.LEAVE_TO_RECLAIM), ""
    if job.status not in UNRESOLVED:
        return Action.SKIP_SETTLED, ""
    if job.escalated_at is not None:
        return Action.SKIP_ESCALATED, ""
    if job.status is JobStatus.TIMED_OUT:
        return Action.ESCALATE, f"TIMED_OUT: needs external verification of {_key(job)}"
    if job.operation_key is None:
        return Action.ESCALATE, "NO_OPERATION_KEY: there is nothing to verify against"
    if job.reconcile_after is not None and job.lookup_tries > 0 and job.reconcile_after > now:
        return Action.SKIP_BACKING_OFF, ""
    return Action.LOOK_UP, ""


def fence(job: Job, *, actor: str, now: datetime) -> Change | None:
    """Take an expired lease from its holder under a new generation: past the marker the job is `indeterminate`, under
    a requested cancellation `cancelled`. None when the row has moved since: renewed, ended, or claimed anew."""
    if classify(job, now)[0] is not Action.FENCE:
        return None
    fenced = {"lease_generation": job.lease_generation + 1}
    end = attempt_end("lease_expired", now)
    if job.dispatched_at is None:
        change = cancelled(job, actor=actor, now=now, attempt=end)
        change.columns.update(fenced)
        return change
    error = JobError.of(
        "LEASE_EXPIRED_AFTER_DISPATCH",
        f"the lease of generation {job.lease_generation} ran out past the boundary; the call may have landed",
    )
    return Change(
        columns=ended(job, JobStatus.INDETERMINATE, now, error) | fenced,
        event=TERMINAL_EVENT[JobStatus.INDETERMINATE],
        data={"error": error.model_dump(), "cause": "sweep"},
        actor=actor,
        attempt=end,
    )


@dataclass(frozen=True)
class Judgement:
    """What a provider's answer leads to: a change, or a later lookup."""

    change: Change | None = None
    bookkeeping: dict[str, Any] | None = None
    word: str = ""
    """For the sweep's summary."""


def judge(
    job: Job,
    state: ProviderState[dict[str, Any]],
    *,
    policy: ReconciliationPolicy,
    source: str,
    evidence: dict[str, Any],
    began: datetime | None,
    now: datetime,
) -> Judgement:
    """What to do about an `indeterminate` job of which its provider says `state`; `began` is when it was asked.

    Absent proves nothing while a paused sender may still send: only the provider's own send deadline, passed before
    the lookup began, makes it `failed`.
    """
    record = {"by": "provider", "source": source, "answer": state.answer, "evidence": evidence}
    match state.answer:
        case ProviderAnswer.SUCCEEDED:
            return Judgement(
                resolved(job, JobStatus.COMPLETED, record, source, now, result=state.result or {}), word="completed"
            )
        case ProviderAnswer.FAILED:
            error = state.error or JobError.of("PROVIDER_FAILED", "the provider reports failure")
            verdict = policy.on_provider_failure
            return Judgement(resolved(job, verdict, record, source, now, error=error), word=verdict)
        case ProviderAnswer.PENDING:
            # A recheck restarts the deadline, the time to which a failed lookup was put off doesn't.
            rechecked = job.reconcile_after if job.lookup_tries == 0 else None
            since = max(filter(None, (job.finished_at, rechecked)), default=now)
            if now - since >= timedelta(seconds=policy.pending_deadline):
                reason = f"PENDING: {_key(job)} is pending beyond its deadline"
                return _escalated(job, reason, source, now, record)
            answered = {"lookup_tries": 0, "reconcile_after": None} if job.lookup_tries else None
            return Judgement(bookkeeping=answered, word="pending")
        case ProviderAnswer.ABSENT:
            if state.send_deadline is None or began is None or state.send_deadline >= began:
                reason = f"ABSENT: the provider knows nothing of {_key(job)}, yet it may still be sent"
                return _escalated(job, reason, source, now, record)
            error = JobError.of(
                "NOT_PERFORMED", f"the provider refused {_key(job)} after {state.send_deadline.isoformat()}"
            )
            record["send_deadline"] = state.send_deadline.isoformat()
            return Judgement(resolved(job, JobStatus.FAILED, record, source, now, error=error), word="failed")
    reason = storable_text(state.reason or "no reason given", 1024)
    return _escalated(job, f"UNKNOWN: the provider can't account for {_key(job)}: {reason}", source, now, record)


def lookup_failed(job: Job, problem: str, *, policy: ReconciliationPolicy, source: str, now: datetime) -> Judgement:
    """A lookup raised, hung or answered rubbish: tried again after a doubling pause, until the deadline."""
    tries = job.lookup_tries + 1
    spent = sum(lookup_pause(each) for each in range(1, tries + 1))
    if spent > policy.lookup_deadline:
        reason = f"LOOKUP_FAILED: {tries} lookups of {_key(job)} failed, the last: {storable_text(problem, 1024)}"
        return _escalated(job, reason, source, now, {"tries": tries, "last": storable_text(problem, 1024)})
    after = now + timedelta(seconds=lookup_pause(tries))
    return Judgement(bookkeeping={"lookup_tries": tries, "reconcile_after": after}, word="lookup_failed")


def lookup_pause(tries: int) -> float:
    """Seconds after the failed lookup number `tries`: 30, doubled each time, at most 30 minutes."""
    return doubled(30.0, tries, 1800.0)


def _escalated(job: Job, reason: str, actor: str, now: datetime, evidence: dict[str, Any]) -> Judgement:
    if job.escalated_at is not None:
        return Judgement(word="escalated")
    return Judgement(escalate(job, reason=reason, actor=actor, now=now, evidence=evidence), word="escalated")


def resolved(
    job: Job,
    verdict: JobStatus,
    record: dict[str, Any],
    actor: str,
    now: datetime,
    *,
    result: dict[str, Any] | None = None,
    error: JobError | None = None,
    follow_ups_due: bool = False,
) -> Change:
    """The uncertain job is settled; the evidence stays on the row and on its trail."""
    columns: dict[str, Any] = {
        "status": verdict,
        "reconciled_at": now,
        "reconciliation": record,
        "error": error.model_dump() if error else None,
        # Whoever resolves it tells its workflow; the launch sweep looks once more, in case that word was lost.
        "launch_check_at": now + timedelta(seconds=LAUNCH_CHECK_SECONDS),
        **UNESCALATED,
        "follow_ups_due": follow_ups_due,
    }
    data: dict[str, Any] = {"reconciliation": record, "error": columns["error"]}
    if verdict is JobStatus.COMPLETED:
        columns["result"] = result
        data |= result_in_event(result or {})
    if verdict is JobStatus.DEAD_LETTER:
        columns |= {"dead_lettered_at": now, "dead_letter_reason": error.message if error else "resolved"}
    return Change(columns=columns, event=EventName.RECONCILED, data=data, actor=actor)


def resolve(
    job: Job,
    verdict: JobStatus,
    *,
    evidence: dict[str, Any],
    actor: str,
    result: dict[str, Any] | None,
    now: datetime,
) -> Change:
    """An operator's word on an uncertain job. Raises `NotResolvable`."""
    if job.status not in UNRESOLVED:
        raise NotResolvable(f"job {job.id} is {job.status}: only an indeterminate or timed out job can be resolved")
    record = {"by": "operator", "actor": actor, "evidence": evidence}
    if verdict is JobStatus.COMPLETED:
        return resolved(job, verdict, record, actor, now, result=result or {}, follow_ups_due=True)
    error = JobError.of(f"RESOLVED_{verdict.upper()}", f"resolved as {verdict} by {actor}")
    return resolved(job, verdict, record, actor, now, error=error)


def recheck(job: Job, *, actor: str, reason: str, now: datetime) -> Change:
    """An escalated job is before an operator no more; an uncertain one goes back into the sweep, its lookups counted
    anew."""
    lookups = {"lookup_tries": 0, "reconcile_after": now} if job.status in UNRESOLVED else {}
    return Change(
        columns={"status": job.status, **UNESCALATED, **lookups},
        event=EventName.ESCALATED,
        data={"cleared": True, "reason": reason},
        actor=actor,
    )


def requeue_interrupted(job: Job, *, actor: str, reason: str, now: datetime) -> Change:
    """An interrupted job, whose lease ran out before its boundary, is fenced and queued, its attempts given back.

    Raises `NotRequeueable`, naming the verb that applies.
    """
    verb = _verb_instead(job, now)
    if verb is not None:
        raise NotRequeueable(f"job {job.id} is {job.status}: {verb}")
    change = requeue(
        job,
        cause="requeue",
        actor=actor,
        now=now,
        due=now,
        attempt=attempt_end("requeued", now),
        attempt_count=0,
    )
    change.columns["lease_generation"] = job.lease_generation + 1
    change.data["reason"] = reason
    return change


def _verb_instead(job: Job, now: datetime) -> str | None:
    if job.status is JobStatus.QUEUED:
        return "it is queued already"
    if job.status is JobStatus.FAILED:
        return "retry_job applies"
    if job.status in UNRESOLVED:
        return "resolve_job applies"
    if job.status not in ACTIVE:
        return "it never moves again"
    if job.dispatched_at is not None:
        return "it crossed its boundary; reconciliation or resolve_job applies"
    if job.lease_expires_at is not None and job.lease_expires_at > now:
        return "its holder's lease is alive; cancel_job applies"
    return None


def _key(job: Job) -> str:
    return f"operation key {job.operation_key!r}"
