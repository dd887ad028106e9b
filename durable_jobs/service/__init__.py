"""The verbs: each one transaction over the store, committed before it returns."""

from durable_jobs.service.approvals import Approvals, ApprovalStore
from durable_jobs.service.claims import Claims
from durable_jobs.service.control import Control, RecheckFilter
from durable_jobs.service.creation import Creation
from durable_jobs.service.operations import Operations
from durable_jobs.service.outcomes import Completion, Outcomes
from durable_jobs.service.reads import Reads
from durable_jobs.service.sweep import Sweeps
from durable_jobs.store.database import Database


class DurableJobService(Creation, Claims, Outcomes, Sweeps, Control, Approvals, Operations, Reads):
    """The durable job service over one Postgres database.

    Async. Every verb owns its transaction, save `create_job(connection=…)`. All raise `StoreUnavailable` when the
    database is away; after it, whether the verb took effect is unknown, and the fence makes it safe to repeat.
    """


__all__ = ["ApprovalStore", "Completion", "Database", "DurableJobService", "RecheckFilter"]
