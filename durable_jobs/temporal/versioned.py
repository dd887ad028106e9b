"""The job's workflow for a worker that uses versioning. Apart, as the sandbox runs a workflow's module for each run."""

from temporalio import workflow
from temporalio.common import VersioningBehavior

with workflow.unsafe.imports_passed_through():
    from durable_jobs.temporal.messages import WORKFLOW_TYPE, JobOutcome, JobStart

from durable_jobs.temporal.job_workflow import JobWorkflow


@workflow.defn(name=WORKFLOW_TYPE, versioning_behavior=VersioningBehavior.AUTO_UPGRADE)
class VersionedJobWorkflow(JobWorkflow):
    """The same, for a worker that uses versioning: an unversioned one fails every task of a declared behaviour."""

    @workflow.run
    async def run(self, start: JobStart) -> JobOutcome:
        return await super().run(start)
