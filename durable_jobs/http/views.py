"""What the API answers with."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from durable_jobs.contract.envelope import EXECUTION, GOVERNANCE, raw_payload
from durable_jobs.contract.models import Job, JobAttempt, JobError, JobEvent, JobHead
from durable_jobs.contract.states import EventName, JobStatus


class ControlStatus(StrEnum):
    """The control plane's words for the ten states."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    UNCERTAIN = "UNCERTAIN"


CONTROL_STATUS = {
    JobStatus.QUEUED: ControlStatus.QUEUED,
    JobStatus.CLAIMED: ControlStatus.RUNNING,
    JobStatus.RUNNING: ControlStatus.RUNNING,
    JobStatus.COMPLETED: ControlStatus.SUCCEEDED,
    JobStatus.FAILED: ControlStatus.FAILED,
    JobStatus.DEAD_LETTER: ControlStatus.FAILED,
    JobStatus.HALT_UNSAFE: ControlStatus.FAILED,
    JobStatus.CANCELLED: ControlStatus.CANCELLED,
    JobStatus.INDETERMINATE: ControlStatus.UNCERTAIN,
    JobStatus.TIMED_OUT: ControlStatus.UNCERTAIN,
}


class View(BaseModel):
    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class JobSummary(View):
    """A job without its payload and result."""

    job_id: UUID
    status: ControlStatus
    state: JobStatus
    type: str
    organization: str
    project: str
    queue: str
    idempotency_key: str
    priority: int
    intent: int
    """0, and one more for each deliberate retry."""
    attempt: int
    max_attempts: int
    scheduled_at: datetime
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    updated_at: datetime
    cancel_requested_at: datetime | None
    error: JobError | None
    escalated_at: datetime | None
    """Since when it stands before an operator."""
    escalation_reason: str | None

    @classmethod
    def of(cls, job: JobHead) -> Self:
        return cls(**_fields(job, cls))


class JobView(JobSummary):
    """A job."""

    payload: dict[str, Any]
    result: dict[str, Any] | None
    execution: dict[str, Any] | None
    """Whose work it is."""
    governance: dict[str, Any] | None
    """What was allowed."""
    backoff_base_seconds: float
    lease_seconds: float
    timeout_seconds: float
    claimed_by: str | None
    """The worker that claimed it last."""
    lease_expires_at: datetime | None
    heartbeat_at: datetime | None
    dispatched_at: datetime | None
    """When it crossed the boundary: from then on a send may have landed."""
    operation_key: str | None
    cancel_reason: str | None
    cancel_actor: str | None
    dead_letter_reason: str | None
    reconciled_at: datetime | None
    reconciliation: dict[str, Any] | None
    """The evidence that resolved an uncertain outcome, and by whom."""


def _fields(job: JobHead, view: type[JobSummary]) -> dict[str, Any]:
    fields = {name: value for name, value in job if name in view.model_fields}
    fields |= {
        "job_id": job.id,
        "status": CONTROL_STATUS[job.status],
        "state": job.status,
        "type": job.job_type,
        "organization": job.organization_id,
        "project": job.project_id,
        "intent": job.intent_number,
        "attempt": job.attempt_count,
    }
    if isinstance(job, Job):
        fields |= {
            "payload": raw_payload(job.payload),
            "execution": _unsealed(job.payload.get(EXECUTION)),
            "governance": _unsealed(job.payload.get(GOVERNANCE)),
        }
    return fields


def _unsealed(envelope: object) -> dict[str, Any] | None:
    """An envelope as it is stored, without its seals; it is checked at dispatch, not here."""
    return {k: v for k, v in envelope.items() if k != "seals"} if isinstance(envelope, dict) else None


class JobPage(View):
    items: list[JobSummary]
    next_cursor: str | None
    """Pass it as `after` for the next page; null on the last."""


class EventView(View):
    """One event of a job's trail."""

    id: int
    event: EventName
    status: ControlStatus
    state: JobStatus
    """After the event, as is `status`."""
    generation: int
    intent: int
    attempt: int
    actor: str
    occurred_at: datetime
    data: dict[str, Any]

    @classmethod
    def of(cls, event: JobEvent) -> Self:
        return cls(
            id=event.id,
            event=event.name,
            status=CONTROL_STATUS[event.status],
            state=event.status,
            generation=event.generation,
            intent=event.intent_number,
            attempt=event.attempt_count,
            actor=event.actor,
            occurred_at=event.occurred_at,
            data=event.shown_data,
        )


class EventPage(View):
    items: list[EventView]
    next_cursor: str | None


class AttemptView(View):
    """One holder's try at a job."""

    generation: int
    intent: int
    worker: str
    claimed_at: datetime
    dispatched_at: datetime | None
    operation_key: str | None
    ended_at: datetime | None
    outcome: str | None
    error: JobError | None
    late_result: dict[str, Any] | None
    """A result that came after the holder was fenced: evidence, never a transition."""
    superseded: dict[str, Any] | None
    """What a retry moved here from the job."""

    @classmethod
    def of(cls, attempt: JobAttempt) -> Self:
        row = {name: value for name, value in attempt if name in cls.model_fields}
        return cls(**row, intent=attempt.intent_number, worker=attempt.worker_id)


class AttemptPage(View):
    items: list[AttemptView]
    next_cursor: str | None


class CancelAnswer(View):
    """`cancelled`: it never ran. `requested`: its holder was told. `already_terminal`: it had ended before."""

    reply: str
    job: JobView


class Rechecked(View):
    job_ids: list[UUID]
    """The jobs taken from before the operator; uncertain ones are back in the sweep."""
