"""A lease holds for as long as its worker renews it, however slowly, and whatever else is broken."""

import asyncio
import time
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import pytest

from durable_jobs import DurableJobs, DurableJobService, EventName, JobContext
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.contract.models import ClaimRefusal
from durable_jobs.temporal.keeper import LeaseKeeper
from tests.conftest import Specs, Workers
from tests.probes import OTHER_WORKER, Gate, Probe, Provider, trail


class Rival:
    """Asks for the job all the time; nobody but its holder may have it while the lease holds."""

    def __init__(self, service: DurableJobService, job_id: UUID) -> None:
        self.refusals: list[ClaimRefusal | None] = []
        self._service, self._job_id = service, job_id

    async def ask_until(self, ended: asyncio.Event) -> None:
        async with asyncio.timeout(30):
            while not ended.is_set():
                outcome = await self._service.claim_job(OTHER_WORKER, uuid4(), job_id=self._job_id)
                assert outcome is not None
                if outcome or not ended.is_set():
                    self.refusals.append(outcome.refusal)
                if outcome.refusal is not ClaimRefusal.HELD:
                    return
                await asyncio.sleep(0.05)


class SlowKeeper:
    """Makes each renewal of every keeper take two seconds more, and notes when it was made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
        self.renewals: list[float] = []
        renew = LeaseKeeper._renew

        def slowly(keeper: LeaseKeeper, *arguments: Any) -> None:
            if before:
                time.sleep(2)
            self.renewals.append(time.monotonic())
            renew(keeper, *arguments)
            if not before:
                time.sleep(2)

        monkeypatch.setattr(LeaseKeeper, "_renew", slowly)

    def longest_gap(self, since: float) -> float:
        """Between two renewals, or the claim and the first: a machine that stands still makes it longer."""
        times = [since, *(each for each in self.renewals if each > since)]
        return max(later - earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize(("slow", "seconds"), [("before the renewal", 10), ("before its answer", 6)])
async def test_a_slow_renewal_loses_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch, slow: str, seconds: float
) -> None:
    """Case 4 of the catalogue, of the kind "leases": a lease of 3 s, a job of 10 s, and each renewal takes 2 s more."""
    keeper = SlowKeeper(monkeypatch, before=slow == "before the renewal")
    provider, claimed, ended = Provider(), asyncio.Event(), asyncio.Event()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        claimed.set()
        await asyncio.sleep(seconds / 2)
        async with job.dispatch(f"probe:{job.id}") as key:
            await asyncio.sleep(seconds / 2)
            ended.set()
            return await provider.call(key)

    handler = Probe(script)
    async with worker(handler):
        for _ in range(3):
            handle = await jobs.create_job(spec(lease_seconds=3))
            await asyncio.wait_for(claimed.wait(), 20)
            began, rival = time.monotonic(), Rival(jobs.service, handle.id)
            await rival.ask_until(ended)
            if keeper.longest_gap(began) < 2.9:
                break
            claimed.clear()
            ended.clear()
        assert set(rival.refusals) == {ClaimRefusal.HELD}
        assert await handle.result(timeout=20) == {"sent": f"probe:{handle.id}"}
    assert provider.keys.count(f"probe:{handle.id}") == 1
    assert await trail(jobs.service, handle.id) == [
        EventName.CLAIMED,
        EventName.DISPATCHED,
        EventName.COMPLETED,
    ]


async def test_a_broken_claim_path_costs_no_lease(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 5 of the catalogue, of the kind "leases": for two leases nothing can be claimed, while renewals work."""
    provider, gate, repaired = Provider(), Gate(), asyncio.Event()
    broken, refused = asyncio.Event(), 0
    claim_job = DurableJobService.claim_job

    async def claim(self: DurableJobService, worker_id: str, *arguments: Any, **named: Any) -> Any:
        nonlocal refused
        if broken.is_set() and worker_id != OTHER_WORKER:
            refused += 1
            raise StoreUnavailable("no claim gets through")
        return await claim_job(self, worker_id, *arguments, **named)

    monkeypatch.setattr(DurableJobService, "claim_job", claim)

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if request["n"] == 1:
            await gate.wait()
        async with job.dispatch(f"probe:{job.id}") as key:
            return await provider.call(key)

    async with worker(Probe(script)):
        held = await jobs.create_job(spec(lease_seconds=1.5))
        await gate.handler_came()
        broken.set()
        waiting = [await jobs.create_job(spec(lease_seconds=1.5, payload={"n": 2})) for _ in range(5)]
        rival = Rival(jobs.service, held.id)
        asking = asyncio.create_task(rival.ask_until(repaired))
        await asyncio.sleep(3)  # two leases
        repaired.set()
        await asking
        broken.clear()
        gate.go_on.set()
        for handle in (held, *waiting):
            assert await handle.result(timeout=30) == {"sent": f"probe:{handle.id}"}
            assert (await handle.job()).lease_generation == 1
    assert refused >= len(waiting)
    assert set(rival.refusals) == {ClaimRefusal.HELD}
    assert len(provider.keys) == 6
