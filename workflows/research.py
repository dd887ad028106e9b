"""One question over several lanes, each a durable job, and their reports joined."""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from activities.messages import LANE_STATES, RESEARCH_TYPE, Lane, LaneState, ResearchAnswer, ResearchQuestion
    from durable_jobs import ExecutionInput, JobSpec
    from durable_jobs.contract.errors import InvalidInput
    from durable_jobs.workflow import run_job

LONGEST_LOOK_SECONDS = 600.0
"""Between two looks at lanes that have not ended, widening: one that turned uncertain is not waited for any longer."""
NO_REPORT = "NO_REPORT"
DEEP = "deep"
_TIMEOUT = timedelta(seconds=30)


@workflow.defn(name=RESEARCH_TYPE, failure_exception_types=[InvalidInput])
class ResearchWorkflow:
    """Tolerant of lanes: one that failed, or of which nobody knows whether its call landed, is named and left out.

    A lane left uncertain goes on without this workflow: reconciliation settles it, and asking again under the same
    workflow id finds the same job.
    """

    @workflow.run
    async def run(self, asked: ResearchQuestion) -> ResearchAnswer:
        """Raises `ApplicationError` of type `NO_REPORT` where no lane gave a report; `InvalidInput` for a question that
        makes no valid job. Cancelled, it cancels its lanes."""
        specs = {mode: self._lane(asked, mode) for mode in asked.modes}
        if asked.deep:
            specs[DEEP] = self._lane(asked, DEEP)
        running = {mode: asyncio.create_task(self._report(mode, spec)) for mode, spec in specs.items()}
        try:
            left = await self._join(asked, specs, running)
        except asyncio.CancelledError:
            for lane in running.values():
                lane.cancel()  # and with it the job, as far as it can be
            await asyncio.gather(*running.values(), return_exceptions=True)
            raise
        lanes = [running[mode].result() if running[mode].done() else left[mode] for mode in specs]
        reports = {lane.mode: lane.report for lane in lanes if lane.report is not None}
        if not reports:
            outcomes = ", ".join(f"{lane.mode} {lane.code or lane.outcome}" for lane in lanes)
            raise ApplicationError(f"no lane gave a report: {outcomes}", type=NO_REPORT, non_retryable=True)
        return ResearchAnswer(question=asked.question, reports=reports, lanes=lanes)

    async def _join(
        self, asked: ResearchQuestion, specs: dict[str, JobSpec], running: "dict[str, asyncio.Task[Lane]]"
    ) -> dict[str, Lane]:
        """Wait for the lanes; the ones that are not waited for any longer."""
        ends, looks = workflow.time() + asked.lane_seconds, 0
        while waiting := [mode for mode, task in running.items() if not task.done()]:
            looks += 1
            seconds = min(2.0**looks, LONGEST_LOOK_SECONDS, ends - workflow.time())
            if seconds > 0:
                await workflow.wait([running[mode] for mode in waiting], timeout=seconds)
                waiting = [mode for mode in waiting if not running[mode].done()]
            states = await self._states(asked, [specs[mode].idempotency_key for mode in waiting]) if waiting else []
            stuck = workflow.time() >= ends or (waiting and all(each.uncertain for each in states))
            if stuck:
                return {
                    mode: Lane(mode, "uncertain" if each.uncertain else "unfinished", job_id=each.job_id)
                    for mode, each in zip(waiting, states, strict=True)
                }
        return {}

    async def _states(self, asked: ResearchQuestion, keys: list[str]) -> list[LaneState]:
        states: list[LaneState] = await workflow.execute_activity(
            LANE_STATES,
            args=[asked.organization, asked.project, keys],
            result_type=list[LaneState],
            start_to_close_timeout=_TIMEOUT,
        )
        return states

    async def _report(self, mode: str, spec: JobSpec) -> Lane:
        try:
            report = await run_job(spec)
        except ApplicationError as failed:
            return Lane(mode, "failed", code=failed.type)
        return Lane(mode, "completed", report=str(report["text"]))

    def _lane(self, asked: ResearchQuestion, mode: str) -> JobSpec:
        deep = mode == DEEP
        return JobSpec(
            organization=asked.organization,
            project=asked.project,
            queue=asked.queue,
            job_type="deep_research" if deep else "research",
            idempotency_key=f"{workflow.info().workflow_id}:{mode}",
            payload={"question": asked.question} | ({} if deep else {"mode": mode}),
            timeout_seconds=90_000 if deep else 3600,
            execution=ExecutionInput(tenant=asked.tenant, actor=asked.actor, trace=asked.trace),
        )
