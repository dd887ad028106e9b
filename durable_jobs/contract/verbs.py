"""Which verbs of an operator or a product apply to a job as it stands. Pure; the verbs themselves decide once more."""

from datetime import datetime

from durable_jobs.contract.models import Job
from durable_jobs.contract.states import ACTIVE, UNRESOLVED, JobStatus


def legal_verbs(job: Job, now: datetime) -> list[str]:
    """The legal next steps at `now`, on the database's clock, the likeliest first: of `cancel`, `requeue`, `resolve`,
    `retry` and `recheck`."""
    return _by_status(job, now) + (["recheck"] if job.escalated_at else [])


def _by_status(job: Job, now: datetime) -> list[str]:
    if job.status is JobStatus.QUEUED:
        return ["cancel"]
    if job.status in ACTIVE:
        interrupted = job.dispatched_at is None and job.lease_expires_at is not None and job.lease_expires_at <= now
        return (["requeue"] if interrupted else []) + ([] if job.cancel_requested_at else ["cancel"])
    if job.status in UNRESOLVED:
        return ["resolve"]
    return ["retry"] if job.status is JobStatus.FAILED else []
