"""Whether a consequential job may be dispatched, decided on its row as it stands. Pure. Any reason means no."""

from datetime import datetime

from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.envelope import (
    EXECUTION,
    GOVERNANCE,
    SQL_DIGEST,
    ExecutionIdentity,
    GovernanceFacts,
    MalformedEnvelope,
    read_execution_identity,
    read_governance,
    stored_digest,
)
from durable_jobs.contract.models import Job

CHANGED_PAYLOAD = "payload: was changed after creation, as request_digest tells"


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
    if not reasons:
        submitted = read_execution_identity(job)
        if submitted is not None and submitted.governance != (governance.digest if governance else None):
            reasons.append(f"{GOVERNANCE}: is not what was submitted with the identity")
    if not reasons and _payload_changed(job):
        reasons.append(CHANGED_PAYLOAD)
    return reasons


def approval_of(job: Job) -> tuple[str | None, str | None]:
    """The approval that a well-formed job is to consume, if any, and the action intent that it must be for.

    The governance names it; where there is none, the identity.
    """
    governance, identity = read_governance(job), read_execution_identity(job)
    if governance is not None:
        return governance.approval, governance.action_intent
    return (identity.approval, identity.action_intent) if identity is not None else (None, None)


def trusted_identity(job: Job) -> ExecutionIdentity | None:
    """The identity that a job may pass on to its children, held against its row. Raises `MalformedEnvelope`."""
    identity = read_execution_identity(job)
    if identity is None:
        return None
    if reasons := validate_execution_identity_for_dispatch(job):
        raise MalformedEnvelope.at(EXECUTION, "; ".join(reasons))
    if _payload_changed(job):
        raise MalformedEnvelope.at(EXECUTION, CHANGED_PAYLOAD)
    return identity


def _payload_changed(job: Job) -> bool:
    """Whether the row holds something else than was submitted; of a row made in SQL only the database can tell."""
    return not job.request_digest.startswith(SQL_DIGEST) and stored_digest(job) != job.request_digest


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
