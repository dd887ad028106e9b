"""Frozen inputs: datasets, policies, cases with their evidence, as they were when something first ran on them."""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncConnection

from activities.datasets import Case, Dataset, Policy, policy_digest
from activities.lineage import Tenant, piece_digest
from activities.runtime import Evidence
from activities.store.sql import one, rows, write
from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.rules import encode_json

_POLICY = """
INSERT INTO {s}.policies (organization_id, project_id, digest, policy_id, version, body)
VALUES (%(organization)s, %(project)s, %(digest)s, %(policy_id)s, %(version)s, %(body)s::jsonb) ON CONFLICT DO NOTHING
"""
_DATASET = """
INSERT INTO {s}.datasets (organization_id, project_id, digest, dataset_id, cases)
VALUES (%(organization)s, %(project)s, %(digest)s, %(dataset_id)s, %(cases)s) ON CONFLICT DO NOTHING
"""
_CASES = """
INSERT INTO {s}.cases (organization_id, project_id, dataset_digest, case_id, position, digest, question,
    expected, evidence)
SELECT %(organization)s, %(project)s, %(digest)s, c ->> 'case_id', (c ->> 'position')::int, c ->> 'digest',
    c -> 'question', c ->> 'expected', ARRAY(SELECT jsonb_array_elements_text(c -> 'evidence'))
FROM jsonb_array_elements(%(cases)s::jsonb) c ON CONFLICT DO NOTHING
"""
_EVIDENCE = """
INSERT INTO {s}.evidence (organization_id, project_id, dataset_digest, case_id, evidence_id, digest, body)
SELECT %(organization)s, %(project)s, %(dataset)s, e ->> 'case_id', e ->> 'evidence_id', e ->> 'digest', e -> 'body'
FROM jsonb_array_elements(%(pieces)s::jsonb) e ON CONFLICT DO NOTHING
"""
_CASE = """
SELECT c.digest, c.question, c.expected, c.evidence, (
    SELECT jsonb_object_agg(e.evidence_id, jsonb_build_object('digest', e.digest, 'body', e.body))
    FROM {s}.evidence e
    WHERE (e.organization_id, e.project_id, e.dataset_digest, e.case_id)
        = (c.organization_id, c.project_id, c.dataset_digest, c.case_id)) AS pieces
FROM {s}.cases c
WHERE c.organization_id = %(organization)s AND c.project_id = %(project)s AND c.dataset_digest = %(digest)s
    AND c.case_id = %(case_id)s
"""
_FIX = """
INSERT INTO {s}.replay_policies (job_id, organization_id, project_id, policy_digest)
VALUES (%(job_id)s, %(organization)s, %(project)s, %(digest)s) ON CONFLICT DO NOTHING
"""
_FIXED = """
SELECT policy_digest FROM {s}.replay_policies
WHERE job_id = %(job_id)s AND organization_id = %(organization)s AND project_id = %(project)s
"""
_POLICY_BODY = """
SELECT policy_id, version, body FROM {s}.policies
WHERE organization_id = %(organization)s AND project_id = %(project)s AND digest = %(digest)s
"""


class EvidenceMissing(Exception):
    """A frozen piece of evidence is gone, or is not what was frozen: nothing may be computed in its place."""

    code = "EVIDENCE_MISSING"


@dataclass(frozen=True)
class FrozenCase:
    """A case with all its evidence, in its order."""

    question: dict[str, Any]
    expected: str
    evidence: tuple[Evidence, ...]


async def freeze_policy(connection: AsyncConnection, tenant: Tenant, policy: Policy) -> None:
    """Keep the policy under its digest; there already, it stays as it is."""
    body = encode_json(policy.rules)
    fields = {"digest": policy.digest, "policy_id": policy.policy_id, "version": policy.version, "body": body}
    await write(connection, _POLICY, tenant, fields)


async def freeze_dataset(connection: AsyncConnection, tenant: Tenant, dataset: Dataset) -> None:
    """Keep the dataset under its digest, with its cases and their evidence; there already, it stays as it is."""
    fields = {"digest": dataset.digest, "dataset_id": dataset.dataset_id, "cases": len(dataset.cases)}
    if not await write(connection, _DATASET, tenant, fields):
        return
    cases = [_case(position, case) for position, case in enumerate(dataset.cases)]
    await write(connection, _CASES, tenant, {"digest": dataset.digest, "cases": encode_json(cases)})
    pieces = [
        {
            "case_id": case.case_id,
            "evidence_id": piece.evidence_id,
            "digest": piece_digest(piece),
            "body": piece.model_dump(mode="json"),
        }
        for case in dataset.cases
        for piece in case.evidence
    ]
    await write(connection, _EVIDENCE, tenant, {"dataset": dataset.digest, "pieces": encode_json(pieces)})


def _case(position: int, case: Case) -> dict[str, Any]:
    evidence = [piece.evidence_id for piece in case.evidence]
    facts = {"question": case.question, "expected": case.expected_decision, "evidence": evidence}
    return {"case_id": case.case_id, "position": position, "digest": request_digest(facts), **facts}


async def frozen_case(connection: AsyncConnection, tenant: Tenant, dataset_digest: str, case_id: str) -> FrozenCase:
    """The case as it was frozen. Raises `EvidenceMissing`, also for a piece whose digest no longer holds."""
    row = await one(connection, _CASE, tenant, {"digest": dataset_digest, "case_id": case_id})
    if row is None:
        raise EvidenceMissing(f"case {case_id} of dataset {dataset_digest} is not frozen here")
    facts = {name: row[name] for name in ("question", "expected", "evidence")}
    if request_digest(facts) != row["digest"]:
        raise EvidenceMissing(f"case {case_id} is not what was frozen")
    kept, pieces = row["pieces"] or {}, []
    for evidence_id in row["evidence"]:
        if evidence_id not in kept:
            raise EvidenceMissing(f"evidence {evidence_id} of case {case_id} is gone")
        try:
            piece = Evidence.model_validate(kept[evidence_id]["body"])
        except ValidationError:
            raise EvidenceMissing(f"evidence {evidence_id} of case {case_id} is not what was frozen") from None
        if piece_digest(piece) != kept[evidence_id]["digest"] or piece.evidence_id != evidence_id:
            raise EvidenceMissing(f"evidence {evidence_id} of case {case_id} is not what was frozen")
        pieces.append(piece)
    return FrozenCase(row["question"], row["expected"], tuple(pieces))


async def frozen_policy(connection: AsyncConnection, tenant: Tenant, digest: str) -> dict[str, Any]:
    """The policy's body as it was frozen. Raises `EvidenceMissing`."""
    found = await rows(connection, _POLICY_BODY, tenant, {"digest": digest})
    if not found:
        raise EvidenceMissing(f"policy {digest} is not frozen here")
    rules: dict[str, Any] = found[0]["body"]
    if policy_digest(found[0]["policy_id"], rules) != digest:
        raise EvidenceMissing(f"policy {digest} is not what was frozen")
    return rules


async def replay_policy(connection: AsyncConnection, tenant: Tenant, job_id: UUID) -> str | None:
    """The digest of the policy that the replay was fixed to by its first delivery."""
    row = await one(connection, _FIXED, tenant, {"job_id": job_id})
    return str(row["policy_digest"]) if row else None


async def fix_replay_policy(connection: AsyncConnection, tenant: Tenant, job_id: UUID, policy: Policy) -> None:
    """Let the replay run under this policy, whatever the catalogue says later; fixed already, it stays as it is."""
    await freeze_policy(connection, tenant, policy)
    await write(connection, _FIX, tenant, {"job_id": job_id, "digest": policy.digest})
