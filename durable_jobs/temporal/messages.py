"""What crosses Temporal: ids, codes, statuses and times. Nothing of a tenant's content enters a history.

Imported by workflow code: nothing here may pull in SQLAlchemy, psycopg or pydantic.
"""

from dataclasses import dataclass
from typing import Any
from uuid import UUID

WORKFLOW_TYPE = "DurableJob"
RUN_ATTEMPT = "durable_jobs.run_attempt"
READ_JOB = "durable_jobs.read_job"
CANCEL_JOB = "durable_jobs.cancel_job"
CLOSE_AS_CANCELLED = "durable_jobs.close_as_cancelled"
CREATE_JOB = "durable_jobs.create_job"
READ_RESULT = "durable_jobs.read_result"
WAKE = "wake"

RECONCILIATION_TYPE = "DurableJobsReconciliation"
RECONCILIATION_SWEEP = "durable_jobs.reconciliation_sweep"
LAUNCH_SWEEP = "durable_jobs.launch_sweep"

NOT_HOSTED = "NOT_HOSTED"
PAUSED = "PAUSED"
NOT_FOUND = "NOT_FOUND"

STATE_ATTRIBUTE = "DurableJobState"
QUEUE_ATTRIBUTE = "DurableJobQueue"
OPERATION_KEY_ATTRIBUTE = "DurableJobOperationKey"
SEARCH_ATTRIBUTES = (STATE_ATTRIBUTE, QUEUE_ATTRIBUTE, OPERATION_KEY_ATTRIBUTE)
"""All of type Keyword."""


def workflow_id(job_id: UUID | str) -> str:
    """The id of the job's workflow."""
    return f"durable-job/{job_id}"


@dataclass
class JobStart:
    """The workflow's input, and the activity's."""

    job_id: str
    job_type: str
    organization: str
    lease_seconds: float
    timeout_seconds: float
    indexed: bool = False
    """Whether the namespace knows the search attributes."""


@dataclass
class JobView:
    """What the workflow knows of the row."""

    status: str
    settled: bool
    terminal: bool
    generation: int = 0
    attempt: int = 0
    due_in: float = 0.0
    """Seconds: until a queued job may be claimed, or until an active job's lease runs out. 0 when terminal."""
    code: str | None = None
    """The error's code, or why nothing was attempted."""
    operation_key: str | None = None


@dataclass
class CancelAsk:
    """The input of `CANCEL_JOB`."""

    job_id: str
    reason: str
    actor: str


@dataclass
class JobOutcome:
    """The workflow's result: what an operator reads in the Temporal UI."""

    job_id: str
    status: str


@dataclass
class ChildJob:
    """What a product's workflow needs to start the workflow of a job that it created, as a child."""

    start: JobStart
    queue: str
    summary: str
    priority_key: int
    fairness_key: str
    settled: bool


@dataclass
class JobAnswer:
    """How a job stands, with its result: only for a product's own workflow, whose history it enters."""

    status: str
    settled: bool
    result: dict[str, Any] | None = None
    error_code: str | None = None
    error_message: str | None = None
