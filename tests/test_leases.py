"""Leases: renewed on the database's clock, capped, lost for good once another holder came."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from durable_jobs import DurableJobService, JobStatus, LeaseStatus
from durable_jobs.contract.errors import IllegalTransition, InvalidInput, LeaseLost
from durable_jobs.contract.models import Claim
from durable_jobs.store.jobs import renewal
from durable_jobs.store.statements import RENEW, RENEW_ALL, statement
from tests.conftest import Specs
from tests.support import (
    ERROR,
    HOLDER_VERBS,
    TERMINAL_BY_VERB,
    A,
    B,
    claimed,
    connection,
    dispatched,
    end_in,
    expire,
    make_due,
    names,
    reclaimed,
    row_locked,
    running,
    snapshot,
    sql,
    until_waiting,
)

GRACE = 5
"""That of the fixture `service`."""


async def refused_everywhere(service: DurableJobService, claim: Claim, error: type[Exception] = LeaseLost) -> None:
    """Every verb of the holder is refused, and changes neither row nor trail."""
    before = await snapshot(service, claim.job_id)
    for name, verb in HOLDER_VERBS.items():
        with pytest.raises(error):
            await verb(service, claim)
        assert (await snapshot(service, claim.job_id)) | {"job_attempts": 0} == before | {"job_attempts": 0}, name
    assert await service.renew_lease(claim) is LeaseStatus.LOST
    assert await service.heartbeat(claim, {"n": 1}) is LeaseStatus.LOST
    assert (await snapshot(service, claim.job_id)) | {"job_attempts": 0} == before | {"job_attempts": 0}


async def test_a_renewal_extends_the_lease(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec(lease_seconds=7))
    await expire(service, claim.job_id)
    before = await service.get_job(claim.job_id)
    assert await service.renew_lease(claim) is LeaseStatus.HELD
    job = await service.get_job(claim.job_id)
    assert job.heartbeat_at is not None
    assert before.heartbeat_at is not None
    assert job.heartbeat_at > before.heartbeat_at
    assert job.lease_expires_at == job.heartbeat_at + timedelta(seconds=7)
    kept = {"lease_expires_at", "heartbeat_at", "updated_at"}
    assert job.model_dump(exclude=kept) == before.model_dump(exclude=kept)


async def test_the_first_renewal_alone_leaves_an_event(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    for _ in range(4):
        assert await service.renew_lease(claim) is LeaseStatus.HELD
    assert (await service.get_job(claim.job_id)).status is JobStatus.RUNNING
    assert await names(service, claim.job_id) == ["claimed", "heartbeat"]


async def test_explicit_progress_always_leaves_one(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    for details in ({"done": 1}, {"done": 2}, None):
        assert await service.heartbeat(claim, details) is LeaseStatus.HELD
    await service.renew_lease(claim)
    events = (await service.list_job_events(claim.job_id)).items[1:]
    assert [(event.name, event.data) for event in events] == [
        ("heartbeat", {"done": 1}),
        ("heartbeat", {"done": 2}),
        ("heartbeat", {}),
    ]
    before = await snapshot(service, claim.job_id)
    with pytest.raises(InvalidInput, match=r"details\.text"):
        await service.heartbeat(claim, {"text": "a\x00b"})
    assert await snapshot(service, claim.job_id) == before


async def test_a_renewal_under_cancellation_says_so_and_extends_all_the_same(
    service: DurableJobService, spec: Specs
) -> None:
    """A sender in mid-call is not fenced for having been asked to stop."""
    for begin in (claimed, dispatched):
        claim = await begin(service, spec())
        await service.cancel_job(claim.job_id, "not wanted", "ann")
        await expire(service, claim.job_id)
        for renew in (service.renew_lease, service.heartbeat):
            answer = await renew(claim)
            assert answer is LeaseStatus.CANCEL_REQUESTED
            assert not answer
            job = await service.get_job(claim.job_id)
            assert job.heartbeat_at is not None
            assert job.lease_expires_at == job.heartbeat_at + timedelta(seconds=60)
        assert job.status is JobStatus.RUNNING


async def test_no_lease_outlives_its_attempt(service: DurableJobService, spec: Specs) -> None:
    """Claim time + timeout + grace is the end, however often a wedged handler's process renews."""
    cap = timedelta(seconds=20 + GRACE)
    for extend in (
        service.renew_lease,
        service.heartbeat,
        lambda c: service.mark_provider_dispatched(c, "key", consequential=False),
    ):
        claim = await claimed(service, spec(lease_seconds=60, timeout_seconds=20))
        (attempt,) = (await service.list_job_attempts(claim.job_id)).items
        await extend(claim)
        assert (await service.get_job(claim.job_id)).lease_expires_at == attempt.claimed_at + cap
        await service.renew_lease(claim)
        assert (await service.get_job(claim.job_id)).lease_expires_at == attempt.claimed_at + cap


async def test_a_wedged_holder_is_reclaimed_while_it_renews(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec(lease_seconds=60, timeout_seconds=20))
    # As if it had been claimed a minute ago.
    await sql(service, "UPDATE durable_jobs.job_attempts SET claimed_at = claimed_at - interval '1 minute'")
    await service.renew_lease(claim)
    second = await reclaimed(service, claim.job_id, B)
    assert second.generation == 2
    await refused_everywhere(service, claim)


async def test_a_renewal_after_losing_the_lease_is_refused(service: DurableJobService, spec: Specs) -> None:
    """Case 9, the kind: a holder that was fenced learns it at its next renewal, and revives nothing."""
    claim = await running(service, spec())
    await expire(service, claim.job_id)
    await reclaimed(service, claim.job_id, B)
    before = await snapshot(service, claim.job_id)
    assert await service.renew_lease(claim) is LeaseStatus.LOST
    assert await service.heartbeat(claim, {"n": 1}) is LeaseStatus.LOST
    assert not LeaseStatus.LOST
    assert await snapshot(service, claim.job_id) == before


async def test_another_incarnation_can_not_renew(service: DurableJobService, spec: Specs) -> None:
    """Case 3, the second half: a process of the same name is another worker; so is the same one at another job."""
    claim = await running(service, spec(), "pod-0:17:9f3a")
    other = await running(service, spec(), "pod-0:17:9f3a")
    before = await snapshot(service, claim.job_id)
    for stranger in (
        claim.model_copy(update={"worker_id": "pod-0:17:c0de"}),
        claim.model_copy(update={"worker_id": "pod-0"}),
        claim.model_copy(update={"generation": 0}),
        claim.model_copy(update={"generation": 2}),
        claim.model_copy(update={"job_id": uuid4()}),
    ):
        assert await service.renew_lease(stranger) is LeaseStatus.LOST
        assert await service.heartbeat(stranger) is LeaseStatus.LOST
    assert await snapshot(service, claim.job_id) == before
    assert await service.renew_lease(other)


async def test_nothing_is_renewed_after_the_holders_own_exit(service: DurableJobService, spec: Specs) -> None:
    for status in (JobStatus.QUEUED, *TERMINAL_BY_VERB):
        claim = await running(service, spec(max_attempts=1))
        if status is JobStatus.QUEUED:
            await service.release_job(claim, "shutdown")
        else:
            await end_in(service, claim, status)
        before = await snapshot(service, claim.job_id)
        assert await service.renew_lease(claim) is LeaseStatus.LOST
        assert await service.heartbeat(claim) is LeaseStatus.LOST
        assert await snapshot(service, claim.job_id) == before


async def test_a_renewal_that_waited_while_it_was_fenced_is_lost(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """The renewal waits for the row's lock, which another holder's claim has: it must end in LOST, not in an error."""
    for renew in (service.renew_lease, service.heartbeat):
        claim = await running(service, spec())
        await expire(service, claim.job_id)
        async with row_locked(database_url, claim.job_id):
            claiming = asyncio.create_task(reclaimed(service, claim.job_id, B))
            await until_waiting(database_url, 1)
            renewing = asyncio.create_task(renew(claim))
            await until_waiting(database_url, 2)
        assert (await claiming).generation == 2
        assert await renewing is LeaseStatus.LOST


async def test_a_stale_holder_is_refused_on_every_verb(service: DurableJobService, spec: Specs) -> None:
    """Case 2, the kind: A's lease runs out unrenewed, B claims; A completes, then fails; B completes."""
    first = await running(service, spec())
    await expire(service, first.job_id)
    second = await reclaimed(service, first.job_id, B)
    with pytest.raises(LeaseLost):
        await service.complete_job(first, {"by": "a"})
    with pytest.raises(LeaseLost):
        await service.fail_job(first, ERROR, retryable=True)
    await refused_everywhere(service, first)
    completion = await service.complete_job(second, {"by": "b"})
    assert completion.job.result == {"by": "b"}
    assert await names(service, first.job_id) == ["claimed", "heartbeat", "claimed", "heartbeat", "completed"]
    await refused_everywhere(service, first)


async def released(service: DurableJobService, claim: Claim) -> None:
    await service.release_job(claim, "shutdown")


async def backed_off(service: DurableJobService, claim: Claim) -> None:
    await service.fail_job(claim, ERROR, retryable=True)
    await make_due(service, claim.job_id)


async def requeued(service: DurableJobService, claim: Claim) -> None:
    await expire(service, claim.job_id)
    await service.requeue_job(claim.job_id, "ann", "the worker is gone")


async def retried(service: DurableJobService, claim: Claim) -> None:
    await service.fail_job(claim, ERROR, retryable=False)
    await service.retry_job(claim.job_id, "ann", "try again")


async def timed_out_resolved_and_retried(service: DurableJobService, claim: Claim) -> None:
    await service.mark_timed_out(claim, ERROR)
    await service.resolve_job(claim.job_id, JobStatus.FAILED, {"looked": True}, "ann")
    await service.retry_job(claim.job_id, "ann", "try again", accept_duplicate_risk=True)


GIVEN_UP: list[Callable[[DurableJobService, Claim], Awaitable[None]]] = [
    *(released, backed_off, requeued, retried, timed_out_resolved_and_retried),
]


@pytest.mark.parametrize("give_up", GIVEN_UP)
async def test_a_late_holder_is_refused_across(
    service: DurableJobService, spec: Specs, give_up: Callable[[DurableJobService, Claim], Awaitable[None]]
) -> None:
    """Case 7, the kind: the job left A by whatever way, B claims it and runs; A's late word changes nothing, while it
    is queued, claimed and running, and the generation never starts again."""
    first = await running(service, spec())
    await give_up(service, first)
    queued = await service.get_job(first.job_id)
    assert (queued.status, queued.lease_id, queued.claimed_by) == (JobStatus.QUEUED, None, None)
    await refused_everywhere(service, first)
    second = await reclaimed(service, first.job_id, B)
    assert second.generation == queued.lease_generation + 1 > first.generation
    await refused_everywhere(service, first)
    assert await service.renew_lease(second) is LeaseStatus.HELD
    await refused_everywhere(service, first)
    await service.mark_provider_dispatched(second, f"key:{second.job_id}:2", consequential=False)
    with pytest.raises(LeaseLost):
        await service.complete_job(first, {"by": "a"})
    await service.complete_job(second, {"by": "b"})
    job = await service.get_job(first.job_id)
    assert (job.status, job.result, job.lease_generation) == (JobStatus.COMPLETED, {"by": "b"}, second.generation)
    with pytest.raises(LeaseLost):
        await service.complete_job(first, {"by": "a"})


async def test_the_same_worker_is_refused_under_its_old_generation(service: DurableJobService, spec: Specs) -> None:
    """Case 7, the variant in which owner and job are the same: the generation alone tells the attempts apart."""
    first = await running(service, spec())
    await service.release_job(first, "shutdown")
    second = await reclaimed(service, first.job_id, A)
    assert (second.worker_id, second.generation) == (first.worker_id, 2)
    await refused_everywhere(service, first)
    assert await service.renew_lease(second)


@pytest.mark.parametrize("status", [JobStatus.TIMED_OUT, JobStatus.INDETERMINATE])
async def test_a_late_word_after_an_uncertain_end_decides_nothing(
    service: DurableJobService, spec: Specs, status: JobStatus
) -> None:
    """Case 7, timed out: owner and generation still match after the holder's own exit; the status does not."""
    claim = await dispatched(service, spec())
    await end_in(service, claim, status)
    await refused_everywhere(service, claim, IllegalTransition)
    await service.resolve_job(claim.job_id, JobStatus.COMPLETED, {"looked": True}, "ann", result={"n": 1})
    await refused_everywhere(service, claim, IllegalTransition)
    assert (await service.get_job(claim.job_id)).result == {"n": 1}


async def test_an_outcome_counts_until_another_holder_comes(service: DurableJobService, spec: Specs) -> None:
    """A lease that ran out unclaimed still lets its holder tell how it ended."""
    for status in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.HALT_UNSAFE):
        claim = await running(service, spec())
        await expire(service, claim.job_id)
        await end_in(service, claim, status)


async def test_a_result_that_came_too_late_is_kept_as_evidence(service: DurableJobService, spec: Specs) -> None:
    """On the fenced attempt's row, the first one, whatever became of the job; never a transition."""
    first = await dispatched(service, spec())
    await expire(service, first.job_id)
    assert not await service.claim_job(B, uuid4(), job_id=first.job_id)
    row = await service.get_job(first.job_id)
    assert row.status is JobStatus.INDETERMINATE
    for result in ({"answer": 42}, {"answer": 43}):
        with pytest.raises(LeaseLost):
            await service.complete_job(first, result)
    attempts = (await service.list_job_attempts(first.job_id)).items
    assert [(attempt.generation, attempt.late_result) for attempt in attempts] == [(1, {"answer": 42}), (2, None)]
    assert await service.get_job(first.job_id) == row
    assert await names(service, first.job_id) == ["claimed", "dispatched", "indeterminate"]


async def test_a_late_result_is_kept_on_its_own_attempt_alone(service: DurableJobService, spec: Specs) -> None:
    first = await running(service, spec())
    await service.release_job(first, "shutdown")
    second = await reclaimed(service, first.job_id, B)
    for stranger in (
        first.model_copy(update={"worker_id": B}),
        second.model_copy(update={"worker_id": A}),
        first.model_copy(update={"generation": 9}),
    ):
        with pytest.raises(LeaseLost):
            await service.complete_job(stranger, {"by": "a stranger"})
        assert not await service.keep_late_result(stranger, {"by": "a stranger"})
    await service.complete_job(second, {"by": "b"})
    assert not await service.keep_late_result(second, {"by": "b"})
    assert await service.keep_late_result(first, {"by": "a"})
    assert not await service.keep_late_result(first, {"by": "a again"})
    attempts = (await service.list_job_attempts(first.job_id)).items
    assert [attempt.late_result for attempt in attempts] == [{"by": "a"}, None]


async def renew_batch(database_url: str, claims: list[Claim]) -> dict[Any, str]:
    """As a process's keeper renews: all its leases in one statement, skipping locked rows."""
    sql_text = statement(RENEW, "durable_jobs", **RENEW_ALL)
    async with connection(database_url) as own:
        rows = await (await own.execute(sql_text, renewal(A, claims, GRACE))).fetchall()
    assert len(rows) == len(claims)
    return {(row["id"], row["generation"]): row["answer"] for row in rows}


async def test_a_batch_of_renewals_skips_a_locked_row(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """One lease's row that somebody has locked delays none of the others, and is no lost lease."""
    claims = [await running(service, spec()) for _ in range(30)]
    locked, flagged, fenced, ended = claims[3:7]
    await service.cancel_job(flagged.job_id, "not wanted", "ann")
    await expire(service, fenced.job_id)
    await reclaimed(service, fenced.job_id, B)
    await service.complete_job(ended, {})
    strangers = [Claim(job_id=uuid4(), worker_id=A, generation=1), fenced.model_copy(update={"generation": 2})]
    (clock,) = await sql(service, "SELECT clock_timestamp() AS now")
    before = {claim.job_id: await snapshot(service, claim.job_id) for claim in (locked, fenced, ended)}
    async with row_locked(database_url, locked.job_id):
        async with asyncio.timeout(5):
            answers = await renew_batch(database_url, claims + strangers)
    expected = {(claim.job_id, claim.generation): "held" for claim in claims}
    expected |= {(locked.job_id, 1): "skipped", (flagged.job_id, 1): "cancel_requested"}
    expected |= {(claim.job_id, claim.generation): "lost" for claim in (fenced, ended, *strangers)}
    assert answers == expected
    for claim in claims:
        job = await service.get_job(claim.job_id)
        if claim.job_id in before:
            assert await snapshot(service, claim.job_id) == before[claim.job_id]
        else:
            assert job.heartbeat_at is not None
            assert job.heartbeat_at > clock["now"]
    # At the next tick the lock is gone.
    assert (await renew_batch(database_url, claims))[locked.job_id, 1] == "held"


async def test_a_batch_of_renewals_promotes_once(service: DurableJobService, spec: Specs, database_url: str) -> None:
    claims = [await claimed(service, spec()) for _ in range(5)]
    for _ in range(3):
        assert set((await renew_batch(database_url, claims)).values()) == {"held"}
    for claim in claims:
        assert await names(service, claim.job_id) == ["claimed", "heartbeat"]
        assert (await service.get_job(claim.job_id)).status is JobStatus.RUNNING
