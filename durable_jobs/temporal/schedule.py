"""The Temporal Schedule that starts the sweep of a queue, and the sweep that is asked for at once."""

from datetime import timedelta
from uuid import uuid4

from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleIntervalSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
)

from durable_jobs.contract.rules import RESERVED_QUEUE_SUFFIX
from durable_jobs.contract.summary import SweepSummary
from durable_jobs.temporal import messages

DEFAULT_INTERVAL = timedelta(seconds=60)
CATCH_UP = timedelta(minutes=10)
RUN_TIMEOUT = timedelta(minutes=15)
"""One hung run would hold every later one back, as overlapping runs are skipped."""


def schedule_id(queue: str) -> str:
    return f"durable-jobs-reconciliation/{queue}"


def reconciliation_queue(queue: str) -> str:
    """The task queue of the sweeps, so that saturated job slots never starve them."""
    return queue + RESERVED_QUEUE_SUFFIX


async def ensure_schedule(client: Client, queue: str, every: timedelta) -> None:
    """Create the queue's schedule, or bring it to this version's; an operator's pause stands. Raises `RPCError`."""
    wanted = Schedule(
        action=ScheduleActionStartWorkflow(
            messages.RECONCILIATION_TYPE,
            queue,
            id=schedule_id(queue),
            task_queue=reconciliation_queue(queue),
            run_timeout=RUN_TIMEOUT,
            static_summary=f"sweep of {queue}",
        ),
        spec=ScheduleSpec(intervals=[ScheduleIntervalSpec(every=every)]),
        policy=SchedulePolicy(overlap=ScheduleOverlapPolicy.SKIP, catchup_window=CATCH_UP),
    )

    def updated(present: ScheduleUpdateInput) -> ScheduleUpdate:
        wanted.state = present.description.schedule.state
        return ScheduleUpdate(schedule=wanted)

    try:
        await client.create_schedule(schedule_id(queue), wanted)
    except ScheduleAlreadyRunningError:
        await client.get_schedule_handle(schedule_id(queue)).update(updated)


async def sweep_now(client: Client, queue: str) -> SweepSummary:
    """Run one sweep of the queue now, beside the schedule, and return its summary. Needs a live worker of the queue."""
    summary: SweepSummary = await client.execute_workflow(
        messages.RECONCILIATION_TYPE,
        queue,
        result_type=SweepSummary,
        id=f"{schedule_id(queue)}/{uuid4()}",
        task_queue=reconciliation_queue(queue),
        run_timeout=RUN_TIMEOUT,
        static_summary=f"sweep of {queue}, asked for",
    )
    return summary
