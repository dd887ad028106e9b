"""Whether a consequential job may be dispatched, decided on its row as it stands. Pure. Any reason means no."""

from datetime import datetime
from typing import NamedTuple

from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.envelope import (
    EXECUTION,
    GOVERNANCE,
    SQL_DIGEST,
    ExecutionIdentity,
    GovernanceFacts,
    MalformedEnvelope,
    job_digest,
    raw_payload,
    read_execution_identity,
    read_governance,
)
from durable_jobs.contract.models import Job

CHANGED_PAYLOAD = "payload: was changed after creation, as request_digest tells"


class Verdict(NamedTuple):
    """Whether a job may be dispatched, and the approval that it is to consume then."""

    reasons: list[str]
    """Why it may not; empty when it may."""
    approval: str | None = None
    """As the governance names it; where there is none, the identity."""
    action_intent: str | None = None
    """What the approval must be for."""


def validate_execution_identity_for_dispatch(job: Job) -> list[str]:
    """Why the job's identity does not allow a dispatch; empty when it does.

    It must exist, name tenant, actor and trace, and agree with the row in organization, project and job.
    """
    return _identity(job)[1]


def admission(job: Job, now: datetime) -> Verdict:
    """Whether the job may be dispatched at `now`, on the database's clock; whether its approval is live, apart."""
    identity, reasons = _identity(job)
    try:
        governance = read_governance(job)
    except MalformedEnvelope as error:
        return Verdict(reasons + [str(problem) for problem in error.problems])
    if governance is not None:
        reasons += _governance_reasons(job, governance, now)
    if not reasons and identity is not None:
        if identity.governance != (governance.digest if governance else None):
            reasons = [f"{GOVERNANCE}: is not what was submitted with the identity"]
        elif _payload_changed(job, identity, governance):
            reasons = [CHANGED_PAYLOAD]
    named = governance or identity
    return Verdict(reasons) if reasons or named is None else Verdict([], named.approval, named.action_intent)


def trusted_identity(job: Job) -> ExecutionIdentity | None:
    """The identity that a job may pass on to its children, held against its row. Raises `MalformedEnvelope`."""
    identity = read_execution_identity(job)
    if identity is None:
        return None
    if reasons := _unbound(job, identity):
        raise MalformedEnvelope.at(EXECUTION, "; ".join(reasons))
    if _payload_changed(job, identity, read_governance(job)):
        raise MalformedEnvelope.at(EXECUTION, CHANGED_PAYLOAD)
    return identity


def _identity(job: Job) -> tuple[ExecutionIdentity | None, list[str]]:
    """The job's identity as far as it can be read, and why it does not allow a dispatch."""
    try:
        identity = read_execution_identity(job)
    except MalformedEnvelope as error:
        return None, [str(problem) for problem in error.problems]
    if identity is None:
        return None, [f"{EXECUTION}: missing; a consequential job needs an execution identity"]
    return identity, _unbound(job, identity)


def _unbound(job: Job, identity: ExecutionIdentity) -> list[str]:
    bound = {"organization": job.organization_id, "project": job.project_id, "job": str(job.id)}
    return [
        f"{EXECUTION}.{field}: {getattr(identity, field)!r} is not the row's {value!r}"
        for field, value in bound.items()
        if getattr(identity, field) != value
    ]


def _payload_changed(job: Job, identity: ExecutionIdentity, governance: GovernanceFacts | None) -> bool:
    """Whether the row holds something else than was submitted; of a row made in SQL only the database can tell."""
    if job.request_digest.startswith(SQL_DIGEST):
        return False
    held = job_digest(job.job_type, job.queue, raw_payload(job.payload), identity, governance)
    return held != job.request_digest


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
