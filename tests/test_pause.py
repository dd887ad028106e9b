"""A paused queue on Temporal: its jobs wait without asking again and again, and notice a resume at once."""

from collections import Counter
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client

from durable_jobs import DurableJobs, DurableJobService, JobContext, JobStatus
from durable_jobs.client import JobHandle
from durable_jobs.contract.models import ClaimOutcome
from durable_jobs.temporal import messages
from durable_jobs.temporal.listener import EnqueueListener
from durable_jobs.temporal.messages import JobView
from durable_jobs.temporal.steps import Act, next_step
from tests.conftest import Specs, Workers
from tests.probes import Gate, Probe, eventually
from tests.support import claimed, expire
from tests.sweeping import NEVER

TIMER_STARTED, TIMER_FIRED = EventType.EVENT_TYPE_TIMER_STARTED, EventType.EVENT_TYPE_TIMER_FIRED
TIMER_CANCELED = EventType.EVENT_TYPE_TIMER_CANCELED
SCHEDULED = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED


@pytest.fixture(autouse=True)
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hears of nothing that was enqueued in SQL."""
    monkeypatch.setattr(EnqueueListener, "start", lambda self: None)


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Counter[UUID]:
    """How often each job was claimed, or was tried to be, by the worker of this process."""
    counted: Counter[UUID] = Counter()
    real = DurableJobService.claim_job

    async def claim(
        service: DurableJobService, worker_id: str, claim_token: UUID, job_id: UUID | None = None, **scope: Any
    ) -> ClaimOutcome | None:
        if job_id is not None:
            counted[job_id] += 1
        return await real(service, worker_id, claim_token, job_id=job_id, **scope)

    monkeypatch.setattr(DurableJobService, "claim_job", claim)
    return counted


async def returns(job: JobContext, request: dict[str, Any]) -> Any:
    return {"attempt": job.attempt}


async def events_of(client: Client, handle: JobHandle) -> list[Any]:
    history = await client.get_workflow_handle(handle.workflow_id).fetch_history()
    return list(history.events)


def waits(events: list[Any]) -> list[float]:
    """The seconds that the workflow meant to wait, time after time."""
    timers = [each.timer_started_event_attributes for each in events if each.event_type == TIMER_STARTED]
    return [timer.start_to_fire_timeout.ToTimedelta().total_seconds() for timer in timers]


async def waiting(client: Client, handle: JobHandle, *, at_least: float) -> list[Any]:
    """The workflow's history, once it has begun to wait for so many seconds."""

    async def look() -> list[Any] | None:
        events = await events_of(client, handle)
        return events if waits(events)[-1:] >= [at_least] else None

    events: list[Any] = await eventually(look, f"a wait of {at_least:g} s")
    return events


def ended_early(events: list[Any]) -> bool:
    """Whether the last wait was ended by a wake, rather than by its time."""
    last = [each.event_type for each in events if each.event_type in (TIMER_STARTED, TIMER_FIRED, TIMER_CANCELED)]
    return last[-2:] == [TIMER_STARTED, TIMER_CANCELED]


async def test_the_jobs_of_a_paused_queue_wait_ever_longer_and_resume_at_once(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str, claims: Counter[UUID]
) -> None:
    """One try for each wait, and the waits widen: no poll per job per second. A resume ends them early."""
    handler = Probe(returns)
    async with worker(handler, reconcile_every=NEVER):
        await jobs.service.pause_queue(queue, actor="ann", reason="their outage")
        handles = await jobs.create_jobs([spec() for _ in range(4)])
        for handle in handles:
            events = await waiting(temporal_client, handle, at_least=4)
            assert all(2 * one <= other for one, other in pairwise(waits(events)))
            tried = [each for each in events if each.event_type == SCHEDULED]
            assert {each.activity_task_scheduled_event_attributes.activity_type.name for each in tried} == {
                messages.RUN_ATTEMPT
            }
            assert len(tried) == claims[handle.id] == len(waits(events)) <= 3
            job = await handle.job()
            assert (job.status, job.attempt_count, job.lease_generation) == (JobStatus.QUEUED, 0, 0)
            assert await handle.events() == []
        assert handler.calls == 0
        assert await jobs.resume_queue(queue, actor="bob", reason="it is over") == 4
        for handle in handles:
            assert await handle.result(timeout=20) == {"attempt": 1}
            events = await events_of(temporal_client, handle)
            assert ended_early(events)
            assert claims[handle.id] == len(waits(events)) + 1


def test_a_wait_is_at_most_five_minutes() -> None:
    """Should nobody tell it of the resume, it looks by itself."""
    paused = JobView(status="queued", settled=False, terminal=False, code=messages.PAUSED)
    steps = [next_step(paused, idle, False) for idle in (1, 2, 9, 10, 1000)]
    assert [(step.act, step.seconds) for step in steps] == [(Act.WAIT, each) for each in (1, 2, 256, 300, 300)]


async def test_a_type_is_paused_alone(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    class Other(Probe):
        job_type = "other"

    paused, other = Probe(returns), Other(returns)
    async with worker(paused, other, reconcile_every=NEVER):
        await jobs.service.pause_queue(queue, "probe", actor="ann", reason="their outage")
        held_back = await jobs.create_job(spec())
        await waiting(temporal_client, held_back, at_least=1)
        assert await (await jobs.create_job(spec(job_type="other"))).result(timeout=20) == {"attempt": 1}
        # The queue's own pause, set and lifted, leaves the type's where it is: its jobs are woken, and wait on.
        await jobs.service.pause_queue(queue, actor="ann", reason="all of it")
        assert await jobs.resume_queue(queue, actor="ann", reason="only that type after all") == 1
        await waiting(temporal_client, held_back, at_least=2)
        assert await held_back.status() is JobStatus.QUEUED
        assert await jobs.resume_queue(queue, "probe", actor="ann", reason="it is over") == 1
        assert await held_back.result(timeout=20) == {"attempt": 1}
    assert (paused.calls, other.calls) == (1, 1)


async def test_an_attempt_in_hand_goes_on_to_its_end(
    jobs: DurableJobs, worker: Workers, spec: Specs, queue: str
) -> None:
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        await gate.wait()
        async with job.dispatch(f"probe:{job.id}"):
            return {"attempt": job.attempt}

    async with worker(Probe(script), reconcile_every=NEVER):
        handle = await jobs.create_job(spec())
        await gate.handler_came()
        await jobs.service.pause_queue(queue, actor="ann", reason="their outage")
        gate.go_on.set()
        assert await handle.result(timeout=20) == {"attempt": 1}


async def test_a_paused_job_can_be_cancelled(jobs: DurableJobs, worker: Workers, spec: Specs, queue: str) -> None:
    async with worker(Probe(returns), reconcile_every=NEVER):
        await jobs.service.pause_queue(queue, actor="ann", reason="their outage")
        handle = await jobs.create_job(spec())
        assert await handle.cancel("not wanted", "ann") == "cancelled"
    assert await handle.status() is JobStatus.CANCELLED


async def test_a_resume_wakes_those_that_wait_to_be_reclaimed(
    jobs: DurableJobs, temporal_client: Client, worker: Workers, spec: Specs, queue: str
) -> None:
    """Its worker died before the boundary, and meanwhile its queue was paused: it waits for the resume as the others
    do, up to five minutes, or up to the next sweep."""
    claim = await claimed(jobs.service, spec())
    await expire(jobs.service, claim.job_id)
    await jobs.service.pause_queue(queue, actor="ann", reason="their outage")
    handle = jobs.handle(claim.job_id)
    async with worker(Probe(returns), reconcile_every=NEVER):
        await handle.wake()
        await waiting(temporal_client, handle, at_least=2)
        assert await jobs.resume_queue(queue, actor="bob", reason="it is over") == 1
        assert await handle.result(timeout=20) == {"attempt": 2}
        assert ended_early(await events_of(temporal_client, handle))
