"""The reference model: what each verb answers and does to a job, as the design's sections 2 and 5 to 9 say.

It knows no SQL, no clock and no lock: time is three flags that a test moves (whether the lease is alive, the job is
due, the attempt's time is up). Refusals are the names of their errors; an answer is what the caller sees.
"""

from dataclasses import dataclass, field
from uuid import UUID

from durable_jobs.contract.models import Claim

ACTIVE = {"claimed", "running"}
UNCERTAIN = {"indeterminate", "timed_out"}
FREE_RELEASES = 10
FAILED_LOOKUPS = 3
"""So many failed lookups in a row reach the deadline that `tests.test_model` sets."""


@dataclass
class ModelJob:
    """One job. `position` in the order of claims and `id` are taken from the row: clocks and chance made them."""

    id: UUID
    variant: int
    job_type: str
    priority: int
    max_attempts: int
    status: str = "queued"
    generation: int = 0
    attempts: int = 0
    intent: int = 0
    releases: int = 0
    claimed_by: str | None = None
    token: UUID | None = None
    lease_alive: bool = False
    time_up: bool = False
    due: bool = True
    operation_key: str | None = None
    marked_generation: int | None = None
    has_error: bool = False
    """Of the last failure, also while it waits for the next attempt."""
    cancel_requested: bool = False
    escalations: int = 0
    escalated: bool = False
    resolved_by: str | None = None
    follow_ups_due: bool = False
    tries: int = 0
    lookups: int = 0
    """Grows with each write of the lookups' bookkeeping."""
    outcomes: dict[int, str | None] = field(default_factory=dict)
    """How the attempt of each generation ended."""
    late: set[int] = field(default_factory=set)
    """Generations whose holder brought a result after it was fenced."""

    @property
    def active(self) -> bool:
        return self.status in ACTIVE

    @property
    def moves(self) -> bool:
        """Whether it is not settled."""
        return self.active or self.status in {"queued", *UNCERTAIN}

    @property
    def expired(self) -> bool:
        return self.active and not self.lease_alive

    @property
    def position(self) -> tuple[object, ...]:
        """What a sweep's write compares."""
        return (self.status, self.generation, self.escalated and self.escalations, self.tries, self.lookups)

    def refusal(self, claim: Claim) -> str | None:
        """Owner, generation and status: all three."""
        own = (self.claimed_by, self.generation) == (claim.worker_id, claim.generation)
        return None if own and self.active else "IllegalTransition" if own else "LeaseLost"

    def end(self, status: str, outcome: str | None = None) -> str:
        self.outcomes[self.generation] = outcome or status
        self.status, self.lease_alive, self.token, self.escalated = status, False, None, False
        self.has_error = status != "completed" and (self.has_error or status != "queued")
        return status

    def queue(self, outcome: str, *, due: bool = True) -> str:
        """Back to the queue; a job whose cancellation is requested is cancelled instead."""
        if self.cancel_requested:
            return self.end("cancelled")
        self.end("queued", outcome)
        self.claimed_by, self.due = None, due
        return "queued"

    def fence(self, status: str) -> str:
        """The expired lease is taken under a new generation, which ends where it began."""
        self.outcomes[self.generation] = "lease_expired"
        self.generation += 1
        return self.end(status)


@dataclass(frozen=True)
class Seen:
    """A candidate as a sweep read it."""

    id: UUID
    position: tuple[object, ...]
    action: str


class Model:
    """Every job of one example."""

    def __init__(self) -> None:
        self.jobs: dict[UUID, ModelJob] = {}
        self.keys: dict[str, UUID] = {}
        self.operation_keys: set[str] = set()
        self.paused: set[str] = set()
        """Paused job types; the empty one pauses the queue."""

    # Creation

    def create(self, key: str, variant: int, job_type: str) -> str:
        if key not in self.keys:
            return "created"
        found = self.jobs[self.keys[key]]
        same = (found.variant, found.job_type) == (variant, job_type)
        return "existing" if same else "IdempotencyKeyConflict"

    def add(self, key: str, job: ModelJob) -> None:
        self.keys[key] = job.id
        self.jobs[job.id] = job

    # Claims and leases

    def eligible(self, job: ModelJob) -> bool:
        """For a claim of the next job."""
        due = job.due if job.status == "queued" else job.expired and not job.cancel_requested
        return due and not self.is_paused(job)

    def is_paused(self, job: ModelJob) -> bool:
        return bool(self.paused & {"", job.job_type})

    def claim(self, job: ModelJob, worker: str, token: UUID) -> str:
        if job.active and (job.claimed_by, job.token) == (worker, token):
            return "repeated"
        if job.status == "queued":
            if not job.due:
                return "not_due"
            if self.is_paused(job):
                return "paused"
        elif not job.active:
            return "settled"
        elif job.lease_alive:
            return "held"
        elif job.operation_key:
            return f"landed in {job.fence('indeterminate')}"
        elif job.cancel_requested:
            return f"landed in {job.fence('cancelled')}"
        elif job.attempts >= job.max_attempts:
            return f"landed in {job.fence('dead_letter')}"
        elif self.is_paused(job):
            return "paused"
        answer = "reclaimed" if job.active else "claimed"
        if job.active:
            job.outcomes[job.generation] = "lease_expired"
        job.status, job.generation, job.attempts = "claimed", job.generation + 1, job.attempts + 1
        job.claimed_by, job.token, job.lease_alive, job.time_up = worker, token, True, False
        job.escalated = False
        job.outcomes[job.generation] = None
        return answer

    def renew(self, job: ModelJob, claim: Claim) -> str:
        if job.refusal(claim):
            return "lost"
        job.status, job.lease_alive = "running", not job.time_up
        return "cancel_requested" if job.cancel_requested else "held"

    def mark(self, job: ModelJob, claim: Claim, key: str, *, admitted: bool) -> str:
        if refusal := job.refusal(claim):
            return refusal
        if job.operation_key:
            return "AlreadyDispatched"
        if job.cancel_requested:
            return "CancellationRequested"
        if not job.lease_alive:
            return "LeaseLost"
        if not admitted:
            return "AdmissionRefused"
        if job.time_up:
            return "LeaseLost"
        if key in self.operation_keys:
            return "OperationKeyConflict"
        self.operation_keys.add(key)
        job.status, job.operation_key, job.marked_generation = "running", key, job.generation
        return "running"

    # Outcomes

    def complete(self, job: ModelJob, claim: Claim) -> str:
        if refusal := job.refusal(claim):
            if refusal == "LeaseLost":
                job.late.add(claim.generation)
            return refusal
        return job.end("completed")

    def fail(self, job: ModelJob, claim: Claim, *, retryable: bool) -> str:
        if refusal := job.refusal(claim):
            return refusal
        if not retryable:
            return job.end("failed")
        if job.operation_key:
            return job.end("indeterminate")
        if job.attempts >= job.max_attempts and not job.cancel_requested:
            return job.end("dead_letter")
        job.has_error = True
        return job.queue("queued", due=False)

    def land(self, job: ModelJob, claim: Claim, status: str) -> str:
        return job.refusal(claim) or job.end(status)

    def release(self, job: ModelJob, claim: Claim) -> str:
        if refusal := job.refusal(claim):
            return refusal
        if job.operation_key:
            return "NotReleasable"
        free = job.releases < FREE_RELEASES
        if not free and job.attempts >= job.max_attempts and not job.cancel_requested:
            return job.end("dead_letter")
        job.attempts -= free
        job.releases += 1
        return job.queue("released")

    def acknowledge(self, job: ModelJob, claim: Claim, *, confirmed: bool) -> str:
        if refusal := job.refusal(claim):
            return refusal
        if not job.cancel_requested:
            return "IllegalTransition"
        return job.end("indeterminate" if job.operation_key and not confirmed else "cancelled")

    # Operators

    def cancel(self, job: ModelJob) -> str:
        if job.status == "queued":
            job.status, job.cancel_requested, job.has_error, job.escalated = "cancelled", True, True, False
            return "cancelled"
        if not job.active:
            return f"already_terminal:{job.status}"
        job.cancel_requested = True
        return "requested"

    def retry(self, job: ModelJob, *, accept_duplicate_risk: bool) -> str:
        if job.status != "failed" or (job.resolved_by == "operator" and not accept_duplicate_risk):
            return "NotRetryable"
        job.status, job.claimed_by, job.due, job.has_error = "queued", None, True, False
        job.intent, job.attempts, job.releases = job.intent + 1, 0, 0
        job.operation_key = job.marked_generation = job.resolved_by = None
        job.cancel_requested, job.escalated, job.tries = False, False, 0
        job.lookups += 1
        return "queued"

    def requeue(self, job: ModelJob) -> str:
        if not job.expired or job.operation_key:
            return "NotRequeueable"
        job.attempts = 0
        old, status = job.generation, job.queue("requeued")
        ended, job.generation = job.outcomes[old], old + 1
        job.outcomes |= {old: ended, job.generation: status}
        return status

    def settle(self, job: ModelJob, status: str, by: str) -> str:
        job.status, job.resolved_by, job.escalated = status, by, False
        job.has_error = status != "completed"
        return status

    def resolve(self, job: ModelJob, verdict: str) -> str:
        if job.status not in UNCERTAIN:
            return "NotResolvable"
        job.follow_ups_due = verdict == "completed"
        return self.settle(job, verdict, "operator")

    def recheck(self, job: ModelJob) -> bool:
        if not job.escalated:
            return False
        job.escalated = False
        if job.status in UNCERTAIN:
            job.tries = 0
            job.lookups += 1
        return True

    def pause(self, job_type: str) -> bool:
        changed = job_type not in self.paused
        self.paused.add(job_type)
        return changed

    def resume(self, job_type: str) -> bool:
        changed = job_type in self.paused
        self.paused.discard(job_type)
        return changed

    # Reconciliation

    def candidates(self) -> list[Seen]:
        found = [job for job in self.jobs.values() if job.status in UNCERTAIN or job.expired]
        return [Seen(job.id, job.position, self.action(job)) for job in found]

    def action(self, job: ModelJob) -> str:
        if job.active:
            return "fence" if job.operation_key or job.cancel_requested else "left_to_reclaim"
        if job.escalated:
            return "escalated"
        return "escalate" if job.status == "timed_out" or not job.operation_key else "look_up"

    def unmoved(self, seen: Seen) -> ModelJob | None:
        job = self.jobs[seen.id]
        return job if job.position == seen.position else None

    def fence_expired(self, seen: Seen) -> str | None:
        """None, here and below: the row has moved, and nothing is written."""
        job = self.unmoved(seen)
        if job is None or not job.expired or not (job.operation_key or job.cancel_requested):
            return None
        return job.fence("indeterminate" if job.operation_key else "cancelled")

    def escalate(self, seen: Seen) -> str | None:
        job = self.unmoved(seen)
        if job is None or job.escalated:
            return None
        return self.escalated(job)

    def escalated(self, job: ModelJob) -> str:
        if not job.escalated:
            job.escalated, job.escalations = True, job.escalations + 1
        return "escalated"

    def judged(self, seen: Seen, answer: str) -> str | None:
        job = self.unmoved(seen)
        return None if job is None else self.judge(job, answer)

    def judge(self, job: ModelJob, answer: str) -> str:
        """What the provider's answer does to an indeterminate job."""
        if answer in ("succeeded", "failed", "refused after its deadline"):
            return self.settle(job, "completed" if answer == "succeeded" else "failed", "provider")
        if answer == "pending":
            job.lookups += bool(job.tries)
            job.tries = 0
            return "pending"
        if answer == "lookup failed" and job.tries + 1 < FAILED_LOOKUPS:
            job.tries += 1
            job.lookups += 1
            return "lookup_failed"
        return self.escalated(job)

    def provider_state(self, key: str, answer: str) -> str:
        job = next((each for each in self.jobs.values() if each.operation_key == key), None)
        if job is None:
            return "JobNotFound"
        if job.status != "indeterminate":
            return "NotResolvable"
        self.judge(job, answer)
        job.follow_ups_due = job.status == "completed"
        return job.status
