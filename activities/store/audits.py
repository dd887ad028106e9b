"""Causal audits: frozen, sampled, and finished once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.contracts import Influence
from activities.influence import Sample, Verdict
from activities.lineage import Tenant
from activities.store.executions import execution_of
from activities.store.sql import one, rows, write
from durable_jobs.contract.rules import encode_json

_FREEZE = """
INSERT INTO {s}.audits (id, organization_id, project_id, execution_id, samples, status)
VALUES (%(id)s, %(organization)s, %(project)s, %(execution_id)s, %(samples)s, 'FROZEN') ON CONFLICT (id) DO NOTHING
"""
_SAMPLES = """
INSERT INTO {s}.audit_samples (audit_id, intervention, sample, seed)
SELECT %(id)s, i.intervention, s.sample - 1, s.seed
FROM unnest(%(interventions)s::text[]) i (intervention)
CROSS JOIN unnest(%(seeds)s::bigint[]) WITH ORDINALITY s (seed, sample)
ON CONFLICT DO NOTHING
"""
_OWN = "id = %(id)s AND organization_id = %(organization)s AND project_id = %(project)s"
_AUDIT = f"SELECT * FROM {{s}}.audits WHERE {_OWN}"
_LOCKED = _AUDIT + " FOR UPDATE"
_ASKED = f"""
SELECT s.intervention, s.sample, s.seed, s.execution_id
FROM {{s}}.audit_samples s JOIN {{s}}.audits a ON a.id = s.audit_id
WHERE a.{_OWN.replace(" AND ", " AND a.")} ORDER BY s.intervention, s.sample
"""
_FILL = """
UPDATE {s}.audit_samples s SET execution_id = %(execution_id)s FROM {s}.audits a
WHERE s.audit_id = %(id)s AND s.intervention = %(intervention)s AND s.sample = %(sample)s AND s.execution_id IS NULL
    AND a.id = s.audit_id AND a.organization_id = %(organization)s AND a.project_id = %(project)s
    AND a.status = 'FROZEN'
"""
_SAMPLED = f"""
SELECT s.intervention, s.sample, e.* FROM {{s}}.audit_samples s JOIN {{s}}.executions e ON e.id = s.execution_id
JOIN {{s}}.replays r ON r.produced_execution_id = e.id AND r.audit_id = s.audit_id
JOIN {{s}}.audits a ON a.id = s.audit_id AND r.execution_id = a.execution_id
WHERE a.{_OWN.replace(" AND ", " AND a.")}
"""
_FINISH = f"""
UPDATE {{s}}.audits SET status = %(status)s, classification = %(classification)s, reasons = %(reasons)s::jsonb,
    finished_at = clock_timestamp(), finished_by = %(finished_by)s
WHERE {_OWN} AND status = 'FROZEN'
"""
_INFLUENCES = """
INSERT INTO {s}.influences (audit_id, evidence_id, influence, flips, role)
SELECT %(id)s, i ->> 'evidence_id', (i ->> 'influence')::numeric, (i ->> 'flips')::int, i ->> 'role'
FROM jsonb_array_elements(%(influences)s::jsonb) i
"""
_PUBLISHED = f"""
SELECT i.evidence_id, i.influence, i.flips, i.role FROM {{s}}.influences i JOIN {{s}}.audits a ON a.id = i.audit_id
WHERE a.{_OWN.replace(" AND ", " AND a.")} ORDER BY i.evidence_id
"""


@dataclass(frozen=True)
class Audit:
    id: UUID
    execution_id: UUID
    samples: int
    status: str
    classification: str | None
    reasons: list[str]


@dataclass(frozen=True)
class Asked:
    """A sample that the audit needs, and the execution that it has by now."""

    intervention: str
    sample: int
    seed: int
    execution_id: UUID | None


def _audit(row: dict[str, Any]) -> Audit:
    return Audit(**{name: row[name] for name in Audit.__dataclass_fields__})


async def freeze_audit(
    connection: AsyncConnection,
    tenant: Tenant,
    audit_id: UUID,
    execution_id: UUID,
    interventions: Sequence[str],
    seeds: Sequence[int],
) -> None:
    """Freeze the audit with every sample that it needs; frozen already, it stays as it is."""
    fields = {"id": audit_id, "execution_id": execution_id, "samples": len(seeds)}
    if await write(connection, _FREEZE, tenant, fields):
        asked = {"id": audit_id, "interventions": list(interventions), "seeds": list(seeds)}
        await write(connection, _SAMPLES, tenant, asked)


async def read_audit(
    connection: AsyncConnection, tenant: Tenant, audit_id: UUID, *, lock: bool = False
) -> Audit | None:
    row = await one(connection, _LOCKED if lock else _AUDIT, tenant, {"id": audit_id})
    return _audit(row) if row else None


async def asked_samples(connection: AsyncConnection, tenant: Tenant, audit_id: UUID) -> list[Asked]:
    """Every sample that the audit needs."""
    return [Asked(**row) for row in await rows(connection, _ASKED, tenant, {"id": audit_id})]


async def asks_for(
    connection: AsyncConnection, tenant: Tenant, audit_id: UUID, execution_id: UUID, wanted: tuple[str, int, int]
) -> bool:
    """Whether the audit, not finished yet, is of this execution and asks for this (intervention, sample, seed)."""
    audit = await read_audit(connection, tenant, audit_id)
    if audit is None or audit.status != "FROZEN" or audit.execution_id != execution_id:
        return False
    asked = await asked_samples(connection, tenant, audit_id)
    return any((each.intervention, each.sample, each.seed) == wanted for each in asked)


async def fill_sample(
    connection: AsyncConnection, tenant: Tenant, audit_id: UUID, intervention: str, sample: int, execution_id: UUID
) -> bool:
    """Give a sample its execution; False where it had one, or where the audit asks for no such sample."""
    fields = {"id": audit_id, "intervention": intervention, "sample": sample, "execution_id": execution_id}
    return bool(await write(connection, _FILL, tenant, fields))


async def samples_of(connection: AsyncConnection, tenant: Tenant, audit_id: UUID) -> list[Sample]:
    """The samples that have an execution which a replay of the audited execution produced for this very audit."""
    found = []
    for row in await rows(connection, _SAMPLED, tenant, {"id": audit_id}):
        execution = execution_of(row)
        kept = {name: value for name, value in vars(execution).items() if name not in ("id", "operation_key")}
        found.append(Sample(intervention=row["intervention"], sample=row["sample"], **kept))
    return found


async def finish_audit(
    connection: AsyncConnection, tenant: Tenant, audit_id: UUID, verdict: Verdict, finished_by: UUID
) -> bool:
    """Write the verdict, with its figures only where it is COMPLETED; False where the audit was finished before."""
    fields = {
        "id": audit_id,
        "status": "COMPLETED" if verdict.classification else "FAILED",
        "classification": verdict.classification,
        "reasons": json.dumps(verdict.reasons),
        "finished_by": finished_by,
    }
    if not await write(connection, _FINISH, tenant, fields):
        return False
    if verdict.classification:
        figures = [each.model_dump(mode="json") for each in verdict.influences]
        await write(connection, _INFLUENCES, tenant, {"id": audit_id, "influences": encode_json(figures)})
    return True


async def published(connection: AsyncConnection, tenant: Tenant, audit_id: UUID) -> list[Influence]:
    """The figures of a completed audit."""
    return [Influence(**row) for row in await rows(connection, _PUBLISHED, tenant, {"id": audit_id})]
