"""The job's workflow: a loop round one fenced activity. The row in Postgres decides; this only carries on.

In the happy path its history is that of a bare workflow with one activity.
"""

import asyncio
import contextlib
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RetryPolicy, SearchAttributeKey
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    # Names, not the module: `from package import module` in the sandbox runs the module again for each workflow.
    from durable_jobs.temporal.messages import (
        CANCEL_JOB,
        CLOSE_AS_CANCELLED,
        OPERATION_KEY_ATTRIBUTE,
        READ_JOB,
        RUN_ATTEMPT,
        STATE_ATTRIBUTE,
        WAKE,
        WORKFLOW_TYPE,
        CancelAsk,
        JobOutcome,
        JobStart,
        JobView,
    )
    from durable_jobs.temporal.steps import Act, Step, next_step

OUTCOME_ALLOWANCE = timedelta(minutes=10)
"""Beyond the handler's own time: its start, and the writing of its outcome while Postgres is away."""

_ONCE = RetryPolicy(maximum_attempts=1)
_UNTIL_ANSWERED = RetryPolicy(initial_interval=timedelta(seconds=1), maximum_interval=timedelta(minutes=1))
_READ_TIMEOUT = timedelta(seconds=30)
_STATE = SearchAttributeKey.for_keyword(STATE_ATTRIBUTE)
_OPERATION_KEY = SearchAttributeKey.for_keyword(OPERATION_KEY_ATTRIBUTE)


# Outside the sandbox, which runs this module anew for each job and took a quarter of the worker's time. It guards
# against nondeterminism; this code is no product's, and the replay of stored histories, in the sandbox too, tests it.
@workflow.defn(name=WORKFLOW_TYPE, sandboxed=False)
class JobWorkflow:
    """Carries one job until the truth about it is known.

    Completed for `completed`; Failed, with the code, for `failed`, `dead_letter` and `halt_unsafe`; Canceled for
    `cancelled`; Running while unresolved.
    """

    def __init__(self) -> None:
        self._woken = False
        self._cancel_asked = False
        self._closing = False
        self._indexed_state: str | None = None

    @workflow.signal(name=WAKE)
    def wake(self) -> None:
        """The row may have changed: look again."""
        self._woken = True

    @workflow.run
    async def run(self, start: JobStart) -> JobOutcome:
        # A cancellation strikes only this frame: the attempt goes on, and the row decides what becomes of the job.
        carrying = asyncio.create_task(self._carry(start))
        try:
            return await asyncio.shield(carrying)
        except asyncio.CancelledError:
            if carrying.done():
                raise
        self._cancel_asked = True
        if not self._closing:
            reason = workflow.cancellation_reason() or "cancelled in Temporal"
            await self._local(CANCEL_JOB, CancelAsk(start.job_id, reason, "temporal"))
            self._woken = True
        return await carrying

    async def _carry(self, start: JobStart) -> JobOutcome:
        view = JobView(status="queued", settled=False, terminal=False)
        idle, waited = 0, False
        while True:
            step = next_step(view, idle, waited)
            woken, self._woken = self._woken, False
            match step.act:
                case Act.CLOSE if not woken:
                    return await self._close(start, view)
                case Act.ATTEMPT:
                    now = await self._attempt(start, view) or await self._read(start)
                case Act.WAIT if not woken:
                    self._index(start, view)
                    woken = await self._wait(step)
                    now = await self._read(start)
                case _:
                    now = await self._read(start)
            waited = step.act is Act.WAIT
            moved = (now.status, now.generation, now.attempt) != (view.status, view.generation, view.attempt)
            idle = 0 if moved or woken else idle + 1
            view = now
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new(start)

    async def _attempt(self, start: JobStart, view: JobView) -> JobView | None:
        """One round of the fenced activity; None when Temporal lost it, and only the row knows."""
        number = view.attempt + 1
        try:
            answer: Any = await workflow.execute_activity(
                RUN_ATTEMPT,
                start,
                start_to_close_timeout=timedelta(seconds=start.timeout_seconds) + OUTCOME_ALLOWANCE,
                heartbeat_timeout=timedelta(seconds=start.lease_seconds),
                retry_policy=_ONCE,
                cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                summary=f"{start.job_type} · attempt {number}",
            )
        except ActivityError as error:
            workflow.logger.info("Attempt lost by Temporal, the row decides: %s", error.cause or error)
            return None
        try:
            return JobView(**answer)
        except TypeError:
            # Completed by hand, with something else.
            workflow.logger.info("The attempt's answer is none of its own, the row decides")
            return None

    async def _read(self, start: JobStart) -> JobView:
        view: JobView = await self._local(READ_JOB, start.job_id, JobView)
        return view

    async def _local(self, name: str, argument: Any, result_type: type | None = None) -> Any:
        """A local activity, tried until Postgres or Temporal answers."""
        return await workflow.execute_local_activity(
            name,
            argument,
            result_type=result_type,
            start_to_close_timeout=_READ_TIMEOUT,
            retry_policy=_UNTIL_ANSWERED,
        )

    async def _wait(self, step: Step) -> bool:
        """Whether the wait ended by a wake rather than by its time."""
        try:
            await workflow.wait_condition(
                lambda: self._woken,
                timeout=timedelta(seconds=step.seconds),
                timeout_summary=f"waits for {step.why}",
            )
        except TimeoutError:
            return False
        return True

    def _index(self, start: JobStart, view: JobView) -> None:
        """Off the happy path, show the state in the search attributes, where the namespace has them."""
        if not start.indexed or self._indexed_state == view.status:
            return
        self._indexed_state = view.status
        updates = [_STATE.value_set(view.status)]
        if view.operation_key is not None:
            updates.append(_OPERATION_KEY.value_set(view.operation_key))
        workflow.upsert_search_attributes(updates)

    async def _close(self, start: JobStart, view: JobView) -> JobOutcome:
        if self._indexed_state is not None:
            self._index(start, view)
        if view.status == "completed":
            return JobOutcome(start.job_id, view.status)
        if view.status != "cancelled":
            raise ApplicationError(f"job {start.job_id} ended {view.status}", type=view.code, non_retryable=True)
        # Raising alone would close the workflow as Failed: it must have been asked to cancel.
        self._closing = True
        while not self._cancel_asked:
            await self._local(CLOSE_AS_CANCELLED, start.job_id)
            with contextlib.suppress(asyncio.TimeoutError):
                await workflow.wait_condition(lambda: self._cancel_asked, timeout=timedelta(seconds=30))
        raise asyncio.CancelledError
