"""The records of workers, and of the queues that they serve."""

from datetime import datetime, timedelta
from enum import StrEnum

from durable_jobs.contract.models import Record


class QueueOverview(Record):
    """How a queue stands, by job type."""

    queue: str
    job_type: str
    queued: int
    due: int
    """Queued and due now."""
    active: int
    unresolved: int
    escalated: int
    oldest_due_seconds: float | None
    """How long the oldest due job has been due."""
    paused: bool
    live_workers: int


class QueuePause(Record):
    """One pause that stands: of a queue, or there of one type, of one organization, or of both."""

    queue: str
    job_type: str | None
    organization: str | None
    """None: every tenant's, the deployer's own pause."""
    paused_at: datetime
    actor: str
    reason: str


class WorkerState(StrEnum):
    HEALTHY = "healthy"
    STALE = "stale"
    """Silent for too long. Its record is kept for diagnosis."""
    STOPPED = "stopped"


class WorkerRecord(Record):
    """One row of the registry of workers: one incarnation of one process. Kept when stale, for diagnosis."""

    id: str
    host: str
    pid: int
    version: str
    queue: str
    job_types: list[str]
    organizations: list[str] | None
    """None: every tenant's."""
    slots: int | None
    """How many jobs it runs at once; None where the worker's own tuner decides."""
    running: int
    """Attempts in hand at the last heartbeat."""
    keeper_lag_seconds: float
    """How late the latest renewal of leases between the last two heartbeats was at its commit."""
    started_at: datetime
    heartbeat_at: datetime
    stopped_at: datetime | None
    now: datetime
    """The database's clock as the record was read."""

    @property
    def is_gone(self) -> bool:
        """Whether it has been silent for a day: its record is history, and nobody has to be told of it any more."""
        return self.now - self.heartbeat_at > timedelta(days=1)

    def state(self, stale_seconds: float) -> WorkerState:
        """`stale` when silent for longer than `stale_seconds`."""
        if self.stopped_at is not None:
            return WorkerState.STOPPED
        silent = self.now - self.heartbeat_at > timedelta(seconds=stale_seconds)
        return WorkerState.STALE if silent else WorkerState.HEALTHY
