"""A worker process dies by SIGKILL: no job is lost, none is sent twice, and one whose call may have landed says so."""

import asyncio
import signal
from dataclasses import dataclass

import pytest
from temporalio.client import WorkflowExecutionStatus

from durable_jobs.contract.errors import JobDeadLetteredError
from tests.processes.harness import Scene
from tests.processes.worker import operation_key

pytest_plugins = ["tests.processes.fixtures"]


@dataclass(frozen=True)
class Fate:
    """What becomes of the job once another worker has been there."""

    status: str
    sends: int
    attempts: int
    trail: list[tuple[str, int]]
    outcomes: list[str]
    """Of its generations."""


UNTOUCHED = Fate(
    status="completed",
    sends=1,
    attempts=1,
    trail=[("claimed", 1), ("dispatched", 1), ("completed", 1)],
    outcomes=["completed"],
)
RUN_AGAIN = Fate(
    status="completed",
    sends=1,
    attempts=2,
    trail=[("claimed", 1), ("claimed", 2), ("dispatched", 2), ("completed", 2)],
    outcomes=["lease_expired", "completed"],
)


def uncertain(sends: int) -> Fate:
    return Fate(
        status="indeterminate",
        sends=sends,
        attempts=1,
        trail=[("claimed", 1), ("dispatched", 1), ("indeterminate", 2)],
        outcomes=["lease_expired", "indeterminate"],
    )


@pytest.mark.parametrize(
    ("point", "fate"),
    [
        pytest.param("before_claim", UNTOUCHED, id="before-the-claim"),
        pytest.param("claimed", RUN_AGAIN, id="between-claim-and-boundary"),
        pytest.param("dispatched", uncertain(sends=0), id="between-boundary-and-send"),
        pytest.param("sending", uncertain(sends=1), id="during-the-send"),
        pytest.param("answered", uncertain(sends=1), id="between-answer-and-outcome"),
        pytest.param("recorded", UNTOUCHED, id="after-the-outcome"),
    ],
)
async def test_killed(point: str, fate: Fate, scene: Scene) -> None:
    first = await scene.start_worker(f"kill:{point}")
    if point == "sending":
        await scene.provider.works(seconds=5)
    handle = await scene.create()
    if point == "sending":
        await scene.provider.reaches(handle.id, "pending")
        first.send(signal.SIGKILL)
    assert await first.ended() == -signal.SIGKILL
    left = await handle.job()

    async with scene.second_worker():
        job = await scene.row_reaches(handle.id, fate.status)
        closed = WorkflowExecutionStatus.COMPLETED if job.status.is_settled else WorkflowExecutionStatus.RUNNING
        await scene.workflow_reaches(handle.id, closed)
    assert await scene.provider.sends(handle.id) == fate.sends
    assert (job.lease_generation, job.attempt_count) == (len(fate.outcomes), fate.attempts)
    assert await scene.trail(handle.id) == fate.trail
    assert await scene.outcomes(handle.id) == fate.outcomes
    assert job.operation_key == operation_key(handle.id)
    if job.status.is_settled:
        assert job.result is not None
        assert job.error is None
    else:
        assert job.result is None
        assert job.error is not None
        assert job.error.code == "LEASE_EXPIRED_AFTER_DISPATCH"
        # Still on the row: whose call it is that may have landed.
        assert (job.claimed_by, job.dispatched_generation) == (left.claimed_by, 1)


async def test_killed_with_many_jobs_in_hand(scene: Scene) -> None:
    first = await scene.start_worker("hold:answered")
    sent = await scene.jobs.create_jobs([scene.spec() for _ in range(8)])
    for handle in sent:
        await first.holds(handle.id, "answered")
    await first.kill()
    waiting = await scene.jobs.create_jobs([scene.spec() for _ in range(8)])

    async with scene.second_worker():
        await asyncio.gather(*(scene.row_reaches(handle.id, "indeterminate") for handle in sent))
        await asyncio.gather(*(scene.row_reaches(handle.id, "completed") for handle in waiting))
    assert [await scene.provider.sends(handle.id) for handle in [*sent, *waiting]] == [1] * 16


async def test_a_job_that_kills_its_workers_does_not_loop(scene: Scene) -> None:
    handle = await scene.create(max_attempts=2)
    for _ in range(2):
        assert await (await scene.start_worker("kill:claimed")).ended() == -signal.SIGKILL
    # It would die as well, if the handler ran once more.
    last = await scene.start_worker("kill:claimed")
    with pytest.raises(JobDeadLetteredError) as ending:
        await handle.result(timeout=30)
    assert ending.value.error_code == "ATTEMPTS_SPENT"
    await scene.workflow_reaches(handle.id, WorkflowExecutionStatus.FAILED)
    assert await last.terminate() == 0

    job = await handle.job()
    assert (job.status, job.attempt_count, job.lease_generation) == ("dead_letter", 2, 3)
    assert job.dead_letter_reason == ending.value.error_message
    assert await scene.provider.sends(handle.id) == 0
    assert await scene.trail(handle.id) == [("claimed", 1), ("claimed", 2), ("dead_lettered", 3)]
    assert await scene.outcomes(handle.id) == ["lease_expired", "lease_expired", "dead_letter"]
