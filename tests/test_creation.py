"""Creating jobs: once per idempotency key, checked at the door, alone, in bulk, and in the caller's own transaction."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest import mock
from uuid import UUID, uuid4

import psycopg
import pytest
import pytest_asyncio
from psycopg import AsyncCursor
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from durable_jobs import DurableJobService, FollowUp, JobSpec, JobStatus
from durable_jobs.contract.errors import (
    IdempotencyKeyConflict,
    InvalidBatch,
    InvalidJob,
    ReservedPayloadKey,
    RetryTransaction,
)
from durable_jobs.store.migrate import driver_url
from tests.conftest import Specs
from tests.support import TERMINAL_BY_VERB, claimed, connection, end_in, names, sql, until_waiting


@pytest_asyncio.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A product's own engine."""
    engine = create_async_engine(driver_url(database_url))
    yield engine
    await engine.dispose()


async def count(service: DurableJobService) -> int:
    """How many jobs there are."""
    (row,) = await sql(service, "SELECT count(*) FROM durable_jobs.jobs")
    return int(row["count"])


@contextmanager
def driver_watched() -> Iterator[tuple[list[str], list[str | None]]]:
    """The statements that the driver sends meanwhile, and the SQLSTATEs of those that fail."""
    sent: list[str] = []
    failed: list[str | None] = []
    execute = AsyncCursor.execute

    async def watched(cursor: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        sent.append(query.decode() if isinstance(query, bytes) else str(query))
        try:
            return await execute(cursor, query, *arguments, **options)
        except psycopg.Error as error:
            failed.append(error.sqlstate)
            raise

    with mock.patch.object(AsyncCursor, "execute", watched):
        yield sent, failed


async def test_a_new_job_has_the_defaults(service: DurableJobService) -> None:
    created = await service.create_job(
        JobSpec(organization="acme", project="alpha", job_type="Probe", idempotency_key="q-17", payload={"n": 1})
    )
    job = created.job
    assert created.created
    assert job == await service.get_job(job.id)
    assert job == await service.find_by_idempotency_key("acme", "alpha", "q-17")
    assert job.id.version == 7
    assert job.model_dump(exclude={"id", "request_digest", "created_at", "launch_check_at"}) == {
        "organization_id": "acme",
        "project_id": "alpha",
        "queue": "default",
        "job_type": "probe",
        "payload": {"n": 1},
        "idempotency_key": "q-17",
        "status": JobStatus.QUEUED,
        "priority": 0,
        "intent_number": 0,
        "attempt_count": 0,
        "max_attempts": 3,
        "backoff_base_seconds": 30.0,
        "lease_seconds": 60.0,
        "timeout_seconds": 3600.0,
        "lease_generation": 0,
        "scheduled_at": job.created_at,
        "updated_at": job.created_at,
        "lookup_tries": 0,
        "follow_ups_due": False,
        "release_count": 0,
    } | dict.fromkeys(
        (
            *("lease_id", "claimed_by", "claim_token", "lease_expires_at", "heartbeat_at", "started_at"),
            *("finished_at", "cancel_requested_at", "cancel_reason", "cancel_actor", "dispatched_at"),
            *("dispatched_generation", "operation_key", "result", "error", "dead_lettered_at", "dead_letter_reason"),
            *("escalated_at", "escalation_reason", "reconciled_at", "reconciliation", "reconcile_after"),
        )
    )
    (clock,) = await sql(service, "SELECT clock_timestamp() AS now")
    assert timedelta(0) < clock["now"] - job.created_at < timedelta(seconds=30)
    assert await names(service, job.id) == []


BAD_KEYS = ["", " ", "\t", "\u00a0", "   \u2003 ", "x" * 256, "k" * 10_240, "a\x00b", "a\nb", "\ud800", 7, None]


async def test_an_unusable_key_is_refused(service: DurableJobService, spec: Specs) -> None:
    """Case 13, the kind: a key that can't identify a request is refused at the door, and no row is written."""
    fields = spec().model_dump()
    for key in BAD_KEYS:
        with pytest.raises(InvalidJob) as refused:
            JobSpec(**fields | {"idempotency_key": key})
        assert [problem.field for problem in refused.value.problems] == ["idempotency_key"], repr(key)
        with pytest.raises(InvalidJob, match="idempotency_key"):
            await service.create_job(JobSpec.model_construct(**fields | {"idempotency_key": key}))
        with pytest.raises(InvalidBatch, match=r"\[0\]\.idempotency_key"):
            await service.create_jobs([fields | {"idempotency_key": key}])
    del fields["idempotency_key"]
    with pytest.raises(InvalidJob, match="idempotency_key"):
        JobSpec(**fields)
    with pytest.raises(InvalidBatch, match=r"\[0\]\.idempotency_key"):
        await service.create_jobs([fields])
    assert await count(service) == 0


async def test_every_usable_key_is_taken(service: DurableJobService, spec: Specs) -> None:
    """Case 13, the other side: 1 to 255 printable characters, whatever they are."""
    for key in ("x", "x" * 255, "😀" * 255, " padded ", "a b", "' OR 1=1 --", "%(id)s {s} :x", "\\", "ключ"):
        job = (await service.create_job(spec(idempotency_key=key))).job
        assert job.idempotency_key == key
        assert (await service.create_job(spec(idempotency_key=key))).job.id == job.id
        assert await service.find_by_idempotency_key("acme", "alpha", key) == job


@pytest.mark.parametrize("winner", ["commits", "rolls back"])
async def test_parallel_creations_of_one_key_make_one_row(
    service: DurableJobService, spec: Specs, database_url: str, engine: AsyncEngine, winner: str
) -> None:
    """Case 23, the kind: any number of creations of one key at once make one row, and all get it.

    Forced: one transaction has inserted the key and not committed, while as many as the pool holds wait for it.
    """
    barrier = asyncio.Barrier(50)

    async def create() -> tuple[UUID, bool]:
        await barrier.wait()
        created = await service.create_job(spec(idempotency_key="the one"))
        return created.job.id, created.created

    async with engine.connect() as own:
        first = (await service.create_job(spec(idempotency_key="the one"), connection=own)).job
        tasks = [asyncio.create_task(create()) for _ in range(50)]
        await until_waiting(database_url, 8)
        await (own.commit() if winner == "commits" else own.rollback())
    answers = await asyncio.gather(*tasks)
    assert len({job_id for job_id, _ in answers}) == 1
    assert sum(created for _, created in answers) == (0 if winner == "commits" else 1)
    assert (answers[0][0] == first.id) is (winner == "commits")
    assert await count(service) == 1


async def test_the_same_request_gets_the_same_job(service: DurableJobService, spec: Specs) -> None:
    """Case 25, the same: key order, spacing, `1` and `1.0`, and all that honest retries differ in."""
    payload = {"a": 1, "b": {"c": [1.5, "x"], "d": None}, "n": 100}
    original = spec(idempotency_key="k", payload=payload)
    first = (await service.create_job(original)).job

    class Payload(BaseModel):
        n: int = 100
        b: dict[str, Any] = {"d": None, "c": [1.5, "x"]}
        a: float = 1.0

    same: list[dict[str, Any]] = [
        {},
        {"payload": {"n": 100, "b": {"d": None, "c": [1.5, "x"]}, "a": 1}},
        {"payload": payload | {"a": 1.0}},
        {"payload": payload | {"n": 1e2}},
        {"payload": Payload()},
        {"job_type": "PROBE"},
        {"priority": 2},
        {"max_attempts": 9},
        {"backoff_base_seconds": 1},
        {"lease_seconds": 5},
        {"timeout_seconds": 5},
        {"scheduled_at": datetime(2030, 1, 1, tzinfo=UTC)},
    ]
    for overrides in same:
        again = await service.create_job(original.model_copy(update=overrides))
        assert not again.created
        assert again.job == first, overrides
    assert await service.get_job(first.id) == first


async def test_another_request_is_a_conflict(service: DurableJobService, spec: Specs) -> None:
    """Case 25, the other: another payload, type or queue under the same key is refused and changes nothing."""
    original = spec(idempotency_key="k", payload={"a": 1, "b": [1, 2]})
    first = (await service.create_job(original)).job
    others: list[dict[str, Any]] = [
        {"payload": {"a": 2, "b": [1, 2]}},
        {"payload": {"a": 1, "b": [2, 1]}},
        {"payload": {"a": "1", "b": [1, 2]}},
        {"payload": {"a": True, "b": [1, 2]}},
        {"payload": {"a": 1, "b": [1, 2], "c": None}},
        {"payload": {"a": 1}},
        {"job_type": "other"},
        {"queue": "elsewhere"},
    ]
    for overrides in others:
        with pytest.raises(IdempotencyKeyConflict) as conflict:
            await service.create_job(original.model_copy(update=overrides))
        assert (conflict.value.idempotency_key, conflict.value.job_id) == ("k", first.id), overrides
    assert await service.get_job(first.id) == first
    assert await count(service) == 1


async def test_a_key_belongs_to_one_project(service: DurableJobService, spec: Specs) -> None:
    tenants = [("acme", "alpha"), ("acme", "beta"), ("globex", "alpha")]
    made = [
        await service.create_job(spec(idempotency_key="k", organization=o, project=p, payload={"n": n}))
        for n, (o, p) in enumerate(tenants)
    ]
    assert all(created.created for created in made)
    for created, (organization, project) in zip(made, tenants, strict=True):
        assert await service.find_by_idempotency_key(organization, project, "k") == created.job
    assert await service.find_by_idempotency_key("globex", "beta", "k") is None


async def test_a_key_stays_taken_after_the_end(service: DurableJobService, spec: Specs) -> None:
    """Case 26, the kind: an ended job still owns its key; no second run, in whatever status it ended."""
    for status in TERMINAL_BY_VERB:
        wanted = spec(max_attempts=1)
        ended = await end_in(service, await claimed(service, wanted), status)
        again = await service.create_job(wanted)
        assert (again.created, again.job) == (False, ended)
        bulk = await service.create_jobs([wanted, wanted])
        assert [(created.created, created.job.id) for created in bulk] == [(False, ended.id)] * 2
        assert await service.claim_job("worker", uuid4()) is None
        assert await service.get_job(ended.id) == ended
        with pytest.raises(IdempotencyKeyConflict):
            await service.create_job(wanted.model_copy(update={"payload": {"n": 2}}))


async def test_bulk_answers_in_the_order_given(service: DurableJobService, spec: Specs) -> None:
    known = (await service.create_job(spec(idempotency_key="k-400"))).job
    keys = [f"k-{n}" for n in (*range(510, 0, -1), 5, 400)]
    answers = await service.create_jobs(spec(idempotency_key=key) for key in keys)
    assert [answer.job.idempotency_key for answer in answers] == keys
    assert [answer.created for answer in answers] == [n != 400 for n in range(510, 0, -1)] + [False, False]
    assert answers[110].job.id == known.id
    assert answers[510].job == answers[505].job
    assert await count(service) == 510


async def test_bulk_is_one_round_trip_for_each_batch(service: DurableJobService, spec: Specs) -> None:
    specs = [spec() for _ in range(501)]
    await service.create_job(spec())  # the pool has connected
    with driver_watched() as (sent, _):
        await service.create_jobs(specs)
    assert len([statement for statement in sent if "INSERT" in statement]) == 2
    assert len([statement for statement in sent if "BEGIN" not in statement]) == 2


async def test_a_bad_one_keeps_all_of_a_batch_out(service: DurableJobService, spec: Specs) -> None:
    good = spec().model_dump()
    batch = [
        good,
        good | {"idempotency_key": " "},
        good | {"idempotency_key": "other", "priority": 3, "queue": "a b"},
        good | {"idempotency_key": "third", "payload": {"execution": {}}},
        good | {"idempotency_key": "fourth", "payload": {"n": float("nan")}},
    ]
    with pytest.raises(InvalidBatch) as refused:
        await service.create_jobs(batch)
    assert {index: type(error) for index, error in refused.value.errors.items()} == {
        1: InvalidJob,
        2: InvalidJob,
        3: ReservedPayloadKey,
        4: InvalidJob,
    }
    assert {problem.field for problem in refused.value.problems} == {
        "[1].idempotency_key",
        "[2].priority",
        "[2].queue",
        "[3].payload.execution",
        "[4].payload.n",
    }
    assert await count(service) == 0


async def test_a_conflict_keeps_all_of_a_batch_out(service: DurableJobService, spec: Specs) -> None:
    first = (await service.create_job(spec(idempotency_key="taken"))).job
    specs = [spec() for _ in range(600)]
    specs[3] = spec(idempotency_key="taken", payload={"n": 2})
    specs[550] = specs[550].model_copy(update={"idempotency_key": specs[2].idempotency_key, "payload": {"n": 9}})
    with pytest.raises(InvalidBatch) as refused:
        await service.create_jobs(specs)
    assert {index: type(error) for index, error in refused.value.errors.items()} == {
        3: IdempotencyKeyConflict,
        550: IdempotencyKeyConflict,
    }
    conflict = refused.value.errors[3]
    assert isinstance(conflict, IdempotencyKeyConflict)
    assert conflict.job_id == first.id
    assert await count(service) == 1


async def test_an_empty_batch_is_nothing(service: DurableJobService) -> None:
    assert await service.create_jobs([]) == []


async def test_batches_in_opposite_orders_do_not_deadlock(
    service: DurableJobService, spec: Specs, database_url: str, engine: AsyncEngine
) -> None:
    """Two batches of the same keys in opposite orders meet at a key in the middle that a third has inserted.

    Inserted in the order given, each would by then hold what the other needs next; sorted, one waits for the other.
    """
    keys = [f"key-{n:03}" for n in range(101)]
    with driver_watched() as (_, failed):
        async with engine.connect() as own:
            await service.create_job(spec(idempotency_key=keys[50]), connection=own)
            up = asyncio.create_task(service.create_jobs([spec(idempotency_key=key) for key in keys]))
            down = asyncio.create_task(service.create_jobs([spec(idempotency_key=key) for key in reversed(keys)]))
            await until_waiting(database_url, 2)
            await own.rollback()
        one, other = await up, await down
    assert failed == []
    assert [answer.job.id for answer in one] == [answer.job.id for answer in reversed(other)]
    assert {answer.created for answer in one} | {answer.created for answer in other} == {True, False}
    assert await count(service) == 101


async def test_reserved_payload_keys_are_refused_at_each_door(
    service: DurableJobService, spec: Specs, engine: AsyncEngine
) -> None:
    class Request(BaseModel):
        governance: dict[str, int] = {}

    fields = spec().model_dump()
    for payload in ({"execution": {}}, {"governance": None, "n": 1}, Request()):
        reserved = "execution" if "execution" in str(payload) else "governance"
        forged = JobSpec.model_construct(**fields | {"payload": payload})
        with pytest.raises(ReservedPayloadKey) as refused:
            JobSpec(**fields | {"payload": payload})
        assert [problem.field for problem in refused.value.problems] == [f"payload.{reserved}"]
        with pytest.raises(ReservedPayloadKey):
            await service.create_job(forged)
        with pytest.raises(InvalidBatch) as batch:
            await service.create_jobs([forged])
        assert isinstance(batch.value.errors[0], ReservedPayloadKey)
        with pytest.raises(InvalidBatch) as batch:
            await service.create_jobs([fields | {"payload": payload}])
        assert isinstance(batch.value.errors[0], ReservedPayloadKey)
        with pytest.raises(ReservedPayloadKey):
            FollowUp(name="next", job_type="probe", payload=payload)
        async with engine.connect() as own:
            with pytest.raises(ReservedPayloadKey):
                await service.create_job(forged, connection=own)
            await own.commit()
    with pytest.raises(ReservedPayloadKey) as both:
        spec(payload={"execution": 1, "governance": 2})
    assert [problem.field for problem in both.value.problems] == ["payload.execution", "payload.governance"]
    assert await count(service) == 0
    # Reserved at the top alone.
    assert (await service.create_job(spec(payload={"data": {"execution": 1, "governance": 2}}))).created


async def test_a_payload_changed_after_its_spec_was_made_is_checked_again(
    service: DurableJobService, spec: Specs
) -> None:
    wanted = spec(payload={"inner": {"n": 1}})
    wanted.payload["inner"]["n"] = float("inf")
    with pytest.raises(InvalidJob, match=r"payload\.inner\.n"):
        await service.create_job(wanted)
    assert await count(service) == 0


NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001 - refused for exactly that
UTC_PLUS_14, UTC_MINUS_12 = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))
NAMES = ("organization", "project", "queue", "job_type")
REFUSED: list[tuple[str, Any, str]] = [
    *((name, value, name) for name in NAMES for value in ("", " ", "-a", ".a", "a b", "a\n", "é", "a\x00", "x" * 129)),
    *((name, value, name) for name in NAMES for value in (None, 7, b"acme")),
    ("queue", "mine.reconciliation", "queue"),
    *(("priority", value, "priority") for value in (-3, 3, 1.0, "1", True, None)),
    *(("max_attempts", value, "max_attempts") for value in (0, -1, 10_001, 2**31, 1.5, True)),
    *(("backoff_base_seconds", value, "backoff_base_seconds") for value in (0, -1, 3601, float("nan"), float("inf"))),
    *(("lease_seconds", value, "lease_seconds") for value in (0, 0.5, 86_401, float("nan"), float("inf"), "60")),
    *(("timeout_seconds", value, "timeout_seconds") for value in (0, -1, 30 * 86_400 + 1, float("nan"), float("inf"))),
    ("scheduled_at", NAIVE, "scheduled_at"),
    ("scheduled_at", "2030-01-01T00:00:00Z", "scheduled_at"),
    ("scheduled_at", 1_900_000_000, "scheduled_at"),
    ("scheduled_at", datetime(1999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC), "scheduled_at"),
    ("scheduled_at", datetime(2000, 1, 1, tzinfo=UTC_PLUS_14), "scheduled_at"),
    ("scheduled_at", datetime(2201, 1, 1, tzinfo=UTC), "scheduled_at"),
    ("scheduled_at", datetime(2200, 12, 31, 23, tzinfo=UTC_MINUS_12), "scheduled_at"),
    ("scheduled_at", datetime.max.replace(tzinfo=UTC_MINUS_12), "scheduled_at"),
    ("scheduled_at", datetime.min.replace(tzinfo=UTC_PLUS_14), "scheduled_at"),
    *(("payload", value, "payload") for value in ({}, None, [], [1], "x", 7)),
    ("payload", {"a": {"b": [0, {"c": float("nan")}]}}, "payload.a.b[1].c"),
    ("payload", {"a": {1: "x"}}, "payload.a"),
    ("payload", {"a": object()}, "payload.a"),
    ("payload", {"a": datetime(2030, 1, 1, tzinfo=UTC)}, "payload.a"),
    ("payload", {"a": b"bytes"}, "payload.a"),
    ("tenant", "acme", "tenant"),
]
TAKEN: list[tuple[str, Any]] = [
    *((name, value) for name in NAMES for value in ("a", "0", "A.b_c:d/e-f", "x" * 128)),
    ("queue", "mine.reconciliation.not"),
    *(("priority", value) for value in (-2, 2)),
    *(("max_attempts", value) for value in (1, 10_000)),
    *(("backoff_base_seconds", value) for value in (0.5, 3600)),
    *(("lease_seconds", value) for value in (1, 1.5, 86_400)),
    *(("timeout_seconds", value) for value in (0.1, 30 * 86_400)),
    ("scheduled_at", None),
    ("scheduled_at", datetime(2000, 1, 1, tzinfo=UTC)),
    ("scheduled_at", datetime(2200, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)),
    ("scheduled_at", datetime(2201, 1, 1, 13, tzinfo=UTC_PLUS_14)),
    ("payload", {"": None}),
    ("payload", {"a": [], "b": {}, "c": "", "d": False}),
]


async def test_a_broken_rule_names_its_field(service: DurableJobService, spec: Specs) -> None:
    """Every field against every rule on it: refused alike when the spec is made and when it reaches the service."""
    fields = spec().model_dump()
    for field, value, named in REFUSED:
        with pytest.raises(InvalidJob) as made:
            JobSpec(**fields | {field: value})
        assert {problem.field for problem in made.value.problems} == {named}, (field, value)
        with pytest.raises(InvalidBatch) as batch:
            await service.create_jobs([fields | {field: value}])
        assert {problem.field for problem in batch.value.problems} == {f"[0].{named}"}, (field, value)
        if field in fields:
            with pytest.raises(InvalidJob) as forged:
                await service.create_job(JobSpec.model_construct(**fields | {field: value}))
            assert {problem.field for problem in forged.value.problems} == {named}, (field, value)
    assert await count(service) == 0


async def test_what_no_rule_forbids_is_taken_as_it_is(service: DurableJobService, spec: Specs) -> None:
    columns = {"organization": "organization_id", "project": "project_id"}
    for field, value in TAKEN:
        job = (await service.create_job(spec(**{field: value}))).job
        stored = getattr(job, columns.get(field, field))
        expected = value.lower() if field == "job_type" else job.created_at if value is None else value
        assert stored == expected, (field, value)


def test_several_problems_are_named_together(spec: Specs) -> None:
    with pytest.raises(InvalidJob) as refused:
        spec(queue="", priority=9, idempotency_key="", scheduled_at=NAIVE)
    assert {p.field for p in refused.value.problems} == {"queue", "priority", "idempotency_key", "scheduled_at"}
    assert (refused.value.code, refused.value.http_status, refused.value.retryable) == ("INVALID_JOB", 422, False)


async def test_the_callers_transaction_decides(service: DurableJobService, spec: Specs, engine: AsyncEngine) -> None:
    async with engine.connect() as own:
        await own.execute(text("CREATE TABLE orders (id int)"))
        await own.commit()
        for commits in (False, True):
            await own.execute(text("INSERT INTO orders VALUES (1)"))
            created = await service.create_job(spec(idempotency_key="order-1"), connection=own)
            assert created.created
            again = await service.create_job(spec(idempotency_key="order-1"), connection=own)
            assert (again.created, again.job.id) == (False, created.job.id)
            assert await service.find_by_idempotency_key("acme", "alpha", "order-1") is None
            await (own.commit() if commits else own.rollback())
        assert await service.find_by_idempotency_key("acme", "alpha", "order-1") == created.job
        assert (await own.execute(text("SELECT count(*) FROM orders"))).scalar() == 1
    claim = await service.claim_job("worker", uuid4())
    assert claim is not None
    assert claim.job is not None
    assert claim.job.id == created.job.id


async def test_a_conflict_leaves_the_callers_transaction_usable(
    service: DurableJobService, spec: Specs, engine: AsyncEngine
) -> None:
    await service.create_job(spec(idempotency_key="taken"))
    async with engine.connect() as own:
        await service.create_job(spec(idempotency_key="before"), connection=own)
        with pytest.raises(IdempotencyKeyConflict):
            await service.create_job(spec(idempotency_key="taken", payload={"n": 2}), connection=own)
        with pytest.raises(InvalidJob):
            await service.create_job(JobSpec.model_construct(**spec().model_dump() | {"queue": ""}), connection=own)
        await service.create_job(spec(idempotency_key="after"), connection=own)
        await own.commit()
    for key in ("before", "after"):
        assert await service.find_by_idempotency_key("acme", "alpha", key) is not None


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("request_", ["the same", "another"])
async def test_a_winner_that_the_callers_snapshot_hides(
    service: DurableJobService, spec: Specs, engine: AsyncEngine, level: str, request_: str
) -> None:
    """The key was taken after the snapshot: the transaction is to be run again, and then finds the job."""
    wanted = spec(idempotency_key="k")
    strict = engine.execution_options(isolation_level=level)
    async with strict.connect() as own:
        await own.execute(text("SELECT 1 FROM pg_class LIMIT 1"))  # takes the snapshot
        payload = wanted.payload if request_ == "the same" else {"n": 2}
        winner = (await service.create_job(spec(idempotency_key="k", payload=payload))).job
        with pytest.raises(RetryTransaction) as lost:
            await service.create_job(wanted, connection=own)
        assert lost.value.retryable
        await own.rollback()
        if request_ == "the same":
            again = await service.create_job(wanted, connection=own)
            assert (again.created, again.job.id) == (False, winner.id)
        else:
            with pytest.raises(IdempotencyKeyConflict):
                await service.create_job(wanted, connection=own)
        await own.commit()


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
async def test_a_creation_waits_for_the_one_before_it(
    service: DurableJobService, spec: Specs, engine: AsyncEngine, database_url: str, level: str
) -> None:
    """READ COMMITTED finds the winner that it waited for; a stricter snapshot can't see it and is told so."""
    wanted = spec(idempotency_key="k")
    async with engine.connect() as first, engine.execution_options(isolation_level=level).connect() as second:
        winner = (await service.create_job(wanted, connection=first)).job
        waiting = asyncio.create_task(service.create_job(wanted, connection=second))
        await until_waiting(database_url)
        await first.commit()
        if level == "READ COMMITTED":
            answer = await waiting
            assert (answer.created, answer.job.id) == (False, winner.id)
        else:
            with pytest.raises(RetryTransaction):
                await waiting
        await second.rollback()
    assert await count(service) == 1


async def test_a_deadlock_in_the_callers_transaction_is_a_retry(
    service: DurableJobService, spec: Specs, engine: AsyncEngine, database_url: str
) -> None:
    async with engine.connect() as one, engine.connect() as other:
        await service.create_job(spec(idempotency_key="a"), connection=one)
        await service.create_job(spec(idempotency_key="b"), connection=other)
        waiting = asyncio.create_task(service.create_job(spec(idempotency_key="b"), connection=one))
        await until_waiting(database_url)
        ended = await asyncio.gather(
            waiting, service.create_job(spec(idempotency_key="a"), connection=other), return_exceptions=True
        )
        (lost,) = [answer for answer in ended if isinstance(answer, BaseException)]
        assert isinstance(lost, RetryTransaction)
        for own in (one, other):
            await own.rollback()
    assert await count(service) == 0


async def test_another_session_sees_nothing_of_a_failed_batch(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Each batch is one transaction, however many statements it takes."""
    last = spec(idempotency_key="zzz")
    async with connection(database_url) as own:
        await own.execute(
            """
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN IF NEW.idempotency_key = 'zzz' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON durable_jobs.jobs FOR EACH ROW EXECUTE FUNCTION refuse();
            """
        )
    with pytest.raises(Exception, match="the database refused a statement"):
        await service.create_jobs([*(spec() for _ in range(600)), last])
    assert await count(service) == 0
