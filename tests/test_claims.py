"""Claiming: which job comes next, to whom, under which generation; and where a reclaim lands instead."""

import asyncio
from datetime import timedelta
from itertools import product
from typing import Any
from uuid import UUID, uuid4

import pytest

from durable_jobs import DurableJobService, Job, JobStatus
from durable_jobs.contract.errors import InvalidInput, LeaseLost, StoreUnavailable
from durable_jobs.contract.models import Claim, ClaimOutcome, ClaimRefusal, LeaseStatus
from tests.conftest import Specs
from tests.support import (
    HOLDER_VERBS,
    TERMINAL_BY_VERB,
    A,
    B,
    claimed,
    dispatched,
    end_in,
    expire,
    names,
    reclaimed,
    row_locked,
    running,
    snapshot,
    sql,
    until_waiting,
)


async def claim_all(service: DurableJobService, worker: str = B, **scope: Any) -> list[Job]:
    """Claim whatever is eligible, one after the other."""
    jobs = []
    while outcome := await service.claim_job(worker, uuid4(), **scope):
        assert outcome.job is not None
        jobs.append(outcome.job)
    return jobs


async def refusal(service: DurableJobService, job_id: UUID, worker: str = B, **scope: Any) -> ClaimOutcome:
    """The falsy outcome of a claim by id."""
    outcome = await service.claim_job(worker, uuid4(), job_id=job_id, **scope)
    assert outcome is not None
    assert not outcome
    return outcome


def claim_order(job: Job) -> tuple[Any, ...]:
    return (-job.priority, job.scheduled_at, job.created_at, job.id)


async def test_a_claim_takes_the_job(service: DurableJobService, spec: Specs) -> None:
    created = (await service.create_job(spec(lease_seconds=7))).job
    token = uuid4()
    outcome = await service.claim_job(A, token)
    assert outcome is not None
    assert outcome.claim == Claim(job_id=created.id, worker_id=A, generation=1)
    job = await service.get_job(created.id)
    assert outcome.job == job
    now = job.heartbeat_at
    assert now is not None
    expected = {
        "status": JobStatus.CLAIMED,
        "attempt_count": 1,
        "lease_generation": 1,
        "lease_id": A,
        "claimed_by": A,
        "claim_token": token,
        "lease_expires_at": now + timedelta(seconds=7),
        "heartbeat_at": now,
        "started_at": now,
        "updated_at": now,
        "launch_check_at": job.launch_check_at,
    }
    assert job == created.model_copy(update=expected)
    (event,) = (await service.list_job_events(job.id)).items
    assert (event.name, event.actor, event.occurred_at, event.generation) == ("claimed", A, now, 1)
    (attempt,) = (await service.list_job_attempts(job.id)).items
    assert (attempt.generation, attempt.worker_id, attempt.claimed_at, attempt.ended_at) == (1, A, now, None)


async def test_the_order_is_priority_schedule_age_id(service: DurableJobService, spec: Specs) -> None:
    """Bulk creation gives all one age, so that the id decides; the rest is shuffled over priorities and schedules."""
    first = (await service.create_job(spec())).job
    times = [first.created_at - timedelta(hours=hours) for hours in (3, 2, 1)]
    specs = [
        spec(priority=priority, scheduled_at=at)
        for _ in range(2)
        for priority, at in product((0, 2, -2, 1, -1), (*times, times[0], None))
    ]
    created = [answer.job for answer in await service.create_jobs(specs)] + [first]
    assert len({job.created_at for job in created}) == 2
    order = [job.id for job in await claim_all(service)]
    assert order == [job.id for job in sorted(created, key=claim_order)]


async def test_expired_leases_take_their_place_in_the_order(service: DurableJobService, spec: Specs) -> None:
    """Jobs whose lease ran out stand in the one order with the queued ones, not before or behind them."""
    specs = [spec(priority=priority, max_attempts=2) for priority in (0, 1, -1) for _ in range(6)]
    created = [answer.job for answer in await service.create_jobs(specs)]
    for job in created[::2]:
        await reclaimed(service, job.id, A)
        await expire(service, job.id)
    order = [job.id for job in await claim_all(service)]
    assert order == [job.id for job in sorted(created, key=claim_order)]


async def test_a_job_is_not_claimed_before_its_time(service: DurableJobService, spec: Specs) -> None:
    now = (await service.create_job(spec(organization="clock"))).job.created_at
    early = (await service.create_job(spec(scheduled_at=now + timedelta(hours=1), priority=2))).job
    due = (await service.create_job(spec(scheduled_at=now - timedelta(hours=1)))).job
    assert [job.id for job in await claim_all(service, organizations=["acme"])] == [due.id]
    assert (await refusal(service, early.id)).refusal is ClaimRefusal.NOT_DUE
    assert await names(service, early.id) == []


async def test_scope_narrows_what_is_claimed(service: DurableJobService, spec: Specs) -> None:
    """Every combination of organizations, queues and job types, in a scan and by id."""
    axes = {"organization": ("acme", "globex"), "queue": ("q1", "q2"), "job_type": ("one", "two")}
    combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    choices = [(None, [], [first], [second, first]) for first, second in axes.values()]
    for chosen in product(*choices):
        scope = {f"{axis}s": values for axis, values in zip(axes, chosen, strict=True)}
        inside, outside = set(), set()
        created = await service.create_jobs(spec(**fields) for fields in combinations)
        for answer, fields in zip(created, combinations, strict=True):
            fits = all(values is None or fields[axis] in values for axis, values in zip(axes, chosen, strict=True))
            (inside if fits else outside).add(answer.job.id)
        for job_id in outside:
            assert (await refusal(service, job_id, **scope)).refusal is ClaimRefusal.OUT_OF_SCOPE
        assert {job.id for job in await claim_all(service, **scope)} == inside, scope
        await sql(service, "DELETE FROM durable_jobs.jobs")


async def test_an_expired_lease_out_of_scope_is_left_alone(service: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(service, spec(organization="globex"))
    await expire(service, claim.job_id)
    before = await snapshot(service, claim.job_id)
    assert await service.claim_job(B, uuid4(), organizations=["acme"]) is None
    assert (await refusal(service, claim.job_id, organizations=["acme"])).refusal is ClaimRefusal.OUT_OF_SCOPE
    assert await snapshot(service, claim.job_id) == before


async def test_a_job_type_is_asked_for_in_any_case(service: DurableJobService, spec: Specs) -> None:
    """Types are folded to lower case where they are stored, so they must be where they are asked for."""
    job = (await service.create_job(spec(job_type="Research"))).job
    assert [found.id for found in (await service.list_jobs(job_type="Research")).items] == [job.id]
    assert [found.id for found in await claim_all(service, job_types=["Research"])] == [job.id]


async def test_no_job_has_two_claimers(service: DurableJobService, spec: Specs) -> None:
    created = await service.create_jobs(spec(priority=n % 5 - 2) for n in range(200))
    barrier = asyncio.Barrier(20)

    async def work(number: int) -> list[UUID]:
        await barrier.wait()
        return [job.id for job in await claim_all(service, f"worker-{number}")]

    taken = [job_id for found in await asyncio.gather(*map(work, range(20))) for job_id in found]
    assert sorted(taken) == sorted(answer.job.id for answer in created)
    assert {job.lease_generation for job in (await service.list_jobs(limit=1000)).items} == {1}


async def test_one_job_has_one_of_many_claimers_by_id(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    job = (await service.create_job(spec())).job
    async with row_locked(database_url, job.id):
        tasks = [asyncio.create_task(service.claim_job(f"worker-{n}", uuid4(), job_id=job.id)) for n in range(8)]
        await until_waiting(database_url, 8)
    outcomes = await asyncio.gather(*tasks)
    assert sorted(outcome.refusal or "" for outcome in outcomes if outcome is not None) == ["", *["held"] * 7]
    assert await names(service, job.id) == ["claimed"]


async def test_the_next_claim_skips_a_locked_row(service: DurableJobService, spec: Specs, database_url: str) -> None:
    first, second = [answer.job for answer in await service.create_jobs([spec(priority=1), spec()])]
    async with row_locked(database_url, first.id):
        assert [job.id for job in await claim_all(service)] == [second.id]
    assert [job.id for job in await claim_all(service)] == [first.id]


async def test_a_locked_row_hides_no_other(service: DurableJobService, spec: Specs, database_url: str) -> None:
    """A queued row that another session has locked must not keep an expired one behind it from being claimed."""
    expired, queued = [answer.job for answer in await service.create_jobs([spec(), spec(priority=1)])]
    await reclaimed(service, expired.id, A)
    await expire(service, expired.id)
    async with row_locked(database_url, queued.id):
        assert [job.id for job in await claim_all(service)] == [expired.id]


async def test_a_claim_by_id_waits_for_the_lock(service: DurableJobService, spec: Specs, database_url: str) -> None:
    job = (await service.create_job(spec())).job
    async with row_locked(database_url, job.id) as own:
        waiting = asyncio.create_task(service.claim_job(A, uuid4(), job_id=job.id))
        await until_waiting(database_url)
        await own.execute("UPDATE durable_jobs.jobs SET priority = 1 WHERE id = %s", [job.id])
    outcome = await waiting
    assert outcome
    assert outcome.job is not None
    assert (outcome.job.priority, outcome.job.lease_generation) == (1, 1)


async def test_a_claim_by_id_judges_the_row_as_it_is_after_the_wait(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """A reclaim that waited while the holder renewed finds the lease alive."""
    claim = await running(service, spec())
    await expire(service, claim.job_id)
    async with row_locked(database_url, claim.job_id) as own:
        waiting = asyncio.create_task(service.claim_job(B, uuid4(), job_id=claim.job_id))
        await until_waiting(database_url)
        await own.execute(
            "UPDATE durable_jobs.jobs SET lease_expires_at = clock_timestamp() + interval '1 minute' WHERE id = %s",
            [claim.job_id],
        )
    outcome = await waiting
    assert outcome is not None
    assert outcome.refusal is ClaimRefusal.HELD
    assert await service.renew_lease(claim)


async def test_a_lock_that_nobody_gives_back_ends_in_a_typed_error(
    service: DurableJobService, spec: Specs, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from durable_jobs.store import database

    monkeypatch.setattr(database, "BEGIN", database.BEGIN.replace("lock_timeout = '5s'", "lock_timeout = '50ms'"))
    job = (await service.create_job(spec())).job
    async with row_locked(database_url, job.id):
        with pytest.raises(StoreUnavailable):
            await service.claim_job(A, uuid4(), job_id=job.id)
    assert await service.claim_job(A, uuid4(), job_id=job.id)


async def test_a_claim_by_id_gives_its_reason(service: DurableJobService, spec: Specs) -> None:
    unknown = await refusal(service, uuid4())
    assert (unknown.refusal, unknown.job) == (ClaimRefusal.NOT_FOUND, None)
    claim = await claimed(service, spec())
    for _ in range(2):
        held = await refusal(service, claim.job_id)
        assert (held.refusal, held.job) == (ClaimRefusal.HELD, await service.get_job(claim.job_id))
        await service.cancel_job(claim.job_id, "not wanted", "ann")
    for status in TERMINAL_BY_VERB:
        ended = await end_in(service, await claimed(service, spec(max_attempts=1)), status)
        settled = await refusal(service, ended.id)
        assert (settled.refusal, settled.job) == (ClaimRefusal.SETTLED, ended)
    cancelled = (await service.create_job(spec())).job
    await service.cancel_job(cancelled.id, "not wanted", "ann")
    assert (await refusal(service, cancelled.id)).refusal is ClaimRefusal.SETTLED


LANDS = {
    # marker, flag, attempts spent
    (True, True, True): JobStatus.INDETERMINATE,
    (True, True, False): JobStatus.INDETERMINATE,
    (True, False, True): JobStatus.INDETERMINATE,
    (True, False, False): JobStatus.INDETERMINATE,
    (False, True, True): JobStatus.CANCELLED,
    (False, True, False): JobStatus.CANCELLED,
    (False, False, True): JobStatus.DEAD_LETTER,
    (False, False, False): JobStatus.CLAIMED,
}
CODES = {
    JobStatus.INDETERMINATE: ("LEASE_EXPIRED_AFTER_DISPATCH", "indeterminate"),
    JobStatus.CANCELLED: ("CANCELLED", "cancelled"),
    JobStatus.DEAD_LETTER: ("ATTEMPTS_SPENT", "dead_lettered"),
}


async def interrupted(service: DurableJobService, spec: Specs, marker: bool, flag: bool, spent: bool) -> Claim:
    """A claim of A's whose lease ran out in this state."""
    wanted = spec(max_attempts=1 if spent else 2)
    claim = await (dispatched if marker else running)(service, wanted)
    if flag:
        await service.cancel_job(claim.job_id, "not wanted", "ann")
    await expire(service, claim.job_id)
    return claim


@pytest.mark.parametrize("how", ["by id", "in a scan"])
async def test_where_a_reclaim_lands(service: DurableJobService, spec: Specs, how: str) -> None:
    """By precedence: marker, flag, attempts. A scan never touches a job whose cancellation is pending."""
    for marker, flag, spent in LANDS:
        await lands(service, spec, how, marker, flag, spent)
        await sql(service, "DELETE FROM durable_jobs.jobs")


async def lands(service: DurableJobService, spec: Specs, how: str, marker: bool, flag: bool, spent: bool) -> None:
    status = LANDS[marker, flag, spent]
    claim = await interrupted(service, spec, marker, flag, spent)
    before = await service.get_job(claim.job_id)
    untouched = await snapshot(service, claim.job_id)
    outcome = await service.claim_job(B, uuid4(), **({"job_id": claim.job_id} if how == "by id" else {}))
    job = await service.get_job(claim.job_id)
    if how == "in a scan" and flag:
        assert outcome is None
        assert await snapshot(service, claim.job_id) == untouched
        return
    attempts = (await service.list_job_attempts(job.id)).items
    event = (await service.list_job_events(job.id)).items[-1]
    assert (job.status, job.lease_generation, attempts[0].outcome) == (status, 2, "lease_expired")
    assert [attempt.generation for attempt in attempts] == [1, 2]
    assert attempts[0].ended_at == event.occurred_at == job.updated_at
    assert (event.generation, event.actor, event.status) == (2, B, status)
    if status is JobStatus.CLAIMED:
        assert outcome
        assert outcome.claim == Claim(job_id=job.id, worker_id=B, generation=2)
        assert (job.attempt_count, job.claimed_by, job.started_at) == (2, B, before.started_at)
        assert (attempts[1].worker_id, attempts[1].outcome, event.name) == (B, None, "claimed")
    else:
        code, name = CODES[status]
        if how == "by id":
            assert outcome is not None
            assert (outcome.claim, outcome.refusal, outcome.job) == (None, ClaimRefusal.LANDED, job)
        else:
            assert outcome is None
        assert job.error is not None
        assert (job.error.code, job.attempt_count, job.claimed_by) == (code, 1, A)
        assert (job.lease_id, job.claim_token, job.lease_expires_at) == (None, None, None)
        assert job.finished_at == event.occurred_at
        assert (event.name, event.data["cause"], event.data["error"]) == (name, "reclaim", job.error.model_dump())
        assert (attempts[1].worker_id, attempts[1].outcome, attempts[1].error) == (B, status, job.error)
        assert attempts[1].ended_at == job.finished_at
        assert (job.dead_letter_reason is not None) is (status is JobStatus.DEAD_LETTER)
        assert (await refusal(service, job.id)).refusal is ClaimRefusal.SETTLED
    # Whatever the reclaim made of it, the old holder is out.
    for verb in HOLDER_VERBS.values():
        with pytest.raises(LeaseLost):
            await verb(service, claim)
    assert await service.renew_lease(claim) is LeaseStatus.LOST
    assert await service.get_job(job.id) == job
    assert await service.check_trail(job.id) == []


async def test_a_scan_goes_on_past_what_it_lands(service: DurableJobService, spec: Specs) -> None:
    """Jobs that kill their workers or crossed their boundary are landed on the way to the next claimable one."""
    poison = [await interrupted(service, spec, marker, False, True) for marker in (True, False) * 3]
    good = (await service.create_job(spec(priority=-2))).job
    outcome = await service.claim_job(B, uuid4())
    assert outcome is not None
    assert outcome.job is not None
    assert outcome.job.id == good.id
    landed = [(await service.get_job(claim.job_id)).status for claim in poison]
    assert landed == [JobStatus.INDETERMINATE, JobStatus.DEAD_LETTER] * 3


async def test_a_claim_repeated_with_its_token_is_the_same_claim(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    token = uuid4()
    first = await service.claim_job(A, token, job_id=job.id)
    assert first is not None
    before = await snapshot(service, job.id)
    for _ in range(3):
        again = await service.claim_job(A, token, job_id=job.id)
        assert again is not None
        assert (again.claim, again.job) == (first.claim, first.job)
    assert await snapshot(service, job.id) == before


async def test_a_next_claim_repeated_with_its_token_is_the_same_claim(service: DurableJobService, spec: Specs) -> None:
    """Its first reply was lost: a second job claimed for it would leave the first without a runner."""
    await service.create_jobs([spec(), spec()])
    token = uuid4()
    first, again = await service.claim_job(A, token), await service.claim_job(A, token)
    assert first is not None
    assert again is not None
    assert again.claim == first.claim


async def test_a_token_that_has_a_claim_elsewhere_gets_no_second_job(service: DurableJobService, spec: Specs) -> None:
    """The same attempt asks again, with another scope: whatever the answer, it comes, and is no other job."""
    await service.create_jobs([spec(queue="one"), spec(queue="two")])
    token = uuid4()
    first = await service.claim_job(A, token, queues=["one"])
    assert first is not None
    async with asyncio.timeout(2):
        again = await service.claim_job(A, token, queues=["two"])
    assert again is None or again.claim == first.claim


async def test_a_token_serves_its_own_claim_alone(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    token = uuid4()
    outcome = await service.claim_job(A, token, job_id=job.id)
    assert outcome is not None
    assert outcome.claim is not None
    another_token = await service.claim_job(A, uuid4(), job_id=job.id)
    another_worker = await service.claim_job(B, token, job_id=job.id)
    assert another_token is not None
    assert another_worker is not None
    assert (another_token.refusal, another_worker.refusal) == (ClaimRefusal.HELD, ClaimRefusal.HELD)
    # Released, the same token is a claim like any other: under a new generation.
    await service.release_job(outcome.claim, "shutdown")
    again = await service.claim_job(A, token, job_id=job.id)
    assert again is not None
    assert again.claim is not None
    assert again.claim.generation == 2
    await service.complete_job(again.claim, {})
    ended = await service.claim_job(A, token, job_id=job.id)
    assert ended is not None
    assert ended.refusal is ClaimRefusal.SETTLED


async def test_a_fenced_holders_token_serves_nothing(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    token = uuid4()
    assert await service.claim_job(A, token, job_id=job.id)
    await expire(service, job.id)
    second = await reclaimed(service, job.id, B)
    outcome = await service.claim_job(A, token, job_id=job.id)
    assert outcome is not None
    assert outcome.refusal is ClaimRefusal.HELD
    assert (await service.get_job(job.id)).lease_generation == second.generation


async def test_concurrent_claims_with_one_token_are_one_claim(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    job = (await service.create_job(spec())).job
    token = uuid4()
    async with row_locked(database_url, job.id):
        tasks = [asyncio.create_task(service.claim_job(A, token, job_id=job.id)) for _ in range(4)]
        await until_waiting(database_url, 4)
    outcomes = await asyncio.gather(*tasks)
    assert {outcome.claim for outcome in outcomes if outcome is not None} == {
        Claim(job_id=job.id, worker_id=A, generation=1)
    }
    assert await names(service, job.id) == ["claimed"]


async def test_an_unusable_worker_id_is_refused(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    for worker in ("", "  ", "a\x00b", "\ud800", "w" * 2049):
        with pytest.raises(InvalidInput, match="worker_id"):
            await service.claim_job(worker, uuid4(), job_id=job.id)
    assert await names(service, job.id) == []
