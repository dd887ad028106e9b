"""What the service is measured against: a workflow with one activity. Apart from the others, as the sandbox runs a
workflow's module for each run."""

from datetime import timedelta
from typing import Any

from temporalio import workflow


@workflow.defn(name="BenchBare")
class BareWorkflow:
    """One activity and nothing else."""

    @workflow.run
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = await workflow.execute_activity(
            "bench_run", request, start_to_close_timeout=timedelta(hours=1)
        )
        return answer
