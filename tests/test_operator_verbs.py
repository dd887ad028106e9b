"""What operators and providers' webhooks do to jobs and queues: each verb's effect, its refusals, its audit row."""

import contextlib
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest

from durable_jobs import DurableJobService, EventName, Job, JobSpec, JobStatus, LeaseStatus, ProviderState
from durable_jobs.contract.errors import (
    DurableJobsError,
    InvalidInput,
    JobNotFound,
    LeaseLost,
    NotRequeueable,
    NotResolvable,
    NotRetryable,
)
from durable_jobs.contract.models import Claim, ClaimRefusal
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.service import RecheckFilter, control
from tests.conftest import Specs
from tests.support import (
    ERROR,
    HOLDER_VERBS,
    B,
    all_jobs,
    claimed,
    dispatched,
    end_in,
    expire,
    names,
    reclaimed,
    running,
    snapshot,
    sql,
)
from tests.sweeping import (
    LANDED,
    RESULT,
    Asked,
    Parent,
    abandoned,
    aged,
    audit,
    clock,
    escalated,
    follow_up,
    many_uncertain,
    summary,
    swept,
    timed_out,
    uncertain,
    unmarked,
)

COMPLETED, FAILED, DEAD_LETTER = JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.DEAD_LETTER
INDETERMINATE, TIMED_OUT = JobStatus.INDETERMINATE, JobStatus.TIMED_OUT
EVIDENCE = {"ticket": "INC-1", "seen": ["their ledger", 42]}

MakeRow = Callable[[DurableJobService, JobSpec], Awaitable[Any]]


async def created(service: DurableJobService, spec: JobSpec) -> Job:
    return (await service.create_job(spec)).job


def ended_in(status: JobStatus) -> MakeRow:
    async def make(service: DurableJobService, spec: JobSpec) -> Job:
        return await end_in(service, await claimed(service, spec.model_copy(update={"max_attempts": 1})), status)

    return make


ROWS: dict[JobStatus, MakeRow] = {
    JobStatus.QUEUED: created,
    JobStatus.CLAIMED: claimed,
    JobStatus.RUNNING: running,
    JobStatus.COMPLETED: ended_in(COMPLETED),
    JobStatus.FAILED: ended_in(FAILED),
    JobStatus.CANCELLED: ended_in(JobStatus.CANCELLED),
    JobStatus.DEAD_LETTER: ended_in(DEAD_LETTER),
    JobStatus.INDETERMINATE: uncertain,
    JobStatus.HALT_UNSAFE: ended_in(JobStatus.HALT_UNSAFE),
    JobStatus.TIMED_OUT: timed_out,
}


async def made(service: DurableJobService, make: MakeRow, spec: JobSpec) -> Job:
    row = await make(service, spec)
    return await service.get_job(row.job_id) if isinstance(row, Claim) else row


# resolve_job


async def test_resolve_settles_on_a_named_operators_word(service: DurableJobService, spec: Specs) -> None:
    makes = (uncertain, timed_out, escalated, unmarked)
    for make, verdict in [(make, verdict) for make in makes for verdict in (COMPLETED, FAILED, DEAD_LETTER)]:
        before = await make(service, spec())
        result = RESULT if verdict is COMPLETED else None
        job = await service.resolve_job(before.id, verdict, EVIDENCE, "ann", result=result)
        assert job == await service.get_job(before.id)
        reason = f"resolved as {verdict} by ann"
        assert (job.status, job.result, job.lease_generation) == (verdict, result, before.lease_generation)
        assert job.reconciliation == {"by": "operator", "actor": "ann", "evidence": EVIDENCE}
        assert (job.escalated_at, job.escalation_reason, job.finished_at) == (None, None, before.finished_at)
        assert (job.operation_key, job.follow_ups_due) == (before.operation_key, verdict is COMPLETED)
        if verdict is COMPLETED:
            assert job.error is None
        else:
            assert job.error is not None
            assert (job.error.code, job.error.message) == (
                f"RESOLVED_{verdict.upper()}",
                f"resolved as {verdict} by ann",
            )
        dead = verdict is DEAD_LETTER
        reason = f"resolved as {verdict} by ann"
        assert (job.dead_letter_reason, job.dead_lettered_at) == ((reason, job.reconciled_at) if dead else (None, None))
        event = (await service.list_job_events(job.id)).items[-1]
        assert (event.name, event.status, event.actor) == (EventName.RECONCILED, verdict, "ann")
        assert event.data["reconciliation"] == job.reconciliation
        (control_event,) = await audit(service, job_id=job.id)
        assert control_event == {
            "job_id": job.id,
            "organization_id": "acme",
            "project_id": "alpha",
            "action": "resolve",
            "actor": "ann",
            "reason": None,
            "data": {"verdict": verdict, "evidence": EVIDENCE},
        }
        with pytest.raises(NotResolvable):
            await service.resolve_job(before.id, verdict, EVIDENCE, "bob")


async def test_resolve_completes_without_a_result(service: DurableJobService, spec: Specs) -> None:
    job = await service.resolve_job((await uncertain(service, spec())).id, COMPLETED, EVIDENCE, "ann")
    assert job.result == {}


async def test_only_what_is_uncertain_can_be_resolved(service: DurableJobService, spec: Specs) -> None:
    for status, make in ROWS.items():
        if status in (INDETERMINATE, TIMED_OUT):
            continue
        job = await made(service, make, spec())
        before = await snapshot(service, job.id)
        with pytest.raises(NotResolvable, match=f"is {status}:"):
            await service.resolve_job(job.id, COMPLETED, EVIDENCE, "ann", result=RESULT)
        assert await snapshot(service, job.id) == before


BAD_RESOLUTIONS: list[tuple[str, dict[str, Any]]] = [
    ("actor", {"actor": ""}),
    ("actor", {"actor": " \t"}),
    ("actor", {"actor": "an\x00n"}),
    ("evidence", {"evidence": {}}),
    ("evidence", {"evidence": ["seen"]}),
    ("evidence.seen", {"evidence": {"seen": math.nan}}),
    ("evidence.seen[0]", {"evidence": {"seen": ["\ud800"]}}),
    ("verdict", {"verdict": JobStatus.CANCELLED}),
    ("verdict", {"verdict": JobStatus.INDETERMINATE}),
    ("verdict", {"verdict": "done"}),
    ("result", {"result": [7]}),
    ("result.total", {"result": {"total": math.inf}}),
    ("result", {"verdict": FAILED, "result": RESULT}),
]


async def test_resolve_checks_its_input(service: DurableJobService, spec: Specs) -> None:
    job = await uncertain(service, spec())
    before = await snapshot(service, job.id)
    for field, overrides in BAD_RESOLUTIONS:
        given = {"verdict": COMPLETED, "evidence": EVIDENCE, "actor": "ann"} | overrides
        with pytest.raises(InvalidInput) as refused:
            await service.resolve_job(job.id, **given)
        assert [problem.field for problem in refused.value.problems] == [field], overrides
    assert await snapshot(service, job.id) == before


async def test_a_verdict_given_as_text_goes_with_a_result(service: DurableJobService, spec: Specs) -> None:
    job = await uncertain(service, spec())
    await service.resolve_job(job.id, "completed", EVIDENCE, "ann", result=RESULT)  # type: ignore[arg-type]
    assert (await service.get_job(job.id)).result == RESULT


async def test_follow_ups_of_a_resolution_are_created_by_the_next_sweep_once(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    job = await uncertain(service, spec(priority=1))
    await service.resolve_job(job.id, COMPLETED, EVIDENCE, "ann", result=RESULT)
    # A worker without the handler can't name them.
    stranger = type("Stranger", (Asked,), {"job_type": "stranger"})(LANDED)
    assert (await swept(service, queue, stranger)).summary.follow_ups == 0
    handler = Parent(LANDED, "mail", "bill")
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(0, follow_ups=2)
    (told,) = sweep.told
    assert told.job is not None
    assert (told.job.id, handler.keys) == (job.id, [])
    assert (await service.get_job(job.id)).follow_ups_due is False
    children = [each for each in await all_jobs(service) if each.id != job.id]
    assert {each.id for each in children} == {each.id for each in told.follow_ups}
    assert {each.idempotency_key: each.payload for each in children} == {
        f"{job.id}:mail": {"of": "mail", "total": 7},
        f"{job.id}:bill": {"of": "bill", "total": 7},
    }
    assert {(each.organization_id, each.project_id, each.queue) for each in children} == {("acme", "alpha", queue)}
    assert (await swept(service, queue, handler)).summary == summary(0)


@pytest.mark.parametrize(
    ("result", "reason"),
    [({"sum": 7}, "FOLLOW_UPS_FAILED: ValidationError: "), (RESULT, "FOLLOW_UP_CONFLICT: ")],
    ids=["a result that doesn't fit the model", "a key that has another request"],
)
async def test_what_goes_wrong_with_follow_ups_escalates_the_parent_and_undoes_nothing(
    service: DurableJobService, spec: Specs, queue: str, result: dict[str, Any], reason: str
) -> None:
    job = await uncertain(service, spec())
    await service.create_job(spec(idempotency_key=f"{job.id}:mail", payload={"somebody": "else"}))
    await service.resolve_job(job.id, COMPLETED, EVIDENCE, "ann", result=result)
    handler = Parent(LANDED, "mail")
    sweep = await swept(service, queue, handler)
    assert (sweep.summary.follow_ups, sweep.words) == (0, {job.id: "completed"})
    after = await service.get_job(job.id)
    assert (after.status, after.result, after.follow_ups_due) == (COMPLETED, result, False)
    assert after.escalation_reason is not None
    assert after.escalation_reason.startswith(reason)
    assert (await names(service, job.id))[-2:] == [EventName.RECONCILED, EventName.ESCALATED]
    assert (await swept(service, queue, handler)).told == []
    assert len((await service.list_jobs()).items) == 2


# requeue_job


INSTEAD = {
    JobStatus.QUEUED: "it is queued already",
    JobStatus.CLAIMED: "cancel_job",
    JobStatus.RUNNING: "cancel_job",
    JobStatus.COMPLETED: "it never moves again",
    JobStatus.FAILED: "retry_job",
    JobStatus.CANCELLED: "it never moves again",
    JobStatus.DEAD_LETTER: "it never moves again",
    JobStatus.INDETERMINATE: "resolve_job",
    JobStatus.HALT_UNSAFE: "it never moves again",
    JobStatus.TIMED_OUT: "resolve_job",
}


async def test_requeue_refuses_and_names_the_verb_that_applies(service: DurableJobService, spec: Specs) -> None:
    assert INSTEAD.keys() == ROWS.keys() == set(JobStatus)
    for status, make in ROWS.items():
        job = await made(service, make, spec())
        before = await snapshot(service, job.id)
        with pytest.raises(NotRequeueable, match=f"is {status}: .*{INSTEAD[status]}"):
            await service.requeue_job(job.id, "ann", "stuck")
        assert await snapshot(service, job.id) == before
    job = await abandoned(service, spec())
    before = await snapshot(service, job.id)
    with pytest.raises(NotRequeueable, match=r"crossed its boundary.*resolve_job"):
        await service.requeue_job(job.id, "ann", "stuck")
    assert await snapshot(service, job.id) == before


@pytest.mark.parametrize("hold", [claimed, running])
async def test_requeue_fences_and_gives_the_attempts_back(service: DurableJobService, spec: Specs, hold: Any) -> None:
    claim = await hold(service, spec(max_attempts=1))
    await expire(service, claim.job_id)
    before = await service.get_job(claim.job_id)
    now = await clock(service)
    job = await service.requeue_job(claim.job_id, "ann", "its node is gone")
    assert (job.status, job.attempt_count, job.lease_generation) == (JobStatus.QUEUED, 0, 2)
    assert (job.lease_id, job.claimed_by, job.claim_token, job.lease_expires_at) == (None, None, None, None)
    assert (job.intent_number, job.error) == (0, None)
    assert now <= job.scheduled_at <= await clock(service)
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.actor, event.generation) == (EventName.RETRIED, "ann", 2)
    assert (event.data["cause"], event.data["reason"]) == ("requeue", "its node is gone")
    held, fenced = (await service.list_job_attempts(job.id)).items
    assert (held.outcome, held.worker_id) == ("requeued", before.claimed_by)
    assert fenced.generation == 2
    assert fenced.ended_at is not None
    (control_event,) = await audit(service, job_id=job.id)
    assert (control_event["action"], control_event["actor"], control_event["reason"]) == (
        "requeue",
        "ann",
        "its node is gone",
    )
    # Whoever held it is refused on every verb, while it is queued and when another has it.
    for verb in HOLDER_VERBS.values():
        with pytest.raises(LeaseLost):
            await verb(service, claim)
    assert await service.renew_lease(claim) is LeaseStatus.LOST
    again = await reclaimed(service, job.id, B)
    assert again.generation == 3
    for verb in HOLDER_VERBS.values():
        with pytest.raises(LeaseLost):
            await verb(service, claim)
    await service.mark_provider_dispatched(again, f"key:{job.id}", consequential=False)
    assert (await service.complete_job(again, RESULT)).job.attempt_count == 1


async def test_requeue_cancels_what_is_to_be_cancelled(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    await service.cancel_job(claim.job_id, "not wanted", "bob")
    await expire(service, claim.job_id)
    job = await service.requeue_job(claim.job_id, "ann", "its node is gone")
    assert (job.status, job.lease_generation) == (JobStatus.CANCELLED, 2)
    assert job.error is not None
    assert job.error.message == "cancelled by bob: not wanted"
    assert await names(service, job.id) == [EventName.CLAIMED, EventName.CANCELLED]
    assert [each["action"] for each in await audit(service, job_id=job.id)] == ["cancel", "requeue"]
    with pytest.raises(LeaseLost):
        await service.complete_job(claim, RESULT)


# retry_job


async def failed_by_the_provider(service: DurableJobService, spec: JobSpec) -> Job:
    job = await uncertain(service, spec)
    await swept(service, spec.queue, Asked(ProviderState.failed("declined")))
    return await service.get_job(job.id)


async def not_performed(service: DurableJobService, spec: JobSpec) -> Job:
    job = await uncertain(service, spec)
    await swept(service, spec.queue, Asked(ProviderState.absent(await clock(service) - timedelta(seconds=1))))
    return await service.get_job(job.id)


async def failed_by_its_handler(service: DurableJobService, spec: JobSpec) -> Job:
    return await service.fail_job(await dispatched(service, spec), ERROR, retryable=False)


async def failed_by_an_operator(service: DurableJobService, spec: JobSpec) -> Job:
    return await service.resolve_job((await escalated(service, spec)).id, FAILED, EVIDENCE, "bob")


@pytest.mark.parametrize("make", [failed_by_the_provider, not_performed, failed_by_its_handler])
async def test_retry_after_the_providers_no(service: DurableJobService, spec: Specs, make: MakeRow) -> None:
    before = await made(service, make, spec(max_attempts=1))
    assert before.status is FAILED
    job = await service.retry_job(before.id, "ann", "their outage is over")
    assert (job.status, job.intent_number, job.attempt_count) == (JobStatus.QUEUED, 1, 0)
    assert (job.operation_key, job.dispatched_at, job.reconciliation, job.error) == (None, None, None, None)
    assert (job.lease_generation, job.finished_at) == (before.lease_generation, None)
    (attempt,) = (await service.list_job_attempts(job.id)).items
    assert attempt.superseded is not None
    assert attempt.superseded["operation_key"] == before.operation_key == attempt.operation_key
    assert attempt.superseded.get("reconciliation") == before.reconciliation
    (control_event,) = await audit(service, job_id=job.id)
    assert (control_event["action"], control_event["actor"]) == ("retry", "ann")
    assert control_event["data"] == {"accept_duplicate_risk": False}


async def test_retry_after_an_operators_no_accepts_the_risk(service: DurableJobService, spec: Specs) -> None:
    """The first send may still land beside the second."""
    job = await failed_by_an_operator(service, spec())
    before = await snapshot(service, job.id)
    with pytest.raises(NotRetryable, match="accept_duplicate_risk"):
        await service.retry_job(job.id, "ann", "again")
    assert await snapshot(service, job.id) == before
    job = await service.retry_job(job.id, "ann", "again", accept_duplicate_risk=True)
    assert (job.status, job.intent_number, job.operation_key, job.escalated_at) == (JobStatus.QUEUED, 1, None, None)
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.actor, event.data["cause"]) == (EventName.RETRIED, "ann", "retry")
    assert (event.data["reason"], event.data["accept_duplicate_risk"]) == ("again", True)
    control_event = (await audit(service, job_id=job.id))[-1]
    assert (control_event["action"], control_event["data"]) == ("retry", {"accept_duplicate_risk": True})
    # The risk was taken for that one send: the next one asks again.
    claim = await reclaimed(service, job.id)
    await service.mark_provider_dispatched(claim, f"key:{job.id}:retry-1", consequential=False)
    await service.mark_indeterminate(claim, ERROR)
    await service.resolve_job(job.id, FAILED, EVIDENCE, "bob")
    with pytest.raises(NotRetryable):
        await service.retry_job(job.id, "ann", "and again")


async def test_a_risk_that_does_not_exist_is_not_recorded(service: DurableJobService, spec: Specs) -> None:
    job = await failed_by_the_provider(service, spec())
    await service.retry_job(job.id, "ann", "again", accept_duplicate_risk=True)
    assert (await service.list_job_events(job.id)).items[-1].data["accept_duplicate_risk"] is False
    assert (await audit(service, job_id=job.id))[-1]["data"] == {"accept_duplicate_risk": False}


async def test_only_what_failed_can_be_retried(service: DurableJobService, spec: Specs) -> None:
    rows = [await made(service, make, spec()) for status, make in ROWS.items() if status is not FAILED]
    dead = await uncertain(service, spec())
    rows.append(await service.resolve_job(dead.id, DEAD_LETTER, EVIDENCE, "bob"))
    for job in rows:
        before = await snapshot(service, job.id)
        with pytest.raises(NotRetryable, match=f"is {job.status}"):
            await service.retry_job(job.id, "ann", "again", accept_duplicate_risk=True)
        assert await snapshot(service, job.id) == before


# Who may, and with what words.


async def test_every_verb_asks_for_actor_and_reason(service: DurableJobService, spec: Specs, queue: str) -> None:
    claim = await claimed(service, spec())
    await expire(service, claim.job_id)
    before = await snapshot(service, claim.job_id)
    verbs: dict[str, Callable[..., Awaitable[Any]]] = {
        "requeue": partial(service.requeue_job, claim.job_id),
        "retry": partial(service.retry_job, claim.job_id),
        "recheck": partial(service.recheck_job, RecheckFilter(queue=queue)),
        "pause": partial(service.pause_queue, queue),
        "resume": partial(service.resume_queue, queue),
    }
    for name, verb in verbs.items():
        for field in ("actor", "reason"):
            for text in ("", " ", "\x00", "\ud800", "x" * 2049):
                with pytest.raises(InvalidInput) as refused:
                    await verb(**({"actor": "ann", "reason": "because"} | {field: text}))
                assert [problem.field for problem in refused.value.problems] == [field], (name, text[:9])
    assert await snapshot(service, claim.job_id) == before
    assert await audit(service) == []


async def test_another_tenants_job_is_not_found(service: DurableJobService, spec: Specs) -> None:
    theirs = await uncertain(service, spec(organization="globex"))
    before = await snapshot(service, theirs.id)
    for job_id, tenant in ((theirs.id, "acme"), (uuid4(), None)):
        for act in (
            service.resolve_job(job_id, COMPLETED, EVIDENCE, "ann", organization=tenant),
            service.requeue_job(job_id, "ann", "stuck", organization=tenant),
            service.retry_job(job_id, "ann", "again", organization=tenant),
        ):
            with pytest.raises(JobNotFound):
                await act
    assert await snapshot(service, theirs.id) == before
    assert await audit(service) == []


# recheck_job


async def test_recheck_sends_back_what_each_filter_names(service: DurableJobService, spec: Specs) -> None:
    specs = [
        spec(),
        spec(organization="globex"),
        spec(project="beta"),
        spec(queue="another-queue"),
        spec(job_type="other"),
    ]
    rows = [await escalated(service, each) for each in specs]
    plain = await uncertain(service, spec())
    before = await snapshot(service, plain.id)
    first, last = rows[0].escalated_at, rows[-1].escalated_at
    assert first is not None
    assert last is not None
    filters: list[tuple[RecheckFilter, list[int]]] = [
        (RecheckFilter(job_id=rows[2].id), [2]),
        (RecheckFilter(organization="globex"), [1]),
        (RecheckFilter(project="beta"), [2]),
        (RecheckFilter(queue="another-queue"), [3]),
        (RecheckFilter(job_type="other"), [4]),
        (RecheckFilter(escalated_after=last), [4]),
        (RecheckFilter(escalated_before=last), [0, 1, 2, 3]),
        (RecheckFilter(escalated_after=first, escalated_before=rows[1].escalated_at), [0]),
        (RecheckFilter(organization="acme", project="alpha", job_type="probe"), [0, 3]),
        (RecheckFilter(organization="nobody"), []),
        (RecheckFilter(job_id=plain.id), []),
    ]
    for chosen, expected in filters:
        sent = await service.recheck_job(chosen, "ann", "their outage is over")
        assert sorted(sent) == sorted(rows[index].id for index in expected), chosen
        for index, row in enumerate(rows):
            job = await service.get_job(row.id)
            assert (job.escalated_at is None) == (index in expected)
            # Back to where it stood, for the next filter.
            await sql(
                service,
                "UPDATE durable_jobs.jobs SET escalated_at = %(at)s, escalation_reason = %(why)s WHERE id = %(id)s",
                id=row.id,
                at=row.escalated_at,
                why=row.escalation_reason,
            )
    assert await snapshot(service, plain.id) == before
    # The last word of every trail, for the check at the end.
    await sql(service, "UPDATE durable_jobs.jobs SET escalated_at = NULL, escalation_reason = NULL")


async def test_recheck_takes_a_job_type_in_any_case(service: DurableJobService, spec: Specs) -> None:
    job = await escalated(service, spec(job_type="Probe"))
    assert await service.recheck_job(RecheckFilter(job_type="Probe"), "ann", "again") == [job.id]


async def test_recheck_counts_the_lookups_anew_and_the_sweep_asks_again(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    job = await uncertain(service, spec())
    await sql(service, "UPDATE durable_jobs.jobs SET lookup_tries = 16")
    handler = Asked(ConnectionError("down"))
    await swept(service, queue, handler)
    assert (await service.get_job(job.id)).escalated_at is not None
    assert await service.recheck_job(RecheckFilter(queue=queue), "ann", "their outage is over") == [job.id]
    after = await service.get_job(job.id)
    assert (after.status, after.escalated_at, after.escalation_reason) == (INDETERMINATE, None, None)
    assert after.lookup_tries == 0
    event = (await service.list_job_events(job.id)).items[-1]
    assert (event.name, event.actor) == (EventName.ESCALATED, "ann")
    assert event.data == {"cleared": True, "reason": "their outage is over"}
    (control_event,) = await audit(service, job_id=job.id)
    assert (control_event["action"], control_event["actor"], control_event["reason"]) == (
        "recheck",
        "ann",
        "their outage is over",
    )
    assert (await swept(service, queue, handler)).summary == summary(skipped={"lookup_failed": 1})
    assert (await service.get_job(job.id)).lookup_tries == 1
    assert len(handler.keys) == 2


async def test_a_recheck_of_what_timed_out_brings_it_back_before_the_operator(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    """Nothing but an operator resolves it: the sweep escalates it again."""
    job = await timed_out(service, spec())
    await swept(service, queue, Asked(LANDED))
    await service.recheck_job(RecheckFilter(job_id=job.id), "ann", "look again")
    sweep = await swept(service, queue, Asked(LANDED))
    assert sweep.summary == summary(escalated=1)


async def test_recheck_of_many_at_once(
    service: DurableJobService, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a provider's outage everything of that hour goes back into the sweep; over several pages."""
    monkeypatch.setattr(control, "_RECHECK_PAGE", 7)
    rows = await many_uncertain(service, [spec() for _ in range(21)])
    handler = Asked(ProviderState.unknown("we are down"))
    outage = await clock(service)
    await swept(service, queue, handler)
    over = await clock(service)
    later = await escalated(service, spec())
    chosen = RecheckFilter(queue=queue, escalated_after=outage, escalated_before=over)
    sent = await service.recheck_job(chosen, "ann", "their outage is over")
    assert sorted(sent) == [job.id for job in rows]
    assert sorted(row["job_id"] for row in await audit(service, action="recheck")) == [job.id for job in rows]
    handler.answer = LANDED
    sweep = await swept(service, queue, handler)
    assert sweep.summary == summary(21, resolved={"completed": 21}, before_an_operator=1)
    assert (await service.get_job(later.id)).escalated_at is not None


async def test_recheck_asks_for_a_filter(service: DurableJobService, spec: Specs) -> None:
    job = await escalated(service, spec())
    with pytest.raises(InvalidInput) as refused:
        await service.recheck_job(RecheckFilter(), "ann", "everything")
    assert [problem.field for problem in refused.value.problems] == ["filter"]
    assert (await service.get_job(job.id)).escalated_at is not None
    with pytest.raises(ValueError, match="timezone"):
        RecheckFilter(escalated_after=datetime(2026, 1, 1))  # noqa: DTZ001 - that is the point
    with pytest.raises(ValueError, match="extra"):
        RecheckFilter(escalated_since=datetime(2026, 1, 1, tzinfo=UTC))  # type: ignore[call-arg]


# record_provider_state


async def said(service: DurableJobService, job: Job, state: ProviderState[Any], **overrides: Any) -> Job:
    assert job.operation_key is not None
    given: dict[str, Any] = {
        "operation_key": job.operation_key,
        "state": state,
        "evidence": EVIDENCE,
        "source": "billing",
        "organization": job.organization_id,
        "project": job.project_id,
    }
    return await service.record_provider_state(**(given | overrides))


@pytest.mark.parametrize("make", [uncertain, escalated])
async def test_a_providers_word_settles(service: DurableJobService, spec: Specs, make: MakeRow) -> None:
    """Escalated or not, as a sweep's lookup would."""
    deadline = await clock(service) - timedelta(minutes=1)
    words: list[tuple[ProviderState[Any], JobStatus, str | None, dict[str, Any]]] = [
        (ProviderState.succeeded(RESULT), COMPLETED, None, {}),
        (ProviderState.failed("declined"), FAILED, "PROVIDER_FAILED", {}),
        (ProviderState.absent(deadline), FAILED, "NOT_PERFORMED", {"send_deadline": deadline.isoformat()}),
    ]
    for state, status, code, more in words:
        before = await made(service, make, spec())
        job = await said(service, before, state, asked_at=await clock(service))
        assert job == await service.get_job(before.id)
        assert (job.status, job.result) == (status, RESULT if status is COMPLETED else None)
        assert (job.error.code if job.error else None) == code
        assert (job.escalated_at, job.escalation_reason, job.finished_at) == (None, None, before.finished_at)
        record = {"by": "provider", "source": "billing", "answer": state.answer, "evidence": EVIDENCE} | more
        assert job.reconciliation == record
        event = (await service.list_job_events(job.id)).items[-1]
        assert (event.name, event.actor, event.data["reconciliation"]) == (EventName.RECONCILED, "billing", record)
        with pytest.raises(NotResolvable):
            await said(service, before, state)


async def test_a_providers_failure_ends_as_the_deployer_says(service: DurableJobService, spec: Specs) -> None:
    policy = ReconciliationPolicy(on_provider_failure=DEAD_LETTER)
    job = await said(service, await uncertain(service, spec()), ProviderState.failed("declined"), policy=policy)
    assert (job.status, job.dead_letter_reason) == (DEAD_LETTER, "declined")


async def test_a_word_that_settles_nothing_escalates(service: DurableJobService, spec: Specs) -> None:
    words = [
        (ProviderState.absent(), "ABSENT: "),
        (ProviderState.absent(datetime(2199, 1, 1, tzinfo=UTC)), "ABSENT: "),
        (ProviderState.unknown("no such ledger"), "UNKNOWN: "),
    ]
    for state, reason in words:
        job = await said(service, await uncertain(service, spec()), state)
        assert (job.status, job.reconciliation) == (INDETERMINATE, None)
        assert job.escalation_reason is not None
        assert job.escalation_reason.startswith(reason)
        assert repr(job.operation_key) in job.escalation_reason
        event = (await service.list_job_events(job.id)).items[-1]
        assert (event.name, event.actor) == (EventName.ESCALATED, "billing")


async def test_a_word_of_pending_changes_nothing_before_the_deadline(service: DurableJobService, spec: Specs) -> None:
    early, late, before_an_operator = [await make(service, spec()) for make in (uncertain, uncertain, escalated)]
    await aged(service, late.id, hours=25)
    for job in (early, before_an_operator):
        before = await snapshot(service, job.id)
        await said(service, job, ProviderState.pending())
        after = await snapshot(service, job.id)
        assert len(after.pop("control_events")) == 1
        assert after == {table: rows for table, rows in before.items() if table != "control_events"}
    job = await said(service, late, ProviderState.pending())
    assert job.escalation_reason is not None
    assert job.escalation_reason.startswith("PENDING: ")


async def test_a_word_of_absent_that_is_older_than_the_deadline_proves_nothing(
    service: DurableJobService, spec: Specs
) -> None:
    """Invariant 10: looked up a second before the send deadline, delivered a second after it.

    `record_provider_state` has no way of being told when the provider looked; until it has one, the word of a webhook
    that the key is absent can't be proof.
    """
    before = await uncertain(service, spec())
    looked_at = await clock(service) - timedelta(seconds=2)
    state: ProviderState[Any] = ProviderState.absent(looked_at + timedelta(seconds=1))
    job = await said(service, before, state, evidence={"looked_at": looked_at.isoformat()})
    assert job.status is INDETERMINATE


async def test_a_providers_word_keeps_to_its_tenant(service: DurableJobService, spec: Specs) -> None:
    """Operation keys are unique within organization and project alone."""
    places = [("acme", "alpha"), ("acme", "beta"), ("globex", "alpha")]
    rows = []
    for organization, project in places:
        claim = await claimed(service, spec(organization=organization, project=project))
        await service.mark_provider_dispatched(claim, "invoice-17", consequential=False)
        rows.append(await service.mark_indeterminate(claim, ERROR))
    assert (await said(service, rows[1], ProviderState.succeeded(RESULT))).id == rows[1].id
    assert [(await service.get_job(job.id)).status for job in rows] == [INDETERMINATE, COMPLETED, INDETERMINATE]
    for organization, project in (("globex", "beta"), ("initech", "alpha")):
        with pytest.raises(JobNotFound):
            await said(service, rows[0], LANDED_STATE, organization=organization, project=project)
    with pytest.raises(JobNotFound):
        await said(service, rows[0], LANDED_STATE, operation_key="invoice-18")


LANDED_STATE: ProviderState[Any] = ProviderState.succeeded(RESULT)


async def test_a_providers_word_is_about_one_intent(service: DurableJobService, spec: Specs) -> None:
    """That of an earlier one is refused: its evidence is never read as that of the present one."""
    first = await uncertain(service, spec())
    await said(service, first, ProviderState.failed("declined"))
    await service.retry_job(first.id, "ann", "again")
    for _ in range(2):
        with pytest.raises(JobNotFound):
            await said(service, first, LANDED_STATE)
        claim = await service.claim_job(B, uuid4(), job_id=first.id)
        if claim and claim.claim:
            await service.mark_provider_dispatched(claim.claim, f"{first.operation_key}:retry-1", consequential=False)
            await service.mark_indeterminate(claim.claim, ERROR)
    second = await service.get_job(first.id)
    assert second.status is INDETERMINATE
    assert (await said(service, second, LANDED_STATE)).status is COMPLETED


async def test_a_providers_word_resolves_what_is_indeterminate_alone(service: DurableJobService, spec: Specs) -> None:
    rows = [await timed_out(service, spec()), await abandoned(service, spec())]
    rows.append(await service.get_job((await dispatched(service, spec())).job_id))
    done = await dispatched(service, spec())
    rows.append((await service.complete_job(done, RESULT)).job)
    for row in rows:
        job = await service.get_job(row.id)
        before = await snapshot(service, job.id)
        with pytest.raises(NotResolvable, match=f"is {job.status}"):
            await said(service, job, LANDED_STATE)
        assert await snapshot(service, job.id) == before


async def test_a_providers_word_is_checked(service: DurableJobService, spec: Specs) -> None:
    job = await uncertain(service, spec())
    before = await snapshot(service, job.id)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("source", {"source": " "}),
        ("evidence", {"evidence": "seen"}),
        ("evidence.seen", {"evidence": {"seen": "\x00"}}),
        ("state.result", {"state": ProviderState.succeeded([7])}),
        ("state.result.total", {"state": ProviderState.succeeded({"total": math.nan})}),
    ]
    for field, overrides in bad:
        with pytest.raises(InvalidInput) as refused:
            await said(service, job, overrides.pop("state", LANDED_STATE), **overrides)
        assert [problem.field for problem in refused.value.problems] == [field]
    assert await snapshot(service, job.id) == before


@pytest.mark.parametrize(
    "overrides",
    [
        {"operation_key": "\x00"},
        {"organization": "\x00"},
        {"state": ProviderState.absent(datetime(2026, 1, 1))},  # noqa: DTZ001 - that is the point
    ],
    ids=["NUL in the key", "NUL in the organization", "a send deadline without a zone"],
)
async def test_a_providers_word_is_checked_altogether(
    service: DurableJobService, spec: Specs, overrides: dict[str, Any]
) -> None:
    """Section 15: bad input is a typed error that names the field. (For a key, not to be found would do as well.)"""
    job = await uncertain(service, spec())
    try:
        await said(service, job, overrides.pop("state", LANDED_STATE), **overrides)
    except (InvalidInput, JobNotFound):
        return
    except (DurableJobsError, TypeError) as error:
        raise AssertionError("not the caller's error, by its type") from error
    raise AssertionError("accepted")


async def test_follow_ups_of_a_providers_word_are_created_by_the_next_sweep_once(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    job = await said(service, await uncertain(service, spec()), LANDED_STATE)
    assert (job.status, job.follow_ups_due) == (COMPLETED, True)
    handler = Parent(LANDED, "mail")
    assert (await swept(service, queue, handler)).summary == summary(0, follow_ups=1)
    assert (await swept(service, queue, handler)).summary == summary(0)
    children = [each.idempotency_key for each in (await service.list_jobs()).items if each.id != job.id]
    assert children == [f"{job.id}:{follow_up('mail').name}"]


async def test_a_providers_word_leaves_an_audit_row(service: DurableJobService, spec: Specs) -> None:
    """Issue 3, point 6: the operator verbs, `record_provider_state` among them, each with a row in `control_events`."""
    job = await said(service, await uncertain(service, spec()), LANDED_STATE)
    (control_event,) = await audit(service, job_id=job.id)
    assert control_event["actor"] == "billing"


# pause_queue, resume_queue


async def claim_by_id(service: DurableJobService, job_id: UUID) -> ClaimRefusal | None:
    outcome = await service.claim_job(B, uuid4(), job_id=job_id)
    assert outcome is not None
    if outcome.claim is not None:
        await service.release_job(outcome.claim, "handed back")
    return outcome.refusal


async def claim_next(service: DurableJobService, *queues: str) -> UUID | None:
    outcome = await service.claim_job(B, uuid4(), queues=queues)
    if outcome is None:
        return None
    assert outcome.claim is not None
    await service.release_job(outcome.claim, "handed back")
    return outcome.claim.job_id


async def test_a_paused_queue_is_not_claimed_from(service: DurableJobService, spec: Specs, queue: str) -> None:
    here, there = await created(service, spec()), await created(service, spec(queue="another-queue"))
    held = await claimed(service, spec())
    assert await service.pause_queue(queue, actor="ann", reason="their outage") is True
    assert await claim_by_id(service, here.id) is ClaimRefusal.PAUSED
    assert await claim_next(service, queue) is None
    assert await claim_next(service, queue, "another-queue") == there.id
    assert await claim_by_id(service, there.id) is None
    # An attempt in hand goes on to its end.
    assert await service.renew_lease(held) is LeaseStatus.HELD
    await service.mark_provider_dispatched(held, f"key:{held.job_id}", consequential=False)
    assert (await service.complete_job(held, RESULT)).job.status is COMPLETED
    assert (await service.get_job(here.id)).attempt_count == 0
    assert await service.resume_queue(queue, actor="bob", reason="it is over") is True
    assert await claim_by_id(service, here.id) is None
    assert await claim_next(service, queue) == here.id


async def test_a_type_is_paused_alone(service: DurableJobService, spec: Specs, queue: str) -> None:
    """In any case, as job types are folded."""
    paused, other = await created(service, spec()), await created(service, spec(job_type="other"))
    elsewhere = await created(service, spec(queue="another-queue"))
    assert await service.pause_queue(queue, "Probe", actor="ann", reason="their outage") is True
    assert await claim_by_id(service, paused.id) is ClaimRefusal.PAUSED
    assert await claim_by_id(service, other.id) is None
    assert await claim_by_id(service, elsewhere.id) is None
    assert await claim_next(service, queue) == other.id
    assert await service.resume_queue(queue, "PROBE", actor="ann", reason="over") is True
    assert await claim_by_id(service, paused.id) is None


async def test_an_organization_is_paused_alone(service: DurableJobService, spec: Specs, queue: str) -> None:
    mine, theirs = await created(service, spec()), await created(service, spec(organization="globex"))
    assert await service.pause_queue(queue, organization="acme", actor="ann", reason="unpaid") is True
    assert await claim_by_id(service, mine.id) is ClaimRefusal.PAUSED
    assert await claim_by_id(service, theirs.id) is None
    assert await claim_next(service, queue) == theirs.id
    assert await service.resume_queue(queue, actor="ann", reason="of nobody in particular") is False
    assert await claim_by_id(service, mine.id) is ClaimRefusal.PAUSED
    assert await service.resume_queue(queue, organization="acme", actor="ann", reason="paid") is True
    assert await claim_by_id(service, mine.id) is None
    assert [row["data"]["organization"] for row in await audit(service)] == ["acme", None, "acme"]


async def test_each_pause_stands_for_itself(service: DurableJobService, spec: Specs, queue: str) -> None:
    job = await created(service, spec())
    assert await service.pause_queue(queue, actor="ann", reason="1") is True
    assert await service.pause_queue(queue, "probe", actor="ann", reason="2") is True
    assert await service.pause_queue(queue, actor="bob", reason="3") is False
    assert await service.resume_queue(queue, actor="ann", reason="4") is True
    assert await claim_by_id(service, job.id) is ClaimRefusal.PAUSED
    assert await service.resume_queue(queue, actor="ann", reason="5") is False
    assert await service.resume_queue(queue, "probe", actor="ann", reason="6") is True
    assert await claim_by_id(service, job.id) is None
    found = [(row["action"], row["actor"], row["reason"], row["data"]["changed"]) for row in await audit(service)]
    assert found == [
        ("pause", "ann", "1", True),
        ("pause", "ann", "2", True),
        ("pause", "bob", "3", False),
        ("resume", "ann", "4", True),
        ("resume", "ann", "5", False),
        ("resume", "ann", "6", True),
    ]
    assert [(row["data"]["queue"], row["data"]["job_type"], row["job_id"]) for row in (await audit(service))[:2]] == [
        (queue, None, None),
        (queue, "probe", None),
    ]


async def test_a_pause_keeps_nothing_uncertain_waiting(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Reclaims that run no handler, and the sweep, go on; one that would run it waits."""
    rows = [await hold(service, spec()) for hold in (dispatched, claimed, claimed)]
    await service.pause_queue(queue, actor="ann", reason="their outage")
    crossed, flagged, plain = rows
    await service.cancel_job(flagged.job_id, "not wanted", "ann")
    for claim in rows:
        await expire(service, claim.job_id)
    assert await claim_by_id(service, crossed.job_id) is ClaimRefusal.LANDED
    assert await claim_by_id(service, flagged.job_id) is ClaimRefusal.LANDED
    assert await claim_by_id(service, plain.job_id) is ClaimRefusal.PAUSED
    assert (await service.get_job(crossed.job_id)).status is INDETERMINATE
    assert (await service.get_job(flagged.job_id)).status is JobStatus.CANCELLED
    sweep = await swept(service, queue, Asked(LANDED))
    assert sweep.summary == summary(2, resolved={"completed": 1}, skipped={"left_to_reclaim": 1})


async def test_a_pause_of_what_can_not_exist_is_refused(service: DurableJobService) -> None:
    """Section 15. An empty type, as a form field left blank gives, would pause the whole queue."""
    accepted = []
    for queue_name, job_type in (("no queue\n", None), ("-", None), ("q", "no type\n"), ("q", " "), ("q", "")):
        with contextlib.suppress(InvalidInput):
            await service.pause_queue(queue_name, job_type, actor="ann", reason="typo")
            accepted.append((queue_name, job_type))
    assert accepted == []
