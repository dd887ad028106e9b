"""After a restore or an unsafe failover: what Postgres may have forgotten is called uncertain. Pure."""

from datetime import datetime

from durable_jobs.contract.decisions import UNESCALATED, Change, attempt_end, ended
from durable_jobs.contract.models import Job, JobError
from durable_jobs.contract.states import ACTIVE, EventName, JobStatus


def quarantine(job: Job, *, since: datetime, actor: str, now: datetime) -> list[Change]:
    """The changes, in order, that make a job `indeterminate` which may have been dispatched since `since`.

    A queued job goes by way of a claim, as the transition table has it. Empty when there is nothing to doubt: the job
    is terminal, or was not due yet.
    """
    if job.status is JobStatus.QUEUED and job.scheduled_at <= now:
        generation = job.lease_generation + 1
        claimed = Change(
            columns={
                "status": JobStatus.CLAIMED,
                "lease_generation": generation,
                "attempt_count": job.attempt_count + 1,
                "claimed_by": actor,
                "lease_id": actor,
                "lease_expires_at": now,
                "started_at": job.started_at or now,
                **UNESCALATED,
            },
            event=EventName.CLAIMED,
            data={"claim_token": None, "cause": "quarantine"},
            actor=actor,
        )
        return [claimed, _uncertain(job, generation, since, actor, now)]
    if job.status in ACTIVE:
        change = _uncertain(job, job.lease_generation + 1, since, actor, now)
        change.columns["lease_generation"] = job.lease_generation + 1
        return [change]
    return []


def _uncertain(job: Job, generation: int, since: datetime, actor: str, now: datetime) -> Change:
    error = JobError.of(
        "QUARANTINED", f"it may have been dispatched since {since.isoformat()}, which the database forgot"
    )
    return Change(
        columns=ended(job, JobStatus.INDETERMINATE, now, error),
        event=EventName.INDETERMINATE,
        data={"error": error.model_dump(), "cause": "quarantine"},
        actor=actor,
        attempt=attempt_end(JobStatus.INDETERMINATE, now, error),
    )
