"""The workflow of one causal audit: every controlled replay as a durable job, then exactly one finalization job.

An uncertain replay is waited for until reconciliation or an operator has settled it. A failed one makes the audit
FAILED, by the finalization job's own verdict: this workflow judges nothing. All its jobs are found by their keys, so
that a workflow which was terminated may be started again.
"""

import asyncio
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from activities.messages import (
        AUDIT_ABANDONED,
        AUDIT_PLAN,
        AUDIT_TYPE,
        Abandoned,
        AuditStart,
        PlannedSample,
        final_key,
        replay_key,
    )
    from durable_jobs import ExecutionInput, JobSpec
    from durable_jobs.contract.errors import InvalidInput
    from durable_jobs.workflow import run_job

CONCURRENT_REPLAYS = 20
REPLAYS_PER_RUN = 1000
"""A replay takes about a dozen events: the history is continued as new well before Temporal's limit of 51,200."""
LEASE_SECONDS = 10.0
"""Of an audit's jobs: they run for seconds, and one whose worker was killed need not be missed for a minute."""
_TIMEOUT = timedelta(seconds=30)


@workflow.defn(name=AUDIT_TYPE, failure_exception_types=[InvalidInput])
class CausalAuditWorkflow:
    """Started by the audit's first job, under an id that names the audit."""

    @workflow.run
    async def run(self, start: AuditStart) -> str:
        """Returns the audit's status: COMPLETED or FAILED, which it is also where its last job did not complete."""
        try:
            await self._replays(start)
            verdict = await run_job(
                _spec(
                    start, "causal_audit", final_key(start.audit_id), {"phase": "finalize", "audit_id": start.audit_id}
                )
            )
            return str(verdict["status"])
        except ApplicationError as failed:
            return await self._abandoned(start, f"its last job ended without a verdict: {failed.type}")
        except BaseException as ended:
            # Of what was under way, whichever noticed first: a task, a child, an activity.
            if is_cancelled_exception(ended):
                await asyncio.shield(self._abandoned(start, "its workflow was cancelled"))
            raise

    async def _replays(self, start: AuditStart) -> None:
        """Every replay from `start.first` on; continues as new after so many. The last job judges those that failed."""
        planned = await workflow.execute_activity(
            AUDIT_PLAN, start, result_type=list[PlannedSample], start_to_close_timeout=_TIMEOUT
        )
        slots = asyncio.Semaphore(CONCURRENT_REPLAYS)

        async def replay(sample: PlannedSample) -> None:
            async with slots:
                try:
                    await run_job(_replay(start, sample))
                except ApplicationError as failed:
                    key = replay_key(start.audit_id, sample.intervention, sample.sample)
                    workflow.logger.info("The replay under %s ended %s", key, failed.type)

        after = start.first + REPLAYS_PER_RUN
        await asyncio.gather(*(replay(sample) for sample in planned[start.first : after]))
        if after < len(planned):
            workflow.continue_as_new(replace(start, first=after))

    async def _abandoned(self, start: AuditStart, reason: str) -> str:
        status: str = await workflow.execute_activity(
            AUDIT_ABANDONED, Abandoned(start, reason), result_type=str, start_to_close_timeout=_TIMEOUT
        )
        return status


def _replay(start: AuditStart, sample: PlannedSample) -> JobSpec:
    audit = {"audit_id": start.audit_id, "intervention": sample.intervention, "sample": sample.sample}
    payload = {"execution_id": sample.execution_id, "seed": sample.seed, "audit": audit}
    key = replay_key(start.audit_id, sample.intervention, sample.sample)
    return _spec(start, "replay_execution", key, payload)


def _spec(start: AuditStart, job_type: str, key: str, payload: dict[str, object]) -> JobSpec:
    """A job of the audit's own tenant, on its queue, for its actor."""
    execution = None
    if start.tenant is not None and start.actor is not None and start.trace is not None:
        execution = ExecutionInput(tenant=start.tenant, actor=start.actor, trace=start.trace, parent_job=start.audit_id)
    return JobSpec(
        organization=start.organization,
        project=start.project,
        queue=start.queue,
        isolated=start.isolated,
        job_type=job_type,
        idempotency_key=key,
        payload=payload,
        execution=execution,
        lease_seconds=LEASE_SECONDS,
    )
