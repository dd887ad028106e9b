"""The naive shape: each fenced statement as an activity of its own."""

from datetime import timedelta
from typing import Any

from temporalio import workflow


@workflow.defn(name="BenchNaive")
class NaiveWorkflow:
    """Each fenced statement as an activity of its own."""

    @workflow.run
    async def run(self, job_id: str) -> str:
        claimed = await self._step("bench_claim", job_id)
        await self._step("bench_mark", claimed["claim"])
        result = await self._step("bench_run", claimed["request"])
        return str(await self._step("bench_complete", {"claim": claimed["claim"], "result": result}))

    async def _step(self, name: str, argument: Any) -> Any:
        return await workflow.execute_activity(name, argument, start_to_close_timeout=timedelta(hours=1))
