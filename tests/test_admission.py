"""Whether a consequential job may be dispatched: decided on its row at the boundary, and nothing is sent without it."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import psycopg
import pytest

from durable_jobs import DurableJobs, DurableJobService, EventName, Job, JobContext, JobFailed, JobSpec, JobStatus
from durable_jobs.contract.errors import (
    AdmissionRefused,
    DurableJobsError,
    IdempotencyKeyConflict,
    JobFailedError,
    LeaseLost,
)
from durable_jobs.contract.models import Claim
from tests.conftest import Specs, Workers
from tests.governing import (
    APPROVAL,
    FACTS,
    INTENT,
    LINEAGE,
    admissions,
    approval_of,
    dispatch,
    governance,
    governed,
    granted,
    identity,
    redigested,
    refusal,
    resealed,
    store_payload,
)
from tests.probes import ConsequentialProbe, Gate, Probe, Provider, eventually, take_over, trail, until
from tests.support import A, B, claimed, names, reclaimed, sql

Json = dict[str, Any]
Tamper = Callable[[Job, Job], Json]

CLAIMED, DISPATCHED, FAILED = EventName.CLAIMED, EventName.DISPATCHED, EventName.FAILED
ADMISSION_CHECKED, COMPLETED = EventName.ADMISSION_CHECKED, EventName.COMPLETED
NO_IDENTITY = "execution: missing; a consequential job needs an execution identity"
CHANGED = "payload: was changed after creation, as request_digest tells"
OTHER_FACTS = "governance: is not what was submitted with the identity"


class Sends(ConsequentialProbe):
    """Sends at once, and keeps what it was asked to send."""

    def __init__(self) -> None:
        self.provider = Provider()
        super().__init__(self._send)

    async def _send(self, job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            return await self.provider.call(key)


async def assert_nothing_sent(service: DurableJobService, job_id: UUID) -> Job:
    """No marker on the row, none on any attempt, none on the trail."""
    job = await service.get_job(job_id)
    assert (job.dispatched_at, job.dispatched_generation, job.operation_key) == (None, None, None)
    assert [each.operation_key for each in (await service.list_job_attempts(job_id)).items if each.dispatched_at] == []
    assert DISPATCHED not in await names(service, job_id)
    return job


# ---- allowed


async def test_what_is_allowed_leaves_its_word_before_the_marker(service: DurableJobService, spec: Specs) -> None:
    await granted(service)
    allowed: dict[str, tuple[JobSpec, str | None]] = {
        "an identity": (spec(execution=identity()), None),
        "every link": (spec(execution=identity(**LINEAGE), governance=governance()), APPROVAL),
        "facts without an approval": (governed(spec(), approval=None), None),
        "empty facts": (governed(spec(), approval=None, capability={}, policy={}, budget={}), None),
    }
    for what, (asked, approval) in allowed.items():
        claim = await claimed(service, asked)
        job = await dispatch(service, claim)
        assert (job.status, job.operation_key) == (JobStatus.RUNNING, f"key:{job.id}"), what
        assert await names(service, job.id) == [CLAIMED, ADMISSION_CHECKED, DISPATCHED], what
        (checked,) = [e for e in (await service.list_job_events(job.id)).items if e.name is ADMISSION_CHECKED]
        assert checked.data == {"allowed": True, "approval": approval}, what
        assert (checked.actor, checked.generation, checked.intent_number) == (A, 1, 0), what
    assert (await approval_of(service)).consumed_at is not None


async def test_what_has_no_consequence_is_not_asked(service: DurableJobService, spec: Specs) -> None:
    await granted(service)
    for asked in (spec(), governed(spec())):
        claim = await claimed(service, asked)
        await service.mark_provider_dispatched(claim, f"key:{claim.job_id}", consequential=False)
        assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED]
    assert (await approval_of(service)).consumed_at is None


async def test_the_verb_asks_unless_it_is_told_not_to(service: DurableJobService, spec: Specs) -> None:
    """As a handler is consequential unless it says otherwise: who forgets the word must not send."""
    claim = await claimed(service, spec())
    with pytest.raises(AdmissionRefused):
        await service.mark_provider_dispatched(claim, "key")


# ---- tampering


def changed(envelope: str, name: str, value: Any) -> Tamper:
    """One field of an envelope is another."""
    return lambda job, other: job.payload | {envelope: job.payload[envelope] | {name: value}}


def removed(envelope: str, name: str) -> Tamper:
    def tamper(job: Job, other: Job) -> Json:
        return job.payload | {envelope: {key: value for key, value in job.payload[envelope].items() if key != name}}

    return tamper


def reseal(envelope: str, **fields: Any) -> Tamper:
    """Fields of an envelope are others, and whoever did it can make seals."""
    return lambda job, other: job.payload | {envelope: resealed(job.id, job.payload[envelope] | fields)}


def reseal_digest(**fields: Any) -> Tamper:
    """The same, of the facts, and whoever did it can make their digest too."""

    def tamper(job: Job, other: Job) -> Json:
        return job.payload | {"governance": resealed(job.id, redigested(job.payload["governance"] | fields))}

    return tamper


def reseal_one(envelope: str, name: str, value: str) -> Tamper:
    """One seal is another."""

    def tamper(job: Job, other: Job) -> Json:
        stored = job.payload[envelope]
        return job.payload | {envelope: stored | {"seals": stored["seals"] | {name: value}}}

    return tamper


LATER = "2190-01-01T00:00:00+00:00"
OTHERS: Json = {
    "version": 2,
    "capability": {"name": "payments.payout"},
    "policy": {"id": "anything"},
    "budget": FACTS["budget"] | {"limit": 101},
    "issued_at": "2026-01-01T00:00:00+00:00",
    "expires_at": LATER,
    "digest": "0" * 64,
}
EXECUTION_FIELDS = ("version", *LINEAGE, "organization", "project", "job", "governance")
GOVERNANCE_FIELDS = ("version", "job", *FACTS, "issued_at", "expires_at", "digest")

TAMPERED: dict[str, tuple[Tamper, str]] = {
    **{
        f"{envelope}.{name} {what}": (tamper(envelope, name), f"{envelope}.{name}: ")
        for envelope, fields in (("execution", EXECUTION_FIELDS), ("governance", GOVERNANCE_FIELDS))
        for name in fields
        for what, tamper in (
            ("changed", lambda e, n: changed(e, n, OTHERS.get(n, "another"))),
            ("emptied", lambda e, n: changed(e, n, "")),
            ("removed", removed),
            ("sealed otherwise", lambda e, n: reseal_one(e, n, "0" * 16)),
        )
    },
    "execution.tenant nulled": (changed("execution", "tenant", None), "execution.tenant: "),
    "execution.approval nulled": (changed("execution", "approval", None), "execution.approval: "),
    "governance.approval nulled": (changed("governance", "approval", None), "governance.approval: "),
    "execution.extra": (changed("execution", "extra", 1), "execution.extra: "),
    "governance.extra": (changed("governance", "extra", 1), "governance.extra: "),
    "execution.seals removed": (removed("execution", "seals"), "execution.seals: is missing"),
    "governance.seals removed": (removed("governance", "seals"), "governance.seals: is missing"),
    "execution.seals emptied": (changed("execution", "seals", {}), "execution."),
    "governance.seals emptied": (changed("governance", "seals", {}), "governance."),
    "execution removed": (lambda job, other: {k: v for k, v in job.payload.items() if k != "execution"}, NO_IDENTITY),
    "execution nulled": (lambda job, other: job.payload | {"execution": None}, "execution: is not an object"),
    "governance nulled": (lambda job, other: job.payload | {"governance": None}, "governance: is not an object"),
    "both removed": (lambda job, other: {"n": 1}, NO_IDENTITY),
    "execution of another": (
        lambda job, other: job.payload | {"execution": other.payload["execution"]},
        "execution.",
    ),
    "governance of another": (
        lambda job, other: job.payload | {"governance": other.payload["governance"]},
        "governance.",
    ),
    "both of another": (lambda job, other: other.payload, "execution."),
    "execution of another, sealed anew": (
        lambda job, other: job.payload | {"execution": resealed(job.id, other.payload["execution"])},
        "execution.job: ",
    ),
    "governance of another, sealed anew": (
        lambda job, other: job.payload | {"governance": resealed(job.id, other.payload["governance"])},
        "governance.job: ",
    ),
    "payload.n changed": (lambda job, other: job.payload | {"n": 2}, CHANGED),
    "payload.n as text": (lambda job, other: job.payload | {"n": "1"}, CHANGED),
    "payload.to.iban changed": (lambda job, other: job.payload | {"to": {"iban": "GB00", "bic": "X"}}, CHANGED),
    "payload.to.bic removed": (lambda job, other: job.payload | {"to": {"iban": "DE00"}}, CHANGED),
    "payload.extra": (lambda job, other: job.payload | {"extra": None}, CHANGED),
    # Whoever may write the table may write seals. What the request digest covers is found all the same.
    "tenant, sealed anew": (reseal("execution", tenant="globex"), CHANGED),
    "actor, sealed anew": (reseal("execution", actor="eve"), CHANGED),
    "organization, sealed anew": (reseal("execution", organization="globex"), "execution.organization: 'globex'"),
    "project, sealed anew": (reseal("execution", project="beta"), "execution.project: 'beta'"),
    "capability, sealed anew": (reseal("governance", capability={}), "governance.digest: does not match"),
    "expiry, sealed anew": (reseal("governance", expires_at=LATER), "governance.digest: does not match"),
    "approval, sealed anew": (reseal("governance", approval=None), "governance.digest: does not match"),
    "capability, digested anew": (reseal_digest(capability={}), OTHER_FACTS),
    "policy, digested anew": (reseal_digest(policy={}), OTHER_FACTS),
    "budget, digested anew": (reseal_digest(budget={"limit": 10**6}), OTHER_FACTS),
    "intent, digested anew": (reseal_digest(action_intent="payout"), OTHER_FACTS),
    "approval, digested anew": (reseal_digest(approval=None), OTHER_FACTS),
    "expiry, digested anew": (reseal_digest(expires_at=LATER), OTHER_FACTS),
    "facts taken away": (lambda job, other: {k: v for k, v in job.payload.items() if k != "governance"}, OTHER_FACTS),
    "job, digested anew": (reseal_digest(job=str(uuid4())), "governance.job: "),
}
"""What was done to the row behind the service's back, and how the reason begins."""


def full(spec: Specs, approval: str | None = APPROVAL) -> JobSpec:
    """A job with everything in it that can be tampered with."""
    return spec(
        payload={"n": 1, "to": {"iban": "DE00", "bic": "X"}},
        execution=identity(**LINEAGE | {"approval": approval}),
        governance=governance(approval=approval),
    )


async def tampered(service: DurableJobService, spec: Specs, cases: Iterable[str]) -> dict[str, Job]:
    """A job for each of these cases of `TAMPERED`, tampered with; by what was done to it."""
    other = (await service.create_job(full(spec))).job
    done = {}
    for what in cases:
        job = (await service.create_job(full(spec))).job
        await store_payload(service, job.id, TAMPERED[what][0](job, other))
        done[what] = job
    return done


async def test_a_tampered_job_is_not_dispatched(service: DurableJobService, spec: Specs) -> None:
    """Each field of both envelopes and of the raw payload, in turn: refused, and the reason names the field."""
    await granted(service)
    jobs = await tampered(service, spec, TAMPERED)
    found = {what: await refusal(service, await reclaimed(service, job.id)) for what, job in jobs.items()}
    wrong = {what: reasons for what, reasons in found.items() if not reasons[0].startswith(TAMPERED[what][1])}
    assert wrong == {}
    assert len(found) == 4 * (16 + 10) + 38
    several = {what for what, reasons in found.items() if len(reasons) > 1}
    # An envelope that was taken from another job is wrong in both its job and its binding.
    assert several <= {"both of another", "job, digested anew", "organization, sealed anew"}
    assert (await approval_of(service)).consumed_at is None


async def test_a_tampered_job_fails_in_its_worker_and_nothing_is_sent(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """The same through a worker: nothing reaches the provider, and each trail ends in the reasons and `failed`."""
    await granted(jobs.service)
    victims = await tampered(
        jobs.service, spec, [what for what in TAMPERED if not what.endswith((" emptied", " removed", " otherwise"))]
    )
    handler = Sends()
    async with worker(handler):
        for job in victims.values():
            await jobs.handle(job.id).launch()
        ended = {what: await until(jobs.service, job.id, JobStatus.FAILED, timeout=40) for what, job in victims.items()}
    assert handler.provider.keys == []
    for what, job in ended.items():
        assert job.error is not None
        assert (job.error.code, job.error.type) == ("ADMISSION_REFUSED", "AdmissionRefused"), what
        (checked,) = await admissions(jobs.service, job.id)
        assert checked.keys() == {"allowed", "reasons"}
        assert (checked["allowed"], "; ".join(checked["reasons"])[:4096]) == (False, job.error.message), what
        assert job.error.message.startswith(TAMPERED[what][1]), what
        assert await trail(jobs.service, job.id) == [CLAIMED, ADMISSION_CHECKED, FAILED], what
        await assert_nothing_sent(jobs.service, job.id)
    assert handler.calls == len(victims)
    assert (await approval_of(jobs.service)).consumed_at is None


async def test_what_the_digest_was_taken_of_may_not_change_either(service: DurableJobService, spec: Specs) -> None:
    """The columns beside the payload: queue, type, organization, project, the digest itself."""
    for column, value, reason in (
        ("request_digest", "0" * 64, CHANGED),
        ("job_type", "other", CHANGED),
        ("queue", "other", CHANGED),
        ("organization_id", "globex", "execution.organization: 'acme' is not the row's 'globex'"),
        ("project_id", "beta", "execution.project: 'alpha' is not the row's 'beta'"),
    ):
        claim = await claimed(service, full(spec, approval=None))
        await sql(
            service,
            f"UPDATE durable_jobs.jobs SET {column} = %(value)s WHERE id = %(id)s",
            value=value,
            id=claim.job_id,
        )
        assert await refusal(service, claim) == [reason], column


async def test_an_erased_digest_hides_nothing(service: DurableJobService, spec: Specs) -> None:
    """One UPDATE, without a single hash to compute: the work is another, and the approval is not asked for."""
    await granted(service)
    found = {}
    for what, change in {
        "the work": "payload || '{\"n\": 2}'",
        "the governance": "payload - 'governance'",
    }.items():
        claim = await claimed(service, full(spec))
        await sql(
            service,
            f"UPDATE durable_jobs.jobs SET payload = {change}, request_digest = '' WHERE id = %(id)s",
            id=claim.job_id,
        )
        try:
            found[what] = (await dispatch(service, claim)).status
        except AdmissionRefused as refused:
            found[what] = type(refused)
    assert found == {"the work": AdmissionRefused, "the governance": AdmissionRefused}


async def test_a_job_from_sql_is_no_easier_to_tamper_with(service: DurableJobService, queue: str) -> None:
    (row,) = await sql(
        service,
        "SELECT durable_jobs.enqueue('acme', 'alpha', 'probe', 'k', '{\"n\": 1}', queue => %(queue)s,"
        " tenant => 't', actor => 'a', trace => 'x') AS id",
        queue=queue,
    )
    claim = await reclaimed(service, row["id"])
    await sql(service, "UPDATE durable_jobs.jobs SET payload = payload || '{\"n\": 2}'")
    with pytest.raises(AdmissionRefused):
        await dispatch(service, claim)


async def test_a_job_from_sql_is_admitted_like_any_other(service: DurableJobService, queue: str) -> None:
    """Its identity is read, bound to its row, and found out when it was changed."""

    async def enqueued(key: str, who: str) -> Claim:
        (row,) = await sql(
            service,
            f"SELECT durable_jobs.enqueue('acme', 'alpha', 'probe', %(key)s, '{{\"n\": 1}}', queue => %(queue)s{who})"
            " AS id",
            queue=queue,
            key=key,
        )
        return await reclaimed(service, row["id"])

    who = ", tenant => 'ключ \"\\ é', actor => 'a', trace => 'x'"
    assert (await dispatch(service, await enqueued("one", who))).status is JobStatus.RUNNING
    assert await refusal(service, await enqueued("two", "")) == [NO_IDENTITY]
    claim = await enqueued("three", who)
    await sql(
        service,
        "UPDATE durable_jobs.jobs SET payload = jsonb_set(payload, '{execution,tenant}', '\"globex\"')"
        " WHERE id = %(id)s",
        id=claim.job_id,
    )
    assert await refusal(service, claim) == ["execution.tenant: was changed after creation"]


async def test_the_door_for_sql_takes_no_identity_that_cannot_be_read(service: DurableJobService, queue: str) -> None:
    """The Python door refuses it by name; a job that is accepted is one that can be dispatched."""
    accepted = []
    for unprintable in ("a\u200bb", "a\u202eb", "a\ue000b"):
        with suppress(DurableJobsError):
            accepted += await sql(
                service,
                "SELECT durable_jobs.enqueue('acme', 'alpha', 'probe', %(key)s, '{\"n\": 1}', queue => %(queue)s,"
                " tenant => %(tenant)s, actor => 'a', trace => 'x') AS id",
                key=uuid4().hex,
                queue=queue,
                tenant=unprintable,
            )
    for row in accepted:
        assert (await dispatch(service, await reclaimed(service, row["id"]))).status is JobStatus.RUNNING


async def test_the_reason_names_an_envelope_that_was_removed(service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, full(spec, approval=None))
    await sql(service, "UPDATE durable_jobs.jobs SET payload = payload - 'governance'")
    (reason,) = await refusal(service, claim)
    assert reason.startswith("governance")


# ---- through a worker


async def refused_jobs(service: DurableJobService, spec: Specs) -> dict[str, tuple[JobSpec, str]]:
    """What is refused without any tampering, and why; what it needs is in place."""
    for approval in ("revoked", "elsewhere", "granted"):
        await granted(service, approval)
    await service.revoke_approval("acme", "alpha", "revoked", actor="grace", reason="by hand")
    await granted(service, "in beta", project="beta")
    await granted(service, "of payouts", action_intent="payout")
    past = datetime.now(UTC) - timedelta(hours=1)
    await granted(service, "over", expires_at=past)
    return {
        "nobody": (spec(), NO_IDENTITY),
        "expired": (
            governed(spec(), approval="granted", issued_at=past - timedelta(hours=1), expires_at=past),
            f"governance.expires_at: expired at {past.isoformat()}",
        ),
        "revoked": (governed(spec(), approval="revoked"), "governance.approval: 'revoked' was revoked by grace"),
        "unknown": (governed(spec(), approval="no such"), "governance.approval: 'no such' does not exist"),
        "elsewhere": (governed(spec(), approval="in beta"), "governance.approval: 'in beta' does not exist"),
        "for another intent": (
            governed(spec(), approval="of payouts"),
            "governance.approval: 'of payouts' is for 'payout', not 'refund'",
        ),
        "over": (governed(spec(), approval="over"), "governance.approval: 'over' has expired"),
    }


async def test_a_refused_job_fails_and_nothing_is_sent(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    cases = await refused_jobs(jobs.service, spec)
    handler = Sends()
    async with worker(handler):
        handles = {what: await jobs.create_job(asked) for what, (asked, _) in cases.items()}
        fine = await jobs.create_job(governed(spec(), approval="granted"))
        assert await fine.result(timeout=20) == {"sent": f"send:{fine.id}"}
        for what, handle in handles.items():
            with pytest.raises(JobFailedError) as failed:
                await handle.result(timeout=20)
            assert (failed.value.error_code, failed.value.error_message) == ("ADMISSION_REFUSED", cases[what][1]), what
    assert handler.provider.keys == [f"send:{fine.id}"]
    for what, handle in handles.items():
        assert await admissions(jobs.service, handle.id) == [{"allowed": False, "reasons": [cases[what][1]]}], what
        assert await trail(jobs.service, handle.id) == [CLAIMED, ADMISSION_CHECKED, FAILED], what
        job = await assert_nothing_sent(jobs.service, handle.id)
        assert (job.attempt_count, job.intent_number) == (1, 0), what
    assert await admissions(jobs.service, fine.id) == [{"allowed": True, "approval": "granted"}]
    assert await trail(jobs.service, fine.id) == [CLAIMED, ADMISSION_CHECKED, DISPATCHED, COMPLETED]


async def test_a_handler_may_say_that_it_has_no_consequence(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            return {"sent": key}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == {"sent": f"send:{handle.id}"}
    assert await trail(jobs.service, handle.id) == [CLAIMED, DISPATCHED, COMPLETED]


SWALLOWED: dict[str, Callable[[JobContext, AdmissionRefused], Any]] = {
    "returns": lambda job, error: {},
    "says that nothing was sent": lambda job, error: job.nothing_sent() or {},
    "says that it may be tried again": lambda job, error: JobFailed("not now", retryable=True),
    "raises its own": lambda job, error: ValueError("wrapped"),
}


async def test_a_handler_that_swallows_the_refusal_changes_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """`except Exception` round a provider's call is common: the refusal is the job's end, and on its trail, anyhow."""
    kinds: dict[UUID, str] = {}

    async def script(job: JobContext, request: Json) -> Any:
        try:
            async with job.dispatch(f"send:{job.id}"):
                raise AssertionError("sent")
        except AdmissionRefused as error:
            answer = SWALLOWED[request["kind"]](job, error)
            if isinstance(answer, Exception):
                raise answer from error
            return answer

    settled = (JobStatus.FAILED, JobStatus.COMPLETED, JobStatus.DEAD_LETTER, JobStatus.INDETERMINATE)
    async with worker(ConsequentialProbe(script)):
        for kind in SWALLOWED:
            kinds[(await jobs.create_job(spec(payload={"kind": kind}, max_attempts=1))).id] = kind
        ended = {kinds[job_id]: await until(jobs.service, job_id, *settled) for job_id in kinds}
    refused = [{"allowed": False, "reasons": [NO_IDENTITY]}]
    found = {kind: (job.status, await admissions(jobs.service, job.id)) for kind, job in ended.items()}
    assert found == dict.fromkeys(SWALLOWED, (JobStatus.FAILED, refused))


async def test_a_stale_worker_leaves_no_refusal_on_the_trail(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fenced between the refusal and its event, it changes nothing: the trail is the new holder's."""
    real = DurableJobService.refuse_dispatch
    written = asyncio.Event()

    async def refuse(service: DurableJobService, claim: Claim, refused: AdmissionRefused) -> Any:
        assert await take_over(service, database_url, claim.job_id)
        try:
            return await real(service, claim, refused)
        finally:
            written.set()

    monkeypatch.setattr(DurableJobService, "refuse_dispatch", refuse)
    async with worker(Sends()):
        handle = await jobs.create_job(spec())
        with suppress(LeaseLost):
            await asyncio.wait_for(written.wait(), 20)
    assert await trail(jobs.service, handle.id) == [CLAIMED, CLAIMED]


async def test_a_refused_job_may_be_retried_and_is_asked_again(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Nothing was sent and nothing consumed: once the approval stands, an operator's retry goes through."""
    handler = Sends()
    async with worker(handler):
        handle = await jobs.create_job(governed(spec()))
        await until(jobs.service, handle.id, JobStatus.FAILED)
        await granted(jobs.service)
        await handle.retry("ann", "it is granted now")
        assert await handle.result(timeout=20) == {"sent": f"send:{handle.id}:retry-1"}
    assert await admissions(jobs.service, handle.id) == [
        {"allowed": False, "reasons": ["governance.approval: 'grant-1' does not exist"]},
        {"allowed": True, "approval": "grant-1"},
    ]
    assert handler.provider.keys == [f"send:{handle.id}:retry-1"]


# ---- expiry


async def test_the_facts_expire_while_the_job_waits_in_its_queue(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    await granted(jobs.service)
    expires = datetime.now(UTC) + timedelta(seconds=1)
    handle = await jobs.create_job(governed(spec(), issued_at=expires - timedelta(hours=1), expires_at=expires))

    async def over() -> bool:
        (row,) = await sql(jobs.service, "SELECT clock_timestamp() >= %(expires)s AS over", expires=expires)
        return bool(row["over"])

    await eventually(over, "the facts' expiry")
    handler = Sends()
    async with worker(handler):
        job = await until(jobs.service, handle.id, JobStatus.FAILED)
    reason = f"governance.expires_at: expired at {expires.isoformat()}"
    assert job.error is not None
    assert job.error.message == reason
    assert await admissions(jobs.service, job.id) == [{"allowed": False, "reasons": [reason]}]
    assert handler.provider.keys == []
    assert (await approval_of(jobs.service)).consumed_at is None


async def test_they_expire_between_the_claim_and_the_boundary(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Judged at the boundary, not at the claim; and a second job that gets there in time is let through."""
    gate, sender = Gate(), Provider()

    async def script(job: JobContext, request: Json) -> Json:
        if request["late"]:
            await gate.wait()
        async with job.dispatch(f"send:{job.id}") as key:
            return await sender.call(key)

    expires = datetime.now(UTC) + timedelta(seconds=4)
    facts = governance(approval=None, issued_at=expires - timedelta(hours=1), expires_at=expires)
    async with worker(ConsequentialProbe(script)):
        early, late = await jobs.create_jobs(
            [spec(payload={"late": late}, execution=identity(), governance=facts) for late in (False, True)]
        )
        assert await early.result(timeout=20) == {"sent": f"send:{early.id}"}
        await gate.handler_came()
        await asyncio.sleep(max(0.0, (expires - datetime.now(UTC)).total_seconds()) + 0.05)
        gate.go_on.set()
        job = await until(jobs.service, late.id, JobStatus.FAILED)
    assert job.error is not None
    assert job.error.message == f"governance.expires_at: expired at {expires.isoformat()}"
    assert sender.keys == [f"send:{early.id}"]


@pytest.mark.parametrize(("ahead", "allowed"), [("2 hours", False), ("-2 hours", True)], ids=["ahead", "behind"])
async def test_the_databases_clock_decides(
    service: DurableJobService, spec: Specs, database_url: str, ahead: str, allowed: bool
) -> None:
    """The server's clock is two hours off this process's: facts and approvals expire by the server's."""
    shim = f"""
        CREATE SCHEMA shim;
        CREATE FUNCTION shim.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE
            AS $$ SELECT pg_catalog.clock_timestamp() + interval '{ahead}' $$;
        CREATE FUNCTION shim.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
            AS $$ SELECT pg_catalog.statement_timestamp() + interval '{ahead}' $$;
        ALTER DATABASE {urlsplit(database_url).path[1:]} SET search_path = shim, pg_catalog;
    """
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(shim.encode())
    await service.database.close()  # the next connection has the new search path
    now = datetime.now(UTC)
    by_hours = -1 if allowed else 1
    facts = {"issued_at": now - timedelta(days=1), "expires_at": now + timedelta(hours=by_hours)}
    await granted(service, "lasting")
    await granted(service, "over", expires_at=now + timedelta(hours=by_hours))
    by_facts = await claimed(service, governed(spec(), approval="lasting", **facts))
    by_approval = await claimed(service, governed(spec(), approval="over", expires_at=now + timedelta(days=1)))
    if allowed:
        assert (await dispatch(service, by_facts)).status is JobStatus.RUNNING
        assert (await dispatch(service, by_approval)).status is JobStatus.RUNNING
    else:
        expired = facts["expires_at"].isoformat()
        assert await refusal(service, by_facts) == [f"governance.expires_at: expired at {expired}"]
        assert await refusal(service, by_approval) == ["governance.approval: 'over' has expired"]


# ---- who is asked


async def test_the_fence_comes_before_the_admission(service: DurableJobService, spec: Specs) -> None:
    """Who does not hold the job, or asks again, is told that; nothing is consumed and no event is left."""
    await granted(service)
    claim = await claimed(service, governed(spec()))
    for stranger in (claim.model_copy(update={"worker_id": B}), claim.model_copy(update={"generation": 2})):
        with pytest.raises(LeaseLost):
            await dispatch(service, stranger)
    refused = await claimed(service, spec())
    with pytest.raises(LeaseLost):
        await dispatch(service, refused.model_copy(update={"worker_id": B}))
    assert await names(service, claim.job_id) == [CLAIMED]
    assert (await approval_of(service)).consumed_at is None


# ---- the request digest


async def test_which_facts_make_it_another_request(service: DurableJobService, spec: Specs) -> None:
    """Tenant, actor, intent, capability, policy and budget do; trace, lineage, times and the approval don't."""
    fixed = {"idempotency_key": "one", "payload": {"n": 1}}

    def asked(execution: Json | None = None, facts: Json | None = None, **fields: Any) -> JobSpec:
        return spec(**fixed | fields, execution=identity(**(execution or {})), governance=governance(**(facts or {})))

    first = (await service.create_job(asked())).job
    now = datetime.now(UTC)
    same = {
        "again": asked(),
        "trace": asked({"trace": "another"}),
        **{
            name: asked({name: "another"})
            for name in ("task", "run", "attempt", "admission_decision", "parent_job", "parent_run")
        },
        "the intent named twice": asked({"action_intent": INTENT}),
        "the approval": asked(facts={"approval": "grant-2"}),
        "issued": asked(facts={"issued_at": now - timedelta(days=1)}),
        "expires": asked(facts={"expires_at": now + timedelta(days=1)}),
        "order of keys": asked(facts={"budget": dict(reversed(FACTS["budget"].items()))}),
        "1 as 1.0": asked(facts={"policy": FACTS["policy"] | {"version": 3.0}}),
        "priority": asked(priority=2, max_attempts=9, timeout_seconds=1),
        "schedule": asked(scheduled_at=now + timedelta(days=1)),
    }
    other = {
        "tenant": asked({"tenant": "acme-us"}),
        "actor": asked({"actor": "eve"}),
        "intent": asked(facts={"action_intent": "payout"}),
        "capability": asked(facts={"capability": {"name": "payments.payout"}}),
        "policy": asked(facts={"policy": FACTS["policy"] | {"version": 4}}),
        "budget": asked(facts={"budget": FACTS["budget"] | {"limit": 101}}),
        "payload": asked(payload={"n": 2}),
        "type": asked(job_type="other"),
        "queue": asked(queue="other"),
        "isolation": asked(isolated=True),
        "no facts": spec(**fixed, execution=identity(action_intent=INTENT)),
        "nobody": spec(**fixed),
    }
    for what, each in same.items():
        created = await service.create_job(each)
        assert (created.created, created.job) == (False, first), what
    for what, each in other.items():
        with pytest.raises(IdempotencyKeyConflict) as conflict:
            await service.create_job(each)
        assert (conflict.value.job_id, conflict.value.idempotency_key) == (first.id, "one"), what
    assert await service.get_job(first.id) == first
    elsewhere = await service.create_job(asked(organization="globex", execution={"tenant": "globex"}))
    assert elsewhere.created
