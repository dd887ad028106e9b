"""What crosses Temporal between the application's workflows and activities: names, ids, times. Light: workflow code
imports it."""

from dataclasses import dataclass, field

AUDIT_TYPE = "CausalAudit"
AUDIT_PLAN = "governance_audit_plan"
RESEARCH_TYPE = "Research"
LANE_STATES = "research_lane_states"


def audit_workflow_id(audit_id: str) -> str:
    return f"causal-audit:{audit_id}"


@dataclass
class AuditStart:
    audit_id: str
    organization: str
    project: str
    queue: str
    tenant: str | None
    actor: str | None
    trace: str | None


@dataclass
class PlannedSample:
    """One controlled replay that an audit needs."""

    execution_id: str
    intervention: str
    sample: int
    seed: int


@dataclass
class ResearchQuestion:
    """One question for several lanes. `lane_seconds`: how long the join waits for the lanes."""

    question: str
    organization: str
    project: str
    queue: str
    tenant: str
    actor: str
    trace: str
    modes: list[str] = field(default_factory=lambda: ["quick", "thorough"])
    deep: bool = False
    """Also ask the deep research lane, which takes minutes."""
    lane_seconds: float = 3600


@dataclass
class LaneState:
    """How a lane's job stands: `uncertain` while nobody knows whether its call landed."""

    key: str
    job_id: str | None
    uncertain: bool


@dataclass
class Lane:
    """What a lane gave: `completed` with its report, `failed` with a code, or `uncertain`, or `unfinished`."""

    mode: str
    outcome: str
    report: str | None = None
    code: str | None = None
    job_id: str | None = None


@dataclass
class ResearchAnswer:
    """The reports of the lanes that have one, and how the others stand."""

    question: str
    reports: dict[str, str]
    lanes: list[Lane]
