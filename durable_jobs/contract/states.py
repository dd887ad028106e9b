"""The job's state machine, as data. Everything that affects it is in this module.

The CHECK constraints and the guard trigger in Postgres, the diagram and the table in the docs are rendered from
`TRANSITIONS` and `EventName` by `durable_jobs.contract.render`. Source: the design, sections 2 and 3.
"""

from enum import StrEnum


class JobStatus(StrEnum):
    """The ten statuses, a closed set."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    DEAD_LETTER = "dead_letter"
    INDETERMINATE = "indeterminate"
    HALT_UNSAFE = "halt_unsafe"
    TIMED_OUT = "timed_out"

    @property
    def is_terminal(self) -> bool:
        """No worker moves the job on: it has a finish time and no lease."""
        return self in TERMINAL

    @property
    def is_settled(self) -> bool:
        """The truth is known. `indeterminate` and `timed_out` are terminal for workers, yet unsettled."""
        return self in SETTLED


class EventName(StrEnum):
    """The fifteen names of the event trail, a closed vocabulary."""

    CLAIMED = "claimed"
    DISPATCHED = "dispatched"
    HEARTBEAT = "heartbeat"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INDETERMINATE = "indeterminate"
    HALT_UNSAFE = "halt_unsafe"
    DEAD_LETTERED = "dead_lettered"
    TIMED_OUT = "timed_out"
    RETRIED = "retried"
    ADMISSION_CHECKED = "admission_checked"
    ESCALATED = "escalated"
    RECONCILED = "reconciled"
    EXECUTION_CONTROL_SHADOW = "execution_control_shadow"


class Via(StrEnum):
    """What a transition asks for beyond the statuses; the guard trigger checks it on the row itself."""

    WORKER = "worker"
    """Nothing more."""
    CLAIM = "claim"
    """A greater lease generation."""
    RECONCILED = "reconciled"
    """A new reconciliation record: by a provider's evidence or by a named operator."""
    RESOLVED = "resolved"
    """A new reconciliation record by a named operator alone."""
    RETRIED = "retried"
    """The intent number plus one."""


ACTIVE = frozenset({JobStatus.CLAIMED, JobStatus.RUNNING})
_UNSUCCESSFUL = (
    JobStatus.FAILED,
    JobStatus.CANCELLED,
    JobStatus.DEAD_LETTER,
    JobStatus.INDETERMINATE,
    JobStatus.HALT_UNSAFE,
    JobStatus.TIMED_OUT,
)
TERMINAL = frozenset({JobStatus.COMPLETED, *_UNSUCCESSFUL})
UNRESOLVED = frozenset({JobStatus.INDETERMINATE, JobStatus.TIMED_OUT})
SETTLED = TERMINAL - UNRESOLVED

INITIAL = JobStatus.QUEUED
"""The one status in which a row may be inserted."""

_Q, _C, _R = JobStatus.QUEUED, JobStatus.CLAIMED, JobStatus.RUNNING

TRANSITIONS: dict[tuple[JobStatus, JobStatus], Via] = {
    (_Q, _C): Via.CLAIM,
    (_Q, JobStatus.CANCELLED): Via.WORKER,
    (_C, _R): Via.WORKER,
    (_C, _Q): Via.WORKER,
    **{(_C, target): Via.WORKER for target in _UNSUCCESSFUL},
    (_C, _C): Via.CLAIM,
    (_R, JobStatus.COMPLETED): Via.WORKER,
    (_R, _Q): Via.WORKER,
    **{(_R, target): Via.WORKER for target in _UNSUCCESSFUL},
    (_R, _C): Via.CLAIM,
    **{
        (JobStatus.INDETERMINATE, target): Via.RECONCILED
        for target in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.DEAD_LETTER)
    },
    **{
        (JobStatus.TIMED_OUT, target): Via.RESOLVED
        for target in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.DEAD_LETTER)
    },
    (JobStatus.FAILED, _Q): Via.RETRIED,
}
"""Every legal change of status. `(claimed, claimed)` is a reclaim; a renewal changes no status and isn't one."""

TERMINAL_EVENT: dict[JobStatus, EventName] = {
    JobStatus.COMPLETED: EventName.COMPLETED,
    JobStatus.FAILED: EventName.FAILED,
    JobStatus.CANCELLED: EventName.CANCELLED,
    JobStatus.DEAD_LETTER: EventName.DEAD_LETTERED,
    JobStatus.INDETERMINATE: EventName.INDETERMINATE,
    JobStatus.HALT_UNSAFE: EventName.HALT_UNSAFE,
    JobStatus.TIMED_OUT: EventName.TIMED_OUT,
}
"""The event that a worker's or a reclaim's move into a terminal status leaves (a resolution leaves `reconciled`)."""
