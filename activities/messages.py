"""What crosses Temporal between the application's workflows and activities: names, ids, times. And how an audit's jobs
are named: its workflow creates them by these keys, its last job finds them by these keys. Pure."""

from dataclasses import dataclass, field

AUDIT_TYPE = "CausalAudit"
AUDIT_PLAN = "governance_audit_plan"
AUDIT_ABANDONED = "governance_audit_abandoned"
RESEARCH_TYPE = "Research"
LANE_STATES = "research_lane_states"


def audit_workflow_id(audit_id: str) -> str:
    return f"causal-audit:{audit_id}"


def replay_key(audit_id: str, intervention: str, sample: int) -> str:
    """The idempotency key of a controlled replay; at most 176 characters."""
    what = f"without:{intervention}" if intervention else "control"
    return f"{audit_id}:{what}:{sample}"


def final_key(audit_id: str) -> str:
    """The idempotency key of the job that judges."""
    return f"{audit_id}:final"


@dataclass
class AuditStart:
    audit_id: str
    organization: str
    project: str
    queue: str
    isolated: bool
    tenant: str | None
    actor: str | None
    trace: str | None
    first: int = 0
    """The sample to go on with, where the workflow was continued as new."""


@dataclass
class Abandoned:
    """Why an audit got no verdict: its last job did not complete, or its workflow was cancelled."""

    start: AuditStart
    reason: str


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
