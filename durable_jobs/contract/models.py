"""The records as the service returns them: frozen, with the column names of the job table."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar
from uuid import UUID

from pydantic import BaseModel, ConfigDict

from durable_jobs.contract.rules import storable_text
from durable_jobs.contract.states import ACTIVE, EventName, JobStatus


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class JobError(Record):
    """Why a job or an attempt did not succeed; always storable, never pickled."""

    code: str
    message: str
    type: str | None = None
    """The exception's class name."""
    traceback: str | None = None
    """At most 8 KiB of it."""

    @classmethod
    def of(cls, code: str, message: object, *, type: str | None = None, traceback: str | None = None) -> Self:
        """Made from anything: escaped and cut so that the write always succeeds."""
        return cls(
            code=storable_text(code, 128) or "ERROR",
            message=storable_text(message, 4096) or "(no message)",
            type=storable_text(type, 255) if type else None,
            traceback=storable_text(traceback[-8192:], 8192) if traceback else None,
        )


class Claim(Record):
    """The right to act on a job: who claimed it, and under which generation. Every write of a worker presents it."""

    job_id: UUID
    worker_id: str
    generation: int


class JobHead(Record):
    """One row of the job table without its payload and result, which may be large: what a list of jobs gives.

    Each field: its meaning, its first value, and when it changes.
    """

    id: UUID
    """UUIDv7, made at creation."""
    organization_id: str
    project_id: str
    queue: str
    job_type: str
    idempotency_key: str
    request_digest: str
    """SHA-256 of what makes two submissions the same request; SQL's `enqueue` takes one of its own kind, `sql:…`."""
    status: JobStatus
    """First `queued`; changes as `contract.states` says."""
    priority: int
    intent_number: int
    """0; plus one for each `retry_job`: a new, deliberate send with an operation key of its own."""
    attempt_count: int
    """0; plus one for each claim that runs the handler; a release gives it back; a retry restarts it."""
    max_attempts: int
    backoff_base_seconds: float
    lease_seconds: float
    timeout_seconds: float
    lease_id: str | None
    """The worker holding the lease; None while queued or terminal."""
    claimed_by: str | None
    """The worker that claimed the current generation; kept on the terminal row; None while queued."""
    claim_token: UUID | None
    """Drawn by the running attempt, so that a claim repeated after a lost reply returns the same generation."""
    lease_generation: int
    """0; only grows; the fencing token of every write."""
    lease_expires_at: datetime | None
    heartbeat_at: datetime | None
    """Last claim or renewal, also silent ones."""
    scheduled_at: datetime
    """Not claimed before; pushed out by backoff."""
    created_at: datetime
    started_at: datetime | None
    """First claim of the current intent."""
    finished_at: datetime | None
    """When it became terminal; None again after a retry."""
    updated_at: datetime
    cancel_requested_at: datetime | None
    cancel_reason: str | None
    cancel_actor: str | None
    dispatched_at: datetime | None
    """The boundary of the current intent; None before it and after a retry."""
    dispatched_generation: int | None
    operation_key: str | None
    """The key under which the provider was called; set with `dispatched_at`."""
    error: JobError | None
    """The last failure, also while waiting for the next attempt; None on completion."""
    dead_lettered_at: datetime | None
    dead_letter_reason: str | None
    escalated_at: datetime | None
    escalation_reason: str | None
    reconciled_at: datetime | None
    reconciliation: dict[str, Any] | None
    """The evidence that resolved an uncertain outcome, and by whom."""
    reconcile_after: datetime | None
    lookup_tries: int
    follow_ups_due: bool
    release_count: int
    """0; plus one for each release; from the eleventh on a release costs an attempt."""
    launch_check_at: datetime | None

    @property
    def settled_by_operator(self) -> bool:
        """Whether an operator's word, not the provider's, settled it: a send may then still land."""
        return (self.reconciliation or {}).get("by") == "operator"

    def holds(self, claim: Claim) -> bool:
        """Whether `claim` is this row's present, active holder (the lease may have run out: nobody else came)."""
        return (
            self.id == claim.job_id
            and self.claimed_by == claim.worker_id
            and self.lease_generation == claim.generation
            and self.status in ACTIVE
        )


class Job(JobHead):
    """One row of the job table."""

    payload: dict[str, Any]
    """As it was admitted, envelopes included."""
    result: dict[str, Any] | None
    """None until it completed."""


class JobEvent(Record):
    """One row of the append-only trail."""

    id: int
    """Grows in the order of the job's own events."""
    job_id: UUID
    organization_id: str
    project_id: str
    name: EventName
    status: JobStatus
    """The job's status after the event."""
    generation: int
    intent_number: int
    attempt_count: int
    """After the event."""
    actor: str
    """The worker's id, an operator's name, or the service's own part that acted."""
    occurred_at: datetime
    """On the database clock."""
    data: dict[str, Any]

    @property
    def shown_data(self) -> dict[str, Any]:
        """The data without the claim token, which is a holder's secret: what a person or a product may see."""
        return {name: value for name, value in self.data.items() if name != "claim_token"}


class JobAttempt(Record):
    """One row per generation: one holder's try at the job."""

    job_id: UUID
    generation: int
    organization_id: str
    project_id: str
    intent_number: int
    worker_id: str
    claimed_at: datetime
    dispatched_at: datetime | None
    operation_key: str | None
    ended_at: datetime | None
    outcome: str | None
    """The status it led to, `released`, `requeued`, or `lease_expired`; None while it runs."""
    error: JobError | None
    late_result: dict[str, Any] | None
    """A result that came after the holder was fenced: evidence for the operator, never a transition."""
    superseded: dict[str, Any] | None
    """What a retry moved here from the job's row: marker, flag, escalation and lookup state."""


class ControlEvent(Record):
    """One act of an operator or a product on a job or a queue: who, what, why."""

    id: int
    job_id: UUID | None
    organization_id: str | None
    project_id: str | None
    action: str
    actor: str
    reason: str | None
    occurred_at: datetime
    data: dict[str, Any]


class Approval(Record):
    """One row of the approvals: a grant of one action intent, for one job to consume."""

    organization_id: str
    project_id: str
    id: str
    action_intent: str
    granted_at: datetime
    granted_by: str
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    revoke_reason: str | None
    consumed_at: datetime | None
    consumed_by: UUID | None
    """The job that crossed its boundary under it."""


class TokenRole(StrEnum):
    """What a token of the HTTP API may do; each includes the ones before it."""

    READER = "reader"
    SUBMITTER = "submitter"
    OPERATOR = "operator"

    def includes(self, role: "TokenRole") -> bool:
        """Whether this role may do what `role` may."""
        ranks = list(TokenRole)
        return ranks.index(self) >= ranks.index(role)


class ApiToken(Record):
    """One token of the HTTP API, without its secret, which is kept as a digest only."""

    id: UUID
    name: str
    role: TokenRole
    organization_id: str
    projects: list[str] | None
    """None: every project of the organization."""
    tenant: str
    """The tenant in the identity of what it submits."""
    actor: str
    """The actor in the identity of what it submits, and in the audit of what it operates."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class LeaseStatus(StrEnum):
    """The answer to a renewal; only `HELD` is truthy."""

    HELD = "held"
    CANCEL_REQUESTED = "cancel_requested"
    LOST = "lost"

    def __bool__(self) -> bool:
        return self is LeaseStatus.HELD


class ClaimRefusal(StrEnum):
    """Why a claim by id gave nothing."""

    NOT_FOUND = "not_found"
    NOT_DUE = "not_due"
    HELD = "held"
    """Another holder's lease is alive."""
    SETTLED = "settled"
    """The job is terminal."""
    PAUSED = "paused"
    """Its queue, or its type there, is paused."""
    OUT_OF_SCOPE = "out_of_scope"
    """Not of the organizations, queues or job types asked for."""
    LANDED = "landed"
    """The reclaim of an expired lease ended the job: see its status."""


class ClaimOutcome(Record):
    """What `claim_job` returns: truthy with a claim, falsy with the reason and the row as it now stands."""

    claim: Claim | None = None
    job: Job | None = None
    refusal: ClaimRefusal | None = None
    reclaimed: bool = False
    """Whether the claim is of a job whose lease had run out."""

    def __bool__(self) -> bool:
        return self.claim is not None


class CreatedJob(Record):
    """What `create_job` returns."""

    job: Job
    created: bool
    """False: the idempotency key already had this job."""


T = TypeVar("T")


class Page(Record, Generic[T]):
    """One page of a listing, and where the next one starts."""

    items: list[T]
    next_cursor: str | None = None
    """Pass it as `after` for the next page; None on the last."""
