"""Identities, grants and tampering: what the tests of envelopes and of governed dispatch share.

The seal is written here a second time, from the documentation alone, so that a test that forges one also says what a
seal is.
"""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.types.json import Jsonb

from durable_jobs import DurableJobService, EventName, ExecutionInput, GovernanceInput, Job, JobSpec
from durable_jobs.contract.errors import AdmissionRefused
from durable_jobs.contract.models import Approval, Claim
from tests.support import snapshot, sql

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
INTENT, APPROVAL = "refund", "grant-1"

LINEAGE = {
    "tenant": "acme-eu",
    "actor": "ada@acme.example",
    "trace": TRACE,
    "task": "task-1",
    "run": "run-1",
    "attempt": "attempt-1",
    "action_intent": INTENT,
    "admission_decision": "decision-1",
    "approval": APPROVAL,
    "parent_job": "parent-1",
    "parent_run": "parent-run-1",
}
"""Every field of an `ExecutionInput`."""

FACTS: dict[str, Any] = {
    "action_intent": INTENT,
    "capability": {"name": "payments.refund", "scopes": ["eu", "uk"]},
    "policy": {"id": "refunds-under-100", "version": 3},
    "budget": {"currency": "EUR", "limit": 100, "left": 12.5},
    "approval": APPROVAL,
}
"""Every field of a `GovernanceInput` but its times."""


def identity(**overrides: Any) -> ExecutionInput:
    """An identity with what is required, and whatever is overridden."""
    required = {name: LINEAGE[name] for name in ("tenant", "actor", "trace")}
    return ExecutionInput(**(required | overrides))


def governance(**overrides: Any) -> GovernanceInput:
    """Facts that allow the intent under the approval, for an hour from now."""
    now = datetime.now(UTC)
    return GovernanceInput(**(FACTS | {"issued_at": now, "expires_at": now + timedelta(hours=1)} | overrides))


def governed(spec: JobSpec, **overrides: Any) -> JobSpec:
    """`spec` with an identity and with facts; `overrides` are of the facts."""
    return spec.model_copy(update={"execution": identity(), "governance": governance(**overrides)})


async def granted(service: DurableJobService, approval: str = APPROVAL, **overrides: Any) -> Approval:
    """Grant the approval that `governance` names."""
    grant = {"organization": "acme", "project": "alpha", "approval_id": approval, "action_intent": INTENT}
    return await service.record_approval(**(grant | {"actor": "grace"} | overrides))


async def approval_of(service: DurableJobService, approval: str = APPROVAL) -> Approval:
    return await service.get_approval("acme", "alpha", approval)


async def dispatch(service: DurableJobService, claim: Claim, key: str | None = None) -> Job:
    """Cross the boundary of a consequential job."""
    return await service.mark_provider_dispatched(claim, key or f"key:{claim.job_id}", consequential=True)


async def refusal(service: DurableJobService, claim: Claim) -> list[str]:
    """Why the dispatch is not admitted; it must write nothing at all."""
    before = await snapshot(service, claim.job_id)
    with pytest.raises(AdmissionRefused) as refused:
        await dispatch(service, claim)
    assert await snapshot(service, claim.job_id) == before
    return list(refused.value.reasons)


async def admissions(service: DurableJobService, job_id: UUID) -> list[dict[str, Any]]:
    """What the trail says of the job's admission, in order."""
    events = (await service.list_job_events(job_id)).items
    return [event.data for event in events if event.name is EventName.ADMISSION_CHECKED]


async def store_payload(service: DurableJobService, job_id: UUID, payload: Mapping[str, Any]) -> None:
    """Write the job's payload behind the service's back."""
    await sql(
        service,
        "UPDATE durable_jobs.jobs SET payload = %(payload)s WHERE id = %(id)s",
        payload=Jsonb(dict(payload)),
        id=job_id,
    )


def as_row(spec: JobSpec, job_id: UUID | None = None) -> Job:
    """The row that `spec` becomes, without a database. Its payload is as JSON carries it."""
    job_id = job_id or uuid4()
    now = datetime.now(UTC)
    nothing = dict.fromkeys(name for name, field in Job.model_fields.items() if type(None) in _options(field))
    row = nothing | {
        "id": job_id,
        "organization_id": spec.organization,
        "project_id": spec.project,
        "queue": spec.stored_queue,
        "job_type": spec.job_type,
        "payload": json.loads(json.dumps(spec.stored_payload(job_id))),
        "idempotency_key": spec.idempotency_key,
        "request_digest": spec.digest(),
        "status": "queued",
        "scheduled_at": now,
        "created_at": now,
        "updated_at": now,
    }
    counts = ("intent_number", "attempt_count", "lease_generation", "lookup_tries", "release_count")
    same = ("priority", "max_attempts", "backoff_base_seconds", "lease_seconds", "timeout_seconds")
    return Job.model_validate(
        row | dict.fromkeys(counts, 0) | {name: getattr(spec, name) for name in same} | {"follow_ups_due": False}
    )


def _options(field: Any) -> tuple[Any, ...]:
    return getattr(field.annotation, "__args__", ())


def seal(job_id: UUID | str, field: str, value: Any) -> str:
    """16 hex digits of the SHA-256 over the canonical form of the job's id, the field's name and its value."""
    sealed = {"job": str(job_id), "field": field, "value": value}
    canonical = json.dumps(sealed, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def resealed(job_id: UUID | str, envelope: Mapping[str, Any]) -> dict[str, Any]:
    """The envelope with seals over what it holds now, as a forger who may write the table would make them."""
    fields = {name: value for name, value in envelope.items() if name != "seals"}
    return fields | {"seals": {name: seal(job_id, name, value) for name, value in fields.items()}}


def redigested(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """The governance envelope with a digest over what it holds now."""
    digested = {name: value for name, value in envelope.items() if name not in ("digest", "seals")}
    canonical = json.dumps(digested, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return dict(envelope) | {"digest": hashlib.sha256(canonical.encode()).hexdigest()}
