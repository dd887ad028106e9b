"""The shipped application on real servers: its tables, its worker, and jobs for one tenant."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from temporalio.client import Client
from temporalio.service import RPCError
from temporalio.worker import Worker

from activities.hosting import application
from activities.settings import AppSettings
from activities.store.migrate import migrate
from durable_jobs import DurableJobs, DurableJobsPlugin, ExecutionInput, JobHandle, JobSpec
from durable_jobs.temporal.schedule import schedule_id
from tests.isolation import STRONGEST
from workflows import PRODUCT

AppWorker = Callable[..., AbstractAsyncContextManager[Worker]]
Submit = Callable[..., Any]

TENANT = ExecutionInput(tenant="acme-eu", actor="ann", trace="00-trace")


@pytest.fixture
def product_url(database_url: str) -> str:
    """This test's database, with the product's tables beside the jobs."""
    migrate(database_url)
    return database_url


@pytest.fixture
def app_worker(product_url: str, temporal_client: Client, queue: str) -> AppWorker:
    """`async with app_worker(…)`: the application's worker in this process, on this test's queue."""

    @asynccontextmanager
    async def run(
        *,
        reconcile_seconds: float = 1,
        queue: str = queue,
        organizations: list[str] | None = None,
        slots: int | None = None,
        **settings: Any,
    ) -> AsyncIterator[Worker]:
        async with application(AppSettings(**({"isolation": STRONGEST} | settings)), product_url) as hosted:
            plugin = DurableJobsPlugin(
                product_url,
                hosted.handlers,
                organizations=organizations,
                grace_seconds=2,
                reconcile_every=timedelta(seconds=reconcile_seconds),
            )
            async with Worker(
                temporal_client,
                task_queue=queue,
                workflows=PRODUCT,
                activities=hosted.activities,
                max_concurrent_activities=slots,
                plugins=[plugin],
            ) as running:
                yield running
            with suppress(RPCError):
                await temporal_client.get_schedule_handle(schedule_id(queue)).delete()

    return run


@pytest.fixture
def submit(jobs: DurableJobs, queue: str) -> Submit:
    """`await submit("evaluation", dataset_id=…)`: a job of the tenant, on this test's queue."""

    async def create(job_type: str, *, key: str | None = None, isolated: bool = False, **payload: Any) -> JobHandle:
        return await jobs.create_job(
            JobSpec(
                organization="acme",
                project="alpha",
                queue=queue,
                job_type=job_type,
                idempotency_key=key or uuid4().hex,
                payload=payload,
                execution=TENANT,
                isolated=isolated,
                lease_seconds=2,
                backoff_base_seconds=0.1,
            )
        )

    return create
