"""The dispatch boundary: crossed once per intent, by the live holder alone, under a key of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from durable_jobs import Database, DurableJobService, JobStatus
from durable_jobs.contract.errors import (
    AlreadyDispatched,
    CancellationRequested,
    IllegalTransition,
    InvalidInput,
    JobNotFound,
    LeaseLost,
    OperationKeyConflict,
)
from durable_jobs.contract.models import Claim, ClaimRefusal
from tests.conftest import Specs
from tests.support import (
    ERROR,
    TERMINAL_BY_VERB,
    A,
    B,
    claimed,
    dispatched,
    end_in,
    expire,
    make_due,
    names,
    reclaimed,
    row_locked,
    running,
    snapshot,
    until_lease_is_dead,
    until_waiting,
)

Begin = Callable[[DurableJobService, Any], Awaitable[Claim]]


async def refused(service: DurableJobService, claim: Claim, error: type[Exception], key: str = "a key") -> Exception:
    """The mark is refused with this very error, and wrote nothing: nothing may be sent."""
    before = await snapshot(service, claim.job_id)
    with pytest.raises(error) as refusal:
        await service.mark_provider_dispatched(claim, key, consequential=False)
    assert refusal.type is error
    assert await snapshot(service, claim.job_id) == before
    return refusal.value


@pytest.mark.parametrize("begin", [claimed, running])
async def test_the_mark_records_time_generation_and_key(service: DurableJobService, spec: Specs, begin: Begin) -> None:
    claim = await begin(service, spec(lease_seconds=7))
    before = await service.get_job(claim.job_id)
    answer = await service.mark_provider_dispatched(claim, "the key", consequential=False)
    job = await service.get_job(claim.job_id)
    at = job.dispatched_at
    assert at is not None
    marked = {
        "status": JobStatus.RUNNING,
        "dispatched_at": at,
        "dispatched_generation": 1,
        "operation_key": "the key",
        "heartbeat_at": at,
        "updated_at": at,
        "lease_expires_at": at + timedelta(seconds=7),
    }
    assert job == before.model_copy(update=marked)
    assert (answer.status, answer.dispatched_at, answer.dispatched_generation, answer.operation_key) == (
        JobStatus.RUNNING,
        at,
        1,
        "the key",
    )
    (attempt,) = (await service.list_job_attempts(job.id)).items
    assert (attempt.dispatched_at, attempt.operation_key) == (at, "the key")
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.occurred_at, event.status, event.data) == (
        "dispatched",
        at,
        JobStatus.RUNNING,
        {"operation_key": "the key"},
    )


async def test_the_mark_answers_with_the_row_as_it_stands(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    assert await service.mark_provider_dispatched(claim, "the key", consequential=False) == await service.get_job(
        claim.job_id
    )


async def test_the_boundary_is_crossed_once(service: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(service, spec())
    for key in (f"key:{claim.job_id}", "another"):
        await refused(service, claim, AlreadyDispatched, key)
    # Also when the lease has run out, or a cancellation came: it was crossed, whatever else.
    await service.cancel_job(claim.job_id, "not wanted", "ann")
    await refused(service, claim, AlreadyDispatched)
    await expire(service, claim.job_id)
    await refused(service, claim, AlreadyDispatched)


@pytest.mark.parametrize("begin", [claimed, running])
async def test_no_mark_under_cancellation(service: DurableJobService, spec: Specs, begin: Begin) -> None:
    claim = await begin(service, spec())
    await service.cancel_job(claim.job_id, "not wanted", "ann")
    await refused(service, claim, CancellationRequested)
    await expire(service, claim.job_id)
    await refused(service, claim, CancellationRequested)


async def test_no_mark_with_a_dead_lease(service: DurableJobService, spec: Specs) -> None:
    """Also when nobody else has claimed the job: from that moment on somebody may."""
    claim = await running(service, spec())
    await expire(service, claim.job_id)
    await refused(service, claim, LeaseLost)
    # Renewed in time, the same holder may.
    assert await service.renew_lease(claim)
    await service.mark_provider_dispatched(claim, "a key", consequential=False)


async def test_no_mark_by_a_fenced_holder(service: DurableJobService, spec: Specs) -> None:
    first = await running(service, spec())
    await expire(service, first.job_id)
    second = await reclaimed(service, first.job_id, B)
    await refused(service, first, LeaseLost)
    await refused(service, first.model_copy(update={"generation": 2}), LeaseLost)
    await refused(service, second.model_copy(update={"generation": 1}), LeaseLost)
    await service.mark_provider_dispatched(second, "a key", consequential=False)
    await refused(service, first, LeaseLost)


async def test_no_mark_after_the_holders_own_exit(service: DurableJobService, spec: Specs) -> None:
    for status in (JobStatus.QUEUED, *TERMINAL_BY_VERB):
        claim = await running(service, spec(max_attempts=1))
        if status is JobStatus.QUEUED:
            await service.release_job(claim, "shutdown")
        else:
            await end_in(service, claim, status)
        await refused(service, claim, LeaseLost if status is JobStatus.QUEUED else IllegalTransition)


async def test_no_mark_with_an_unusable_key(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    for key in ("", "  ", "k" * 256, "a\x00b", "a\nb", "\ud800"):
        assert "operation_key" in str(await refused(service, claim, InvalidInput, key))
    await service.mark_provider_dispatched(claim, "😀" * 255, consequential=False)


async def test_no_mark_of_an_unknown_job(service: DurableJobService) -> None:
    with pytest.raises(JobNotFound):
        await service.mark_provider_dispatched(
            Claim(job_id=uuid4(), worker_id=A, generation=1), "a key", consequential=False
        )


async def test_of_two_marks_at_once_one_crosses(service: DurableJobService, spec: Specs, database_url: str) -> None:
    """Case 11, one claim in two hands, such as an activity that Temporal ran twice: forced to mark together."""
    claim = await claimed(service, spec())
    async with row_locked(database_url, claim.job_id):
        tasks = [
            asyncio.create_task(service.mark_provider_dispatched(claim, f"key {n}", consequential=False))
            for n in range(5)
        ]
        await until_waiting(database_url, 5)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    (winner,) = [answer for answer in answers if not isinstance(answer, BaseException)]
    losers = [type(answer) for answer in answers if isinstance(answer, BaseException)]
    assert losers == [AlreadyDispatched] * 4
    job = await service.get_job(claim.job_id)
    assert job.operation_key == winner.operation_key == f"key {answers.index(winner)}"
    assert await names(service, job.id) == ["claimed", "dispatched"]


async def test_of_two_holders_that_mark_the_fenced_one_stops(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Case 11, two generations: B's claim is ahead of A's mark in the row's queue; A is told, B crosses."""
    first = await running(service, spec())
    await expire(service, first.job_id)
    async with row_locked(database_url, first.job_id):
        claiming = asyncio.create_task(reclaimed(service, first.job_id, B))
        await until_waiting(database_url, 1)
        marking = asyncio.create_task(service.mark_provider_dispatched(first, "a's key", consequential=False))
        await until_waiting(database_url, 2)
    second = await claiming
    with pytest.raises(LeaseLost):
        await marking
    assert (await service.get_job(first.job_id)).dispatched_at is None
    await service.mark_provider_dispatched(second, "b's key", consequential=False)
    job = await service.get_job(first.job_id)
    assert (job.operation_key, job.dispatched_generation) == ("b's key", 2)


async def test_a_mark_that_waited_past_its_lease_is_refused(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Case 11, the wait: the clock that counts is read after the lock was got, not when the statement began."""
    claim = await running(service, spec(lease_seconds=1))
    before = await snapshot(service, claim.job_id)
    async with row_locked(database_url, claim.job_id):
        marking = asyncio.create_task(service.mark_provider_dispatched(claim, "too late", consequential=False))
        await until_waiting(database_url)
        await until_lease_is_dead(database_url, claim.job_id)
    with pytest.raises(LeaseLost):
        await marking
    assert await snapshot(service, claim.job_id) == before


async def test_a_reclaim_that_waited_for_a_mark_finds_the_job_held(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """The mark was in time, by a moment: it renewed the lease, and the job isn't landed under the sender."""
    claim = await running(service, spec())
    async with row_locked(database_url, claim.job_id):
        marking = asyncio.create_task(service.mark_provider_dispatched(claim, "a key", consequential=False))
        await until_waiting(database_url, 1)
        claiming = asyncio.create_task(service.claim_job(B, uuid4(), job_id=claim.job_id))
        await until_waiting(database_url, 2)
    await marking
    outcome = await claiming
    assert outcome is not None
    assert outcome.refusal is ClaimRefusal.HELD
    assert outcome.job == await service.get_job(claim.job_id)


async def test_a_mark_that_waited_for_a_cancellation_is_refused(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    claim = await running(service, spec())
    async with row_locked(database_url, claim.job_id):
        cancelling = asyncio.create_task(service.cancel_job(claim.job_id, "not wanted", "ann"))
        await until_waiting(database_url, 1)
        marking = asyncio.create_task(service.mark_provider_dispatched(claim, "a key", consequential=False))
        await until_waiting(database_url, 2)
    assert await cancelling == "requested"
    with pytest.raises(CancellationRequested):
        await marking


async def test_the_key_is_recorded_once_and_stays(service: DurableJobService, spec: Specs, database_url: str) -> None:
    """Case 15, the kind: over two attempts, a restart and a retry the key is stored with the boundary, before any
    send; each intent has one, and no later act rewrites it."""
    first = await running(service, spec())
    await service.fail_job(first, ERROR, retryable=True)
    assert (await service.get_job(first.job_id)).operation_key is None
    await make_due(service, first.job_id)
    second = await reclaimed(service, first.job_id, B)
    await service.mark_provider_dispatched(second, "research:17", consequential=False)
    restarted = Database(database_url)
    try:
        for reader in (service, DurableJobService(restarted)):
            assert (await reader.get_job(first.job_id)).operation_key == "research:17"
    finally:
        await restarted.close()
    await service.fail_job(second, ERROR, retryable=False)
    assert (await service.get_job(first.job_id)).operation_key == "research:17"
    await service.retry_job(first.job_id, "ann", "try again")
    third = await reclaimed(service, first.job_id)
    # Evidence of the first intent must never be read as the second's.
    await refused(service, third, OperationKeyConflict, "research:17")
    await service.mark_provider_dispatched(third, "research:17:retry-1", consequential=False)
    attempts = (await service.list_job_attempts(first.job_id)).items
    assert [(attempt.intent_number, attempt.operation_key) for attempt in attempts] == [
        (0, None),
        (0, "research:17"),
        (1, "research:17:retry-1"),
    ]
    marks = [event for event in (await service.list_job_events(first.job_id)).items if event.name == "dispatched"]
    assert [event.data["operation_key"] for event in marks] == ["research:17", "research:17:retry-1"]


async def test_a_key_is_unique_within_its_project(service: DurableJobService, spec: Specs) -> None:
    """Case 15, two jobs under one key: a lookup by key could not tell them apart."""
    first = await claimed(service, spec())
    await service.mark_provider_dispatched(first, "shared", consequential=False)
    for ends in (False, True):
        if ends:
            await service.complete_job(first, {})
        second = await running(service, spec())
        assert "'shared'" in str(await refused(service, second, OperationKeyConflict, "shared"))
        await service.mark_provider_dispatched(second, f"own {ends}", consequential=False)
    for organization, project in (("acme", "beta"), ("globex", "alpha")):
        elsewhere = await claimed(service, spec(organization=organization, project=project))
        await service.mark_provider_dispatched(elsewhere, "shared", consequential=False)


async def test_of_two_jobs_that_take_one_key_at_once_one_crosses(service: DurableJobService, spec: Specs) -> None:
    for _ in range(20):
        claims = [await claimed(service, spec()) for _ in range(2)]
        key, barrier = uuid4().hex, asyncio.Barrier(2)

        async def mark(claim: Claim, key: str = key, barrier: asyncio.Barrier = barrier) -> bool:
            await barrier.wait()
            try:
                await service.mark_provider_dispatched(claim, key, consequential=False)
            except OperationKeyConflict:
                return False
            return True

        crossed = await asyncio.gather(*map(mark, claims))
        assert sorted(crossed) == [False, True]
        for claim, did in zip(claims, crossed, strict=True):
            assert ((await service.get_job(claim.job_id)).dispatched_at is not None) is did


async def test_a_new_intent_has_a_boundary_of_its_own(service: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(service, spec())
    for intent in range(1, 4):
        await service.fail_job(claim, ERROR, retryable=False)
        await service.retry_job(claim.job_id, "ann", "try again")
        claim = await reclaimed(service, claim.job_id)
        await service.mark_provider_dispatched(claim, f"key:{intent}", consequential=False)
        await refused(service, claim, AlreadyDispatched)
        job = await service.get_job(claim.job_id)
        assert (job.intent_number, job.operation_key, job.dispatched_generation) == (
            intent,
            f"key:{intent}",
            intent + 1,
        )
