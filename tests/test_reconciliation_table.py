"""Every row of the design's table of reconciliation, section 9: what a sweep finds, and what it makes of it."""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from durable_jobs import DurableJobService, EventName, Job, JobError, JobSpec, JobStatus, ProviderState
from durable_jobs.contract.errors import LeaseLost
from durable_jobs.contract.provider import ProviderAnswer
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.service import RecheckFilter
from durable_jobs.service.reconciliation import Candidate
from tests.conftest import Specs
from tests.support import HOLDER_VERBS, A, claimed, dispatched, expire, names, running, snapshot, sql
from tests.sweeping import (
    LANDED,
    RESULT,
    Asked,
    Report,
    abandoned,
    aged,
    clock,
    escalated,
    summary,
    swept,
    timed_out,
    uncertain,
    unmarked,
    untouched_for,
)

CLAIMED, DISPATCHED, HEARTBEAT = EventName.CLAIMED, EventName.DISPATCHED, EventName.HEARTBEAT
INDETERMINATE, TIMED_OUT = EventName.INDETERMINATE, EventName.TIMED_OUT
ESCALATED, RECONCILED = EventName.ESCALATED, EventName.RECONCILED

MakeRow = Callable[[DurableJobService, JobSpec], Awaitable[Job]]


async def escalated_timed_out(service: DurableJobService, spec: JobSpec) -> Job:
    job = await service.escalate_job(await timed_out(service, spec), "somebody has to look", "ann")
    assert job is not None
    return job


@pytest.mark.parametrize("make", [escalated, escalated_timed_out])
async def test_already_escalated_is_skipped(service: DurableJobService, spec: Specs, queue: str, make: MakeRow) -> None:
    job = await make(service, spec())
    before = await snapshot(service, job.id)
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler)
    assert (sweep.summary, sweep.told, handler.keys) == (summary(0, before_an_operator=1), [], [])
    assert await snapshot(service, job.id) == before


async def test_a_row_of_another_project_is_skipped_loudly(
    service: DurableJobService,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    mine, other = await uncertain(service, spec()), await uncertain(service, spec(project="beta"))
    await sql(service, "UPDATE durable_jobs.jobs SET created_at = created_at - interval '1 hour'")
    before = await snapshot(service, other.id)
    real = service.find_reconciliation_candidates

    async def confused(organization: str, project: str, **options: Any) -> list[Candidate]:
        """The candidates of project alpha, with one of project beta among them."""
        page = await real(organization, project, **options)
        foreign = await real(organization, "beta", **options)
        return [*foreign, *page] if project == "alpha" else []

    monkeypatch.setattr(service, "find_reconciliation_candidates", confused)
    handler = Asked(LANDED)
    with caplog.at_level(logging.ERROR):
        sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(2, resolved={"completed": 1}, skipped={"project_mismatch": 1})
    assert handler.keys == [mine.operation_key]
    assert await snapshot(service, other.id) == before
    (record,) = caplog.records
    assert str(other.id) in record.getMessage()


@pytest.mark.parametrize("hold", [claimed, running])
async def test_an_expired_lease_with_a_requested_cancellation_is_cancelled(
    service: DurableJobService, spec: Specs, queue: str, hold: Any
) -> None:
    claim = await hold(service, spec())
    await service.cancel_job(claim.job_id, "not wanted", "ann")
    await expire(service, claim.job_id)
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(skipped={"cancelled": 1})
    assert (sweep.words, handler.keys) == ({claim.job_id: "cancelled"}, [])
    job = await service.get_job(claim.job_id)
    assert (job.status, job.lease_generation, job.attempt_count) == (JobStatus.CANCELLED, 2, 1)
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("CANCELLED", "cancelled by ann: not wanted")
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.generation, event.actor) == (EventName.CANCELLED, 2, "sweep")
    first, second = (await service.list_job_attempts(job.id)).items
    assert (first.outcome, first.worker_id, first.ended_at) == ("lease_expired", A, job.finished_at)
    assert (second.outcome, second.worker_id, second.ended_at) == ("cancelled", "sweep", job.finished_at)
    with pytest.raises(LeaseLost):
        await service.complete_job(claim, RESULT)


@pytest.mark.parametrize("hold", [claimed, running])
async def test_an_expired_lease_before_the_marker_is_left_to_be_reclaimed(
    service: DurableJobService, spec: Specs, queue: str, hold: Any
) -> None:
    """Nothing is written: a claim by its workflow, which is told to look, decides about the attempts."""
    claim = await hold(service, spec())
    await expire(service, claim.job_id)
    before = await snapshot(service, claim.job_id)
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(skipped={"left_to_reclaim": 1})
    assert (sweep.words, handler.keys) == ({claim.job_id: "left_to_reclaim"}, [])
    assert await snapshot(service, claim.job_id) == before


async def test_a_lease_that_lives_is_no_candidate(service: DurableJobService, spec: Specs, queue: str) -> None:
    before = []
    for hold in (claimed, running, dispatched):
        claim = await hold(service, spec())
        await service.cancel_job(claim.job_id, "not wanted", "ann")
        before.append(await snapshot(service, claim.job_id))
    sweep = await swept(service, queue, Asked(LANDED))
    assert (sweep.summary, sweep.told) == (summary(0), [])
    assert [await snapshot(service, each["jobs"][0]["id"]) for each in before] == before


@pytest.mark.parametrize("flagged", [False, True], ids=["", "under a requested cancellation"])
async def test_an_expired_lease_past_the_marker_is_fenced_and_looked_up(
    service: DurableJobService, spec: Specs, queue: str, flagged: bool
) -> None:
    claim = await dispatched(service, spec())
    if flagged:
        await service.cancel_job(claim.job_id, "not wanted", "ann")
    await expire(service, claim.job_id)
    seen: list[tuple[JobStatus, int]] = []

    async def answer(key: str, job: Job) -> Any:
        row = await service.get_job(job.id)
        seen.append((row.status, row.lease_generation))
        return LANDED

    handler = Asked(answer)
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(resolved={"completed": 1})
    # The lookup began only when the holder was fenced: what it says is then said of a send that no longer moves.
    assert seen == [(JobStatus.INDETERMINATE, 2)]
    assert handler.keys == [f"key:{claim.job_id}"]
    job = await service.get_job(claim.job_id)
    assert (job.status, job.result, job.lease_generation) == (JobStatus.COMPLETED, RESULT, 2)
    assert await names(service, job.id) == [CLAIMED, DISPATCHED, INDETERMINATE, RECONCILED]
    fenced = (await service.list_job_events(job.id)).items[2]
    assert (fenced.generation, fenced.actor, fenced.data["cause"]) == (2, "sweep", "sweep")
    assert fenced.data["error"]["code"] == "LEASE_EXPIRED_AFTER_DISPATCH"
    outcomes = [(each.generation, each.outcome) for each in (await service.list_job_attempts(job.id)).items]
    assert outcomes == [(1, "lease_expired"), (2, "indeterminate")]
    for verb in HOLDER_VERBS.values():
        with pytest.raises(LeaseLost):
            await verb(service, claim)


@pytest.mark.parametrize("crossed", [True, False], ids=["past the marker", "without one"])
async def test_timed_out_is_escalated_unasked(
    service: DurableJobService, spec: Specs, queue: str, crossed: bool
) -> None:
    if crossed:
        job = await timed_out(service, spec())
    else:
        job = await service.mark_timed_out(await claimed(service, spec()), JobError.of("LATE", "too late"))
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(escalated=1)
    assert (sweep.words, handler.keys) == ({job.id: "escalated"}, [])
    key = repr(job.operation_key)
    await assert_escalated(service, job, f"TIMED_OUT: needs external verification of operation key {key}")


async def test_no_operation_key_is_escalated(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await unmarked(service, spec())
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(escalated=1)
    assert (sweep.words, handler.keys) == ({job.id: "escalated"}, [])
    await assert_escalated(service, job, "NO_OPERATION_KEY: there is nothing to verify against")


async def assert_escalated(service: DurableJobService, before: Job, reason: str) -> Job:
    """The row stands before an operator, in the status that it had, and its trail says why."""
    job = await service.get_job(before.id)
    assert (job.status, job.lease_generation, job.error) == (before.status, before.lease_generation, before.error)
    assert job.escalation_reason == reason
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.status, event.actor) == (ESCALATED, before.status, "sweep")
    assert (event.data["reason"], event.occurred_at) == (reason, job.escalated_at)
    return job


async def assert_reconciled(
    service: DurableJobService, before: Job, status: JobStatus, answer: ProviderAnswer, **more: Any
) -> Job:
    """The row is settled by the provider's word; the evidence stands on it and on its trail."""
    job = await service.get_job(before.id)
    assert (job.status, job.lease_generation, job.finished_at) == (status, before.lease_generation, before.finished_at)
    evidence = {"operation_key": before.operation_key, "asked": "Asked"}
    record = {"by": "provider", "source": "sweep", "answer": answer, "evidence": evidence} | more
    assert job.reconciliation == record
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.status, event.actor) == (RECONCILED, status, "sweep")
    assert (event.data["reconciliation"], event.occurred_at) == (record, job.reconciled_at)
    return job


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (ProviderState.succeeded(Report(total=7)), {"total": 7}),
        (ProviderState.succeeded({"total": 7}), {"total": 7}),
        (ProviderState.succeeded({"note": "x" * 70_000, "total": 7}), {"note": "x" * 70_000, "total": 7}),
    ],
    ids=["a model", "an object", "above 64 KiB"],
)
async def test_succeeded_completes(
    service: DurableJobService, spec: Specs, queue: str, answer: ProviderState[Any], result: dict[str, Any]
) -> None:
    before = await uncertain(service, spec())
    handler = Asked(answer)
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(resolved={"completed": 1})
    assert (sweep.words, handler.keys) == ({before.id: "completed"}, [before.operation_key])
    job = await assert_reconciled(service, before, JobStatus.COMPLETED, ProviderAnswer.SUCCEEDED)
    assert (job.result, job.error) == (result, None)
    again = await swept(service, queue, handler)
    assert (again.summary, len(handler.keys)) == (summary(0), 1)


@pytest.mark.parametrize("verdict", [JobStatus.FAILED, JobStatus.DEAD_LETTER])
@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("card declined", ("PROVIDER_FAILED", "card declined")),
        (JobError.of("DECLINED", "card declined"), ("DECLINED", "card declined")),
        ("a \x00 and a \ud800", ("PROVIDER_FAILED", "a \\u0000 and a \\ud800")),
    ],
    ids=["a text", "an error", "an unstorable text"],
)
async def test_failed_ends_as_the_deployer_says(
    service: DurableJobService,
    spec: Specs,
    queue: str,
    verdict: JobStatus,
    said: JobError | str,
    error: tuple[str, str],
) -> None:
    before = await uncertain(service, spec())
    policy = ReconciliationPolicy(on_provider_failure=verdict)
    sweep = await swept(service, queue, Asked(ProviderState.failed(said)), policy=policy)
    assert sweep.summary == summary(resolved={str(verdict): 1})
    assert sweep.words == {before.id: verdict}
    job = await assert_reconciled(service, before, verdict, ProviderAnswer.FAILED)
    assert job.error is not None
    assert (job.error.code, job.error.message, job.result) == (*error, None)
    dead = verdict is JobStatus.DEAD_LETTER
    assert (job.dead_letter_reason, job.dead_lettered_at) == ((error[1], job.reconciled_at) if dead else (None, None))


async def test_a_failure_is_failed_by_default(service: DurableJobService, spec: Specs, queue: str) -> None:
    before = await uncertain(service, spec())
    await swept(service, queue, Asked(ProviderState.failed("no")))
    assert (await service.get_job(before.id)).status is JobStatus.FAILED


async def test_pending_is_left_until_its_deadline(service: DurableJobService, spec: Specs, queue: str) -> None:
    early, late = await uncertain(service, spec()), await uncertain(service, spec())
    await aged(service, early.id, hours=23, minutes=59)
    await aged(service, late.id, hours=24, minutes=1)
    before = await snapshot(service, early.id)
    handler = Asked(ProviderState.pending())
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(2, escalated=1, skipped={"pending": 1})
    assert sweep.words == {late.id: "escalated"}
    assert await snapshot(service, early.id) == before
    key = repr(late.operation_key)
    await assert_escalated(service, late, f"PENDING: operation key {key} is pending beyond its deadline")
    # It is asked again by every sweep until then; the escalated one is not.
    await swept(service, queue, handler)
    assert sorted(handler.keys[:2]) == sorted([str(early.operation_key), str(late.operation_key)])
    assert handler.keys[2:] == [early.operation_key]


async def test_pending_counts_anew_after_a_recheck(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await uncertain(service, spec())
    await aged(service, job.id, hours=25)
    handler = Asked(ProviderState.pending())
    await swept(service, queue, handler)
    assert await service.recheck_job(RecheckFilter(job_id=job.id), "ann", "their outage is over") == [job.id]
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(skipped={"pending": 1})
    assert (await service.get_job(job.id)).escalated_at is None


async def test_a_failed_lookup_moves_no_pending_deadline(service: DurableJobService, spec: Specs, queue: str) -> None:
    """It counts from when the job became uncertain or was last rechecked: a lookup that failed is neither."""
    job = await uncertain(service, spec())
    await aged(service, job.id, hours=25)
    await swept(service, queue, Asked(ConnectionError("down")))
    await sql(service, "UPDATE durable_jobs.jobs SET reconcile_after = clock_timestamp() - interval '1 second'")
    sweep = await swept(service, queue, Asked(ProviderState.pending()))
    assert sweep.summary == summary(escalated=1)


async def test_pending_deadline_is_the_deployers(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await uncertain(service, spec())
    await aged(service, job.id, seconds=61)
    policy = ReconciliationPolicy(pending_deadline=60)
    sweep = await swept(service, queue, Asked(ProviderState.pending()), policy=policy)
    assert sweep.summary == summary(escalated=1)


async def test_absent_proves_nothing(service: DurableJobService, spec: Specs, queue: str) -> None:
    """A paused sender may still send."""
    before = await uncertain(service, spec())
    await aged(service, before.id, days=30)
    sweep = await swept(service, queue, Asked(ProviderState.absent()))
    assert sweep.summary == summary(escalated=1)
    assert sweep.words == {before.id: "escalated"}
    key = f"operation key {before.operation_key!r}"
    await assert_escalated(service, before, f"ABSENT: the provider knows nothing of {key}, yet it may still be sent")


async def test_absent_after_the_providers_send_deadline_was_not_performed(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    before = await uncertain(service, spec())
    deadline = await clock(service) - timedelta(milliseconds=1)
    policy = ReconciliationPolicy(on_provider_failure=JobStatus.DEAD_LETTER)  # this is no failure of the provider's
    sweep = await swept(service, queue, Asked(ProviderState.absent(deadline)), policy=policy)
    assert sweep.summary == summary(resolved={"failed": 1})
    job = await assert_reconciled(
        service, before, JobStatus.FAILED, ProviderAnswer.ABSENT, send_deadline=deadline.isoformat()
    )
    assert job.error is not None
    assert job.error.code == "NOT_PERFORMED"
    assert before.operation_key is not None
    assert before.operation_key in job.error.message


@pytest.mark.parametrize("when", ["to come", "passed while the provider was asked"])
async def test_absent_before_the_send_deadline_is_escalated(
    service: DurableJobService, spec: Specs, queue: str, when: str
) -> None:
    before = await uncertain(service, spec())

    async def answer(key: str, job: Job) -> Any:
        now = await clock(service)
        if when == "to come":
            return ProviderState.absent(now + timedelta(hours=1))
        # By the time that the answer is judged it has passed; as the lookup began it had not.
        return ProviderState.absent(now)

    sweep = await swept(service, queue, Asked(answer))
    assert sweep.summary == summary(escalated=1)
    assert (await service.get_job(before.id)).status is JobStatus.INDETERMINATE


async def test_unknown_is_escalated_and_names_the_key(service: DurableJobService, spec: Specs, queue: str) -> None:
    before = await uncertain(service, spec())
    handler = Asked(ProviderState.unknown("the ledger of that day is gone"))
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(escalated=1)
    key = f"operation key {before.operation_key!r}"
    reason = f"UNKNOWN: the provider can't account for {key}: the ledger of that day is gone"
    await assert_escalated(service, before, reason)
    # Automatic resolution stops, even where the provider would know better by now.
    handler.answer = LANDED
    again = await swept(service, queue, handler)
    assert (again.summary, handler.keys) == (summary(0, before_an_operator=1), [before.operation_key])


async def test_an_unknown_of_unstorable_text_is_escalated_as_any_other(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    """`ProviderState.failed` escapes its text; that of `unknown` is on our own failure path just as well."""
    await uncertain(service, spec())
    sweep = await swept(service, queue, Asked(ProviderState.unknown("the ledger is \x00 gone")))
    assert sweep.summary == summary(escalated=1)


async def test_a_handler_without_a_lookup_knows_nothing(service: DurableJobService, spec: Specs, queue: str) -> None:
    class Mute(Asked):
        provider_state = Asked.__mro__[1].provider_state  # type: ignore[assignment]

    before = await uncertain(service, spec())
    sweep = await swept(service, queue, Mute(LANDED))
    assert sweep.summary == summary(escalated=1)
    reason = (await service.get_job(before.id)).escalation_reason
    assert reason is not None
    assert reason.startswith("UNKNOWN: ")


# The lookup itself fails.


class Mumbles(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("even my text fails")


class Panic(BaseException):
    """What an extension in another language may raise: no `Exception`."""


async def hangs(key: str, job: Job) -> Any:
    await asyncio.Event().wait()


async def cancels_itself(key: str, job: Job) -> Any:
    raise asyncio.CancelledError


def returns(answer: Any) -> Callable[[str, Job], Awaitable[Any]]:
    async def lookup(key: str, job: Job) -> Any:
        return answer

    return lookup


FAILING: dict[str, Any] = {
    "raises": ConnectionError("refused"),
    "raises its own timeout": TimeoutError("slow"),
    "raises a group": ExceptionGroup("many", [ValueError("one")]),
    "raises an unstorable text": ValueError("\x00 \ud800"),
    "cancels itself": cancels_itself,
    "hangs": hangs,
    "None": returns(None),
    "a text": returns("succeeded"),
    "an object": returns({"answer": "succeeded", "result": {"total": 7}}),
    "an answer alone": returns(ProviderAnswer.SUCCEEDED),
    "no result, which the model asks for": ProviderState.succeeded(None),
    "a result that doesn't fit the model": ProviderState.succeeded({"sum": 7}),
    "a list for a result": ProviderState.succeeded([7]),
    "NUL in the result": ProviderState.succeeded({"total": 7, "note": "\x00"}),
    "a lone surrogate in the result": ProviderState.succeeded({"total": 7, "note": "\ud800"}),
    "NaN in the result": ProviderState.succeeded({"total": 7, "note": math.nan}),
    "bytes in the result": ProviderState.succeeded({"total": 7, "note": b"bytes"}),
    "a result above 8 MiB": ProviderState.succeeded({"total": 7, "note": "x" * 8 * 1024 * 1024}),
}


class AskedOfEach(Asked):
    """Answers each job in its own way."""

    def __init__(self, answers: dict[UUID, Any]) -> None:
        super().__init__(LANDED)
        self.answers = answers

    async def provider_state(self, operation_key: str, job: Job) -> Any:
        self.answer = self.answers[job.id]
        return await super().provider_state(operation_key, job)


def put_off(before: Job, after: Job) -> bool:
    """Whether nothing but the lookup's bookkeeping has changed."""
    kept = {"lookup_tries": 1, "reconcile_after": after.reconcile_after, "updated_at": after.updated_at}
    return after == before.model_copy(update=kept)


async def test_a_failed_lookup_backs_off(service: DurableJobService, spec: Specs, queue: str) -> None:
    before = {kind: await uncertain(service, spec()) for kind in FAILING}
    trails = {kind: await service.list_job_events(job.id) for kind, job in before.items()}
    handler = AskedOfEach({before[kind].id: answer for kind, answer in FAILING.items()})
    policy = ReconciliationPolicy(lookup_timeout=0.5)
    began = await clock(service)
    async with asyncio.timeout(20):
        sweep = await swept(service, queue, handler, policy=policy)
    ended = await clock(service)
    assert sweep.summary == summary(len(FAILING), skipped={"lookup_failed": len(FAILING)})
    assert (sweep.words, sorted(handler.keys)) == ({}, sorted(str(job.operation_key) for job in before.values()))
    after = {kind: await service.get_job(job.id) for kind, job in before.items()}
    assert [kind for kind, job in before.items() if not put_off(job, after[kind])] == []
    for job in after.values():
        assert job.reconcile_after is not None
        assert began <= job.reconcile_after - timedelta(seconds=30) <= ended
    assert {kind: await service.list_job_events(job.id) for kind, job in before.items()} == trails
    # Put off means that it is not asked, and not put off any further.
    again = await swept(service, queue, handler, policy=policy)
    assert again.summary == summary(len(FAILING), skipped={"backing_off": len(FAILING)})
    assert len(handler.keys) == len(FAILING)
    assert {kind: await service.get_job(job.id) for kind, job in before.items()} == after


def defect(answer: Any, id: str, reason: str) -> Any:
    return pytest.param(answer, id=id, marks=())


UNJUDGED = "it is taken for an answer, fails as it is judged, and is asked for again by every sweep, for ever"

DEFECTS = [
    defect(Mumbles(), "raises what has no text", "the text of the exception is taken unguarded"),
    defect(
        ProviderState.absent(datetime(2026, 1, 1)),  # noqa: DTZ001 - that is the point
        "a send deadline without a zone",
        UNJUDGED,
    ),
    defect(ProviderState.failed(JobError(code="NO", message="\x00")), "NUL in the error", UNJUDGED),
    defect(ProviderState(ProviderAnswer.FAILED, error="no"), "a text for an error", UNJUDGED),  # type: ignore[arg-type]
    defect(
        ProviderState("succeeded", result={"sum": 7}),  # type: ignore[arg-type]
        "a text for the answer, a result that doesn't fit the model",
        "compared by identity first, by equality later: it completes unchecked",
    ),
]


@pytest.mark.parametrize("answer", DEFECTS)
async def test_rubbish_of_other_kinds_backs_off_too(
    service: DurableJobService, spec: Specs, queue: str, answer: Any
) -> None:
    before = await uncertain(service, spec())
    sweep = await swept(service, queue, Asked(answer))
    assert sweep.summary == summary(skipped={"lookup_failed": 1})
    assert put_off(before, await service.get_job(before.id))


async def test_a_lookup_that_panics_backs_off(service: DurableJobService, spec: Specs, queue: str) -> None:
    before = await uncertain(service, spec())
    try:
        sweep = await swept(service, queue, Asked(Panic()))
    except BaseExceptionGroup as group:
        raise AssertionError("the sweep has ended with the lookup") from group
    assert sweep.summary == summary(skipped={"lookup_failed": 1})
    assert (await service.get_job(before.id)).lookup_tries == 1


async def test_a_lookup_that_swallows_its_cancellation_holds_nothing_up(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    stubborn, willing = await uncertain(service, spec()), await uncertain(service, spec())
    go, came = asyncio.Event(), asyncio.Event()

    async def answer(key: str, job: Job) -> Any:
        if job.id != stubborn.id:
            return LANDED
        while not go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go.wait()
        came.set()
        return LANDED

    policy = ReconciliationPolicy(lookup_timeout=0.1, lookup_concurrency=1)
    async with asyncio.timeout(10):
        sweep = await swept(service, queue, Asked(answer), policy=policy)
    assert sweep.summary == summary(2, resolved={"completed": 1}, skipped={"lookup_failed": 1})
    assert (await service.get_job(willing.id)).status is JobStatus.COMPLETED
    # What it says in the end is said to nobody.
    before = await snapshot(service, stubborn.id)
    go.set()
    await came.wait()
    await asyncio.sleep(0)
    assert await snapshot(service, stubborn.id) == before


PAUSES = [30, 60, 120, 240, 480, 960, 1800, 1800]
"""Seconds after the first failed lookup, the second, …"""


async def test_the_pauses_widen(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await uncertain(service, spec())
    handler = Asked(ConnectionError("refused"))
    for tries, pause in enumerate(PAUSES, start=1):
        began = await clock(service)
        await swept(service, queue, handler)
        after = await service.get_job(job.id)
        assert after.reconcile_after is not None
        assert (after.lookup_tries, len(handler.keys)) == (tries, tries)
        assert began <= after.reconcile_after - timedelta(seconds=pause) <= await clock(service)
        await sql(service, "UPDATE durable_jobs.jobs SET reconcile_after = clock_timestamp()")


async def test_failed_lookups_end_at_their_deadline(service: DurableJobService, spec: Specs, queue: str) -> None:
    """16 failed lookups are 5 h 31 min of pauses, 17 would be 6 h 1 min."""
    within, beyond = await uncertain(service, spec()), await uncertain(service, spec())
    for job, tries in ((within, 15), (beyond, 16)):
        await sql(service, "UPDATE durable_jobs.jobs SET lookup_tries = %(n)s WHERE id = %(id)s", n=tries, id=job.id)
    handler = Asked(ConnectionError("refused \x00"))
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(2, escalated=1, skipped={"lookup_failed": 1})
    assert sweep.words == {beyond.id: "escalated"}
    assert (await service.get_job(within.id)).lookup_tries == 16
    key = f"operation key {beyond.operation_key!r}"
    reason = f"LOOKUP_FAILED: 17 lookups of {key} failed, the last: ConnectionError: refused \\u0000"
    await assert_escalated(service, beyond, reason)


async def test_the_lookup_deadline_is_the_deployers(service: DurableJobService, spec: Specs, queue: str) -> None:
    await uncertain(service, spec())
    policy = ReconciliationPolicy(lookup_deadline=29)
    sweep = await swept(service, queue, Asked(ConnectionError("refused")), policy=policy)
    assert sweep.summary == summary(escalated=1)


async def test_a_lookup_that_works_again_resolves(service: DurableJobService, spec: Specs, queue: str) -> None:
    before = await uncertain(service, spec())
    handler = Asked(ConnectionError("refused"))
    await swept(service, queue, handler)
    await sql(service, "UPDATE durable_jobs.jobs SET reconcile_after = clock_timestamp()")
    handler.answer = LANDED
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(resolved={"completed": 1})
    await assert_reconciled(service, before, JobStatus.COMPLETED, ProviderAnswer.SUCCEEDED)


async def test_an_answer_ends_a_row_of_failed_lookups(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Otherwise a call that is pending for a day is escalated over single failures, hours apart."""
    job = await uncertain(service, spec())
    await sql(service, "UPDATE durable_jobs.jobs SET lookup_tries = 16")
    await swept(service, queue, Asked(ProviderState.pending()))
    sweep = await swept(service, queue, Asked(ConnectionError("refused")))
    assert sweep.summary == summary(skipped={"lookup_failed": 1})
    assert (await service.get_job(job.id)).lookup_tries == 1


# A type or a queue that no live worker hosts: any worker's sweep escalates it.


async def register(service: DurableJobService, queue: str, **overrides: Any) -> None:
    """A worker's record, as it makes it itself."""
    record: dict[str, Any] = {
        "worker_id": A,
        "host": "host-a",
        "pid": 1,
        "version": "0",
        "queue": queue,
        "job_types": ["other", "probe"],
        "organizations": None,
    }
    await service.register_worker(**(record | overrides))


async def silent_for(service: DurableJobService, **ago: float) -> None:
    """Every worker's last heartbeat came so long ago."""
    await sql(
        service,
        "UPDATE durable_jobs.workers SET heartbeat_at = clock_timestamp() - make_interval(secs => %(ago)s)",
        ago=timedelta(**ago).total_seconds(),
    )


async def elsewhere(service: DurableJobService) -> Any:
    """The sweep of a worker that has nothing to do with the job."""
    return await swept(service, "another-queue", type("Other", (Asked,), {"job_type": "unrelated"})(LANDED))


UNHOSTED: dict[str, dict[str, Any] | None] = {
    "no worker at all": None,
    "a worker of another type": {"job_types": ["other"]},
    "a worker of another queue": {"queue": "another-queue"},
    "a worker of other tenants": {"organizations": ["globex", "initech"]},
}


async def assert_no_handler(service: DurableJobService, before: Job, trail: list[EventName]) -> None:
    sweep = await elsewhere(service)
    assert sweep.summary.looked_at == sweep.summary.escalated == 1
    assert sweep.words == {before.id: "escalated"}
    job = await service.get_job(before.id)
    assert job.escalation_reason == f"NO_HANDLER: no live worker hosts 'probe' on queue {before.queue!r}"
    assert await names(service, job.id) == trail
    again = await elsewhere(service)
    assert (again.summary.looked_at, again.told) == (0, [])


@pytest.mark.parametrize("worker", UNHOSTED.values(), ids=UNHOSTED)
async def test_what_nobody_hosts_is_escalated(
    service: DurableJobService, spec: Specs, queue: str, worker: dict[str, Any] | None
) -> None:
    job = await uncertain(service, spec())
    await untouched_for(service, job.id, minutes=16)
    if worker is not None:
        await register(service, **({"queue": queue} | worker))
    await assert_no_handler(service, job, [CLAIMED, DISPATCHED, INDETERMINATE, ESCALATED])


async def test_what_only_a_silent_worker_hosts_is_escalated(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    job = await uncertain(service, spec())
    await untouched_for(service, job.id, minutes=16)
    await register(service, queue)
    await silent_for(service, minutes=14)
    assert (await elsewhere(service)).told == []
    await silent_for(service, minutes=16)
    await assert_no_handler(service, job, [CLAIMED, DISPATCHED, INDETERMINATE, ESCALATED])


@pytest.mark.parametrize("organizations", [None, ["acme"]], ids=["of every tenant", "of this tenant"])
async def test_what_a_live_worker_hosts_is_left_to_it(
    service: DurableJobService, spec: Specs, queue: str, organizations: list[str] | None
) -> None:
    job = await uncertain(service, spec())
    await untouched_for(service, job.id, days=3)
    await register(service, queue, organizations=organizations)
    before = await snapshot(service, job.id)
    sweep = await elsewhere(service)
    assert (sweep.summary.looked_at, sweep.told) == (0, [])
    assert await snapshot(service, job.id) == before


async def test_a_deploy_has_its_time_before_anything_counts_as_unhosted(
    service: DurableJobService, spec: Specs
) -> None:
    job = await uncertain(service, spec())
    await untouched_for(service, job.id, minutes=14)
    assert (await elsewhere(service)).told == []


async def test_timed_out_that_nobody_hosts_is_escalated(service: DurableJobService, spec: Specs) -> None:
    job = await timed_out(service, spec())
    await untouched_for(service, job.id, minutes=16)
    await assert_no_handler(service, job, [CLAIMED, DISPATCHED, TIMED_OUT, ESCALATED])


async def test_an_expired_lease_past_the_marker_that_nobody_hosts_is_fenced_and_escalated(
    service: DurableJobService, spec: Specs
) -> None:
    job = await abandoned(service, spec())
    await untouched_for(service, job.id, minutes=16)
    await assert_no_handler(service, job, [CLAIMED, DISPATCHED, INDETERMINATE, ESCALATED])
    job = await service.get_job(job.id)
    assert (job.status, job.lease_generation) == (JobStatus.INDETERMINATE, 2)


@pytest.mark.parametrize("flagged", [False, True], ids=["", "under a requested cancellation"])
async def test_an_expired_lease_before_the_marker_that_nobody_hosts_reaches_somebody(
    service: DurableJobService, spec: Specs, flagged: bool
) -> None:
    """Invariant 6. Cancelling what is flagged asks for no handler; the rest goes before an operator."""
    claim = await claimed(service, spec())
    if flagged:
        await service.cancel_job(claim.job_id, "not wanted", "ann")
    await expire(service, claim.job_id)
    await untouched_for(service, claim.job_id, minutes=16)
    await elsewhere(service)
    job = await service.get_job(claim.job_id)
    if flagged:
        assert (job.status, job.lease_generation) == (JobStatus.CANCELLED, 2)
    else:
        assert job.escalated_at is not None


# What the sweep looks at, and in what order.


async def test_oldest_first_within_its_project(service: DurableJobService, spec: Specs, queue: str) -> None:
    rows = [await uncertain(service, spec(priority=priority)) for priority in (-2, 2, 0)]
    rows.append(await abandoned(service, spec()))
    for age, job in enumerate(rows):
        await sql(
            service,
            "UPDATE durable_jobs.jobs SET created_at = created_at - make_interval(days => %(age)s) WHERE id = %(id)s",
            id=job.id,
            age=age,
        )
    handler = Asked(LANDED)
    await swept(service, queue, handler, policy=ReconciliationPolicy(lookup_concurrency=1))
    assert handler.keys == [job.operation_key for job in reversed(rows)]


async def test_only_what_is_hosted_is_looked_at(service: DurableJobService, spec: Specs, queue: str) -> None:
    rows = [
        await uncertain(service, spec(job_type="other")),
        await uncertain(service, spec(queue="another-queue")),
        await uncertain(service, spec(organization="globex")),
    ]
    before = [await snapshot(service, job.id) for job in rows]
    mine = [await uncertain(service, spec()), await uncertain(service, spec(project="beta"))]
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler, organizations=["acme", "initech"])
    assert sweep.summary == summary(2, resolved={"completed": 2})
    assert sorted(handler.keys) == sorted(str(job.operation_key) for job in mine)
    assert [await snapshot(service, job.id) for job in rows] == before


async def test_lookups_run_side_by_side_and_are_bounded(service: DurableJobService, spec: Specs, queue: str) -> None:
    for _ in range(7):
        await uncertain(service, spec())
    full, at_once, most = asyncio.Event(), 0, 0

    async def answer(key: str, job: Job) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0)
        at_once -= 1
        return LANDED

    policy = ReconciliationPolicy(lookup_concurrency=3)
    async with asyncio.timeout(10):
        sweep = await swept(service, queue, Asked(answer), policy=policy)
    assert (sweep.summary, most) == (summary(7, resolved={"completed": 7}), 3)


async def test_candidates_come_in_pages_of_one_project(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Keyset: what is left as it was is passed, not met again."""
    expected = [await make(service, spec()) for make in (uncertain, abandoned, escalated, timed_out, uncertain)]
    await uncertain(service, spec(project="beta"))
    await uncertain(service, spec(organization="globex"))
    found: list[Job] = []
    last: Candidate | None = None
    while page := await service.find_reconciliation_candidates("acme", "alpha", queue=queue, after=last, limit=2):
        assert len(page) <= 2
        found += [job for job, _ in page]
        last = page[-1]
    assert [job.id for job in found] == [job.id for job in expected]
    unseen = await service.find_reconciliation_candidates("acme", "alpha", escalated=False)
    assert [job.id for job, _ in unseen] == [job.id for job in expected if job.escalated_at is None]


@pytest.mark.parametrize(
    "state", [ProviderState.unknown("no such ledger"), ProviderState.absent()], ids=["unknown", "absent"]
)
async def test_the_evidence_for_an_escalation_stays_on_the_trail(
    service: DurableJobService, spec: Specs, state: ProviderState[Any]
) -> None:
    """Issue 3: every resolution and every escalation leaves an event with its evidence."""
    job = await uncertain(service, spec())
    assert job.operation_key is not None
    evidence = {"webhook": "evt-4711"}
    await service.record_provider_state(
        job.operation_key, state, evidence, "billing", organization="acme", project="alpha"
    )
    event = (await service.list_job_events(job.id)).items[-1]
    assert event.name is ESCALATED
    assert "evt-4711" in json.dumps(event.data)
