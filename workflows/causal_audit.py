"""The workflow of one causal audit: every controlled replay as a durable job, then exactly one finalization job.

An uncertain replay is waited for until reconciliation or an operator has settled it. A failed one makes the audit
FAILED, by the finalization job's own verdict: this workflow judges nothing.
"""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.messages import AUDIT_PLAN, AUDIT_TYPE, AuditStart, PlannedSample
    from durable_jobs import ExecutionInput, JobSpec
    from durable_jobs.workflow import run_job

CONCURRENT_REPLAYS = 20
LEASE_SECONDS = 10.0
"""Of an audit's jobs: they run for seconds, and one whose worker was killed need not be missed for a minute."""
_TIMEOUT = timedelta(seconds=30)


@workflow.defn(name=AUDIT_TYPE)
class CausalAuditWorkflow:
    """Started by the audit's first job, under an id that names the audit."""

    @workflow.run
    async def run(self, start: AuditStart) -> str:
        """Returns the audit's status: COMPLETED or FAILED. Raises what the finalization job ended with otherwise."""
        planned = await workflow.execute_activity(
            AUDIT_PLAN, start, result_type=list[PlannedSample], start_to_close_timeout=_TIMEOUT
        )
        slots = asyncio.Semaphore(CONCURRENT_REPLAYS)

        async def replay(sample: PlannedSample) -> dict[str, object] | None:
            async with slots:
                try:
                    await run_job(_replay(start, sample))
                except ApplicationError as failed:
                    return {"intervention": sample.intervention, "sample": sample.sample, "code": failed.type}
            return None

        ended = await asyncio.gather(*(replay(sample) for sample in planned))
        failures = [each for each in ended if each is not None]
        verdict = await run_job(
            _spec(
                start,
                "causal_audit",
                f"{start.audit_id}:final",
                {
                    "phase": "finalize",
                    "audit_id": start.audit_id,
                    "failures": failures,
                },
            )
        )
        return str(verdict["status"])


def _replay(start: AuditStart, sample: PlannedSample) -> JobSpec:
    what = f"without:{sample.intervention}" if sample.intervention else "control"
    audit = {"audit_id": start.audit_id, "intervention": sample.intervention, "sample": sample.sample}
    payload = {"execution_id": sample.execution_id, "seed": sample.seed, "audit": audit}
    return _spec(start, "replay_execution", f"{start.audit_id}:{what}:{sample.sample}", payload)


def _spec(start: AuditStart, job_type: str, key: str, payload: dict[str, object]) -> JobSpec:
    """A job of the audit's own tenant, on its queue, for its actor."""
    execution = None
    if start.tenant is not None and start.actor is not None and start.trace is not None:
        execution = ExecutionInput(tenant=start.tenant, actor=start.actor, trace=start.trace, parent_job=start.audit_id)
    return JobSpec(
        organization=start.organization,
        project=start.project,
        queue=start.queue,
        job_type=job_type,
        idempotency_key=key,
        payload=payload,
        execution=execution,
        lease_seconds=LEASE_SECONDS,
    )
