"""A governed dispatch, refused and allowed: `python -m examples.governed`, beside a running `durable-jobs dev`.

Three jobs ask to pay a refund. The first names nobody it acts for; the second's approval was revoked while it waited;
the third's stands, and is consumed by it. Needs DURABLE_JOBS_DATABASE_URL and TEMPORAL_ADDRESS.
"""

import asyncio
import os
from datetime import UTC, datetime, timedelta
from secrets import token_hex
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from durable_jobs import (
    DurableJobs,
    DurableJobsError,
    DurableJobsPlugin,
    ExecutionInput,
    GovernanceInput,
    JobContext,
    JobHandler,
    JobSpec,
)

QUEUE = "refunds"
Payload = dict[str, Any]


class Refund(JobHandler[Payload, Payload]):
    job_type = "refund"  # consequential, as every handler is that doesn't say otherwise

    async def run(self, job: JobContext, request: Payload) -> Payload:
        async with job.dispatch(f"refund:{job.id}") as operation_key:
            assert job.identity is not None
            return {"refunded": request["amount"], "key": operation_key, "for": job.identity.actor}


def governed(approval: str) -> GovernanceInput:
    """What the queue-time authority allowed."""
    now = datetime.now(UTC)
    return GovernanceInput(
        action_intent="refund",
        capability={"name": "payments.refund"},
        policy={"id": "refunds-under-100", "version": 3},
        budget={"currency": "EUR", "limit": 100},
        approval=approval,
        issued_at=now,
        expires_at=now + timedelta(hours=1),
    )


async def main() -> None:
    url, address = os.environ["DURABLE_JOBS_DATABASE_URL"], os.environ["TEMPORAL_ADDRESS"]
    temporal = await Client.connect(address)
    run = token_hex(4)
    identity = ExecutionInput(tenant="acme-eu", actor="ada@acme.example", trace=token_hex(16))
    worker = Worker(temporal, task_queue=QUEUE, plugins=[DurableJobsPlugin(url, handlers=[Refund()])])

    async with await DurableJobs.connect(url, temporal) as jobs:

        def spec(name: str, **identity_and_governance: Any) -> JobSpec:
            return JobSpec(
                organization="acme",
                project="support",
                queue=QUEUE,
                job_type="refund",
                idempotency_key=f"{name}-{run}",
                payload={"amount": 20},
                **identity_and_governance,
            )

        for approval in (f"revoked-{run}", f"granted-{run}"):
            await jobs.service.record_approval("acme", "support", approval, "refund", actor="grace@acme.example")
        handles = [
            await jobs.create_job(spec("nobody")),
            await jobs.create_job(spec("revoked", execution=identity, governance=governed(f"revoked-{run}"))),
            await jobs.create_job(spec("granted", execution=identity, governance=governed(f"granted-{run}"))),
        ]
        await jobs.service.revoke_approval(
            "acme", "support", f"revoked-{run}", actor="grace@acme.example", reason="the customer was refunded by hand"
        )
        async with worker:
            for handle in handles:
                try:
                    print("allowed:", await handle.result(timeout=60))
                except DurableJobsError as error:
                    print("refused:", error.message)


if __name__ == "__main__":
    asyncio.run(main())
