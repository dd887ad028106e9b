"""What the application's handlers share: the product's tables, the catalogue, the runtimes, the agent."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.datasets import Dataset, Policy, load_dataset, load_policy
from activities.lineage import Tenant
from activities.runtime import AgentRef
from activities.runtimes import Runtimes
from activities.store.inputs import EvidenceMissing
from durable_jobs import Database, DurableJobService, Job, JobContext, JobFailed
from durable_jobs.contract.errors import InvalidInput

T = TypeVar("T")


@dataclass(frozen=True)
class Product:
    """`tables` is the database that holds the schema `governance`; `jobs` reads the job table."""

    tables: Database
    jobs: DurableJobService
    runtimes: Runtimes
    agent: AgentRef

    async def read(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run `work` in a transaction of the product's own, and commit it.

        Raises `JobFailed` where a frozen input is gone: never a figure in its place.
        """
        try:
            return await self.tables.run(work)
        except EvidenceMissing as gone:
            raise JobFailed(str(gone), retryable=False, code=gone.code) from gone

    write = read


def tenant_of(job: JobContext) -> Tenant:
    """Whose data a job works on: the row's organization and project, never the payload's."""
    return Tenant(job.organization, job.project)


def tenant_of_row(job: Job) -> Tenant:
    return Tenant(job.organization_id, job.project_id)


def dataset(dataset_id: str) -> Dataset:
    """From the catalogue. Raises `JobFailed` for an id that it doesn't hold, or for a file that breaks its rules."""
    try:
        return load_dataset(dataset_id)
    except InvalidInput as refused:
        raise JobFailed(refused.message, retryable=False, code=refused.code) from refused


def policy(policy_id: str) -> Policy:
    """From the catalogue. Raises `JobFailed`."""
    try:
        return load_policy(policy_id)
    except InvalidInput as refused:
        raise JobFailed(refused.message, retryable=False, code=refused.code) from refused
