"""Durable jobs on Temporal, with Postgres as the authority on what happened.

Names are loaded when first used: importing the package loads no SQLAlchemy, psycopg or HTTP module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from durable_jobs.client import DurableJobs, JobHandle
    from durable_jobs.contract.envelope import ExecutionIdentity, ExecutionInput, GovernanceInput
    from durable_jobs.contract.errors import DurableJobsError, HaltUnsafe, JobFailed, JobOutcomeError
    from durable_jobs.contract.models import Job, JobAttempt, JobError, JobEvent, JobHead, LeaseStatus
    from durable_jobs.contract.provider import ProviderState
    from durable_jobs.contract.reconciliation import ReconciliationPolicy
    from durable_jobs.contract.specs import FollowUp, JobSpec
    from durable_jobs.contract.states import EventName, JobStatus
    from durable_jobs.contract.summary import SweepSummary
    from durable_jobs.handler import JobContext, JobHandler
    from durable_jobs.service import Database, DurableJobService
    from durable_jobs.temporal._plugin import DurableJobsPlugin

_HOMES = {
    "client": ("DurableJobs", "JobHandle"),
    "contract.envelope": ("ExecutionIdentity", "ExecutionInput", "GovernanceInput"),
    "contract.errors": ("DurableJobsError", "HaltUnsafe", "JobFailed", "JobOutcomeError"),
    "contract.models": ("Job", "JobAttempt", "JobError", "JobEvent", "JobHead", "LeaseStatus"),
    "contract.reconciliation": ("ReconciliationPolicy",),
    "contract.specs": ("FollowUp", "JobSpec"),
    "contract.states": ("EventName", "JobStatus"),
    "contract.summary": ("SweepSummary",),
    "contract.provider": ("ProviderState",),
    "handler": ("JobContext", "JobHandler"),
    "service": ("Database", "DurableJobService"),
    "temporal._plugin": ("DurableJobsPlugin",),
}
_HOME_OF = {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [
    "Database",
    "DurableJobService",
    "DurableJobs",
    "DurableJobsError",
    "DurableJobsPlugin",
    "EventName",
    "ExecutionIdentity",
    "ExecutionInput",
    "FollowUp",
    "GovernanceInput",
    "HaltUnsafe",
    "Job",
    "JobAttempt",
    "JobContext",
    "JobError",
    "JobEvent",
    "JobFailed",
    "JobHandle",
    "JobHandler",
    "JobHead",
    "JobOutcomeError",
    "JobSpec",
    "JobStatus",
    "LeaseStatus",
    "ProviderState",
    "ReconciliationPolicy",
    "SweepSummary",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
