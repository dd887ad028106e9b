"""A sweep acts on what it read; meanwhile a worker, a claim, a renewal, a webhook, an operator or another sweep may
have been there. Its snapshot overwrites nothing."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from durable_jobs import DurableJobService, EventName, Job, JobError, JobStatus, LeaseStatus, ProviderState
from durable_jobs.contract.errors import DuplicateWorker, JobNotFound, LeaseLost, NotResolvable
from durable_jobs.contract.models import Claim, ClaimRefusal
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.service.reconciliation import Candidate
from durable_jobs.service.sweep import named_follow_ups
from tests.conftest import Specs
from tests.support import (
    ERROR,
    A,
    B,
    claimed,
    dispatched,
    expire,
    names,
    reclaimed,
    row_locked,
    snapshot,
    sql,
    until_waiting,
)
from tests.sweeping import LANDED, RESULT, Asked, Parent, Swept, abandoned, summary, swept, uncertain

CLAIMED, DISPATCHED, INDETERMINATE = EventName.CLAIMED, EventName.DISPATCHED, EventName.INDETERMINATE
COMPLETED, RECONCILED = EventName.COMPLETED, EventName.RECONCILED

Happening = Callable[[DurableJobService, Claim], Awaitable[Any]]


def between_look_and_write(
    service: DurableJobService, monkeypatch: pytest.MonkeyPatch, verb: str, happens: Callable[[Job], Awaitable[None]]
) -> None:
    """Let something happen after the sweep has decided on what it read, and before it writes by this verb."""
    real = getattr(service, verb)

    async def late(candidate: Job, *arguments: Any, **options: Any) -> Any:
        await happens(candidate)
        return await real(candidate, *arguments, **options)

    monkeypatch.setattr(service, verb, late)


async def expired(service: DurableJobService, claim: Claim, *, flagged: bool = False) -> Claim:
    if flagged:
        await service.cancel_job(claim.job_id, "not wanted", "ann")
    await expire(service, claim.job_id)
    return claim


async def claimed_by_b(service: DurableJobService, claim: Claim) -> None:
    outcome = await service.claim_job(B, uuid4(), job_id=claim.job_id)
    assert outcome is not None
    assert outcome.refusal is ClaimRefusal.LANDED


PAST_THE_MARKER: dict[str, tuple[Happening, JobStatus]] = {
    "its holder completes it": (lambda s, c: s.complete_job(c, {"total": 1}), JobStatus.COMPLETED),
    "its holder fails it": (lambda s, c: s.fail_job(c, ERROR, retryable=False), JobStatus.FAILED),
    "its holder is uncertain": (lambda s, c: s.mark_indeterminate(c, ERROR), JobStatus.INDETERMINATE),
    "its holder renews": (lambda s, c: s.renew_lease(c), JobStatus.RUNNING),
    "another worker claims it": (claimed_by_b, JobStatus.INDETERMINATE),
}
FLAGGED: dict[str, tuple[Happening, JobStatus]] = {
    "its holder acknowledges": (lambda s, c: s.acknowledge_cancellation(c), JobStatus.CANCELLED),
    "its holder completes it": (lambda s, c: s.complete_job(c, {"total": 1}), JobStatus.COMPLETED),
    "its holder renews": (lambda s, c: s.renew_lease(c), JobStatus.RUNNING),
    "another worker claims it": (claimed_by_b, JobStatus.CANCELLED),
}


@pytest.mark.parametrize(
    ("flagged", "happening", "status"),
    [
        *(pytest.param(False, *each, id=f"past the marker, {name}") for name, each in PAST_THE_MARKER.items()),
        *(pytest.param(True, *each, id=f"flagged, {name}") for name, each in FLAGGED.items()),
    ],
)
async def test_what_moved_between_look_and_write_is_left_alone(
    service: DurableJobService,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    flagged: bool,
    happening: Happening,
    status: JobStatus,
) -> None:
    """Case 1 of the catalogue, of the kind "leases and stale workers": 0 rows, no event; the rest is handled."""
    hold = claimed if flagged else dispatched
    claims = [await expired(service, await hold(service, spec()), flagged=flagged) for _ in range(3)]
    moving = claims[1]
    then: list[Any] = []

    async def happens(candidate: Job) -> None:
        if candidate.id == moving.job_id:
            await happening(service, moving)
            then.append(await snapshot(service, moving.job_id))

    between_look_and_write(service, monkeypatch, "fence_expired", happens)
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler)
    assert [await snapshot(service, moving.job_id)] == then
    assert (await service.get_job(moving.job_id)).status is status
    others = [claims[0].job_id, claims[2].job_id]
    word = "cancelled" if flagged else "completed"
    assert sweep.words == dict.fromkeys(others, word)
    handled = {"skipped": {"moved": 1, "cancelled": 2}} if flagged else {"resolved": {word: 2}, "skipped": {"moved": 1}}
    assert sweep.summary == summary(3, **handled)
    assert handler.keys == ([] if flagged else [f"key:{job_id}" for job_id in others])
    assert [(await service.get_job(job_id)).status for job_id in others] == [word, word]


@pytest.mark.parametrize(
    "happening",
    [
        lambda s, c: s.complete_job(c, {"total": 1}),
        lambda s, c: s.renew_lease(c),
        lambda s, c: reclaimed(s, c.job_id, B),
    ],
    ids=["its holder completes it", "its holder renews", "another worker claims it"],
)
async def test_an_expired_lease_before_the_marker_is_the_claims_alone(
    service: DurableJobService, spec: Specs, queue: str, happening: Happening
) -> None:
    """Case 1 again: the sweep only tells its workflow, and writes nothing whatever happened."""
    claim = await expired(service, await claimed(service, spec()))
    real, then = service.find_reconciliation_candidates, []

    async def read(*arguments: Any, **options: Any) -> list[Candidate]:
        page = await real(*arguments, **options)
        await happening(service, claim)
        then.append(await snapshot(service, claim.job_id))
        return page

    service.find_reconciliation_candidates = read  # type: ignore[method-assign]
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler)
    assert (sweep.words, handler.keys) == ({claim.job_id: "left_to_reclaim"}, [])
    assert [await snapshot(service, claim.job_id)] == then


async def in_turn(database_url: str, job_id: UUID, *acts: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Let each act wait for the row's lock, the earlier ones first, then let them have it; what each one gave."""
    async with asyncio.TaskGroup() as group, row_locked(database_url, job_id):
        tasks = []
        for number, act in enumerate(acts, start=1):
            tasks.append(group.create_task(outcome_of(act)))
            await until_waiting(database_url, number)
    return [task.result() for task in tasks]


async def outcome_of(act: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await act()
    except LeaseLost as refusal:
        return type(refusal)


@pytest.mark.parametrize("first", ["the holder", "the sweep"])
async def test_sweep_against_completion(
    service: DurableJobService, database_url: str, spec: Specs, queue: str, first: str
) -> None:
    """Both wait for the row's lock; the second to get it finds that the row has moved."""
    claim = await expired(service, await dispatched(service, spec()))
    handler = Asked(ProviderState.pending())
    complete = partial(service.complete_job, claim, {"total": 1})
    sweep = partial(swept, service, queue, handler)
    if first == "the holder":
        completion, sweeping = await in_turn(database_url, claim.job_id, complete, sweep)
        assert completion.job.status is JobStatus.COMPLETED
        assert (sweeping.summary, handler.keys) == (summary(skipped={"moved": 1}), [])
        assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED, COMPLETED]
        return
    sweeping, completion = await in_turn(database_url, claim.job_id, sweep, complete)
    assert completion is LeaseLost
    assert (sweeping.summary, len(handler.keys)) == (summary(skipped={"pending": 1}), 1)
    assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED, INDETERMINATE]
    held, fenced = (await service.list_job_attempts(claim.job_id)).items
    assert (held.late_result, fenced.late_result) == ({"total": 1}, None)


@pytest.mark.parametrize("first", ["the claim", "the sweep"])
async def test_sweep_against_claim(
    service: DurableJobService, database_url: str, spec: Specs, queue: str, first: str
) -> None:
    claim = await expired(service, await dispatched(service, spec()))
    handler = Asked(ProviderState.pending())
    take = partial(service.claim_job, B, uuid4(), job_id=claim.job_id)
    sweep = partial(swept, service, queue, handler)
    if first == "the claim":
        outcome, sweeping = await in_turn(database_url, claim.job_id, take, sweep)
        assert outcome.refusal is ClaimRefusal.LANDED
        assert (sweeping.summary, handler.keys) == (summary(skipped={"moved": 1}), [])
    else:
        sweeping, outcome = await in_turn(database_url, claim.job_id, sweep, take)
        assert outcome.refusal is ClaimRefusal.SETTLED
        assert (sweeping.summary, len(handler.keys)) == (summary(skipped={"pending": 1}), 1)
    events = (await service.list_job_events(claim.job_id)).items
    assert [(each.name, each.generation) for each in events] == [(CLAIMED, 1), (DISPATCHED, 1), (INDETERMINATE, 2)]
    assert events[-1].actor == (B if first == "the claim" else "sweep")


@pytest.mark.parametrize("first", ["the renewal", "the sweep"])
async def test_sweep_against_renewal(
    service: DurableJobService, database_url: str, spec: Specs, queue: str, first: str
) -> None:
    claim = await expired(service, await dispatched(service, spec()))
    handler = Asked(ProviderState.pending())
    renew = partial(service.renew_lease, claim)
    sweep = partial(swept, service, queue, handler)
    if first == "the renewal":
        renewal, sweeping = await in_turn(database_url, claim.job_id, renew, sweep)
        assert renewal is LeaseStatus.HELD
        assert (sweeping.summary, handler.keys) == (summary(skipped={"moved": 1}), [])
        assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED]
        assert (await service.complete_job(claim, {"total": 1})).job.status is JobStatus.COMPLETED
        return
    sweeping, renewal = await in_turn(database_url, claim.job_id, sweep, renew)
    assert renewal is LeaseStatus.LOST
    assert (sweeping.summary, len(handler.keys)) == (summary(skipped={"pending": 1}), 1)
    assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED, INDETERMINATE]


# Case 3: the registry of workers says nothing of a lease.


async def register(service: DurableJobService, worker_id: str) -> None:
    await service.register_worker(
        worker_id, host="pod-0", pid=1, version="0", queue="q", job_types=["probe"], organizations=None
    )


async def test_a_lease_is_not_judged_by_the_registry(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Case 3 of the catalogue, of the kind "leases and stale workers": expiry comes from the job's row."""
    await register(service, A)
    claim = await dispatched(service, spec())
    before = await snapshot(service, claim.job_id)
    await service.stop_worker(A)
    assert (await swept(service, queue, Asked(LANDED))).summary == summary(0)
    await sql(service, "DELETE FROM durable_jobs.workers")
    assert (await swept(service, queue, Asked(LANDED))).summary == summary(0)
    assert await snapshot(service, claim.job_id) == before
    assert await service.renew_lease(claim) is LeaseStatus.HELD


async def test_a_new_incarnation_keeps_no_old_lease_alive(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Case 3 of the catalogue: `pod-0` is back under its name, and heartbeats."""
    old, new = "pod-0:1:aaaa", "pod-0:1:bbbb"
    await register(service, old)
    claim = await dispatched(service, spec(), old)
    with pytest.raises(DuplicateWorker):
        await register(service, old)
    await register(service, new)
    before = await snapshot(service, claim.job_id)
    revived = Claim(job_id=claim.job_id, worker_id=new, generation=claim.generation)
    assert await service.renew_lease(revived) is LeaseStatus.LOST
    assert await service.heartbeat(revived, {"i am": "back"}) is LeaseStatus.LOST
    assert await snapshot(service, claim.job_id) == before
    await expire(service, claim.job_id)
    sweep = await swept(service, queue, Asked(LANDED))
    assert sweep.summary == summary(resolved={"completed": 1})
    assert {worker.id: worker.stopped_at for worker in await service.list_workers()} == {old: None, new: None}


# Case 10: two sweeps with one snapshot.


async def two_sweeps_of_one_snapshot(
    service: DurableJobService, monkeypatch: pytest.MonkeyPatch, queue: str, handler: Asked
) -> tuple[Swept, Swept, list[str]]:
    """Both read their candidates before either acts; the second goes on with its old list when the first has ended.

    Returns also what the second one asked the provider for.
    """
    real, both_have_read, first_ended = service.find_reconciliation_candidates, asyncio.Barrier(2), asyncio.Event()

    async def read(*arguments: Any, **options: Any) -> list[Candidate]:
        page = await real(*arguments, **options)
        await both_have_read.wait()
        if asyncio.current_task() is second:
            await first_ended.wait()
        return page

    with monkeypatch.context() as patched:
        patched.setattr(service, "find_reconciliation_candidates", read)
        first = asyncio.create_task(swept(service, queue, handler))
        second = asyncio.create_task(swept(service, queue, handler))
        done = await first
        asked = len(handler.keys)
        first_ended.set()
        return done, await second, handler.keys[asked:]


async def test_the_second_of_two_sweeps_finds_the_expired_ones_fenced(
    service: DurableJobService, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 10 of the catalogue, of the kind "leases and stale workers": no event, no provider lookup."""
    rows = [await abandoned(service, spec()) for _ in range(3)]
    flagged = await expired(service, await claimed(service, spec()), flagged=True)
    handler = Asked(LANDED)
    first, second, asked = await two_sweeps_of_one_snapshot(service, monkeypatch, queue, handler)
    assert first.summary == summary(4, resolved={"completed": 3}, skipped={"cancelled": 1})
    assert (second.summary, second.told[0].job, asked) == (summary(4, skipped={"moved": 4}), None, [])
    for job in rows:
        assert await names(service, job.id) == [CLAIMED, DISPATCHED, INDETERMINATE, RECONCILED]
        assert (await service.get_job(job.id)).lease_generation == 2
    assert await names(service, flagged.job_id) == [CLAIMED, EventName.CANCELLED]


@pytest.mark.parametrize(
    ("answer", "word", "event"),
    [
        (LANDED, {"resolved": {"completed": 1}}, RECONCILED),
        (ProviderState.failed("no"), {"resolved": {"failed": 1}}, RECONCILED),
        (ProviderState.unknown("lost"), {"escalated": 1}, EventName.ESCALATED),
    ],
    ids=["succeeded", "failed", "unknown"],
)
async def test_the_second_of_two_sweeps_writes_nothing(
    service: DurableJobService,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    answer: ProviderState[Any],
    word: dict[str, Any],
    event: EventName,
) -> None:
    """Case 10 of the catalogue: 0 rows, no event, and nobody is told a second time."""
    job = await uncertain(service, spec())
    first, second, _ = await two_sweeps_of_one_snapshot(service, monkeypatch, queue, Asked(answer))
    assert first.summary == summary(**word)
    assert second.summary == summary(skipped={"moved": 1})
    assert second.words == {}
    assert await names(service, job.id) == [CLAIMED, DISPATCHED, INDETERMINATE, event]


@pytest.mark.parametrize("answer", [LANDED, ProviderState.unknown("lost")], ids=["settled", "escalated"])
async def test_the_second_of_two_sweeps_asks_for_nothing(
    service: DurableJobService,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    answer: ProviderState[Any],
) -> None:
    """Case 10 of the catalogue: no provider lookup."""
    await uncertain(service, spec())
    _, _, asked = await two_sweeps_of_one_snapshot(service, monkeypatch, queue, Asked(answer))
    assert asked == []


async def test_two_sweeps_count_a_failed_lookup_once(
    service: DurableJobService, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 10 of the catalogue: 0 rows."""
    job = await uncertain(service, spec())
    await two_sweeps_of_one_snapshot(service, monkeypatch, queue, Asked(ConnectionError("down")))
    assert (await service.get_job(job.id)).lookup_tries == 1


async def test_two_sweeps_create_due_follow_ups_once(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await uncertain(service, spec())
    parent = await service.resolve_job(job.id, JobStatus.COMPLETED, {"seen": "ledger"}, "ann", result=RESULT)
    name_them = partial(named_follow_ups, Parent(LANDED, "mail", "bill"))
    both_name_them = asyncio.Barrier(2)

    async def create() -> int:
        await both_name_them.wait()
        _, created = await service.create_follow_ups_due(parent, name_them, "sweep")
        return len(created)

    assert sorted(await asyncio.gather(create(), create())) == [0, 2]
    found = [each.idempotency_key for each in (await service.list_jobs()).items if each.id != job.id]
    assert sorted(found) == [f"{job.id}:bill", f"{job.id}:mail"]


# A webhook, an operator.


async def webhook(service: DurableJobService, job: Job, state: ProviderState[Any] = LANDED) -> Job:
    assert job.operation_key is not None
    said = ProviderState.succeeded({"total": 1}) if state is LANDED else state
    return await service.record_provider_state(
        job.operation_key, said, {"event": "evt-1"}, "webhook", organization="acme", project="alpha"
    )


async def test_a_webhook_overtakes_the_lookup(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Its word stands; the follow-ups that it left to a sweep are created by this very one, once."""
    job = await uncertain(service, spec())

    async def answer(key: str, asked: Job) -> Any:
        await webhook(service, asked)
        return LANDED

    sweep = await swept(service, queue, Parent(answer, "mail"))
    assert sweep.summary == summary(skipped={"moved": 1}, follow_ups=1)
    after = await service.get_job(job.id)
    assert (after.status, after.result) == (JobStatus.COMPLETED, {"total": 1})
    assert after.reconciliation is not None
    assert after.reconciliation["source"] == "webhook"
    assert await names(service, job.id) == [CLAIMED, DISPATCHED, INDETERMINATE, RECONCILED]
    again = await swept(service, queue, Parent(LANDED, "mail"))
    assert again.summary.follow_ups == 0
    assert len((await service.list_jobs()).items) == 2


async def test_a_webhook_after_the_sweep_is_told_so(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await uncertain(service, spec())
    await swept(service, queue, Parent(LANDED, "mail"))
    before = await snapshot(service, job.id)
    with pytest.raises(NotResolvable):
        await webhook(service, job)
    assert await snapshot(service, job.id) == before
    assert len((await service.list_jobs()).items) == 2


@pytest.mark.parametrize("state", [ProviderState.failed("no"), ProviderState.unknown("?")], ids=["failed", "unknown"])
async def test_a_webhook_of_another_word_overtakes_the_lookup(
    service: DurableJobService, spec: Specs, queue: str, state: ProviderState[Any]
) -> None:
    job = await uncertain(service, spec())
    then: list[Any] = []

    async def answer(key: str, asked: Job) -> Any:
        await webhook(service, asked, state)
        then.append(await snapshot(service, job.id))
        return LANDED

    sweep = await swept(service, queue, Asked(answer))
    assert (sweep.words, sweep.summary.skipped["moved"]) == ({}, 1)
    assert [await snapshot(service, job.id)] == then


async def test_an_operator_overtakes_the_lookup(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await uncertain(service, spec())

    async def answer(key: str, asked: Job) -> Any:
        await service.resolve_job(asked.id, JobStatus.DEAD_LETTER, {"phone": "they lost it"}, "ann")
        return LANDED

    sweep = await swept(service, queue, Asked(answer))
    assert sweep.summary == summary(skipped={"moved": 1})
    assert (await service.get_job(job.id)).status is JobStatus.DEAD_LETTER


@pytest.mark.parametrize("verb", ["resolve_by_provider", "defer_lookup", "escalate_job"])
async def test_an_operator_comes_just_before_the_write(
    service: DurableJobService, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    job = await uncertain(service, spec())
    if verb == "escalate_job":
        other = spec()
        job = await service.mark_timed_out(await dispatched(service, other), ERROR)
    then: list[Any] = []

    async def happens(candidate: Job) -> None:
        if candidate.id == job.id:
            await service.resolve_job(job.id, JobStatus.COMPLETED, {"phone": "it landed"}, "ann", result=RESULT)
            await sql(service, "UPDATE durable_jobs.jobs SET follow_ups_due = false")
            then.append(await snapshot(service, job.id))

    between_look_and_write(service, monkeypatch, verb, happens)
    answer = ConnectionError("down") if verb == "defer_lookup" else ProviderState.failed("no")
    sweep = await swept(service, queue, Asked(answer))
    assert sweep.summary.skipped["moved"] == 1
    assert job.id not in sweep.words
    assert [await snapshot(service, job.id)] == then


async def next_intent(service: DurableJobService, job: Job) -> Claim:
    """An operator fails the job and has it sent again, under a key of its own; that send is uncertain as well."""
    await service.resolve_job(job.id, JobStatus.FAILED, {"phone": "they know nothing"}, "ann")
    await service.retry_job(job.id, "ann", "send it again", accept_duplicate_risk=True)
    claim = await reclaimed(service, job.id, B)
    await service.mark_provider_dispatched(claim, f"key:{job.id}:retry-1", consequential=False)
    await service.mark_indeterminate(claim, JobError.of("LOST", "no answer"))
    return claim


async def test_what_a_lookup_says_of_one_intent_is_not_said_of_the_next(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    """While the provider is asked, the job goes round: uncertain again, yet about another send."""
    job = await uncertain(service, spec())

    async def answer(key: str, asked: Job) -> Any:
        if asked.intent_number == 0:
            await next_intent(service, asked)
        return LANDED

    handler = Asked(answer)
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(skipped={"moved": 1})
    after = await service.get_job(job.id)
    assert (after.status, after.operation_key) == (JobStatus.INDETERMINATE, f"key:{job.id}:retry-1")
    await swept(service, queue, handler)
    assert handler.keys == [f"key:{job.id}", f"key:{job.id}:retry-1"]


async def test_what_a_webhook_says_of_one_intent_is_not_said_of_the_next(
    service: DurableJobService, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding the job by its key and locking its row, the job goes round."""
    job = await uncertain(service, spec())
    real = service._sweeps.by_operation_key

    async def found(*arguments: Any) -> UUID | None:
        job_id = await real(*arguments)
        await next_intent(service, job)
        return job_id

    monkeypatch.setattr(service._sweeps, "by_operation_key", found)
    with contextlib.suppress(JobNotFound, NotResolvable):
        await webhook(service, job)
    after = await service.get_job(job.id)
    assert (after.status, after.operation_key) == (JobStatus.INDETERMINATE, f"key:{job.id}:retry-1")


async def test_of_many_who_resolve_one_does(service: DurableJobService, spec: Specs, queue: str) -> None:
    """A sweep, a webhook and an operator, let loose at once on each of thirty jobs."""
    rows = [await uncertain(service, spec()) for _ in range(30)]
    together = {job.id: asyncio.Barrier(3) for job in rows}

    async def answer(key: str, job: Job) -> Any:
        await together[job.id].wait()
        return LANDED

    async def other(job: Job, act: Callable[[], Awaitable[Any]]) -> bool:
        await together[job.id].wait()
        try:
            await act()
        except NotResolvable:
            return False
        return True

    def resolve(job: Job) -> Awaitable[Any]:
        return service.resolve_job(job.id, JobStatus.FAILED, {"phone": "no"}, "ann")

    async with asyncio.TaskGroup() as group:
        sweeping = group.create_task(
            swept(service, queue, Asked(answer), policy=ReconciliationPolicy(lookup_concurrency=30))
        )
        hooks = [group.create_task(other(job, partial(webhook, service, job))) for job in rows]
        operators = [group.create_task(other(job, partial(resolve, job))) for job in rows]
    sources = []
    for job, hook, operator in zip(rows, hooks, operators, strict=True):
        assert await names(service, job.id) == [CLAIMED, DISPATCHED, INDETERMINATE, RECONCILED]
        record = (await service.get_job(job.id)).reconciliation
        assert record is not None
        sources.append(record.get("source", record.get("actor")))
        assert (hook.result(), operator.result()) == (sources[-1] == "webhook", sources[-1] == "ann")
    sweep, won = sweeping.result().summary, sources.count("sweep")
    assert (sweep.resolved.get("completed", 0), sweep.skipped.get("moved", 0)) == (won, 30 - won)
