"""Cancelling against everything else: exactly one wins, both callers are told, and nothing cancelled runs again."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from durable_jobs import DurableJobService, JobStatus
from durable_jobs.contract.errors import IllegalTransition, InvalidInput, JobNotFound
from durable_jobs.contract.models import Claim, ClaimOutcome, ClaimRefusal
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
    names,
    row_locked,
    running,
    snapshot,
    sql,
    unchecked,
    until_waiting,
)

Begin = Callable[..., Awaitable[Claim]]
ROUNDS = 1000


async def cancel(service: DurableJobService, job_id: Any) -> str:
    return await service.cancel_job(job_id, "not wanted", "ann")


async def settle(service: DurableJobService, claim: Claim) -> JobStatus:
    """As a worker whose handler is done: its result completes the job; asked in time to stop, it yields."""
    if await service.renew_lease(claim):
        await service.complete_job(claim, {"by": claim.worker_id})
        return JobStatus.COMPLETED
    return (await service.acknowledge_cancellation(claim)).status


async def in_groups(rounds: int, one: Callable[[int], Awaitable[Any]], size: int = 8) -> list[Any]:
    """Run `one` for each round, some at a time."""
    slots = asyncio.Semaphore(size)

    async def slotted(number: int) -> Any:
        async with slots:
            return await one(number)

    return await asyncio.gather(*map(slotted, range(rounds)))


async def claim_many(service: DurableJobService, spec: Specs, count: int) -> list[Claim]:
    """Create and claim so many, through the verbs."""
    created = await service.create_jobs(spec() for _ in range(count))

    async def claim(number: int) -> Claim:
        outcome = await service.claim_job(A, uuid4(), job_id=created[number].job.id)
        assert outcome is not None
        assert outcome.claim is not None
        return outcome.claim

    return await in_groups(count, claim)


async def test_of_a_cancel_and_a_completion_one_wins(spec: Specs, database_url: str) -> None:
    """Case 17: 1,000 rounds of cancel against complete, barrier start, half of them past the boundary.

    Each round: the completion stands and its caller has it; the canceller is told either that it came too late, or
    that its request is on the row, which it is exactly then. Both orders are forced further below.
    """
    async with unchecked(database_url) as service:
        claims = await claim_many(service, spec, ROUNDS)

        async def one(number: int) -> str:
            claim, barrier = claims[number], asyncio.Barrier(2)
            if number % 2:
                await service.mark_provider_dispatched(claim, f"key:{claim.job_id}", consequential=False)

            async def canceller() -> str:
                await barrier.wait()
                return await cancel(service, claim.job_id)

            async def completer() -> JobStatus:
                await barrier.wait()
                return (await service.complete_job(claim, {"n": number})).job.status

            reply, status = await asyncio.gather(canceller(), completer())
            assert status is JobStatus.COMPLETED
            return reply

        replies = await in_groups(ROUNDS, one)
        rows = await sql(
            service,
            """
            SELECT j.id, j.status, j.result, j.cancel_requested_at IS NOT NULL AS flagged, array_agg(e.name) AS names
            FROM durable_jobs.jobs j JOIN durable_jobs.job_events e ON e.job_id = j.id
            WHERE e.name NOT IN ('claimed', 'heartbeat', 'dispatched') GROUP BY j.id
            """,
        )
        for claim in claims[::50]:
            assert await service.check_trail(claim.job_id) == []
    ended = {row["id"]: row for row in rows}
    assert len(ended) == ROUNDS
    for number, (claim, reply) in enumerate(zip(claims, replies, strict=True)):
        row = ended[claim.job_id]
        assert (row["status"], row["result"], row["names"]) == ("completed", {"n": number}, ["completed"])
        assert reply == ("requested" if row["flagged"] else "already_terminal:completed")


async def test_of_a_cancel_and_a_worker_that_heeds_it_one_wins(service: DurableJobService, spec: Specs) -> None:
    """Case 17, with a worker that looks before it completes: cancelled or completed, and both callers know which."""
    claims = await claim_many(service, spec, 100)

    async def one(number: int) -> tuple[str, JobStatus]:
        barrier = asyncio.Barrier(2)

        async def canceller() -> str:
            await barrier.wait()
            return await cancel(service, claims[number].job_id)

        async def worker() -> JobStatus:
            await barrier.wait()
            return await settle(service, claims[number])

        return await asyncio.gather(canceller(), worker())

    for claim, (reply, status) in zip(claims, await in_groups(100, one), strict=True):
        job = await service.get_job(claim.job_id)
        assert job.status is status
        assert status in (JobStatus.COMPLETED, JobStatus.CANCELLED)
        assert (job.result is not None) is (status is JobStatus.COMPLETED)
        if reply == "already_terminal:completed":
            assert (status, job.cancel_requested_at) == (JobStatus.COMPLETED, None)
        else:
            assert reply == "requested"
            assert job.cancel_requested_at is not None
        ends = [name for name in await names(service, job.id) if name in ("completed", "cancelled")]
        assert ends == [status]


async def test_of_a_cancel_and_a_claim_one_wins(service: DurableJobService, spec: Specs) -> None:
    """Case 17, of a queued job: cancelled and never claimed, or claimed and its holder asked."""
    created = await service.create_jobs(spec() for _ in range(100))

    async def one(number: int) -> tuple[str, ClaimOutcome | None]:
        job_id, barrier = created[number].job.id, asyncio.Barrier(2)

        async def canceller() -> str:
            await barrier.wait()
            return await cancel(service, job_id)

        async def claimer() -> ClaimOutcome | None:
            await barrier.wait()
            return await service.claim_job(A, uuid4(), job_id=job_id)

        return await asyncio.gather(canceller(), claimer())

    for answer, (reply, outcome) in zip(created, await in_groups(100, one), strict=True):
        assert outcome is not None
        job = await service.get_job(answer.job.id)
        if outcome:
            assert (reply, job.status, job.lease_generation) == ("requested", JobStatus.CLAIMED, 1)
            assert job.cancel_requested_at is not None
        else:
            assert (reply, outcome.refusal) == ("cancelled", ClaimRefusal.SETTLED)
            assert (job.status, job.lease_generation) == (JobStatus.CANCELLED, 0)


async def test_of_two_endings_by_one_holder_one_wins(service: DurableJobService, spec: Specs) -> None:
    """Case 17, one claim in two hands: one completes, the other acknowledges; the loser is told that it's over."""
    claims = await claim_many(service, spec, 50)

    async def one(number: int) -> list[Any]:
        claim, barrier = claims[number], asyncio.Barrier(2)
        await cancel(service, claim.job_id)

        async def after(verb: Callable[[], Awaitable[Any]]) -> Any:
            await barrier.wait()
            return await verb()

        return await asyncio.gather(
            after(lambda: service.complete_job(claim, {})),
            after(lambda: service.acknowledge_cancellation(claim)),
            return_exceptions=True,
        )

    for claim, ends in zip(claims, await in_groups(50, one), strict=True):
        (loser,) = [end for end in ends if isinstance(end, BaseException)]
        assert isinstance(loser, IllegalTransition)
        status = JobStatus.CANCELLED if loser is ends[0] else JobStatus.COMPLETED
        assert (await service.get_job(claim.job_id)).status is status


@pytest.mark.parametrize("begin", [claimed, running, dispatched])
@pytest.mark.parametrize("first", ["cancel", "complete"])
async def test_both_orders_of_the_race(
    service: DurableJobService, spec: Specs, database_url: str, begin: Begin, first: str
) -> None:
    """Case 17, each order forced: both wait for the row's lock, in the order in which they came."""
    claim = await begin(service, spec())
    verbs: dict[str, Callable[[], Any]] = {
        "cancel": lambda: cancel(service, claim.job_id),
        "complete": lambda: service.complete_job(claim, {}),
    }
    tasks: dict[str, asyncio.Task[Any]] = {}
    async with row_locked(database_url, claim.job_id):
        for waiting, name in enumerate(sorted(verbs, key=lambda name: name != first), start=1):
            tasks[name] = asyncio.create_task(verbs[name]())
            await until_waiting(database_url, waiting)
    assert (await tasks["complete"]).job.status is JobStatus.COMPLETED
    assert await tasks["cancel"] == ("requested" if first == "cancel" else "already_terminal:completed")
    assert ((await service.get_job(claim.job_id)).cancel_requested_at is not None) is (first == "cancel")


@pytest.mark.parametrize(
    ("begin", "status"),
    [
        (claimed, JobStatus.CANCELLED),
        (running, JobStatus.CANCELLED),
        (dispatched, JobStatus.INDETERMINATE),
    ],
)
async def test_a_cancelled_job_gets_no_new_attempt(
    service: DurableJobService, spec: Specs, begin: Begin, status: JobStatus
) -> None:
    """Case 18: cancel a running job before and after the marker, then let the worker report a retryable failure, or
    give it back, or just die: it never goes back to the queue and nobody claims it again."""

    async def dies(claim: Claim) -> None:
        await expire(service, claim.job_id)
        assert await service.claim_job(B, uuid4()) is None  # a scan leaves it alone
        assert not await service.claim_job(B, uuid4(), job_id=claim.job_id)

    async def dies_and_is_requeued(claim: Claim) -> None:
        await expire(service, claim.job_id)
        await service.requeue_job(claim.job_id, "ann", "the worker is gone")

    def fails(claim: Claim) -> Awaitable[Any]:
        return service.fail_job(claim, ERROR, retryable=True)

    def is_released(claim: Claim) -> Awaitable[Any]:
        return service.release_job(claim, "shutdown")

    ways: list[Callable[[Claim], Awaitable[Any]]] = [fails, dies]
    if begin is not dispatched:
        ways += [is_released, dies_and_is_requeued]
    for way in ways:
        claim = await begin(service, spec())
        assert await cancel(service, claim.job_id) == "requested"
        await way(claim)
        job = await service.get_job(claim.job_id)
        assert job.status is status, way
        assert "retried" not in await names(service, job.id)
        outcome = await service.claim_job(B, uuid4(), job_id=job.id)
        assert outcome is not None
        assert outcome.refusal is ClaimRefusal.SETTLED
        assert await service.claim_job(B, uuid4()) is None


async def test_a_queued_job_is_cancelled_at_once(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    assert await cancel(service, job.id) == "cancelled"
    cancelled = await service.get_job(job.id)
    assert (cancelled.status, cancelled.finished_at) == (JobStatus.CANCELLED, cancelled.updated_at)
    assert (cancelled.cancel_requested_at, cancelled.cancel_reason, cancelled.cancel_actor) == (
        cancelled.updated_at,
        "not wanted",
        "ann",
    )
    assert cancelled.error is not None
    assert (cancelled.error.code, cancelled.error.message) == ("CANCELLED", "cancelled by ann: not wanted")
    (event,) = (await service.list_job_events(job.id)).items
    assert (event.name, event.actor, event.occurred_at) == ("cancelled", "ann", cancelled.finished_at)
    assert (await service.list_job_attempts(job.id)).items == []


async def test_a_job_waiting_for_its_backoff_is_cancelled_at_once(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    await service.fail_job(claim, ERROR, retryable=True)
    assert await cancel(service, claim.job_id) == "cancelled"
    assert (await service.get_job(claim.job_id)).status is JobStatus.CANCELLED


@pytest.mark.parametrize("begin", [claimed, running, dispatched])
async def test_a_held_job_is_asked_to_stop(service: DurableJobService, spec: Specs, begin: Begin) -> None:
    """The flag alone changes; the first request stands, later ones are told the same."""
    claim = await begin(service, spec())
    before = await service.get_job(claim.job_id)
    assert await cancel(service, claim.job_id) == "requested"
    job = await service.get_job(claim.job_id)
    flag = {"cancel_requested_at": job.updated_at, "cancel_reason": "not wanted", "cancel_actor": "ann"}
    assert job == before.model_copy(update=flag | {"updated_at": job.updated_at})
    assert await service.cancel_job(claim.job_id, "really", "bob") == "requested"
    assert await service.get_job(claim.job_id) == job


async def test_an_ended_job_is_past_cancelling(service: DurableJobService, spec: Specs) -> None:
    for status in TERMINAL_BY_VERB:
        job = await end_in(service, await claimed(service, spec(max_attempts=1)), status)
        assert await cancel(service, job.id) == f"already_terminal:{status}"
        assert await service.get_job(job.id) == job


async def test_every_cancellation_is_audited(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    await cancel(service, claim.job_id)
    await service.cancel_job(claim.job_id, "really", "bob")
    await service.complete_job(claim, {})
    await service.cancel_job(claim.job_id, "now", "eve")
    audit = await sql(service, "SELECT * FROM durable_jobs.control_events ORDER BY id")
    assert [(row["action"], row["actor"], row["reason"], row["data"]["reply"]) for row in audit] == [
        ("cancel", "ann", "not wanted", "requested"),
        ("cancel", "bob", "really", "requested"),
        ("cancel", "eve", "now", "already_terminal:completed"),
    ]
    assert {(row["job_id"], row["organization_id"], row["project_id"]) for row in audit} == {
        (claim.job_id, "acme", "alpha")
    }


async def test_a_cancellation_needs_a_job_an_actor_and_a_reason(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    before = await snapshot(service, claim.job_id)
    for reason, actor, field in (
        ("", "ann", "reason"),
        ("why", " ", "actor"),
        ("a\x00b", "ann", "reason"),
        ("why", "\ud800", "actor"),
        ("x" * 2049, "ann", "reason"),
    ):
        with pytest.raises(InvalidInput, match=field):
            await service.cancel_job(claim.job_id, reason, actor)
    with pytest.raises(JobNotFound):
        await cancel(service, uuid4())
    assert await snapshot(service, claim.job_id) == before
