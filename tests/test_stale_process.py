"""A worker process that is frozen past its lease and wakes as a stale one, and one that is asked to shut down."""

import signal
from datetime import timedelta

import pytest

from tests.processes.harness import Scene, until

pytest_plugins = ["tests.processes.fixtures"]


async def test_frozen_past_the_lease(scene: Scene) -> None:
    """Cases 2 and 7 (leases and stale workers): a process that is frozen with four jobs in hand, while another worker
    takes them over, changes nothing when it wakes. What it gets from the provider then is evidence, no transition.

    No fence stops a send past its boundary, which is why such a job is uncertain though the provider knows of nothing.
    """
    stale = await scene.start_worker("hold:claimed,dispatched")
    lands, fails, unsent, unmarked = handles = await scene.jobs.create_jobs([scene.spec() for _ in range(4)])
    for handle in handles:
        await stale.holds(handle.id, "claimed")
    await scene.provider.works(seconds=1, fails=fails.id)
    for handle in (lands, fails, unsent):
        stale.go(handle.id)
        await stale.holds(handle.id, "dispatched")
    for handle in (lands, fails):
        stale.go(handle.id)
        await scene.provider.reaches(handle.id, "pending")
    stale.send(signal.SIGSTOP)

    async with scene.second_worker():
        for handle in (lands, fails, unsent):
            job = await scene.row_reaches(handle.id, "indeterminate")
            assert job.error is not None
            assert job.error.code == "LEASE_EXPIRED_AFTER_DISPATCH"
            assert await scene.trail(handle.id) == [("claimed", 1), ("dispatched", 1), ("indeterminate", 2)]
        await scene.row_reaches(unmarked.id, "completed")
        assert await scene.trail(unmarked.id) == [("claimed", 1), ("claimed", 2), ("dispatched", 2), ("completed", 2)]
    await scene.provider.reaches(lands.id, "succeeded")
    await scene.provider.reaches(fails.id, "failed")
    rows = [await handle.job() for handle in handles]
    trails = [await scene.trail(handle.id) for handle in handles]
    assert [await scene.provider.sends(handle.id) for handle in handles] == [1, 1, 0, 1]

    for handle in (unsent, unmarked, unmarked):  # twice: were it not stopped at the boundary, it would send as well
        stale.go(handle.id)
    stale.send(signal.SIGCONT)
    await stale.says(f"{fails.id} ends with JobFailed")
    await stale.says(f"{unmarked.id} ends with (LeaseLost|CancelledError)")  # at its mark, or by the keeper before
    await scene.provider.reaches(unsent.id, "succeeded")
    assert await stale.terminate() == 0
    assert [await handle.job() for handle in handles] == rows
    assert [await scene.trail(handle.id) for handle in handles] == trails
    assert [await scene.provider.sends(handle.id) for handle in handles] == [1, 1, 1, 1]

    for handle in handles:
        fenced, landed = await scene.attempts(handle.id)
        assert (fenced.outcome, landed.outcome) == ("lease_expired", (await handle.job()).status)
        assert landed.late_result is None
        answer = (await scene.provider.operation(handle.id)).get("result")
        assert fenced.late_result == (answer if handle in (lands, unsent) else None)


async def test_shutdown_before_the_boundary(scene: Scene) -> None:
    """Case 8 (leases and stale workers): at the end of the grace the job is released, and no attempt is counted."""
    first = await scene.start_worker("hold:claimed", grace_seconds=0.5)
    handle = await scene.create()
    await first.holds(handle.id, "claimed")
    assert await first.terminate() == 0
    job = await handle.job()
    assert (job.status, job.attempt_count, job.release_count, job.lease_generation) == ("queued", 0, 1, 1)
    assert await scene.trail(handle.id) == [("claimed", 1), ("retried", 1)]
    assert await scene.outcomes(handle.id) == ["released"]
    assert await scene.provider.sends(handle.id) == 0

    async with scene.second_worker():
        job = await scene.row_reaches(handle.id, "completed")
    assert (job.attempt_count, job.lease_generation) == (1, 2)
    assert await scene.outcomes(handle.id) == ["released", "completed"]
    assert await scene.provider.sends(handle.id) == 1


async def test_shutdown_during_the_send(scene: Scene) -> None:
    """Case 8 (leases and stale workers): at the end of the grace a job past its boundary is indeterminate."""
    await scene.provider.works(seconds=5)
    first = await scene.start_worker(grace_seconds=0.5)
    handle = await scene.create()
    await scene.provider.reaches(handle.id, "pending")
    assert await first.terminate() == 0
    job = await handle.job()
    assert (job.status, job.lease_generation) == ("indeterminate", 1)
    assert job.error is not None
    assert job.error.code == "WORKER_SHUTDOWN"
    assert await scene.trail(handle.id) == [("claimed", 1), ("dispatched", 1), ("indeterminate", 1)]
    assert await scene.outcomes(handle.id) == ["indeterminate"]
    # The call was still under way: it was not waited for.
    assert await scene.provider.operation(handle.id) == {"state": "pending", "sends": 1} | {
        "operation_key": job.operation_key
    }


@pytest.mark.parametrize("point", ["claimed", "answered"])
async def test_finished_within_the_grace(point: str, scene: Scene) -> None:
    """Case 8 (leases and stale workers): in a grace of several leases the leases are renewed till the handler returns,
    and the job completes on either side of its boundary."""
    first = await scene.start_worker(f"hold:{point}", grace_seconds=20)
    handle = await scene.create()
    await first.holds(handle.id, point)
    first.send(signal.SIGTERM)
    await first.tells(handle.id, "shutting_down")
    asked = (await handle.job()).heartbeat_at
    assert asked is not None

    async def two_leases_later() -> bool:
        renewed = (await handle.job()).heartbeat_at
        return renewed is not None and renewed - asked > timedelta(seconds=2)

    await until("the lease is renewed for two leases of the grace", two_leases_later)
    first.go(handle.id)
    assert await first.ended() == 0
    job = await handle.job()
    assert (job.status, job.lease_generation, job.release_count) == ("completed", 1, 0)
    assert await scene.trail(handle.id) == [("claimed", 1), ("dispatched", 1), ("completed", 1)]
    assert await scene.provider.sends(handle.id) == 1


async def test_an_idle_worker_does_not_wait_out_its_grace(scene: Scene) -> None:
    idle = await scene.start_worker(grace_seconds=600)
    assert await idle.terminate() == 0
