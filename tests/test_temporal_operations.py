"""Case T1 (duplicate effects): what an operator can do to a running attempt on Temporal sends nothing twice.

Each operation strikes two jobs, one before and one past its dispatch boundary; once with the worker alive, and once
with it killed afterwards. What becomes of the job is decided by its row.
"""

import json
from collections.abc import Awaitable, Callable
from uuid import UUID, uuid4

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from temporalio.api.activity.v1 import ActivityOptions
from temporalio.api.common.v1 import Payload, Payloads, RetryPolicy, WorkflowExecution
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import (
    PauseActivityRequest,
    ResetActivityRequest,
    ResetWorkflowExecutionRequest,
    RespondActivityTaskCompletedByIdRequest,
    UnpauseActivityRequest,
    UpdateActivityOptionsRequest,
)
from temporalio.client import WorkflowExecutionStatus, WorkflowHandle

from durable_jobs import JobHandle
from durable_jobs.temporal.messages import workflow_id
from tests.processes.harness import Scene, WorkerProcess

pytest_plugins = ["tests.processes.fixtures"]

CANCELED = WorkflowExecutionStatus.CANCELED
COMPLETED = WorkflowExecutionStatus.COMPLETED
RUNNING = WorkflowExecutionStatus.RUNNING

OPERATOR = "an operator"


class OnTemporal:
    """One job's workflow and the attempt that it waits for, as an operator of Temporal gets at them."""

    def __init__(self, scene: Scene, job_id: UUID) -> None:
        self.workflow: WorkflowHandle = scene.temporal.get_workflow_handle(workflow_id(job_id))
        self._service = scene.temporal.workflow_service
        self._namespace = scene.temporal.namespace

    async def _attempt(self) -> tuple[WorkflowExecution, PendingActivityInfo]:
        description = await self.workflow.describe()
        (attempt,) = description.raw_description.pending_activities
        return WorkflowExecution(workflow_id=self.workflow.id, run_id=description.run_id), attempt

    async def pause(self) -> None:
        execution, attempt = await self._attempt()
        await self._service.pause_activity(
            PauseActivityRequest(
                namespace=self._namespace, execution=execution, id=attempt.activity_id, identity=OPERATOR
            )
        )

    async def unpause(self) -> None:
        execution, attempt = await self._attempt()
        assert attempt.paused
        await self._service.unpause_activity(
            UnpauseActivityRequest(
                namespace=self._namespace, execution=execution, id=attempt.activity_id, identity=OPERATOR
            )
        )

    async def allow_more_attempts_and_reset(self) -> None:
        execution, attempt = await self._attempt()
        await self._service.update_activity_options(
            UpdateActivityOptionsRequest(
                namespace=self._namespace,
                execution=execution,
                id=attempt.activity_id,
                identity=OPERATOR,
                activity_options=ActivityOptions(retry_policy=RetryPolicy(maximum_attempts=5)),
                update_mask=FieldMask(paths=["retry_policy.maximum_attempts"]),
            )
        )
        await self._service.reset_activity(
            ResetActivityRequest(
                namespace=self._namespace, execution=execution, id=attempt.activity_id, identity=OPERATOR
            )
        )

    async def reset_workflow(self) -> None:
        """Back to its first workflow task, which schedules the attempt anew."""
        execution, _ = await self._attempt()
        history = await self.workflow.fetch_history()
        done = (each for each in history.events if each.HasField("workflow_task_completed_event_attributes"))
        await self._service.reset_workflow_execution(
            ResetWorkflowExecutionRequest(
                namespace=self._namespace,
                workflow_execution=execution,
                reason="the operator wants it",
                workflow_task_finish_event_id=next(done).event_id,
                request_id=str(uuid4()),
                identity=OPERATOR,
            )
        )

    async def terminate(self) -> None:
        await self.workflow.terminate("the operator wants it")

    async def complete_attempt(self, *results: object) -> None:
        """The attempt's activity, completed by hand with these results."""
        execution, attempt = await self._attempt()
        payloads = [
            Payload(metadata={"encoding": b"json/plain"}, data=json.dumps(result).encode()) for result in results
        ]
        await self._service.respond_activity_task_completed_by_id(
            RespondActivityTaskCompletedByIdRequest(
                namespace=self._namespace,
                workflow_id=execution.workflow_id,
                run_id=execution.run_id,
                activity_id=attempt.activity_id,
                result=Payloads(payloads=payloads) if payloads else None,
                identity=OPERATOR,
            )
        )


class Operation:
    """What is done to a held attempt, and what of it has to be done before its job can go on."""

    def __init__(
        self,
        strike: Callable[[OnTemporal], Awaitable[None]],
        *,
        told: str,
        then: Callable[[OnTemporal], Awaitable[None]] | None = None,
        afterwards: Callable[[OnTemporal], Awaitable[None]] | None = None,
        closes: bool = False,
        runs_again: bool = False,
    ) -> None:
        self._strike = strike
        self._told = told
        self._then = then
        self.afterwards = afterwards
        """Done once the worker is dead, or else once the job has come to its end."""
        self.closes = closes
        """The workflow's run is closed by it: whoever wants the job to go on creates it again."""
        self.runs_again = runs_again
        """Temporal runs the attempt again beside the one that is held."""

    async def __call__(self, scene: Scene, worker: WorkerProcess, handle: JobHandle) -> None:
        on_temporal = OnTemporal(scene, handle.id)
        await self._strike(on_temporal)
        # Temporal has really given up the attempt, or asked it to stop.
        await worker.tells(handle.id, f"by Temporal: {self._told}")
        if self._then:
            await self._then(on_temporal)


FORGED = {"status": "completed", "settled": True, "terminal": True, "generation": 1, "attempt": 1}
"""As an attempt would answer that had completed the job."""

OPERATIONS = {
    "pause": Operation(OnTemporal.pause, told="paused", afterwards=OnTemporal.unpause),
    "pause-and-unpause": Operation(OnTemporal.pause, told="paused", then=OnTemporal.unpause),
    "more-attempts-and-reset": Operation(OnTemporal.allow_more_attempts_and_reset, told="reset"),
    "workflow-reset": Operation(OnTemporal.reset_workflow, told="not_found", runs_again=True),
    "workflow-terminated": Operation(OnTemporal.terminate, told="not_found", closes=True),
    "completed-by-hand": Operation(OnTemporal.complete_attempt, told="not_found"),
    "completed-by-hand-with-a-text": Operation(lambda attempt: attempt.complete_attempt("done"), told="not_found"),
    "completed-by-hand-as-completed": Operation(
        lambda attempt: attempt.complete_attempt(FORGED), told="not_found", closes=True
    ),
}

operations = pytest.mark.parametrize("operation", [pytest.param(each, id=name) for name, each in OPERATIONS.items()])


async def two_held(scene: Scene, worker: WorkerProcess, lease_seconds: float = 2) -> tuple[JobHandle, JobHandle]:
    """A job held before its boundary, and one whose call the provider has answered."""
    before, past = [await scene.create(lease_seconds=lease_seconds) for _ in range(2)]
    for handle in (before, past):
        await worker.holds(handle.id, "claimed")
    worker.go(past.id)
    await worker.holds(past.id, "answered")
    return before, past


async def create_again(scene: Scene, handle: JobHandle) -> None:
    key = (await handle.job()).idempotency_key
    again = await scene.create(idempotency_key=key)
    assert (again.id, again.created) == (handle.id, False)


@operations
async def test_with_the_worker_alive(operation: Operation, scene: Scene) -> None:
    """Case T1 (duplicate effects): the attempt that Temporal gave up runs on, and its outcome stands."""
    worker = await scene.start_worker("hold:claimed,answered")
    before, past = await two_held(scene, worker)
    for handle in (before, past):
        await operation(scene, worker, handle)
        if operation.closes:
            await create_again(scene, handle)
        if operation.closes or operation.runs_again:
            await worker.says(f"{handle.id} is held")

    for handle in (before, before, past):
        worker.go(handle.id)
    for handle in (before, past):
        job = await scene.row_reaches(handle.id, "completed")
        await scene.workflow_reaches(handle.id, COMPLETED)
        assert (job.lease_generation, job.attempt_count) == (1, 1)
        assert await scene.trail(handle.id) == [("claimed", 1), ("dispatched", 1), ("completed", 1)]
        assert await scene.outcomes(handle.id) == ["completed"]
        assert await scene.provider.sends(handle.id) == 1


@operations
async def test_with_the_worker_killed(operation: Operation, scene: Scene) -> None:
    """Case T1 (duplicate effects): before the boundary the job is run again, and sent once; past it it is uncertain,
    until what the provider says of the one send settles it."""
    worker = await scene.start_worker("hold:claimed,answered")
    before, past = await two_held(scene, worker)
    for handle in (before, past):
        await operation(scene, worker, handle)
    await worker.kill()

    async with scene.second_worker():
        for handle in (before, past):
            if operation.afterwards:
                await operation.afterwards(OnTemporal(scene, handle.id))
            if operation.closes:
                await create_again(scene, handle)
        job = await scene.row_reaches(before.id, "completed")
        await scene.workflow_reaches(before.id, COMPLETED)
        assert (job.lease_generation, job.attempt_count) == (2, 2)
        assert await scene.outcomes(before.id) == ["lease_expired", "completed"]

        job = await scene.row_reaches(past.id, "indeterminate")
        await scene.workflow_reaches(past.id, RUNNING)
        assert (job.lease_generation, job.attempt_count) == (2, 1)
        assert await scene.outcomes(past.id) == ["lease_expired", "indeterminate"]
        await scene.jobs.sweep(scene.queue)
        assert await past.status() == "completed"
        await scene.workflow_reaches(past.id, COMPLETED)
    assert await scene.provider.sends(before.id) == 1
    assert await scene.provider.sends(past.id) == 1


async def test_cancelled_on_temporal_with_the_worker_alive(scene: Scene) -> None:
    """Case T1 (duplicate effects): before the boundary nothing is sent; past it the handler is told, and its result
    completes the job."""
    worker = await scene.start_worker("hold:claimed,answered")
    before, past = await two_held(scene, worker)
    for handle in (before, past):
        await OnTemporal(scene, handle.id).workflow.cancel()
    await scene.row_reaches(before.id, "cancelled")
    await scene.workflow_reaches(before.id, CANCELED)
    assert await scene.trail(before.id) == [("claimed", 1), ("cancelled", 1)]
    assert await scene.provider.sends(before.id) == 0

    await worker.tells(past.id, "cancel_requested")
    worker.go(past.id)
    await scene.row_reaches(past.id, "completed")
    await scene.workflow_reaches(past.id, COMPLETED)
    assert await scene.trail(past.id) == [("claimed", 1), ("dispatched", 1), ("completed", 1)]
    assert await scene.provider.sends(past.id) == 1


async def test_cancelled_on_temporal_with_the_worker_killed(scene: Scene) -> None:
    """Case T1 (duplicate effects): before the boundary the job is cancelled once its lease has run out; past it it is
    uncertain, for the call may have landed."""
    worker = await scene.start_worker("hold:claimed,answered")
    before, past = await two_held(scene, worker, lease_seconds=4)
    await OnTemporal(scene, past.id).workflow.cancel()
    await worker.tells(past.id, "cancel_requested")
    async with scene.second_worker():
        await worker.kill()
        # Well before the lease of the dead runs out, and the job would be run again.
        await OnTemporal(scene, before.id).workflow.cancel()
        await scene.row_reaches(before.id, "cancelled")
        await scene.workflow_reaches(before.id, CANCELED)
        assert await scene.trail(before.id) == [("claimed", 1), ("cancelled", 2)]
        assert await scene.outcomes(before.id) == ["lease_expired", "cancelled"]

        await scene.row_reaches(past.id, "indeterminate")
        await scene.workflow_reaches(past.id, RUNNING)
        assert await scene.trail(past.id) == [("claimed", 1), ("dispatched", 1), ("indeterminate", 2)]
        await scene.jobs.sweep(scene.queue)
        assert await past.status() == "completed"
        await scene.workflow_reaches(past.id, COMPLETED)
    assert await scene.provider.sends(before.id) == 0
    assert await scene.provider.sends(past.id) == 1
