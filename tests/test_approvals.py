"""Approvals: granted, revoked, and consumed with the mark itself, by one job only, however many race for it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs import (
    Database,
    DurableJobs,
    DurableJobService,
    EventName,
    Job,
    JobContext,
    JobError,
    JobSpec,
    JobStatus,
)
from durable_jobs.contract.errors import (
    AdmissionRefused,
    AlreadyDispatched,
    ApprovalConflict,
    ApprovalNotFound,
    InvalidInput,
    JobFailed,
    LeaseLost,
    NotRetryable,
    OperationKeyConflict,
    StoreUnavailable,
)
from durable_jobs.contract.models import Claim
from tests.conftest import Specs, Workers
from tests.governing import APPROVAL, INTENT, admissions, approval_of, dispatch, governed, granted, identity, refusal
from tests.probes import ConsequentialProbe, Provider, trail, until
from tests.support import (
    A,
    claimed,
    connection,
    expire,
    names,
    reclaimed,
    row_locked,
    sql,
    until_lease_is_dead,
    until_waiting,
)

Json = dict[str, Any]

CLAIMED, DISPATCHED, ADMISSION_CHECKED = EventName.CLAIMED, EventName.DISPATCHED, EventName.ADMISSION_CHECKED
RACERS = 50
GRANT = {"organization": "acme", "project": "alpha", "approval_id": APPROVAL, "action_intent": INTENT}
LOCK = "SELECT FROM durable_jobs.approvals FOR NO KEY UPDATE"


def reason(approval: str, why: str) -> list[str]:
    return [f"governance.approval: {approval!r} {why}"]


async def assert_given_back(service: DurableJobService, job_id: UUID) -> None:
    """Neither consumed nor marked, and no word of it on the trail."""
    found = await approval_of(service)
    assert (found.consumed_at, found.consumed_by) == (None, None)
    job = await service.get_job(job_id)
    assert (job.dispatched_at, job.operation_key) == (None, None)
    assert await admissions(service, job_id) == []


# ---- grants


async def test_a_grant_is_kept_as_it_was_given(service: DurableJobService) -> None:
    expires = datetime.now(UTC) + timedelta(hours=1)
    first = await granted(service, expires_at=expires)
    assert first.model_dump(exclude={"granted_at"}) == {
        "organization_id": "acme",
        "project_id": "alpha",
        "id": APPROVAL,
        "action_intent": INTENT,
        "granted_by": "grace",
        "expires_at": expires,
        **dict.fromkeys(("revoked_at", "revoked_by", "revoke_reason", "consumed_at", "consumed_by")),
    }
    (clock,) = await sql(service, "SELECT clock_timestamp() AS now")
    assert timedelta(0) < clock["now"] - first.granted_at < timedelta(seconds=30)
    assert await approval_of(service) == first
    assert await granted(service, expires_at=expires, actor="somebody else") == first
    for other in ({"action_intent": "payout"}, {"expires_at": None}, {"expires_at": expires + timedelta(seconds=1)}):
        with pytest.raises(ApprovalConflict):
            await granted(service, **{"expires_at": expires} | other)
    assert await approval_of(service) == first
    for elsewhere in ({"project": "beta"}, {"organization": "globex"}):
        assert (await granted(service, action_intent="payout", **elsewhere)).action_intent == "payout"
    assert await approval_of(service) == first


async def test_a_revocation_is_kept_and_is_final(service: DurableJobService) -> None:
    await granted(service)
    for organization, project, approval in (
        ("globex", "alpha", APPROVAL),
        ("acme", "beta", APPROVAL),
        ("acme", "alpha", "grant-2"),
    ):
        with pytest.raises(ApprovalNotFound):
            await service.revoke_approval(organization, project, approval, actor="eve", reason="because")
        with pytest.raises(ApprovalNotFound):
            await service.get_approval(organization, project, approval)
    revoked = await service.revoke_approval("acme", "alpha", APPROVAL, actor="grace", reason="refunded by hand")
    assert (revoked.revoked_by, revoked.revoke_reason, revoked.consumed_at) == ("grace", "refunded by hand", None)
    assert await service.revoke_approval("acme", "alpha", APPROVAL, actor="ann", reason="again") == revoked
    assert await granted(service) == revoked


async def test_a_bad_grant_is_a_typed_error(service: DurableJobService) -> None:
    for name in ("organization", "project", "approval_id", "action_intent", "actor"):
        for value in ("", " ", "a\x00", "\ud800", *(["x" * 256] if name != "actor" else ["x" * 2049])):
            with pytest.raises(InvalidInput) as refused:
                await granted(service, **{name: value})
            assert [problem.field for problem in refused.value.problems] == [name], repr(value)
    for time in (datetime(2030, 1, 1), datetime(1999, 1, 1, tzinfo=UTC), datetime(2300, 1, 1, tzinfo=UTC)):  # noqa: DTZ001
        with pytest.raises(InvalidInput, match="expires_at"):
            await granted(service, expires_at=time)
    for given in ({"actor": "", "reason": "r"}, {"actor": "a", "reason": " "}, {"actor": "a", "reason": "\x00"}):
        with pytest.raises(InvalidInput):
            await service.revoke_approval("acme", "alpha", APPROVAL, **given)
    assert await sql(service, "SELECT id FROM durable_jobs.approvals") == []


async def test_a_bad_id_is_a_typed_error(service: DurableJobService) -> None:
    found = []
    for bad in ("a\x00", "\ud800"):
        for call in (
            service.get_approval("acme", "alpha", bad),
            service.revoke_approval("acme", "alpha", bad, actor="grace", reason="r"),
        ):
            try:
                await call
            except Exception as error:
                found.append(isinstance(error, InvalidInput | ApprovalNotFound))
    assert found == [True] * 4


# ---- why not


async def test_why_an_approval_does_not_stand(service: DurableJobService, spec: Specs) -> None:
    now = datetime.now(UTC)
    await granted(service, "revoked", expires_at=now - timedelta(hours=1))
    await service.revoke_approval("acme", "alpha", "revoked", actor="grace", reason="r")
    await granted(service, "over", expires_at=now - timedelta(microseconds=1))
    await granted(service, "of payouts", action_intent="payout")
    await granted(service, "of Refunds", action_intent="Refund")
    await granted(service, "in beta", project="beta")
    await granted(service, "of globex", organization="globex")
    await granted(service, "spent")
    winner = await claimed(service, governed(spec(), approval="spent"))
    await dispatch(service, winner)
    why = {
        "revoked": "was revoked by grace",
        "over": "has expired",
        "of payouts": "is for 'payout', not 'refund'",
        "of Refunds": "is for 'Refund', not 'refund'",
        "in beta": "does not exist",
        "of globex": "does not exist",
        "Spent": "does not exist",
        "spent": f"was consumed by job {winner.job_id}",
    }
    found = {name: await refusal(service, await claimed(service, governed(spec(), approval=name))) for name in why}
    assert found == {name: reason(name, because) for name, because in why.items()}
    consumed = await sql(service, "SELECT id, consumed_by FROM durable_jobs.approvals WHERE consumed_at IS NOT NULL")
    assert consumed == [{"id": "spent", "consumed_by": winner.job_id}]


async def test_an_approval_named_by_the_identity_alone_is_checked_too(service: DurableJobService, spec: Specs) -> None:
    """The identity says that it was approved: a handler, and whoever reads the ledger, will believe it."""
    await granted(service)
    await service.revoke_approval("acme", "alpha", APPROVAL, actor="grace", reason="r")
    claim = await claimed(service, spec(execution=identity(action_intent=INTENT, approval=APPROVAL)))
    with pytest.raises(AdmissionRefused):
        await dispatch(service, claim)


# ---- one winner


@pytest_asyncio.fixture
async def crowd(database_url: str) -> AsyncIterator[DurableJobService]:
    """A service with a connection for every racer."""
    database = Database(database_url, pool_size=RACERS)
    yield DurableJobService(database)
    await database.close()


async def test_of_fifty_jobs_one_is_dispatched(
    service: DurableJobService, crowd: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Forced: all fifty are in their marking transaction and wait for the one approval before any may have it."""
    await granted(service)
    claims = [await claimed(service, governed(spec())) for _ in range(RACERS)]
    async with connection(database_url) as own, own.transaction():
        await own.execute(LOCK)
        marks = [asyncio.create_task(dispatch(crowd, claim)) for claim in claims]
        await until_waiting(database_url, RACERS)
    answers = await asyncio.gather(*marks, return_exceptions=True)
    (winner,) = [answer for answer in answers if isinstance(answer, Job)]
    refused = [answer for answer in answers if isinstance(answer, AdmissionRefused)]
    assert [list(each.reasons) for each in refused] == [
        reason(APPROVAL, f"was consumed by job {winner.id}") for _ in range(RACERS - 1)
    ]
    found = await approval_of(service)
    assert found.consumed_by == winner.id
    for claim in claims:
        won = claim.job_id == winner.id
        trail = [CLAIMED, ADMISSION_CHECKED, DISPATCHED] if won else [CLAIMED]
        assert await names(service, claim.job_id) == trail
        assert (await service.get_job(claim.job_id)).operation_key == (f"key:{claim.job_id}" if won else None)


async def test_of_fifty_jobs_one_reaches_the_provider(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """The same through a worker: the handlers wait for one another at the boundary, then all go."""
    await granted(jobs.service)
    sender, together = Provider(), asyncio.Barrier(RACERS)

    async def script(job: JobContext, request: Json) -> Json:
        await asyncio.wait_for(together.wait(), 25)
        async with job.dispatch(f"send:{job.id}") as key:
            return await sender.call(key)

    async with worker(ConsequentialProbe(script)):
        handles = await jobs.create_jobs([governed(spec()) for _ in range(RACERS)])
        ended = [await until(jobs.service, each.id, JobStatus.COMPLETED, JobStatus.FAILED) for each in handles]
    (winner,) = [job for job in ended if job.status is JobStatus.COMPLETED]
    assert sender.keys == [f"send:{winner.id}"]
    losers = [job for job in ended if job is not winner]
    (why,) = reason(APPROVAL, f"was consumed by job {winner.id}")
    assert {job.error.message if job.error else None for job in losers} == {why}
    assert await admissions(jobs.service, losers[0].id) == [{"allowed": False, "reasons": [why]}]
    assert await admissions(jobs.service, winner.id) == [{"allowed": True, "approval": APPROVAL}]


async def test_a_revocation_and_a_dispatch_that_race_have_one_winner(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Both wait for the approval's row; whoever comes first, both are told the truth."""
    outcomes = set()
    for turn in range(8):
        approval = f"grant-{turn}"
        await granted(service, approval)
        claim = await claimed(service, governed(spec(), approval=approval))
        calls = [
            lambda c=claim: dispatch(service, c),  # type: ignore[misc]
            lambda a=approval: service.revoke_approval("acme", "alpha", a, actor="grace", reason="r"),  # type: ignore[misc]
        ]
        started: list[asyncio.Task[Any]] = []
        async with connection(database_url) as own, own.transaction():
            await own.execute(LOCK)
            for waiting, call in enumerate(calls if turn % 2 else reversed(calls), 1):
                started.append(asyncio.create_task(call()))
                await until_waiting(database_url, waiting)
        answers = await asyncio.gather(*started, return_exceptions=True)
        marked, revoked = answers if turn % 2 else reversed(answers)
        found = await approval_of(service, approval)
        if isinstance(marked, Job):
            assert isinstance(revoked, ApprovalConflict)
            assert str(revoked) == f"approval {approval!r} was consumed by job {claim.job_id}"
            assert (found.consumed_by, found.revoked_at) == (claim.job_id, None)
        else:
            assert isinstance(marked, AdmissionRefused)
            assert list(marked.reasons) == reason(approval, "was revoked by grace")
            assert (found.consumed_by, found.revoked_by) == (None, "grace")
        outcomes.add(isinstance(marked, Job))
    assert outcomes == {True, False}


async def test_what_was_consumed_is_not_revoked(service: DurableJobService, spec: Specs) -> None:
    await granted(service)
    claim = await claimed(service, governed(spec()))
    await dispatch(service, claim)
    consumed = await approval_of(service)
    with pytest.raises(ApprovalConflict, match=f"was consumed by job {claim.job_id}"):
        await service.revoke_approval("acme", "alpha", APPROVAL, actor="grace", reason="too late")
    assert await approval_of(service) == consumed
    assert await granted(service) == consumed


# ---- in the transaction of the mark


async def test_a_refused_mark_gives_the_approval_back(service: DurableJobService, spec: Specs) -> None:
    """The approval was consumed and the admission on its way to the trail when the mark hit another's key."""
    await granted(service)
    first = await claimed(service, spec(execution=identity()))
    await dispatch(service, first, "the same")
    claim = await claimed(service, governed(spec()))
    with pytest.raises(OperationKeyConflict):
        await dispatch(service, claim, "the same")
    await assert_given_back(service, claim.job_id)
    assert (await dispatch(service, claim, "another")).operation_key == "another"
    assert (await approval_of(service)).consumed_by == claim.job_id
    assert await admissions(service, claim.job_id) == [{"allowed": True, "approval": APPROVAL}]


@pytest.mark.parametrize("kills", [1, 5], ids=["once", "until it gives up"])
async def test_a_connection_that_dies_past_the_consumption_consumes_nothing(
    service: DurableJobService, spec: Specs, database_url: str, kills: int
) -> None:
    """Held where the mark writes its attempt's row, with the approval consumed in the same transaction."""
    await granted(service)
    claim = await claimed(service, governed(spec()))
    async with connection(database_url) as own, connection(database_url) as killer, own.transaction():
        await own.execute("SELECT FROM durable_jobs.job_attempts WHERE job_id = %s FOR UPDATE", [claim.job_id])
        marking = asyncio.create_task(dispatch(service, claim))
        for _ in range(kills):
            (pid,) = await until_waiting(database_url)
            held = await killer.execute(
                "SELECT count(*) AS n FROM pg_locks WHERE pid = %s AND mode = 'RowExclusiveLock'"
                " AND relation = 'durable_jobs.approvals'::regclass",
                [pid],
            )
            assert await held.fetchone() == {"n": 1}
            await killer.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        if kills > 1:
            with pytest.raises(StoreUnavailable):
                await marking
            await assert_given_back(service, claim.job_id)
    if kills == 1:
        assert (await marking).status is JobStatus.RUNNING
        assert await names(service, claim.job_id) == [CLAIMED, ADMISSION_CHECKED, DISPATCHED]
        assert (await approval_of(service)).consumed_by == claim.job_id
    else:
        assert (await dispatch(service, claim)).status is JobStatus.RUNNING


async def test_a_lease_that_dies_in_the_wait_for_the_approval_gives_it_back(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """The admission took the approval, the mark then found the lease dead: nothing was sent, nothing may be spent."""
    await granted(service)
    claim = await claimed(service, governed(spec(lease_seconds=1)))
    async with connection(database_url) as own, own.transaction():
        await own.execute(LOCK)
        marking = asyncio.create_task(dispatch(service, claim))
        await until_waiting(database_url)
        await until_lease_is_dead(database_url, claim.job_id)
    with pytest.raises(LeaseLost):
        await marking
    await assert_given_back(service, claim.job_id)
    assert await names(service, claim.job_id) == [CLAIMED]


async def test_an_approval_that_expires_in_the_wait_for_it_is_not_consumed(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    expires = datetime.now(UTC) + timedelta(seconds=1.5)
    await granted(service, expires_at=expires)
    claim = await claimed(service, governed(spec()))
    async with connection(database_url) as own, own.transaction():
        await own.execute(LOCK)
        marking = asyncio.create_task(dispatch(service, claim))
        await until_waiting(database_url)
        assert datetime.now(UTC) < expires
        await asyncio.sleep((expires - datetime.now(UTC)).total_seconds() + 0.1)
    with pytest.raises(AdmissionRefused) as refused:
        await marking
    assert list(refused.value.reasons) == reason(APPROVAL, "has expired")


async def test_facts_that_expire_in_the_wait_for_the_approval_allow_nothing(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    await granted(service)
    expires = datetime.now(UTC) + timedelta(seconds=1.5)
    claim = await claimed(service, governed(spec(), issued_at=expires - timedelta(hours=1), expires_at=expires))
    async with connection(database_url) as own, own.transaction():
        await own.execute(LOCK)
        marking = asyncio.create_task(dispatch(service, claim))
        await until_waiting(database_url)
        assert datetime.now(UTC) < expires
        await asyncio.sleep((expires - datetime.now(UTC)).total_seconds() + 0.1)
    with pytest.raises(AdmissionRefused) as refused:
        await marking
    assert list(refused.value.reasons) == [f"governance.expires_at: expired at {expires.isoformat()}"]
    await assert_given_back(service, claim.job_id)


async def test_what_expires_in_the_wait_for_the_row_is_found_out(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """The wait for the job's own row: facts and approval are judged by a clock that is read after it."""
    expires = datetime.now(UTC) + timedelta(seconds=1.5)
    await granted(service, expires_at=expires)
    facts = {"issued_at": expires - timedelta(hours=1), "expires_at": expires}
    claim = await claimed(service, governed(spec(), approval=APPROVAL))
    other = await claimed(service, governed(spec(), approval=None, **facts))
    async with row_locked(database_url, claim.job_id), row_locked(database_url, other.job_id):
        marks = [asyncio.create_task(dispatch(service, each)) for each in (claim, other)]
        await until_waiting(database_url, 2)
        assert datetime.now(UTC) < expires
        await asyncio.sleep((expires - datetime.now(UTC)).total_seconds() + 0.1)
    by_approval, by_facts = await asyncio.gather(*marks, return_exceptions=True)
    assert isinstance(by_approval, AdmissionRefused)
    assert isinstance(by_facts, AdmissionRefused)
    assert list(by_approval.reasons) == reason(APPROVAL, "has expired")
    assert list(by_facts.reasons) == [f"governance.expires_at: expired at {expires.isoformat()}"]


# ---- once


async def test_a_mark_that_is_repeated_consumes_once(service: DurableJobService, spec: Specs) -> None:
    await granted(service)
    claim = await claimed(service, governed(spec()))
    await dispatch(service, claim)
    consumed = await approval_of(service)
    for key in (f"key:{claim.job_id}", "another"):
        with pytest.raises(AlreadyDispatched):
            await dispatch(service, claim, key)
    assert await approval_of(service) == consumed
    assert await names(service, claim.job_id) == [CLAIMED, ADMISSION_CHECKED, DISPATCHED]


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "did not reach the database"])
async def test_a_lost_reply_consumes_once(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    await granted(jobs.service)
    real, calls, sender = DurableJobService.mark_provider_dispatched, [], Provider()

    async def mark(service: DurableJobService, claim: Claim, key: str, **options: Any) -> Job:
        calls.append(options)
        if len(calls) > 1:
            return await real(service, claim, key, **options)
        if committed:
            await real(service, claim, key, **options)
        raise StoreUnavailable("the reply was lost")

    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            return await sender.call(key)

    monkeypatch.setattr(DurableJobService, "mark_provider_dispatched", mark)
    async with worker(ConsequentialProbe(script)):
        handle = await jobs.create_job(governed(spec()))
        assert await handle.result(timeout=20) == {"sent": f"send:{handle.id}"}
    assert calls == [{"consequential": True}] * (1 if committed else 2)
    assert sender.keys == [f"send:{handle.id}"]
    assert (await approval_of(jobs.service)).consumed_by == handle.id
    assert await admissions(jobs.service, handle.id) == [{"allowed": True, "approval": APPROVAL}]
    marks = [name for name in await trail(jobs.service, handle.id) if name is DISPATCHED]
    assert marks == [DISPATCHED]


async def test_what_ends_before_the_boundary_consumes_nothing(service: DurableJobService, spec: Specs) -> None:
    """A released, a requeued, a failed and a reclaimed attempt leave the approval to the next."""
    await granted(service)
    claim = await claimed(service, governed(spec(backoff_base_seconds=0.001)))
    await service.release_job(claim, "shutdown")
    claim = await reclaimed(service, claim.job_id)
    await expire(service, claim.job_id)
    await service.requeue_job(claim.job_id, "ann", "stuck")
    claim = await reclaimed(service, claim.job_id)
    await expire(service, claim.job_id)
    claim = await reclaimed(service, claim.job_id)
    assert claim.generation == 5
    assert (await approval_of(service)).consumed_at is None
    await dispatch(service, claim)
    assert (await approval_of(service)).consumed_by == claim.job_id


async def test_a_job_that_consumed_its_approval_is_not_retried(service: DurableJobService, spec: Specs) -> None:
    """Failed by the provider's own no, or by an operator's word with the risk accepted: a new job needs a new one."""
    no = JobError.of("NO", "the provider said no")
    await granted(service)
    refused = await claimed(service, governed(spec()))
    await dispatch(service, refused)
    await service.fail_job(refused, no, retryable=False)
    await granted(service, "grant-2")
    unsure = await claimed(service, governed(spec(), approval="grant-2"))
    await dispatch(service, unsure)
    await service.mark_indeterminate(unsure, no)
    await service.resolve_job(unsure.job_id, JobStatus.FAILED, {"seen": "nothing"}, "ann")
    for claim, approval in ((refused, APPROVAL), (unsure, "grant-2")):
        before = await service.get_job(claim.job_id)
        with pytest.raises(NotRetryable, match=f"has consumed its approval '{approval}'"):
            await service.retry_job(claim.job_id, "ann", "again", accept_duplicate_risk=True)
        assert await service.get_job(claim.job_id) == before
    # One that failed with its approval untouched may be.
    await granted(service, "grant-3")
    early = await claimed(service, governed(spec(), approval="grant-3"))
    await service.fail_job(early, no, retryable=False)
    assert (await service.retry_job(early.job_id, "ann", "again")).status is JobStatus.QUEUED
    again = await reclaimed(service, early.job_id)
    assert (await dispatch(service, again)).status is JobStatus.RUNNING
    assert (await approval_of(service, "grant-3")).consumed_by == early.job_id


# ---- another store


class Ledger:
    """A store of the deployer's own, in a table of its own, as a ticket system would be."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)
        self.asked: list[tuple[UUID, str, str]] = []

    async def consume(self, connection: AsyncConnection, job: Job, approval_id: str, action_intent: str) -> list[str]:
        self.asked.append((job.id, approval_id, action_intent))
        await connection.exec_driver_sql(
            "INSERT INTO public.ledger VALUES (%(id)s, %(job)s)", {"id": approval_id, "job": job.id}
        )
        return self.reasons

    async def consumed_by(self, connection: AsyncConnection, job: Job, approval_id: str) -> bool:
        query = "SELECT FROM public.ledger WHERE id = %(id)s AND job = %(job)s"
        found = await connection.exec_driver_sql(query, {"id": approval_id, "job": job.id})
        return found.first() is not None


class TicketsAwayError(Exception):
    """What a deployer's own system raises."""


class Broken(Ledger):
    async def consume(self, connection: AsyncConnection, job: Job, approval_id: str, action_intent: str) -> list[str]:
        await super().consume(connection, job, approval_id, action_intent)
        raise TicketsAwayError("until Monday")


@pytest_asyncio.fixture
async def ledger(service: DurableJobService) -> None:
    await sql(service, "CREATE TABLE public.ledger (id text PRIMARY KEY, job uuid)")


async def entries(service: DurableJobService) -> list[UUID]:
    return [row["job"] for row in await sql(service, "SELECT job FROM public.ledger")]


@pytest.mark.usefixtures("ledger")
async def test_another_store_decides_in_the_same_transaction(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    await granted(service)
    await dispatch(service, await claimed(service, spec(execution=identity())), "taken")
    database = Database(database_url)
    try:
        refusing = DurableJobService(database, approvals=Ledger("ticket 7: is closed", "ticket 7: is not yours"))
        claim = await claimed(service, governed(spec()))
        with pytest.raises(AdmissionRefused) as refused:
            await dispatch(refusing, claim)
        assert list(refused.value.reasons) == ["ticket 7: is closed", "ticket 7: is not yours"]
        with pytest.raises(TicketsAwayError):
            await dispatch(DurableJobService(database, approvals=Broken()), claim)
        store = Ledger()
        allowing = DurableJobService(database, approvals=store)
        with pytest.raises(OperationKeyConflict):
            await dispatch(allowing, claim, "taken")
        # Whatever it wrote went with the mark.
        assert await entries(service) == []
        await assert_given_back(service, claim.job_id)
        await dispatch(allowing, claim)
        assert store.asked == [(claim.job_id, APPROVAL, INTENT)] * 2
        assert await entries(service) == [claim.job_id]
        assert (await approval_of(service)).consumed_at is None
        # Without an approval it is not asked.
        await dispatch(allowing, await claimed(service, governed(spec(), approval=None)))
        assert len(store.asked) == 2
        await service.fail_job(claim, JobError.of("NO", "no"), retryable=False)
        with pytest.raises(NotRetryable, match="has consumed its approval"):
            await allowing.retry_job(claim.job_id, "ann", "again")
    finally:
        await database.close()


@pytest.mark.usefixtures("ledger")
async def test_a_worker_asks_the_plugins_store(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    store, sender = Ledger(), Provider()

    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            return await sender.call(key)

    async with worker(ConsequentialProbe(script), approvals=store):
        first = await jobs.create_job(governed(spec()))
        assert await first.result(timeout=20) == {"sent": f"send:{first.id}"}
        store.reasons = ["ticket 7: is closed"]
        second = await jobs.create_job(governed(spec(), approval="grant-2"))
        job = await until(jobs.service, second.id, JobStatus.FAILED)
    assert job.error is not None
    assert job.error.message == "ticket 7: is closed"
    assert store.asked == [(first.id, APPROVAL, INTENT), (second.id, "grant-2", INTENT)]
    assert sender.keys == [f"send:{first.id}"]
    assert await entries(jobs.service) == [first.id]


@pytest.mark.usefixtures("ledger")
async def test_a_store_that_is_away_is_tried_again(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Before the boundary: an ordinary failure, retried with backoff; nothing was sent under it."""
    store, sender = Broken(), Provider()

    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            return await sender.call(key)

    async with worker(ConsequentialProbe(script), approvals=store):
        handle = await jobs.create_job(governed(spec(max_attempts=2, backoff_base_seconds=0.05)))
        job = await until(jobs.service, handle.id, JobStatus.DEAD_LETTER)
    assert job.error is not None
    assert (job.error.code, job.error.type, len(store.asked)) == ("HANDLER_ERROR", "TicketsAwayError", 2)
    assert (sender.keys, await entries(jobs.service)) == ([], [])
    assert job.dispatched_at is None


@pytest.mark.usefixtures("ledger")
async def test_a_handler_that_swallows_a_broken_store_has_not_dispatched(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """The row holds no marker: what the handler returns is not the result of a dispatch."""

    async def script(job: JobContext, request: Json) -> Json:
        with suppress(TicketsAwayError):
            async with job.dispatch(f"send:{job.id}"):
                raise AssertionError("sent")
        return {"done": True}

    async with worker(ConsequentialProbe(script), approvals=Broken()):
        handle = await jobs.create_job(governed(spec()))
        job = await until(jobs.service, handle.id, JobStatus.COMPLETED, JobStatus.INDETERMINATE)
    assert job.dispatched_at is None
    assert (job.status, job.error and job.error.code) == (JobStatus.INDETERMINATE, "DISPATCH_NOT_RECORDED")


@pytest.mark.usefixtures("ledger")
async def test_the_clients_retry_asks_the_deployers_store(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}"):
            raise JobFailed("the provider said no", retryable=False)

    async with worker(ConsequentialProbe(script), approvals=Ledger()):
        handle = await jobs.create_job(governed(spec()))
        await until(jobs.service, handle.id, JobStatus.FAILED)
        with pytest.raises(NotRetryable):
            await handle.retry("ann", "again")


async def test_governance_without_an_approval_is_not_spent(service: DurableJobService, spec: Specs) -> None:
    """It may be retried, and is judged anew."""
    made: JobSpec = governed(spec(), approval=None)
    claim = await claimed(service, made)
    await dispatch(service, claim)
    await service.fail_job(claim, JobError.of("NO", "no"), retryable=False)
    await service.retry_job(claim.job_id, "ann", "again")
    again = await reclaimed(service, claim.job_id, A)
    await dispatch(service, again, f"key:{claim.job_id}:retry-1")
    assert await admissions(service, claim.job_id) == [{"allowed": True, "approval": None}] * 2
