"""The event trail: append-only by the database's hand, a closed vocabulary, and the fold that the row must equal."""

import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import pytest_asyncio

from durable_jobs import DurableJobService, FollowUp
from durable_jobs.contract.errors import InvalidInput, JobNotFound, UnknownEvent
from durable_jobs.contract.models import Job
from durable_jobs.contract.states import EventName, JobStatus
from durable_jobs.contract.trail import MAX_RESULT_IN_EVENT_BYTES
from tests.conftest import Specs
from tests.support import (
    ERROR,
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
    unchecked,
)

INFORMATIVE = ("heartbeat", "admission_checked", "execution_control_shadow")


@pytest.fixture(params=["origin", "replica"])
def session(request: pytest.FixtureRequest, database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A session of the tables' owner, also in a replica's role, in which ordinary triggers don't fire."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        try:
            connection.execute(f"SET session_replication_role = {request.param}")
        except psycopg.errors.InsufficientPrivilege:
            pytest.skip("only a superuser may change its replication role")
        yield connection


@pytest_asyncio.fixture
async def tampered(database_url: str) -> AsyncIterator[DurableJobService]:
    """The verbs over a database whose jobs are made unsound on purpose: no check at the end."""
    async with unchecked(database_url) as service:
        yield service


CHANGES = [
    "UPDATE {t} SET actor = 'nobody'",
    "UPDATE {t} SET data = data",
    "DELETE FROM {t}",
    "TRUNCATE {t}",
    "TRUNCATE {t} CASCADE",
    "MERGE INTO {t} t USING (SELECT 1) one ON true WHEN MATCHED THEN DELETE",
]


async def test_rows_can_not_be_changed(
    service: DurableJobService, spec: Specs, session: psycopg.Connection[Any]
) -> None:
    claim = await claimed(service, spec())
    await service.cancel_job(claim.job_id, "not wanted", "ann")
    before = await snapshot(service, claim.job_id)
    for table in ("job_events", "control_events"):
        assert before[table]
        for change in CHANGES:
            with pytest.raises(psycopg.Error) as refused:
                session.execute(change.format(t=f"durable_jobs.{table}"))
            assert refused.value.sqlstate == "DJ002", (table, change)
    assert await snapshot(service, claim.job_id) == before


async def test_an_unknown_event_is_refused_by_name(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    before = await snapshot(service, claim.job_id)
    for name in ("job_created", "Claimed", "claimed ", "", "\x00"):
        with pytest.raises(UnknownEvent) as refused:
            await service.append_job_event(claim.job_id, name, "worker", {})
        assert repr(name) in refused.value.message
        assert [problem.field for problem in refused.value.problems] == ["name"]
    assert await snapshot(service, claim.job_id) == before


async def test_a_name_that_records_a_change_is_left_by_its_verb_alone(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    for name in set(EventName) - set(INFORMATIVE):
        with pytest.raises(UnknownEvent) as refused:
            await service.append_job_event(claim.job_id, name, "worker", {})
        assert repr(str(name)) in refused.value.message
    assert await names(service, claim.job_id) == ["claimed"]


@pytest.mark.parametrize("name", INFORMATIVE)
async def test_an_informative_event_is_appended(service: DurableJobService, spec: Specs, name: str) -> None:
    claim = await dispatched(service, spec())
    before = await service.get_job(claim.job_id)
    event = await service.append_job_event(claim.job_id, name, "ann", {"seen": [1, "two"]})
    assert event == (await service.list_job_events(claim.job_id)).items[-1]
    assert (event.name, event.actor, event.data) == (name, "ann", {"seen": [1, "two"]})
    assert (event.status, event.generation, event.intent_number, event.attempt_count) == (JobStatus.RUNNING, 1, 0, 1)
    assert await service.get_job(claim.job_id) == before


async def test_an_event_needs_a_job_an_actor_and_storable_data(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    with pytest.raises(JobNotFound):
        await service.append_job_event(uuid4(), "heartbeat", "ann", {})
    with pytest.raises(InvalidInput, match="actor"):
        await service.append_job_event(job.id, "heartbeat", " ", {})
    with pytest.raises(InvalidInput, match=r"data\.text"):
        await service.append_job_event(job.id, "heartbeat", "ann", {"text": "a\x00b"})
    assert await names(service, job.id) == []


def test_the_database_knows_the_same_names(session: psycopg.Connection[Any]) -> None:
    insert = """
        INSERT INTO durable_jobs.job_events (job_id, organization_id, project_id, name, status, generation,
            intent_number, attempt_count, actor, occurred_at, data)
        VALUES (gen_random_uuid(), 'acme', 'alpha', %s, 'queued', 0, 0, 0, 'ann', now(), '{}')
    """
    for name in EventName:
        session.execute(insert, [name])
    with pytest.raises(psycopg.errors.CheckViolation):
        session.execute(insert, ["created"])


async def test_one_event_for_each_change(service: DurableJobService, spec: Specs) -> None:
    """A whole life: what each change leaves, in order, with the row as it stood after it."""
    claim = await running(service, spec(backoff_base_seconds=1))
    await service.fail_job(claim, ERROR, retryable=True)
    await make_due(service, claim.job_id)
    second = await reclaimed(service, claim.job_id, B)
    await service.mark_provider_dispatched(second, "key", consequential=False)
    await service.complete_job(second, {"n": 1})
    events = (await service.list_job_events(claim.job_id)).items
    assert [(e.name, e.status, e.generation, e.attempt_count, e.actor) for e in events] == [
        ("claimed", "claimed", 1, 1, claim.worker_id),
        ("heartbeat", "running", 1, 1, claim.worker_id),
        ("retried", "queued", 1, 1, claim.worker_id),
        ("claimed", "claimed", 2, 2, B),
        ("dispatched", "running", 2, 2, B),
        ("completed", "completed", 2, 2, B),
    ]
    assert [e.id for e in events] == sorted({e.id for e in events})
    assert events[2].data["cause"] == "backoff"
    assert events[-1].data == {"result": {"n": 1}}


@pytest.mark.parametrize(("excess", "whole"), [(0, True), (1, False)])
async def test_a_large_result_leaves_its_digest_and_size(
    service: DurableJobService, spec: Specs, excess: int, whole: bool
) -> None:
    """Up to 64 KiB the event carries the result; above, its SHA-256 and size."""
    result = {"text": ""}
    result["text"] = "x" * (MAX_RESULT_IN_EVENT_BYTES - len(json.dumps(result, separators=(",", ":"))) + excess)
    encoded = json.dumps(result, separators=(",", ":")).encode()
    assert (MAX_RESULT_IN_EVENT_BYTES, len(encoded)) == (65536, 65536 + excess)
    claim = await running(service, spec())
    await service.complete_job(claim, result)
    data = (await service.list_job_events(claim.job_id)).items[-1].data
    digest = hashlib.sha256(encoded).hexdigest()
    assert data == ({"result": result} if whole else {"result_sha256": digest, "result_bytes": len(encoded)})
    assert (await service.get_job(claim.job_id)).result == result


LARGE = "x" * 70_000


LARGE_RESULTS: dict[str, dict[str, Any]] = {
    "keys that jsonb reorders": {"zebra": LARGE, "ant": 1, "bee": {"y": 1, "x": 2}},
    "numbers that jsonb rewrites": {"text": LARGE, "vast": 1e22, "whole": 1.0, "zero": -0.0, "tiny": 1e-7},
    "a tuple": {"text": LARGE, "twos": (1, 2)},
    "long numbers and wide characters": {"text": LARGE, "zeros": 10**399, "zounds": "é€😀"},
}


async def test_a_large_result_is_sound_whatever_its_form(tampered: DurableJobService, spec: Specs) -> None:
    """`jsonb` reorders keys and rewrites numbers: the digest in the trail must be of what the row gives back."""
    unsound = {}
    for form, result in LARGE_RESULTS.items():
        claim = await running(tampered, spec())
        await tampered.complete_job(claim, result)
        unsound[form] = await tampered.check_trail(claim.job_id)
    assert not any(unsound.values()), unsound


async def test_a_large_result_that_was_changed_is_noticed(tampered: DurableJobService, spec: Specs) -> None:
    claim = await running(tampered, spec())
    await tampered.complete_job(claim, {"text": LARGE})
    assert await tampered.check_trail(claim.job_id) == []
    await sql(
        tampered, "UPDATE durable_jobs.jobs SET result = jsonb_build_object('text', %(t)s::text)", t=LARGE[1:] + "y"
    )
    (difference,) = await tampered.check_trail(claim.job_id)
    assert difference.startswith("result:")


FOLDED = {
    "status": "'running'",
    "intent_number": "1",
    "attempt_count": "2",
    "lease_generation": "7",
    "lease_id": "'somebody'",
    "claimed_by": "'somebody'",
    "claim_token": "gen_random_uuid()",
    "started_at": "now() + interval '1 day'",
    "finished_at": "now() + interval '1 day'",
    "dispatched_at": "now() + interval '1 day'",
    "dispatched_generation": "7",
    "operation_key": "'another'",
    "result": "'{\"n\": 2}'",
    "error": '\'{"code": "OTHER", "message": "other", "type": null, "traceback": null}\'',
    "dead_lettered_at": "now() + interval '1 day'",
    "dead_letter_reason": "'other'",
    "escalated_at": "now() + interval '1 day'",
    "escalation_reason": "'other'",
    "reconciled_at": "now() + interval '1 day'",
    "reconciliation": '\'{"by": "nobody"}\'',
    "release_count": "3",
}
EXEMPT = {
    "lease_expires_at": "now() + interval '1 day'",
    "heartbeat_at": "now() + interval '1 day'",
    "updated_at": "now() + interval '1 day'",
    "cancel_requested_at": "now() + interval '1 day'",
    "cancel_reason": "'other'",
    "cancel_actor": "'other'",
    "launch_check_at": "now() + interval '1 day'",
}
FIXED = {
    *("id", "organization_id", "project_id", "queue", "job_type", "payload", "idempotency_key", "request_digest"),
    *("priority", "max_attempts", "backoff_base_seconds", "lease_seconds", "timeout_seconds", "created_at"),
}
"""Written once, at creation, which leaves no event."""
ELSEWHERE = {"scheduled_at", "reconcile_after", "lookup_tries", "follow_ups_due"}
"""`scheduled_at` is folded from the first requeue on; the others keep the books of sweeps."""


def test_every_column_is_folded_or_exempt_for_a_reason() -> None:
    assert set(Job.model_fields) == set(FOLDED) | set(EXEMPT) | FIXED | ELSEWHERE


async def tamper(service: DurableJobService, job: Job, column: str, value: str) -> list[str]:
    """What the checker says of the job with one column changed, with every guard and CHECK out of the way."""
    dropped = "ALTER TABLE durable_jobs.jobs DISABLE TRIGGER USER"
    for check in ("jobs_terminal_finished", "jobs_lease_while_active", "jobs_marker_whole"):
        dropped += f", DROP CONSTRAINT IF EXISTS {check}"
    await sql(service, dropped)
    await sql(service, f"UPDATE durable_jobs.jobs SET {column} = {value} WHERE id = %(id)s", id=job.id)
    return await service.check_trail(job.id)


@pytest.mark.parametrize("status", [JobStatus.COMPLETED, JobStatus.DEAD_LETTER])
async def test_a_changed_column_is_named(tampered: DurableJobService, spec: Specs, status: JobStatus) -> None:
    begin = dispatched if status is JobStatus.COMPLETED else claimed
    for column, value in FOLDED.items():
        job = await end_in(tampered, await begin(tampered, spec(max_attempts=1)), status)
        assert await tampered.check_trail(job.id) == []
        found = await tamper(tampered, job, column, value)
        assert [difference.partition(":")[0] for difference in found] == [column]


async def test_a_changed_schedule_is_named(tampered: DurableJobService, spec: Specs) -> None:
    job = await tampered.fail_job(await claimed(tampered, spec()), ERROR, retryable=True)
    (difference,) = await tamper(tampered, job, "scheduled_at", "now()")
    assert difference.startswith("scheduled_at: ")


async def test_an_exempt_column_is_not(tampered: DurableJobService, spec: Specs) -> None:
    job = await tampered.get_job((await running(tampered, spec())).job_id)
    for column, value in EXEMPT.items():
        assert await tamper(tampered, job, column, value) == []


async def test_a_missing_event_is_noticed(tampered: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(tampered, spec())
    await tampered.complete_job(claim, {"n": 1})
    await sql(tampered, "ALTER TABLE durable_jobs.job_events DISABLE TRIGGER append_only")
    await sql(tampered, "DELETE FROM durable_jobs.job_events WHERE name = 'dispatched'")
    found = await tampered.check_trail(claim.job_id)
    assert [difference.partition(":")[0] for difference in found] == [
        "dispatched_at",
        "dispatched_generation",
        "operation_key",
    ]


async def test_a_trail_of_more_than_a_page_is_folded_whole(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    await sql(
        service,
        """
        INSERT INTO durable_jobs.job_events (job_id, organization_id, project_id, name, status, generation,
            intent_number, attempt_count, actor, occurred_at, data)
        SELECT job_id, organization_id, project_id, 'heartbeat', 'claimed', generation, intent_number, attempt_count,
            actor, clock_timestamp(), '{}'
        FROM durable_jobs.job_events, generate_series(1, 1500)
        """,
    )
    await service.complete_job(claim, {"n": 1})
    assert await service.check_trail(claim.job_id) == []
    first = await service.list_job_events(claim.job_id)
    assert (len(first.items), first.next_cursor) == (1000, str(first.items[-1].id))
    rest = await service.list_job_events(claim.job_id, after=first.next_cursor)
    assert (len(rest.items), rest.next_cursor) == (503, None)


async def test_a_release_is_sound_whatever_its_cause(tampered: DurableJobService, spec: Specs) -> None:
    """The cause is the caller's free text: it must not be read as one of the trail's own."""
    unsound = {}
    for cause in ("shutdown", "backoff", "claimed", "retry"):
        claim = await running(tampered, spec())
        await tampered.release_job(claim, cause)
        unsound[cause] = await tampered.check_trail(claim.job_id)
        event = (await tampered.list_job_events(claim.job_id)).items[-1]
        assert (event.name, event.actor) == ("retried", claim.worker_id)
        assert cause in str(event.data)
    assert not any(unsound.values()), unsound


async def test_reclaims_and_follow_ups_are_sound(service: DurableJobService, spec: Specs) -> None:
    """The ways on which a row changes apart from its holder's verbs."""
    for prepare, status in (
        (dispatched, JobStatus.INDETERMINATE),
        (claimed, JobStatus.DEAD_LETTER),
    ):
        claim = await prepare(service, spec(max_attempts=1))
        await expire(service, claim.job_id)
        outcome = await service.claim_job(B, uuid4(), job_id=claim.job_id)
        assert outcome is not None
        assert outcome.job is not None
        assert outcome.job.status is status
        assert await service.check_trail(claim.job_id) == []
    claim = await running(service, spec())
    await service.complete_job(claim, {}, [FollowUp(name="next", job_type="probe", payload={"n": 2})])
    assert await service.check_trail(claim.job_id) == []
