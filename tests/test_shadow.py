"""A policy in shadow: what it would have decided is on the trail, and nothing else comes of it."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from durable_jobs import DurableJobs, DurableJobService, EventName, Job, JobContext, JobEvent, JobStatus
from durable_jobs.contract.envelope import read_execution_identity, read_governance
from durable_jobs.contract.errors import UnknownEvent
from durable_jobs.handler import ShadowDecision
from tests.conftest import Specs, Workers
from tests.governing import admissions, approval_of, governed, granted, identity
from tests.probes import ConsequentialProbe, Gate, Probe, Provider, take_over, trail, until
from tests.support import claimed

Json = dict[str, Any]

CLAIMED, DISPATCHED, COMPLETED = EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED
SHADOW, ADMISSION_CHECKED, FAILED = EventName.EXECUTION_CONTROL_SHADOW, EventName.ADMISSION_CHECKED, EventName.FAILED

ALLOWS = ShadowDecision("spend-limits-2", allowed=True)
REFUSES = ShadowDecision("spend-limits-2", allowed=False, reasons=("over the limit", "no second pair of eyes"))


class Shadow:
    """A policy that answers as it was told to, and keeps the jobs that it was asked about."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Job] = []

    def __call__(self, job: Job) -> Any:
        self.asked.append(job)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer(job) if callable(self.answer) else self.answer


def sends(provider: Provider) -> Callable[[JobContext, Json], Any]:
    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            return await provider.call(key)

    return script


async def shadows(service: DurableJobService, handle: Any) -> list[JobEvent]:
    return [event for event in await handle.events() if event.name is SHADOW]


async def test_what_it_would_have_decided_is_recorded_and_has_no_effect(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """Allowed or refused by the shadow, the admission decides; and the other way round."""
    await granted(jobs.service)
    provider, policy = Provider(), Shadow(lambda job: REFUSES if job.payload["refuse"] else ALLOWS)
    async with worker(ConsequentialProbe(sends(provider)), shadow_policy=policy):
        allowed = await jobs.create_job(governed(spec(payload={"refuse": True})))
        assert await allowed.result(timeout=20) == {"sent": f"send:{allowed.id}"}
        refused = await jobs.create_job(spec(payload={"refuse": False}))
        await until(jobs.service, refused.id, JobStatus.FAILED)
    assert await trail(jobs.service, allowed.id) == [
        CLAIMED,
        SHADOW,
        ADMISSION_CHECKED,
        DISPATCHED,
        COMPLETED,
    ]
    assert await trail(jobs.service, refused.id) == [CLAIMED, SHADOW, ADMISSION_CHECKED, FAILED]
    (against,), (in_favour,) = await shadows(jobs.service, allowed), await shadows(jobs.service, refused)
    assert against.data == {
        "policy": "spend-limits-2",
        "allowed": False,
        "reasons": ["over the limit", "no second pair of eyes"],
    }
    assert in_favour.data == {"policy": "spend-limits-2", "allowed": True, "reasons": []}
    claims = [event for event in await allowed.events() if event.name is CLAIMED]
    assert (against.actor, against.generation) == (claims[0].actor, 1)
    assert provider.keys == [f"send:{allowed.id}"]
    assert [job.id for job in policy.asked] == [allowed.id, refused.id]
    assert read_execution_identity(policy.asked[0]) is not None
    assert read_governance(policy.asked[0]) is not None
    assert (await admissions(jobs.service, allowed.id))[0]["allowed"] is True
    assert (await approval_of(jobs.service)).consumed_by == allowed.id


async def test_it_is_asked_at_each_dispatch_and_only_there(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """A harmless handler's dispatches too; a job that sends nothing is not its business; a retry is asked anew."""
    provider, policy = Provider(), Shadow(REFUSES)

    async def script(job: JobContext, request: Json) -> Json:
        if not request["sends"] or job.attempt == 1:
            job.nothing_sent()
            if request["sends"]:
                raise ValueError("before the boundary")
            return {}
        return await sends(provider)(job, request)

    async with worker(Probe(script), shadow_policy=policy):
        silent, loud = await jobs.create_jobs(
            [spec(payload={"sends": sent}, backoff_base_seconds=0.05) for sent in (False, True)]
        )
        assert await silent.result(timeout=20) == {}
        assert await loud.result(timeout=20) == {"sent": f"send:{loud.id}"}
    assert await shadows(jobs.service, silent) == []
    assert await trail(jobs.service, loud.id) == [
        CLAIMED,
        EventName.RETRIED,
        CLAIMED,
        SHADOW,
        DISPATCHED,
        COMPLETED,
    ]
    assert [job.id for job in policy.asked] == [loud.id]


def unstorable(**fields: Any) -> ShadowDecision:
    return ShadowDecision(**{"policy": "p", "allowed": True} | fields)


FAILURES: dict[str, Any] = {
    "raises": RuntimeError("the policy is broken"),
    "times out": TimeoutError(),
    "is refused itself": UnknownEvent.at("name", "as an error of ours"),
    "answers nothing": None,
    "answers text": "allowed",
    "reasons that are no list": unstorable(reasons=None),
    "a reason with U+0000": unstorable(reasons=["\x00"]),
    "a reason that is no JSON": unstorable(reasons=[object()]),
    "a name that is NaN": unstorable(policy=float("nan")),
    "8 MiB of reasons": unstorable(reasons=["x" * (8 * 1024 * 1024 + 1)]),
}


async def test_its_failure_has_no_effect_either(
    jobs: DurableJobs, worker: Workers, spec: Specs, caplog: pytest.LogCaptureFixture
) -> None:
    """Logged with the job's id; the dispatch goes on as if there were no policy."""
    provider = Provider()
    answers = dict(enumerate(FAILURES.values()))

    def policy(job: Job) -> Any:
        return Shadow(answers[job.payload["n"]])(job)

    async with worker(ConsequentialProbe(sends(provider)), shadow_policy=policy):
        with caplog.at_level(logging.ERROR, logger="durable_jobs.temporal.context"):
            handles = await jobs.create_jobs([spec(payload={"n": n}, execution=identity()) for n in answers])
            for handle in handles:
                assert await handle.result(timeout=20) == {"sent": f"send:{handle.id}"}
    for handle, what in zip(handles, FAILURES, strict=True):
        assert await trail(jobs.service, handle.id) == [
            CLAIMED,
            ADMISSION_CHECKED,
            DISPATCHED,
            COMPLETED,
        ], what
    logged = [record.getMessage() for record in caplog.records if record.name == "durable_jobs.temporal.context"]
    assert sorted(logged) == sorted(f"Job {handle.id}: the policy in shadow failed" for handle in handles)


async def test_a_failing_write_of_its_word_has_no_effect(
    jobs: DurableJobs, worker: Workers, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, tried = Provider(), []

    async def away(service: DurableJobService, *word: Any) -> Any:
        tried.append(SHADOW)
        raise ConnectionError("the database is away")

    monkeypatch.setattr(DurableJobService, "record_shadow", away)
    async with worker(ConsequentialProbe(sends(provider)), shadow_policy=Shadow(REFUSES)):
        handle = await jobs.create_job(spec(execution=identity()))
        assert await handle.result(timeout=20) == {"sent": f"send:{handle.id}"}
    assert tried == [SHADOW]
    assert await trail(jobs.service, handle.id) == [CLAIMED, ADMISSION_CHECKED, DISPATCHED, COMPLETED]


async def test_it_can_change_nothing_of_the_job(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """What the handler sends after the dispatch is what was submitted."""
    sent = []

    def policy(job: Job) -> ShadowDecision:
        job.payload["to"]["iban"] = "the policy's own"
        return ALLOWS

    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}"):
            sent.append(request["to"]["iban"])
            return {}

    async with worker(ConsequentialProbe(script), shadow_policy=policy):
        handle = await jobs.create_job(spec(payload={"to": {"iban": "DE00"}}, execution=identity()))
        await handle.result(timeout=20)
    assert sent == ["DE00"]


async def test_a_policy_that_raises_a_cancellation_has_no_effect(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """As a client library does that is used with a loop of its own."""
    provider = Provider()
    async with worker(ConsequentialProbe(sends(provider)), shadow_policy=Shadow(asyncio.CancelledError())):
        handle = await jobs.create_job(spec(execution=identity(), timeout_seconds=1, max_attempts=1))
        job = await until(jobs.service, handle.id, *(s for s in JobStatus if s.is_terminal), timeout=10)
    assert (job.status, provider.keys) == (JobStatus.COMPLETED, [f"send:{handle.id}"])


async def test_a_slow_policy_holds_no_other_job_up(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """It looks something up, as policies do: meanwhile the worker's other jobs go on."""
    provider, looking, found = Provider(), threading.Event(), threading.Event()

    def policy(job: Job) -> ShadowDecision:
        if job.payload["slow"]:
            looking.set()
            found.wait(3)
        return ALLOWS

    async with worker(ConsequentialProbe(sends(provider)), shadow_policy=policy):
        slow = await jobs.create_job(spec(payload={"slow": True}, execution=identity()))
        await asyncio.to_thread(looking.wait, 20)
        other = await jobs.create_job(spec(payload={"slow": False}, execution=identity()))
        done = await until(jobs.service, other.id, JobStatus.COMPLETED)
        found.set()
        held_up = await until(jobs.service, slow.id, JobStatus.COMPLETED)
    assert done.finished_at is not None
    assert held_up.finished_at is not None
    assert done.finished_at < held_up.finished_at


async def test_a_stale_worker_leaves_no_word_of_its_policy(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """Fenced while it was busy, it changes nothing: the trail is the new holder's."""
    gate, ended = Gate(), asyncio.Event()

    async def script(job: JobContext, request: Json) -> Json:
        await gate.wait()
        try:
            return await sends(Provider())(job, request)
        finally:
            ended.set()

    async with worker(ConsequentialProbe(script), shadow_policy=Shadow(ALLOWS)):
        handle = await jobs.create_job(spec(execution=identity()))
        await gate.handler_came()
        assert await take_over(jobs.service, database_url, handle.id)
        gate.go_on.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 20)
    assert await trail(jobs.service, handle.id) == [CLAIMED, CLAIMED]


async def test_the_events_of_control_change_nothing(service: DurableJobService, spec: Specs) -> None:
    """As the verb has it: appended by name, with the row as it stands."""
    claim = await claimed(service, spec())
    before = await service.get_job(claim.job_id)
    for name in (SHADOW, ADMISSION_CHECKED):
        event = await service.append_job_event(claim.job_id, name, "policy", {"allowed": False})
        assert (event.status, event.generation, event.data) == (JobStatus.CLAIMED, 1, {"allowed": False})
    with pytest.raises(UnknownEvent):
        await service.append_job_event(claim.job_id, DISPATCHED, "policy", {})
    assert await service.get_job(claim.job_id) == before
