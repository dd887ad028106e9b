"""What workflow code may call. Loads no SQLAlchemy, no psycopg and no HTTP module, so the sandbox stays light.

with workflow.unsafe.imports_passed_through():
    from durable_jobs import JobSpec
    from durable_jobs.workflow import run_job
"""

from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import Priority, SearchAttributeKey, SearchAttributePair, TypedSearchAttributes
from temporalio.exceptions import ActivityError, ApplicationError, ChildWorkflowError, WorkflowAlreadyStartedError
from temporalio.workflow import ParentClosePolicy

with workflow.unsafe.imports_passed_through():
    from durable_jobs.contract.specs import JobSpec
    from durable_jobs.temporal import messages
    from durable_jobs.temporal.messages import ChildJob, JobAnswer, JobOutcome, workflow_id
    from durable_jobs.temporal.steps import widening

__all__ = ["run_job"]

_TIMEOUT = timedelta(seconds=30)
_LONGEST_POLL = 600.0
_QUEUE = SearchAttributeKey.for_keyword(messages.QUEUE_ATTRIBUTE)


async def run_job(spec: JobSpec) -> dict[str, Any]:
    """Create a job from inside a workflow, wait until it is settled, and return its result, a JSON object.

    The workflow's own worker must have the plugin. The job's workflow runs as a child, on the job's queue; cancelling
    the calling workflow cancels the job. A job that exists under the same key is waited for. Spec and result enter
    the calling workflow's history, with Temporal's limit of 2 MB.

    Tenant, actor and trace are those of `spec.execution`; its run is the calling workflow's, unless it names one.

    Raises `ApplicationError`, whose type is the job's error code, for every ending but completed, and for a spec that
    is refused.
    """
    if spec.execution is not None and spec.execution.run is None:
        execution = spec.execution.model_copy(update={"run": workflow.info().run_id})
        spec = spec.model_copy(update={"execution": execution})
    try:
        child = await workflow.execute_activity(
            messages.CREATE_JOB, spec.model_dump_json(), result_type=ChildJob, start_to_close_timeout=_TIMEOUT
        )
    except ActivityError as error:
        raise (error.cause if isinstance(error.cause, ApplicationError) else error) from None
    if not child.settled:
        await _wait_for(child)
    polls = 0
    while True:
        answer = await workflow.execute_activity(
            messages.READ_RESULT, child.start.job_id, result_type=JobAnswer, start_to_close_timeout=_TIMEOUT
        )
        if answer.settled:
            break
        # Its workflow was terminated, or another one started it: the row tells in time.
        polls += 1
        await workflow.sleep(widening(polls, longest=_LONGEST_POLL))
    if answer.status == "completed":
        return answer.result or {}
    message = f"job {child.start.job_id} ended {answer.status}: {answer.error_message}"
    raise ApplicationError(message, type=answer.error_code or answer.status, non_retryable=True)


async def _wait_for(child: ChildJob) -> None:
    """Run the job's workflow as a child; how it ended is read from the row, so its failure is not an error here."""
    try:
        await workflow.execute_child_workflow(
            messages.WORKFLOW_TYPE,
            child.start,
            id=workflow_id(child.start.job_id),
            task_queue=child.queue,
            result_type=JobOutcome,
            parent_close_policy=ParentClosePolicy.ABANDON,
            priority=Priority(priority_key=child.priority_key, fairness_key=child.fairness_key),
            static_summary=child.summary,
            search_attributes=TypedSearchAttributes([SearchAttributePair(_QUEUE, child.queue)])
            if child.start.indexed
            else None,
        )
    except WorkflowAlreadyStartedError:
        return
    except ChildWorkflowError:
        if workflow.cancellation_reason() is not None:
            raise
