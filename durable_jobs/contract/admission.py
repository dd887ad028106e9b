"""Whether a consequential job may be dispatched, decided on its row as it stands. Pure. Any reason means no."""

from datetime import datetime

from durable_jobs.contract.digest import job_digest, request_digest
from durable_jobs.contract.envelope import (
    EXECUTION,
    GOVERNANCE,
    ExecutionIdentity,
    GovernanceFacts,
    MalformedEnvelope,
    raw_payload,
    read_execution_identity,
    read_governance,
)
from durable_jobs.contract.models import Job


def validate_execution_identity_for_dispatch(job: Job) -> list[str]:
    """Why the job's identity does not allow a dispatch; empty when it does.

    It must exist, name tenant, actor and trace, and agree with the row in organization, project and job.
    """
    try:
        identity = read_execution_identity(job)
    except MalformedEnvelope as error:
        return [str(problem) for problem in error.problems]
    if identity is None:
        return [f"{EXECUTION}: missing; a consequential job needs an execution identity"]
    bound = {"organization": job.organization_id, "project": job.project_id, "job": str(job.id)}
    return [
        f"{EXECUTION}.{field}: {getattr(identity, field)!r} is not the row's {value!r}"
        for field, value in bound.items()
        if getattr(identity, field) != value
    ]


def admission_reasons(job: Job, now: datetime) -> list[str]:
    """Why the job may not be dispatched at `now`, on the database's clock; its approval, if any, apart."""
    reasons = validate_execution_identity_for_dispatch(job)
    try:
        governance = read_governance(job)
    except MalformedEnvelope as error:
        return reasons + [str(problem) for problem in error.problems]
    if governance is not None:
        reasons += _governance_reasons(job, governance, now)
    if not reasons and _present_digest(job, read_execution_identity(job), governance) != job.request_digest:
        reasons.append("payload: was changed after creation, as request_digest tells")
    return reasons


def _governance_reasons(job: Job, governance: GovernanceFacts, now: datetime) -> list[str]:
    stored = job.payload[GOVERNANCE]
    digested = {field: value for field, value in stored.items() if field not in ("digest", "seals")}
    reasons = []
    if request_digest(digested) != governance.digest:
        reasons.append(f"{GOVERNANCE}.digest: does not match the facts")
    if governance.job != str(job.id):
        reasons.append(f"{GOVERNANCE}.job: {governance.job!r} is not the row's {str(job.id)!r}")
    if governance.expires_at <= now:
        reasons.append(f"{GOVERNANCE}.expires_at: expired at {governance.expires_at.isoformat()}")
    return reasons


def _present_digest(job: Job, identity: ExecutionIdentity | None, governance: GovernanceFacts | None) -> str:
    """The request digest of what the row holds now; it was taken of what was submitted."""
    return job_digest(
        job_type=job.job_type,
        queue=job.queue,
        payload=raw_payload(job.payload),
        tenant=identity.tenant if identity else None,
        actor=identity.actor if identity else None,
        action_intent=governance.action_intent if governance else identity.action_intent if identity else None,
        capability=governance.capability if governance else None,
        policy=governance.policy if governance else None,
        budget=governance.budget if governance else None,
    )
