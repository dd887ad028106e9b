"""Follow-ups: created once, with the completion, and launched; what goes wrong with them undoes nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from temporalio.client import Client, WorkflowExecutionStatus

from durable_jobs import DurableJobs, EventName, FollowUp, Job, JobContext, JobFailed, JobHandle, JobStatus
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.contract.models import Claim
from durable_jobs.service import DurableJobService
from tests.conftest import Specs, Workers
from tests.probes import Probe, Script, eventually, trail, until, until_workflow

Naming = Callable[[Job, Any], Any]


class Parent(Probe):
    """Follows up with whatever the test names; remembers what it was asked."""

    job_type = "parent"

    def __init__(self, script: Script, naming: Naming) -> None:
        super().__init__(script)
        self.naming = naming
        self.asked: list[tuple[JobStatus, Any]] = []

    def follow_ups(self, job: Job, result: Any) -> Sequence[FollowUp]:
        self.asked.append((job.status, result))
        named: Sequence[FollowUp] = self.naming(job, result)
        return named


async def sends(job: JobContext, request: dict[str, Any]) -> Any:
    async with job.dispatch(f"{job.id}"):
        return {"sum": 3}


async def child(job: JobContext, request: dict[str, Any]) -> Any:
    return {"got": request}


def two(job: Job, result: Any) -> list[FollowUp]:
    return [
        FollowUp(name="mail", job_type="probe", payload={"sum": result["sum"]}, priority=1),
        FollowUp(name="audit", job_type="probe", payload={"parent": str(job.id)}),
    ]


async def follow_up(jobs: DurableJobs, parent: JobHandle, name: str) -> Job:
    found = await jobs.service.find_by_idempotency_key("acme", "alpha", f"{parent.id}:{name}")
    assert found is not None
    return found


async def test_created_once_and_launched(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    parent, probe = Parent(sends, two), Probe(child)
    async with worker(parent, probe):
        handle = await jobs.create_job(spec(job_type="parent"))
        assert await handle.result(timeout=20) == {"sum": 3}
        results = []
        for name in ("mail", "audit"):
            follower = await follow_up(jobs, handle, name)
            results.append(await jobs.handle(follower.id).result(timeout=20))
            assert (follower.organization_id, follower.project_id) == ("acme", "alpha")
            assert follower.queue == (await handle.job()).queue
            await until_workflow(temporal_client, follower.id, WorkflowExecutionStatus.COMPLETED)
        assert results == [{"got": {"sum": 3}}, {"got": {"parent": str(handle.id)}}]
    assert (await follow_up(jobs, handle, "mail")).priority == 1
    assert (parent.calls, probe.calls) == (1, 2)
    # With the completion, in one transaction.
    created = {(await follow_up(jobs, handle, name)).created_at for name in ("mail", "audit")}
    assert len(created) == 1
    assert (await handle.job()).escalated_at is None
    assert len((await jobs.service.list_jobs()).items) == 3


async def test_none_without_a_completion(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async def fails(job: JobContext, request: dict[str, Any]) -> Any:
        raise JobFailed("no", retryable=False)

    parent = Parent(fails, two)
    async with worker(parent):
        handle = await jobs.create_job(spec(job_type="parent"))
        await until(jobs.service, handle.id, JobStatus.FAILED)
    assert parent.asked == []
    assert len((await jobs.service.list_jobs()).items) == 1


@pytest.fixture
def lost_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """The completion of a parent is committed, and its reply is lost once."""
    real, told = DurableJobService.complete_job, set()

    async def lossy(service: DurableJobService, claim: Claim, *arguments: Any, **named: Any) -> Any:
        answer = await real(service, claim, *arguments, **named)
        if answer.follow_ups and claim.job_id not in told:
            told.add(claim.job_id)
            raise StoreUnavailable("the reply was lost")
        return answer

    monkeypatch.setattr(DurableJobService, "complete_job", lossy)


@pytest.mark.usefixtures("lost_reply")
async def test_created_once_although_the_reply_was_lost(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async with worker(Parent(sends, two), Probe(child)):
        handle = await jobs.create_job(spec(job_type="parent"))
        assert await handle.result(timeout=20) == {"sum": 3}
        assert len((await jobs.service.list_jobs()).items) == 3
    assert await trail(jobs.service, handle.id) == [EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED]


@pytest.mark.usefixtures("lost_reply")
async def test_launched_at_once_although_the_reply_was_lost(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async with worker(Parent(sends, two), Probe(child)):
        handle = await jobs.create_job(spec(job_type="parent"))
        await handle.result(timeout=20)
        follower = await follow_up(jobs, handle, "mail")
        await jobs.handle(follower.id).result(timeout=3)


async def escalated(jobs: DurableJobs, handle: JobHandle) -> Job:
    async def look() -> Job | None:
        job = await handle.job()
        return job if job.escalated_at else None

    job: Job = await eventually(look, "the escalation")
    return job


async def test_a_conflict_escalates_the_parent_and_undoes_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    parent, probe = Parent(sends, two), Probe(child)
    told: list[Job] = []
    async with worker(parent, probe, on_escalation=told.append):
        # Created and not launched: the key of its follow-up is taken before it runs.
        request = spec(job_type="parent")
        created = await jobs.service.create_job(request)
        taken = await jobs.create_job(spec(idempotency_key=f"{created.job.id}:mail", payload={"other": True}))
        handle = await jobs.create_job(request)
        assert await handle.result(timeout=20) == {"sum": 3}
        job = await escalated(jobs, handle)
        audit = await follow_up(jobs, handle, "audit")
        assert await jobs.handle(audit.id).result(timeout=20) == {"got": {"parent": str(handle.id)}}
    assert job.status is JobStatus.COMPLETED
    assert job.escalation_reason is not None
    assert job.escalation_reason.startswith("FOLLOW_UP_CONFLICT: ")
    assert str(taken.id) in job.escalation_reason
    assert (await taken.job()).payload == {"other": True}
    assert [each.id for each in told] == [handle.id]
    assert await trail(jobs.service, handle.id) == [EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED]
    assert [event.name for event in await handle.events()][-1] is EventName.ESCALATED


def _raises(job: Job, result: Any) -> Any:
    raise KeyError("no such customer")


def _names_nothing(job: Job, result: Any) -> Any:
    return None


def _names_a_dict(job: Job, result: Any) -> Any:
    return [{"name": "mail", "job_type": "probe", "payload": {"n": 1}}]


def _names_the_unchecked(job: Job, result: Any) -> Any:
    return [FollowUp.model_construct(name="mail", job_type="probe", payload={"text": "\x00"}, priority=0)]


def _names_one_twice(job: Job, result: Any) -> Any:
    return [FollowUp(name="mail", job_type="probe", payload={"n": n}) for n in (1, 2)]


@pytest.mark.parametrize(
    ("naming", "reason"),
    [
        pytest.param(_raises, "FOLLOW_UPS_FAILED: KeyError: 'no such customer'", id="it raises"),
        pytest.param(_names_nothing, "FOLLOW_UPS_FAILED: TypeError", id="it returns None"),
        pytest.param(_names_one_twice, "FOLLOW_UP_CONFLICT: ", id="it names one twice"),
        pytest.param(
            _names_a_dict,
            "FOLLOW_UPS_FAILED: ",
            id="it returns no FollowUp",
            marks=(),
        ),
        pytest.param(_names_the_unchecked, "FOLLOW_UPS_FAILED: ", id="it returns an unchecked one"),
    ],
)
async def test_what_goes_wrong_in_naming_them_undoes_nothing(
    jobs: DurableJobs, worker: Workers, spec: Specs, naming: Naming, reason: str
) -> None:
    async with worker(Parent(sends, naming), Probe(child)):
        handle = await jobs.create_job(spec(job_type="parent"))
        assert await handle.result(timeout=5) == {"sum": 3}
        job = await escalated(jobs, handle)
    assert job.escalation_reason is not None
    assert job.escalation_reason.startswith(reason)
    assert (job.status, job.result) == (JobStatus.COMPLETED, {"sum": 3})


async def test_a_pure_method_is_asked_with_the_stored_result(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """What it names depends on the row and the result alone: asked again later, it names the same."""
    parent = Parent(sends, two)
    async with worker(parent, Probe(child)):
        handle = await jobs.create_job(spec(job_type="parent"))
        await handle.result(timeout=20)
    (asked,) = parent.asked
    assert asked[1] == {"sum": 3}
    job = await handle.job()
    again = [each.name for each in parent.follow_ups(job, parent.parse_result(job.result or {}))]
    assert again == ["mail", "audit"]


async def test_on_the_path_of_an_operator(jobs: DurableJobs, worker: Workers, spec: Specs, queue: str) -> None:
    """Completed where no handler is at hand: the next sweep asks for them, and creates them once."""

    async def uncertain(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"{job.id}"):
            raise ValueError("broke")

    parent, probe = Parent(uncertain, two), Probe(child)
    async with worker(parent, probe):
        handle = await jobs.create_job(spec(job_type="parent"))
        await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
        await handle.resolve(JobStatus.COMPLETED, {"seen": "on the invoice"}, "ann", result={"sum": 4})
        assert parent.asked == []
        for _ in range(2):
            await jobs.sweep(queue)
        follower = await follow_up(jobs, handle, "mail")
        assert await jobs.handle(follower.id).result(timeout=20) == {"got": {"sum": 4}}
    assert [result for _, result in parent.asked] == [{"sum": 4}]
    assert len((await jobs.service.list_jobs()).items) == 3
