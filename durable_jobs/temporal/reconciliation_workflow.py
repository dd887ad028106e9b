"""The scheduled sweep of one queue, on `<queue>.reconciliation`; its summary is the workflow's result."""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from durable_jobs.contract.summary import SweepSummary
    from durable_jobs.temporal import messages

SWEEP_TIMEOUT = timedelta(minutes=10)
_HEARTBEAT = timedelta(seconds=10)
"""A worker killed in mid-sweep holds the next one back for so long; a repeated sweep is harmless."""
_RETRY = RetryPolicy(maximum_attempts=3)


@workflow.defn(name=messages.RECONCILIATION_TYPE)
class ReconciliationWorkflow:
    """Looks for the missing workflows, and resolves or escalates what is uncertain."""

    @workflow.run
    async def run(self, queue: str) -> SweepSummary:
        launching = asyncio.create_task(
            workflow.execute_activity(
                messages.LAUNCH_SWEEP,
                queue,
                result_type=int,
                start_to_close_timeout=SWEEP_TIMEOUT,
                heartbeat_timeout=_HEARTBEAT,
                retry_policy=_RETRY,
            )
        )
        summary: SweepSummary = await workflow.execute_activity(
            messages.RECONCILIATION_SWEEP,
            queue,
            result_type=SweepSummary,
            start_to_close_timeout=SWEEP_TIMEOUT,
            heartbeat_timeout=_HEARTBEAT,
            retry_policy=_RETRY,
        )
        summary.launches = await launching
        return summary
