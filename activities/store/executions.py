"""Executions, and what is made of them: replays, evaluations, comparisons, drift. Written once for each job."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection
from uuid_utils.compat import uuid7

from activities.comparison import CaseOutcome, Compared
from activities.influence import Lineage
from activities.lineage import Tenant
from activities.runtime import RuntimeOutcome
from activities.store.sql import one, rows, write

_EXECUTION = """
INSERT INTO {s}.executions (id, organization_id, project_id, job_id, kind, dataset_digest, case_id, policy_digest,
    evidence_digest, without, seed, runtime, agent, agent_version, build, operation_key, outcome, decision, score)
VALUES (%(id)s, %(organization)s, %(project)s, %(job_id)s, %(kind)s, %(dataset_digest)s, %(case_id)s,
    %(policy_digest)s, %(evidence_digest)s, %(without)s, %(seed)s, %(runtime)s, %(agent)s, %(agent_version)s,
    %(build)s, %(operation_key)s, %(outcome)s::jsonb, %(decision)s, %(score)s)
ON CONFLICT ON CONSTRAINT executions_one_per_job DO NOTHING
"""
_OWN = "organization_id = %(organization)s AND project_id = %(project)s"
_BY_ID = f"SELECT * FROM {{s}}.executions WHERE id = %(id)s AND {_OWN}"
_OF_CASE = f"""
SELECT * FROM {{s}}.executions
WHERE job_id = %(job_id)s AND policy_digest = %(policy_digest)s AND case_id = %(case_id)s AND {_OWN}
"""
_BY_JOB = f"SELECT * FROM {{s}}.executions WHERE job_id = %(job_id)s AND {_OWN}"
_OUTCOMES = f"""
SELECT e.case_id, c.expected, e.decision, e.score FROM {{s}}.executions e
JOIN {{s}}.cases c USING (organization_id, project_id, dataset_digest, case_id)
WHERE e.job_id = %(job_id)s AND e.policy_digest = %(policy_digest)s AND {_OWN} ORDER BY c.position
"""
_REPLAY = """
INSERT INTO {s}.replays (id, organization_id, project_id, execution_id, produced_execution_id, audit_id)
VALUES (%(id)s, %(organization)s, %(project)s, %(execution_id)s, %(produced_execution_id)s, %(audit_id)s)
ON CONFLICT (id) DO NOTHING
"""
_REPLAY_BY_ID = f"SELECT * FROM {{s}}.replays WHERE id = %(id)s AND {_OWN}"
_EVALUATION = """
INSERT INTO {s}.evaluations (id, organization_id, project_id, job_id, dataset_digest, policy_digest, replay_id, cases,
    correct, mean_score)
VALUES (%(id)s, %(organization)s, %(project)s, %(job_id)s, %(dataset_digest)s, %(policy_digest)s, %(replay_id)s,
    %(cases)s, %(correct)s, %(mean_score)s)
ON CONFLICT DO NOTHING
"""
_EVALUATION_OF = f"""
SELECT * FROM {{s}}.evaluations WHERE {_OWN} AND CASE
    WHEN %(replay_id)s::uuid IS NULL THEN job_id = %(job_id)s AND policy_digest = %(policy_digest)s
    ELSE replay_id = %(replay_id)s END
"""
_COMPARISON = """
INSERT INTO {s}.comparisons (id, organization_id, project_id, job_id, subject, baseline, candidate, cases, agreements,
    correct_delta, score_delta)
VALUES (%(id)s, %(organization)s, %(project)s, %(job_id)s, %(subject)s, %(baseline)s, %(candidate)s, %(cases)s,
    %(agreements)s, %(correct_delta)s, %(score_delta)s)
ON CONFLICT ON CONSTRAINT comparisons_once DO NOTHING
"""
_COMPARISON_OF = f"""
SELECT * FROM {{s}}.comparisons WHERE baseline = %(baseline)s AND candidate = %(candidate)s AND {_OWN}
"""
_DRIFT = """
INSERT INTO {s}.drift (replay_id, evaluation_id, comparison_id, drift, score_delta)
SELECT r.id, %(evaluation_id)s, %(comparison_id)s, %(drift)s, %(score_delta)s FROM {s}.replays r
WHERE r.id = %(replay_id)s AND r.organization_id = %(organization)s AND r.project_id = %(project)s
ON CONFLICT (replay_id) DO NOTHING
"""

Kind = Literal["evaluation", "replay", "counterfactual"]


@dataclass(frozen=True)
class Ran:
    """What an execution ran on, and what came of it."""

    job_id: UUID
    kind: Kind
    lineage: Lineage
    evidence_digest: str
    without: str | None
    seed: int
    outcome: RuntimeOutcome
    operation_key: str | None = None


@dataclass(frozen=True)
class Execution:
    """A recorded execution."""

    id: UUID
    lineage: Lineage
    evidence_digest: str
    without: str | None
    seed: int
    decision: str
    score: Decimal
    operation_key: str | None


@dataclass(frozen=True)
class Replay:
    id: UUID
    execution_id: UUID
    produced_execution_id: UUID
    audit_id: UUID | None


def execution_of(row: dict[str, Any]) -> Execution:
    """One row of the table of executions."""
    lineage = Lineage(**{name: row[name] for name in Lineage.__dataclass_fields__})
    kept = {
        name: row[name] for name in ("id", "evidence_digest", "without", "seed", "decision", "score", "operation_key")
    }
    return Execution(lineage=lineage, **kept)


async def record_execution(connection: AsyncConnection, tenant: Tenant, ran: Ran) -> Execution:
    """The job's one execution of this case under this policy: recorded now, or as it was recorded before."""
    fields = vars(ran.lineage) | {
        "id": uuid7(),
        "job_id": ran.job_id,
        "kind": ran.kind,
        "evidence_digest": ran.evidence_digest,
        "without": ran.without,
        "seed": ran.seed,
        "operation_key": ran.operation_key,
        "outcome": ran.outcome.model_dump_json(),
        "decision": ran.outcome.decision,
        "score": Decimal(repr(ran.outcome.score)),
    }
    await write(connection, _EXECUTION, tenant, fields)
    (row,) = await rows(connection, _OF_CASE, tenant, fields)
    return execution_of(row)


async def read_execution(connection: AsyncConnection, tenant: Tenant, execution_id: UUID) -> Execution | None:
    row = await one(connection, _BY_ID, tenant, {"id": execution_id})
    return execution_of(row) if row else None


async def executions_of_job(connection: AsyncConnection, tenant: Tenant, job_id: UUID) -> list[Execution]:
    """What the job has recorded so far."""
    return [execution_of(row) for row in await rows(connection, _BY_JOB, tenant, {"job_id": job_id})]


async def outcomes_of_job(
    connection: AsyncConnection, tenant: Tenant, job_id: UUID, policy_digest: str
) -> list[CaseOutcome]:
    """What the job has recorded under this policy, in the dataset's order."""
    fields = {"job_id": job_id, "policy_digest": policy_digest}
    return [CaseOutcome(**row) for row in await rows(connection, _OUTCOMES, tenant, fields)]


async def record_replay(connection: AsyncConnection, tenant: Tenant, replay: Replay) -> None:
    """Written once: again changes nothing."""
    await write(connection, _REPLAY, tenant, vars(replay))


async def read_replay(connection: AsyncConnection, tenant: Tenant, replay_id: UUID) -> Replay | None:
    row = await one(connection, _REPLAY_BY_ID, tenant, {"id": replay_id})
    return Replay(**{name: row[name] for name in Replay.__dataclass_fields__}) if row else None


async def record_evaluation(
    connection: AsyncConnection,
    tenant: Tenant,
    job_id: UUID,
    lineage: tuple[str, str],
    outcomes: Sequence[CaseOutcome],
    mean: Decimal,
    replay_id: UUID | None = None,
) -> dict[str, Any]:
    """The replay's one evaluation, whichever job asks, or the job's one of this dataset under this policy; its row.

    `lineage`: the digests of dataset and policy.
    """
    fields = {
        "id": uuid7(),
        "job_id": job_id,
        "dataset_digest": lineage[0],
        "policy_digest": lineage[1],
        "replay_id": replay_id,
        "cases": len(outcomes),
        "correct": sum(each.correct for each in outcomes),
        "mean_score": mean,
    }
    await write(connection, _EVALUATION, tenant, fields)
    (row,) = await rows(connection, _EVALUATION_OF, tenant, fields)
    return row


async def record_comparison(
    connection: AsyncConnection,
    tenant: Tenant,
    job_id: UUID,
    subject: Literal["evaluation", "execution"],
    pair: tuple[UUID, UUID],
    both: Compared,
) -> dict[str, Any]:
    """The one comparison of a baseline with a candidate; its row."""
    fields = {"id": uuid7(), "job_id": job_id, "subject": subject, "baseline": pair[0], "candidate": pair[1]}
    await write(connection, _COMPARISON, tenant, fields | vars(both))
    (row,) = await rows(connection, _COMPARISON_OF, tenant, fields)
    return row


async def record_drift(connection: AsyncConnection, tenant: Tenant, **fields: Any) -> None:
    """The replay's one drift result: `replay_id`, `evaluation_id`, `comparison_id`, `drift`, `score_delta`."""
    await write(connection, _DRIFT, tenant, fields)
