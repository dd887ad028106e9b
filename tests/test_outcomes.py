"""How an attempt ends, on either side of the boundary; what goes back to the queue, and when; what is created next."""

import itertools
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from durable_jobs import DurableJobService, FollowUp, Job, JobError, JobStatus
from durable_jobs.contract.decisions import FREE_RELEASES, MAX_BACKOFF_SECONDS, backoff_seconds
from durable_jobs.contract.errors import (
    IllegalTransition,
    InvalidInput,
    JobNotFound,
    LeaseLost,
    NotReleasable,
    NotRetryable,
    NotStorable,
)
from durable_jobs.contract.models import Claim
from tests.conftest import Specs
from tests.support import (
    ERROR,
    HOLDER_VERBS,
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
    running,
    snapshot,
    sql,
)

Begin = Callable[..., Awaitable[Claim]]
BEGINNINGS: dict[str, Begin] = {"claimed": claimed, "running": running, "dispatched": dispatched}


async def cancel(service: DurableJobService, claim: Claim) -> None:
    assert await service.cancel_job(claim.job_id, "not wanted", "ann") == "requested"


def failure_of(begun: str, retryable: bool, spent: bool, flag: bool) -> JobStatus:
    """The design's table of failures (section 7)."""
    if not retryable:
        return JobStatus.FAILED
    if begun == "dispatched":
        return JobStatus.INDETERMINATE
    if flag:
        return JobStatus.CANCELLED
    return JobStatus.DEAD_LETTER if spent else JobStatus.QUEUED


@pytest.mark.parametrize("begun", BEGINNINGS)
async def test_where_a_failure_leads(service: DurableJobService, spec: Specs, begun: str) -> None:
    """Before and after the marker × retryable or not × attempts left or spent × cancellation requested or not."""
    for retryable, spent, flag in itertools.product((True, False), repeat=3):
        claim = await BEGINNINGS[begun](service, spec(max_attempts=1 if spent else 2))
        if flag:
            await cancel(service, claim)
        before = await service.get_job(claim.job_id)
        answer = await service.fail_job(claim, ERROR, retryable)
        job = await service.get_job(claim.job_id)
        status = failure_of(begun, retryable, spent, flag)
        assert answer == job
        assert job.status is status, (retryable, spent, flag)
        assert (job.lease_generation, job.attempt_count) == (1, 1)
        assert (job.lease_id, job.claim_token, job.lease_expires_at) == (None, None, None)
        assert job.dispatched_at == before.dispatched_at
        (attempt,) = (await service.list_job_attempts(job.id)).items
        event = (await service.list_job_events(job.id)).items[-1]
        assert (attempt.outcome, attempt.error) == (status, ERROR)
        assert attempt.ended_at == event.occurred_at == job.updated_at
        assert event.actor == claim.worker_id
        if status is JobStatus.QUEUED:
            assert (job.error, job.claimed_by, job.finished_at) == (ERROR, None, None)
            assert job.scheduled_at == event.occurred_at + timedelta(seconds=30)
        else:
            assert (job.claimed_by, job.finished_at) == (claim.worker_id, event.occurred_at)
            assert job.error is not None
            assert job.error.code == ("CANCELLED" if status is JobStatus.CANCELLED else ERROR.code)
        dead = status is JobStatus.DEAD_LETTER
        assert (job.dead_lettered_at, job.dead_letter_reason) == (
            (job.finished_at, ERROR.message) if dead else (None, None)
        )


BACKOFFS = {1: 30, 2: 60, 7: 1920, 8: 3600, 12: 3600, 13: 3600, 31: 3600, 63: 3600, 64: 3600, 1024: 3600}


def test_backoff_never_overflows() -> None:
    """Case 36, the kind: any attempt number, up to the largest that the column holds, gives a pause that is monotone,
    never zero, at most an hour, and never raises."""
    for attempt, seconds in (BACKOFFS | {2**31 - 1: 3600}).items():
        assert backoff_seconds(30, attempt) == seconds
    for base in (0.001, 0.5, 1, 30, 3599.9, 3600):
        pauses = [backoff_seconds(base, n) for n in [*range(1, 1100), 2**31 - 2, 2**31 - 1, 2**63, 10**400]]
        assert pauses == sorted(pauses)
        assert (pauses[0], pauses[-1]) == (base, MAX_BACKOFF_SECONDS)
    for attempt in (0, -1, -(2**31)):
        assert backoff_seconds(30, attempt) == 30


async def test_backoff_of_a_row(service: DurableJobService, spec: Specs) -> None:
    """Case 36 on the row: due after the pause of its attempt; at the last number that the column holds, a dead letter,
    not an error."""
    set_count = f"UPDATE durable_jobs.jobs SET attempt_count = %(n)s, max_attempts = {2**31 - 1} WHERE id = %(id)s"
    for attempt in (1, 12, 13, 31, 63, 64, 1024, 2**31 - 2):
        claim = await running(service, spec())
        await sql(service, set_count, n=attempt, id=claim.job_id)
        job = await service.fail_job(claim, ERROR, retryable=True)
        assert (job.status, job.attempt_count) == (JobStatus.QUEUED, attempt)
        assert job.scheduled_at - job.updated_at == timedelta(seconds=BACKOFFS.get(attempt, 3600))
    claim = await running(service, spec())
    await sql(service, set_count, n=2**31 - 1, id=claim.job_id)
    assert (await service.fail_job(claim, ERROR, retryable=True)).status is JobStatus.DEAD_LETTER


async def test_backoff_counts_from_the_failure(service: DurableJobService, spec: Specs) -> None:
    """Case 37, the kind: a job that ran ten minutes and failed is due its pause after the failure, on the database's
    clock, not after its start."""
    claim = await running(service, spec(timeout_seconds=86_400))
    moved = "created_at = created_at - i, scheduled_at = scheduled_at - i, heartbeat_at = heartbeat_at - i"
    # The trail is moved along, so that the row still equals its fold.
    await sql(
        service,
        f"""
        ALTER TABLE durable_jobs.job_events DISABLE TRIGGER append_only;
        UPDATE durable_jobs.jobs SET {moved.replace("- i", "- interval '10 minutes'")},
            started_at = started_at - interval '10 minutes';
        UPDATE durable_jobs.job_events SET occurred_at = occurred_at - interval '10 minutes';
        UPDATE durable_jobs.job_attempts SET claimed_at = claimed_at - interval '10 minutes';
        ALTER TABLE durable_jobs.job_events ENABLE ALWAYS TRIGGER append_only;
        """,
    )
    (before,) = await sql(service, "SELECT clock_timestamp() AS now")
    job = await service.fail_job(claim, ERROR, retryable=True)
    (after,) = await sql(service, "SELECT clock_timestamp() AS now")
    assert before["now"] + timedelta(seconds=30) <= job.scheduled_at <= after["now"] + timedelta(seconds=30)
    assert job.started_at is not None
    assert before["now"] - job.started_at >= timedelta(minutes=10)
    assert not await service.claim_job(B, uuid4(), job_id=job.id)


async def test_attempts_run_out(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec(max_attempts=3))).job
    for attempt in (1, 2, 3):
        claim = await reclaimed(service, job.id)
        job = await service.fail_job(claim, ERROR, retryable=True)
        assert (job.attempt_count, job.lease_generation) == (attempt, attempt)
        if attempt < 3:
            assert job.scheduled_at - job.updated_at == timedelta(seconds=30 * 2 ** (attempt - 1))
            await make_due(service, job.id)
    assert job.status is JobStatus.DEAD_LETTER
    assert (await names(service, job.id)).count("retried") == 2


@pytest.mark.parametrize("begin", [claimed, dispatched])
async def test_a_release_gives_the_attempt_back(service: DurableJobService, spec: Specs, begin: Begin) -> None:
    claim = await begin(service, spec(max_attempts=1))
    before = await snapshot(service, claim.job_id)
    if begin is dispatched:
        with pytest.raises(NotReleasable):
            await service.release_job(claim, "shutdown")
        assert await snapshot(service, claim.job_id) == before
        return
    job = await service.release_job(claim, "shutdown")
    assert job == await service.get_job(job.id)
    assert (job.status, job.attempt_count, job.release_count, job.lease_generation) == (JobStatus.QUEUED, 0, 1, 1)
    assert (job.error, job.claimed_by, job.scheduled_at) == (None, None, job.updated_at)
    (attempt,) = (await service.list_job_attempts(job.id)).items
    assert (attempt.outcome, attempt.ended_at) == ("released", job.updated_at)
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.data["cause"], event.actor) == ("retried", "shutdown", A)
    assert (await reclaimed(service, job.id, B)).generation == 2


async def test_releases_are_free_ten_times(service: DurableJobService, spec: Specs) -> None:
    """From the eleventh on each counts as an attempt, and the last attempt that it counts as is the end."""
    assert FREE_RELEASES == 10
    job = (await service.create_job(spec(max_attempts=2))).job
    for release in range(1, 13):
        claim = await reclaimed(service, job.id)
        job = await service.release_job(claim, "deploy")
        if release <= 10:
            assert (job.status, job.attempt_count, job.release_count) == (JobStatus.QUEUED, 0, release)
        elif release == 11:
            assert (job.status, job.attempt_count, job.release_count) == (JobStatus.QUEUED, 1, 11)
    assert (job.status, job.attempt_count, job.lease_generation) == (JobStatus.DEAD_LETTER, 2, 12)
    assert job.error is not None
    assert (job.error.code, job.dead_letter_reason) == ("RELEASED_TOO_OFTEN", job.error.message)
    assert "deploy" in job.error.message


@pytest.mark.parametrize("released", [0, 10])
async def test_a_release_under_cancellation_cancels(service: DurableJobService, spec: Specs, released: int) -> None:
    job = (await service.create_job(spec(max_attempts=1))).job
    for _ in range(released):
        await service.release_job(await reclaimed(service, job.id), "deploy")
    claim = await reclaimed(service, job.id)
    await cancel(service, claim)
    job = await service.release_job(claim, "shutdown")
    assert job == await service.get_job(job.id)
    assert (job.status, job.release_count) == (JobStatus.CANCELLED, released + 1)
    assert job.error is not None
    assert (job.error.code, job.error.message) == ("CANCELLED", "cancelled by ann: not wanted")
    assert (await names(service, job.id))[-1] == "cancelled"


CONFIRMED = {"provider": "said", "id": 7}


@pytest.mark.parametrize("begun", BEGINNINGS)
@pytest.mark.parametrize("confirmed", [None, CONFIRMED])
async def test_acknowledging_a_cancellation(
    service: DurableJobService, spec: Specs, begun: str, confirmed: dict[str, Any] | None
) -> None:
    """Without a marker: cancelled. With one: only on the provider's own word, kept as evidence; else indeterminate."""
    claim = await BEGINNINGS[begun](service, spec())
    before = await snapshot(service, claim.job_id)
    with pytest.raises(IllegalTransition):
        await service.acknowledge_cancellation(claim, confirmed)
    assert await snapshot(service, claim.job_id) == before
    await cancel(service, claim)
    answer = await service.acknowledge_cancellation(claim, confirmed)
    job = await service.get_job(claim.job_id)
    assert answer == job
    past = begun == "dispatched"
    status = JobStatus.INDETERMINATE if past and confirmed is None else JobStatus.CANCELLED
    assert job.status is status
    assert job.error is not None
    assert job.error.code == ("CANCELLED_AFTER_DISPATCH" if past and confirmed is None else "CANCELLED")
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.data.get("provider_confirmed")) == (status, confirmed)
    (attempt,) = (await service.list_job_attempts(job.id)).items
    assert (attempt.outcome, attempt.ended_at) == (status, job.finished_at)
    assert (job.cancel_reason, job.cancel_actor) == ("not wanted", "ann")


async def test_evidence_of_a_cancellation_is_checked(service: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(service, spec())
    await cancel(service, claim)
    before = await snapshot(service, claim.job_id)
    with pytest.raises(InvalidInput, match=r"provider_confirmed\.text"):
        await service.acknowledge_cancellation(claim, {"text": "\x00"})
    assert await snapshot(service, claim.job_id) == before


MARKS = {
    JobStatus.INDETERMINATE: DurableJobService.mark_indeterminate,
    JobStatus.HALT_UNSAFE: DurableJobService.mark_halt_unsafe,
    JobStatus.TIMED_OUT: DurableJobService.mark_timed_out,
}


async def test_marks_end_the_job_with_an_error(service: DurableJobService, spec: Specs) -> None:
    for status, (begun, begin), flag in itertools.product(MARKS, BEGINNINGS.items(), (False, True)):
        claim = await begin(service, spec())
        if flag:
            await cancel(service, claim)
        answer = await MARKS[status](service, claim, ERROR)
        job = await service.get_job(claim.job_id)
        assert answer == job
        assert (job.status, job.error, job.finished_at) == (status, ERROR, job.updated_at)
        assert (job.dispatched_at is not None) is (begun == "dispatched")
        (attempt,) = (await service.list_job_attempts(job.id)).items
        assert (attempt.outcome, attempt.error, attempt.ended_at) == (status, ERROR, job.finished_at)
        event = (await service.list_job_events(job.id)).items[-1]
        assert (event.name, event.data) == (status, {"error": ERROR.model_dump()})


async def test_an_ending_needs_code_and_message(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    before = await snapshot(service, claim.job_id)
    for field, error in (
        ("code", JobError(code="", message="text")),
        ("message", JobError(code="CODE", message="")),
    ):
        for end in (*MARKS.values(), DurableJobService.fail_job):
            with pytest.raises(InvalidInput, match=rf"error\.{field}"):
                await end(service, claim, error, *([True] if end is DurableJobService.fail_job else []))
    assert await snapshot(service, claim.job_id) == before


@pytest.mark.parametrize("begun", BEGINNINGS)
async def test_a_completion(service: DurableJobService, spec: Specs, begun: str) -> None:
    """Promotes first if need be; also under a requested cancellation: the result is there."""
    for flag in (False, True):
        claim = await BEGINNINGS[begun](service, spec())
        if flag:
            await cancel(service, claim)
        completion = await service.complete_job(claim, {"answer": 42})
        job = await service.get_job(claim.job_id)
        assert (completion.job, completion.follow_ups) == (job, [])
        assert (job.status, job.result, job.error) == (JobStatus.COMPLETED, {"answer": 42}, None)
        assert (job.finished_at, job.lease_id, job.claim_token) == (job.updated_at, None, None)
        assert (job.lease_expires_at, job.claimed_by) == (None, A)
        assert (job.cancel_requested_at is not None) is flag
        middle = {"claimed": ["heartbeat"], "running": ["heartbeat"], "dispatched": ["dispatched"]}[begun]
        assert await names(service, job.id) == ["claimed", *middle, "completed"]
        (attempt,) = (await service.list_job_attempts(job.id)).items
        assert (attempt.outcome, attempt.ended_at) == ("completed", job.finished_at)


async def test_a_completion_clears_the_error_of_earlier_attempts(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    await service.fail_job(claim, ERROR, retryable=True)
    await make_due(service, claim.job_id)
    second = await reclaimed(service, claim.job_id)
    assert (await service.get_job(claim.job_id)).error == ERROR
    assert (await service.complete_job(second, {})).job.error is None


async def test_no_verb_after_the_holders_own_exit(service: DurableJobService, spec: Specs) -> None:
    """Owner and generation alone still match then. Ended by its own hand: illegal. Given up: the lease is lost."""
    for status in (JobStatus.QUEUED, *TERMINAL_BY_VERB):
        claim = await running(service, spec(max_attempts=1))
        if status is JobStatus.QUEUED:
            await service.release_job(claim, "shutdown")
        else:
            await end_in(service, claim, status)
        job, trail = await service.get_job(claim.job_id), await names(service, claim.job_id)
        for verb in HOLDER_VERBS.values():
            with pytest.raises(LeaseLost if status is JobStatus.QUEUED else IllegalTransition):
                await verb(service, claim)
        assert await service.get_job(claim.job_id) == job
        assert await names(service, claim.job_id) == trail


async def test_no_verb_for_a_stranger_or_an_unknown_job(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    before = await snapshot(service, claim.job_id)
    for verb in HOLDER_VERBS.values():
        for other in ({"worker_id": B}, {"generation": 2}, {"generation": 0}):
            with pytest.raises(LeaseLost):
                await verb(service, claim.model_copy(update=other))
        with pytest.raises(JobNotFound):
            await verb(service, claim.model_copy(update={"job_id": uuid4()}))
    assert await snapshot(service, claim.job_id) == before


def next_job(name: str = "next", **overrides: Any) -> FollowUp:
    return FollowUp(**({"name": name, "job_type": "probe", "payload": {"n": 2}} | overrides))


async def test_follow_ups_are_created_with_the_completion(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec(organization="globex", project="beta"))
    completion = await service.complete_job(
        claim, {}, [next_job("b", queue="elsewhere", priority=2), next_job("a", max_attempts=7)]
    )
    made = [created.job for created in completion.follow_ups]
    assert [job.idempotency_key for job in made] == [f"{claim.job_id}:b", f"{claim.job_id}:a"]
    assert {(job.organization_id, job.project_id) for job in made} == {("globex", "beta")}
    parent = await service.get_job(claim.job_id)
    assert [job.queue for job in made] == ["elsewhere", parent.queue]
    assert [(job.priority, job.max_attempts) for job in made] == [(2, 3), (0, 7)]
    for created in completion.follow_ups:
        assert created.created
        assert await service.get_job(created.job.id) == created.job
    assert parent.escalated_at is None
    # One transaction: what one statement inserted, the other's commit shows.
    ids = await sql(service, "SELECT xmin::text AS x FROM durable_jobs.jobs WHERE id = %(id)s", id=made[0].id)
    assert ids == await sql(service, "SELECT xmin::text AS x FROM durable_jobs.jobs WHERE id = %(id)s", id=claim.job_id)


async def test_a_refused_completion_creates_nothing(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    await expire(service, claim.job_id)
    await reclaimed(service, claim.job_id, B)
    with pytest.raises(LeaseLost):
        await service.complete_job(claim, {}, [next_job()])
    with pytest.raises(NotStorable, match="result"):
        await service.complete_job(claim, {"n": float("nan")}, [next_job()])
    assert len((await service.list_jobs()).items) == 1


async def test_a_follow_up_that_is_there_already_is_found(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    key = f"{claim.job_id}:next"
    parent = await service.get_job(claim.job_id)
    there = (await service.create_job(spec(idempotency_key=key, payload={"n": 2}, queue=parent.queue))).job
    completion = await service.complete_job(claim, {}, [next_job(), next_job()])
    assert [(created.created, created.job.id) for created in completion.follow_ups] == [(False, there.id)] * 2
    assert (await service.get_job(claim.job_id)).escalated_at is None


async def test_a_follow_up_conflict_undoes_nothing_and_escalates(service: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(service, spec())
    taken = f"{claim.job_id}:taken"
    there = (await service.create_job(spec(idempotency_key=taken, payload={"another": "request"}))).job
    completion = await service.complete_job(claim, {"answer": 42}, [next_job("taken"), next_job("free")])
    job = await service.get_job(claim.job_id)
    assert completion.job == job
    assert (job.status, job.result) == (JobStatus.COMPLETED, {"answer": 42})
    assert job.escalation_reason is not None
    assert "FOLLOW_UP_CONFLICT" in job.escalation_reason
    assert taken in job.escalation_reason
    assert job.escalated_at is not None
    assert await names(service, job.id) == ["claimed", "dispatched", "completed", "escalated"]
    assert await service.get_job(there.id) == there
    assert [created.job.idempotency_key for created in completion.follow_ups] == [f"{claim.job_id}:free"]
    assert await service.find_by_idempotency_key("acme", "alpha", f"{claim.job_id}:free") is not None


async def test_what_kept_follow_ups_from_being_named_escalates(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    problem = "FOLLOW_UPS_FAILED: ValueError: \x00 \ud800 " + "x" * 5000
    job = (await service.complete_job(claim, {}, follow_up_problem=problem)).job
    assert job.status is JobStatus.COMPLETED
    assert job.escalation_reason is not None
    assert job.escalation_reason.startswith("FOLLOW_UPS_FAILED: ValueError: \\u0000 \\ud800 x")


async def failed(service: DurableJobService, spec: Specs, begun: str = "dispatched") -> Job:
    claim = await BEGINNINGS[begun](service, spec(max_attempts=2))
    return await service.fail_job(claim, ERROR, retryable=False)


@pytest.mark.parametrize("begun", BEGINNINGS)
async def test_a_retry_is_a_new_intent(service: DurableJobService, spec: Specs, begun: str) -> None:
    before = await failed(service, spec, begun)
    job = await service.retry_job(before.id, "ann", "the provider is back")
    assert job == await service.get_job(before.id)
    fresh = {
        "status": JobStatus.QUEUED,
        "intent_number": 1,
        "attempt_count": 0,
        "claimed_by": None,
        "scheduled_at": job.updated_at,
        "updated_at": job.updated_at,
        "launch_check_at": job.launch_check_at,
        "started_at": None,
        "finished_at": None,
        "dispatched_at": None,
        "dispatched_generation": None,
        "operation_key": None,
        "error": None,
    }
    assert job == before.model_copy(update=fresh)
    assert job.lease_generation == 1
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.actor, event.data["cause"], event.data["reason"]) == (
        "retried",
        "ann",
        "retry",
        "the provider is back",
    )
    assert event.data["accept_duplicate_risk"] is False
    (attempt,) = (await service.list_job_attempts(job.id)).items
    moved = {"dispatched_at", "dispatched_generation", "operation_key"} if begun == "dispatched" else set()
    assert attempt.superseded is not None
    assert set(attempt.superseded) == moved
    if moved:
        assert attempt.superseded["operation_key"] == before.operation_key
        assert attempt.superseded["dispatched_generation"] == 1
    (control,) = await sql(service, "SELECT * FROM durable_jobs.control_events")
    assert (control["action"], control["actor"], control["reason"], control["job_id"]) == (
        "retry",
        "ann",
        "the provider is back",
        job.id,
    )
    # The budget is whole again, and the generation goes on from where it was.
    claim = await reclaimed(service, job.id, B)
    assert (claim.generation, (await service.get_job(job.id)).attempt_count) == (2, 1)
    await service.fail_job(claim, ERROR, retryable=True)
    assert (await service.get_job(job.id)).status is JobStatus.QUEUED


async def test_intents_go_on_counting(service: DurableJobService, spec: Specs) -> None:
    job = await failed(service, spec, "claimed")
    for intent in (1, 2, 3):
        job = await service.retry_job(job.id, "ann", "again")
        assert (job.intent_number, job.lease_generation) == (intent, intent)
        await service.fail_job(await reclaimed(service, job.id), ERROR, retryable=False)
    attempts = (await service.list_job_attempts(job.id)).items
    assert [(attempt.generation, attempt.intent_number) for attempt in attempts] == [(1, 0), (2, 1), (3, 2), (4, 3)]


async def test_a_retry_clears_flag_and_escalation(service: DurableJobService, spec: Specs) -> None:
    """A cancellation of the old intent is none of the new one; it is kept on the old attempt's row."""
    claim = await running(service, spec())
    await cancel(service, claim)
    await service.fail_job(claim, ERROR, retryable=False)
    job = await service.retry_job(claim.job_id, "ann", "after all")
    assert (job.status, job.cancel_requested_at, job.cancel_reason, job.cancel_actor) == (
        JobStatus.QUEUED,
        None,
        None,
        None,
    )
    (attempt,) = (await service.list_job_attempts(job.id)).items
    assert attempt.superseded is not None
    assert (attempt.superseded["cancel_reason"], attempt.superseded["cancel_actor"]) == ("not wanted", "ann")
    second = await reclaimed(service, job.id)
    assert await service.renew_lease(second)


async def test_releases_count_anew_after_a_retry(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec(max_attempts=2))).job
    for _ in range(11):
        await service.release_job(await reclaimed(service, job.id), "deploy")
    await service.fail_job(await reclaimed(service, job.id), ERROR, retryable=False)
    job = await service.retry_job(job.id, "ann", "again")
    assert (job.release_count, job.attempt_count) == (0, 0)
    job = await service.release_job(await reclaimed(service, job.id), "deploy")
    assert (job.release_count, job.attempt_count) == (1, 0)


async def test_only_a_failed_job_is_retried(service: DurableJobService, spec: Specs) -> None:
    for status in set(JobStatus) - {JobStatus.FAILED}:
        if status is JobStatus.QUEUED:
            job = (await service.create_job(spec())).job
        elif status in (JobStatus.CLAIMED, JobStatus.RUNNING):
            job = await service.get_job((await BEGINNINGS[status](service, spec())).job_id)
        else:
            job = await end_in(service, await claimed(service, spec(max_attempts=1)), status)
        before = await snapshot(service, job.id)
        for accept in (False, True):
            with pytest.raises(NotRetryable, match=status):
                await service.retry_job(job.id, "ann", "again", accept_duplicate_risk=accept)
        assert await snapshot(service, job.id) == before
    with pytest.raises(JobNotFound):
        await service.retry_job(uuid4(), "ann", "again")


async def test_a_retry_needs_an_actor_and_a_reason(service: DurableJobService, spec: Specs) -> None:
    job = await failed(service, spec)
    for actor, reason, field in (("", "again", "actor"), ("ann", " ", "reason"), ("ann", "\x00", "reason")):
        with pytest.raises(InvalidInput, match=field):
            await service.retry_job(job.id, actor, reason)
    assert await service.get_job(job.id) == job


async def test_an_operators_failure_is_retried_at_accepted_risk_alone(service: DurableJobService, spec: Specs) -> None:
    """The operator's word is no provider's: the first send may yet land beside the second."""
    for status in (JobStatus.INDETERMINATE, JobStatus.TIMED_OUT):
        claim = await dispatched(service, spec())
        await end_in(service, claim, status)
        await service.resolve_job(claim.job_id, JobStatus.FAILED, {"looked": "in the console"}, "ann")
        before = await snapshot(service, claim.job_id)
        with pytest.raises(NotRetryable, match="accept_duplicate_risk"):
            await service.retry_job(claim.job_id, "ann", "again")
        assert await snapshot(service, claim.job_id) == before
        job = await service.retry_job(claim.job_id, "bob", "again", accept_duplicate_risk=True)
        assert (job.status, job.reconciliation, job.reconciled_at) == (JobStatus.QUEUED, None, None)
        assert (await service.list_job_events(job.id)).items[-1].data["accept_duplicate_risk"] is True
        (attempt,) = (await service.list_job_attempts(job.id)).items
        assert attempt.superseded is not None
        assert attempt.superseded["reconciliation"]["actor"] == "ann"
