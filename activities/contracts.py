"""What the application's jobs are asked, and what they return: payloads and results. Pure; workflow code imports it.

Figures are decimals, exact to the last digit; JSON has them as text.
"""

from decimal import Decimal
from typing import Annotated, Literal, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Seed = Annotated[int, Field(ge=0, lt=2**53)]
CatalogueId = Annotated[str, Field(min_length=1, max_length=128)]
RuntimeName = Literal["isolated", "model"]
"""`isolated`: the agent's program in a subprocess without network. `model`: a model behind an OpenAI-compatible API."""

MAX_SAMPLES = 20
"""Samples of each intervention."""
LARGEST_SEED = 2**53 - 1
CONTROL = ""
"""The intervention that leaves nothing out."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EvaluationRequest(Part):
    """Run every case of a dataset under a policy."""

    dataset_id: CatalogueId
    policy_id: CatalogueId
    seed: Seed = 0


class EvaluationResult(Part):
    evaluation_id: UUID
    dataset_digest: str
    policy_digest: str
    cases: int
    correct: int
    """Cases whose decision is the expected one."""
    mean_score: Decimal


class ExperimentRequest(Part):
    """Compare policies over one dataset; the first is the baseline."""

    dataset_id: CatalogueId
    policy_ids: list[CatalogueId] = Field(min_length=2, max_length=8)
    seed: Seed = 0

    @field_validator("policy_ids")
    @classmethod
    def _distinct(cls, policies: list[str]) -> list[str]:
        if len(set(policies)) != len(policies):
            raise ValueError("must name each policy once")
        return policies


class ComparisonResult(Part):
    comparison_id: UUID
    policy_id: str
    agreements: int
    """Cases that the baseline decides in the same way."""
    correct_delta: int
    score_delta: Decimal


class ExperimentResult(Part):
    baseline: EvaluationResult
    candidates: list[EvaluationResult]
    comparisons: list[ComparisonResult]


class AuditSample(Part):
    """Which sample of an audit a controlled replay is."""

    audit_id: UUID
    intervention: str
    """The piece of evidence that is left out; `CONTROL`: none."""
    sample: int = Field(ge=0, lt=MAX_SAMPLES)


class ReplayRequest(Part):
    """Run a recorded execution's case again: under its own policy, seed and runtime, or under others."""

    execution_id: UUID
    policy_id: CatalogueId | None = None
    seed: Seed | None = None
    runtime: RuntimeName | None = None
    audit: AuditSample | None = None

    @model_validator(mode="after")
    def _controlled(self) -> Self:
        if self.audit is not None and (self.policy_id, self.runtime) != (None, None):
            raise ValueError("a controlled replay of an audit keeps the policy and the runtime of its execution")
        return self


class ReplayResult(Part):
    """The bounded outcome artifact of a replay."""

    replay_id: UUID
    execution_id: UUID
    """What was replayed."""
    produced_execution_id: UUID
    decision: str
    score: Decimal
    audit: AuditSample | None = None


class ReplayEvaluationRequest(Part):
    replay_id: UUID


class ReplayEvaluationResult(Part):
    replay_id: UUID
    evaluation_id: UUID
    comparison_id: UUID
    correct: bool
    drift: Literal["none", "score", "decision"]
    score_delta: Decimal


class CausalAuditRequest(Part):
    """Find out which pieces of evidence a recorded execution's decision rests on, and how much."""

    phase: Literal["start"] = "start"
    execution_id: UUID
    samples: int = Field(default=3, ge=1, le=MAX_SAMPLES)
    """Replays of each intervention, and of the control."""


class CausalAuditResumption(Part):
    """Start the workflow of an audit again, which was terminated or lost; one that runs goes on as it is."""

    phase: Literal["resume"]
    audit_id: UUID


class CausalAuditFinalization(Part):
    """The audit's last job, under `<audit>:final`: what its workflow creates once every sample has ended."""

    phase: Literal["finalize"]
    audit_id: UUID


class Influence(Part):
    evidence_id: str
    influence: Decimal
    """The mean, over the samples, of the score with everything less the score without this piece."""
    flips: int
    """In how many samples the decision changed without it."""
    role: Literal["decisive", "supporting", "opposing", "none"]


class CausalAuditResult(Part):
    audit_id: UUID
    status: Literal["FROZEN", "COMPLETED", "FAILED"]
    replays: int
    """Controlled replays that the audit asks for."""
    workflow_id: str | None = None
    classification: Literal["single_cause", "joint_causes", "overdetermined", "insensitive"] | None = None
    influences: list[Influence] = Field(default_factory=list)
    reasons: list[str] = Field(default_factory=list)
