"""Two tenants side by side, alike in all but their name: no read, no claim, no sweep and no control verb crosses."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from temporalio import workflow
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from durable_jobs import (
    DurableJobs,
    DurableJobService,
    DurableJobsPlugin,
    FollowUp,
    Job,
    JobContext,
    JobHandler,
    JobSpec,
    JobStatus,
    ProviderState,
)
from durable_jobs.contract.errors import (
    ApprovalNotFound,
    DurableJobsError,
    IdempotencyKeyConflict,
    InvalidInput,
    InvalidJob,
    JobNotFound,
)
from durable_jobs.contract.models import ClaimRefusal
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.service import RecheckFilter
from durable_jobs.temporal.launch import job_start
from durable_jobs.temporal.messages import CREATE_JOB, READ_RESULT, WORKFLOW_TYPE, workflow_id
from durable_jobs.temporal.schedule import schedule_id
from tests.conftest import Specs, Workers
from tests.governing import granted, identity
from tests.probes import ConsequentialProbe, Probe, eventually, execute, until
from tests.support import ERROR, A, B, claimed, dispatched, end_in, expire, names, snapshot, sql
from tests.sweeping import LANDED, NEVER, Asked, audit, escalated, swept, uncertain, untouched_for

Json = dict[str, Any]
Verb = Callable[[DurableJobService, UUID, str], Awaitable[Any]]

ACME, GLOBEX = "acme", "globex"
TENANTS = (ACME, GLOBEX)


def other(organization: str) -> str:
    return GLOBEX if organization == ACME else ACME


async def of_each(make: Callable[[JobSpec], Awaitable[Job]], spec: Specs, **fields: Any) -> dict[str, Job]:
    """A job of each tenant, the same in every field that a caller types."""
    same = {"idempotency_key": uuid4().hex} | fields
    return {organization: await make(spec(organization=organization, **same)) for organization in TENANTS}


async def all_of(service: DurableJobService, jobs: dict[str, Job]) -> dict[str, Json]:
    return {organization: await snapshot(service, job.id) for organization, job in jobs.items()}


# ---- reads


async def test_no_read_crosses(service: DurableJobService, spec: Specs, queue: str) -> None:
    async def queued(asked: JobSpec) -> Job:
        return (await service.create_job(asked)).job

    async def doubted(asked: JobSpec) -> Job:
        job = await service.mark_indeterminate(await dispatched(service, asked), ERROR)
        await sql(service, "UPDATE durable_jobs.jobs SET operation_key = 'same' WHERE id = %(id)s", id=job.id)
        return job

    jobs = await of_each(queued, spec, idempotency_key="one")
    unsure = await of_each(lambda asked: uncertain(service, asked), spec)
    stuck = await of_each(lambda asked: escalated(service, asked), spec)
    mine = {name: {each[name].id for each in (jobs, unsure, stuck)} for name in TENANTS}
    for name, job in unsure.items():
        stranger = other(name)
        with pytest.raises(JobNotFound) as hidden:
            await service.get_job(job.id, organization=stranger)
        with pytest.raises(JobNotFound) as unknown:
            await service.get_job(unknown_id := uuid4(), organization=stranger)
        # A job of another tenant and one that never was are told apart by nothing.
        assert str(hidden.value).replace(str(job.id), "?") == str(unknown.value).replace(str(unknown_id), "?")
        assert (await service.get_job(job.id, organization=name)).id == job.id
        for read in (service.list_job_events, service.list_job_attempts):
            with pytest.raises(JobNotFound):
                await read(job.id, organization=stranger)
        assert len((await service.list_job_events(job.id, organization=name)).items) == 3
        assert len((await service.list_job_attempts(job.id, organization=name)).items) == 1
        assert {each.id for each in (await service.list_jobs(organization=name)).items} == mine[name]
        assert {each.id for each in (await service.list_jobs(organization=name, project="alpha")).items} == mine[name]
        found = await service.find_by_idempotency_key(name, "alpha", "one")
        assert found is not None
        assert found.id == jobs[name].id
        candidates = await service.find_reconciliation_candidates(name, "alpha", queue=queue)
        assert {each.id for each, _ in candidates} == mine[name] - {jobs[name].id}
        assert await service.find_reconciliation_candidates(name, "alpha", organizations=[stranger]) == []
        assert await service.list_candidate_projects(queue, ["probe"], [name]) == [(name, "alpha")]
        assert await service.count_escalated(queue, ["probe"], [name]) == 1
        (overview,) = await service.list_queues(organization=name)
        assert (overview.queued, overview.unresolved, overview.escalated) == (1, 2, 1)
    assert await service.list_candidate_projects(queue, ["probe"], []) == []
    assert await service.count_escalated(queue, ["probe"], []) == 0
    assert (await service.list_jobs(organization="")).items == []
    assert await service.find_by_idempotency_key("", "alpha", "one") is None


async def test_a_listing_of_one_tenant_pages_through_its_own_alone(service: DurableJobService, spec: Specs) -> None:
    for _ in range(4):
        for name in TENANTS:
            await service.create_job(spec(organization=name))
    seen: list[str] = []
    cursor: str | None = None
    while True:
        page = await service.list_jobs(organization=ACME, after=cursor, limit=1)
        seen += [job.organization_id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == [ACME] * 4
    # A cursor is a position and no key: another's leads to nobody else's rows.
    last = (await service.list_jobs(organization=GLOBEX)).items[0].id
    assert {job.organization_id for job in (await service.list_jobs(organization=ACME, after=str(last))).items} == {
        ACME
    }


async def test_the_same_words_are_two_jobs(service: DurableJobService, spec: Specs) -> None:
    """One idempotency key, one operation key, one approval's id: each is its tenant's."""
    for name in TENANTS:
        await granted(service, organization=name)
    jobs = await of_each(lambda asked: _created(service, asked), spec, idempotency_key="one")
    assert jobs[ACME].id != jobs[GLOBEX].id
    with pytest.raises(IdempotencyKeyConflict) as conflict:
        await service.create_job(spec(organization=GLOBEX, idempotency_key="one", payload={"n": 2}))
    assert conflict.value.job_id == jobs[GLOBEX].id
    for name, job in jobs.items():
        outcome = await service.claim_job(A, uuid4(), job_id=job.id, organizations=[name])
        assert outcome is not None
        assert outcome.claim is not None
        await service.mark_provider_dispatched(outcome.claim, "the same key", consequential=False)
    await service.revoke_approval(ACME, "alpha", "grant-1", actor="grace", reason="r")
    assert (await service.get_approval(GLOBEX, "alpha", "grant-1")).revoked_at is None
    for name, project in ((ACME, "beta"), ("initech", "alpha")):
        with pytest.raises(ApprovalNotFound):
            await service.get_approval(name, project, "grant-1")


async def _created(service: DurableJobService, asked: JobSpec) -> Job:
    return (await service.create_job(asked)).job


# ---- control


CONTROLS: dict[str, tuple[Callable[[DurableJobService, JobSpec], Awaitable[Job]], Verb]] = {}


def control(make: Callable[[DurableJobService, JobSpec], Awaitable[Job]]) -> Callable[[Verb], Verb]:
    """A control verb, and the state of a job that it acts on."""

    def register(verb: Verb) -> Verb:
        CONTROLS[verb.__name__] = (make, verb)
        return verb

    return register


async def _queued(service: DurableJobService, asked: JobSpec) -> Job:
    return await _created(service, asked)


async def _running(service: DurableJobService, asked: JobSpec) -> Job:
    return await service.get_job((await claimed(service, asked)).job_id)


async def _failed(service: DurableJobService, asked: JobSpec) -> Job:
    return await end_in(service, await claimed(service, asked), JobStatus.FAILED)


async def _interrupted(service: DurableJobService, asked: JobSpec) -> Job:
    claim = await claimed(service, asked)
    await expire(service, claim.job_id)
    return await service.get_job(claim.job_id)


@control(_queued)
async def cancel_queued(service: DurableJobService, job_id: UUID, organization: str) -> Any:
    return await service.cancel_job(job_id, "not wanted", "eve", organization=organization)


@control(_running)
async def cancel_running(service: DurableJobService, job_id: UUID, organization: str) -> Any:
    return await service.cancel_job(job_id, "not wanted", "eve", organization=organization)


@control(_failed)
async def cancel_terminal(service: DurableJobService, job_id: UUID, organization: str) -> Any:
    return await service.cancel_job(job_id, "not wanted", "eve", organization=organization)


@control(_failed)
async def retry(service: DurableJobService, job_id: UUID, organization: str) -> Any:
    return await service.retry_job(job_id, "eve", "again", organization=organization)


@control(_interrupted)
async def requeue(service: DurableJobService, job_id: UUID, organization: str) -> Any:
    return await service.requeue_job(job_id, "eve", "stuck", organization=organization)


@control(uncertain)
async def resolve(service: DurableJobService, job_id: UUID, organization: str) -> Any:
    return await service.resolve_job(job_id, JobStatus.COMPLETED, {"seen": "it"}, "eve", organization=organization)


@control(uncertain)
async def resolve_as_failed(service: DurableJobService, job_id: UUID, organization: str) -> Any:
    return await service.resolve_job(job_id, JobStatus.FAILED, {"seen": "it"}, "eve", organization=organization)


async def test_no_control_verb_crosses(service: DurableJobService, spec: Specs) -> None:
    """For each verb and both directions: another tenant's job is not found, nothing changes and nothing is audited;
    its own moves, and alone."""
    for name, (make, verb) in CONTROLS.items():
        jobs = await of_each(lambda asked, m=make: m(service, asked), spec)  # type: ignore[misc]
        before = await all_of(service, jobs)
        for organization, job in jobs.items():
            for stranger in (other(organization), "", "initech", organization.upper(), f"{organization}%"):
                with pytest.raises(JobNotFound):
                    await verb(service, job.id, stranger)
        assert await all_of(service, jobs) == before, name
        await verb(service, jobs[GLOBEX].id, GLOBEX)
        after = await all_of(service, jobs)
        assert after[ACME] == before[ACME], name
        assert after[GLOBEX] != before[GLOBEX], name
        (done,) = await audit(service, job_id=jobs[GLOBEX].id)
        assert (done["organization_id"], done["actor"]) == (GLOBEX, "eve"), name


async def test_a_recheck_of_one_tenant_leaves_the_others_alone(service: DurableJobService, spec: Specs) -> None:
    jobs = await of_each(lambda asked: escalated(service, asked), spec)
    before = await snapshot(service, jobs[ACME].id)
    crossed = RecheckFilter(organization=GLOBEX, job_id=jobs[ACME].id)
    assert await service.recheck_job(crossed, "eve", "look again") == []
    mine = RecheckFilter(organization=GLOBEX)
    assert await service.recheck_job(mine, "eve", "look again") == [jobs[GLOBEX].id]
    assert await snapshot(service, jobs[ACME].id) == before


async def test_a_providers_word_reaches_its_tenant_alone(service: DurableJobService, spec: Specs) -> None:
    """One operation key under two tenants: the word is on the job of the tenant that the webhook names."""

    async def doubted(asked: JobSpec) -> Job:
        claim = await claimed(service, asked)
        await service.mark_provider_dispatched(claim, "the same key", consequential=False)
        return await service.mark_indeterminate(claim, ERROR)

    jobs = await of_each(doubted, spec)
    before = await snapshot(service, jobs[ACME].id)
    state: ProviderState[Json] = ProviderState.succeeded({"total": 7})
    with pytest.raises(JobNotFound):
        await service.record_provider_state(
            "the same key", state, {"seen": 1}, "webhook", organization="initech", project="alpha"
        )
    with pytest.raises(JobNotFound):
        await service.record_provider_state(
            "the same key", state, {"seen": 1}, "webhook", organization=GLOBEX, project="beta"
        )
    job = await service.record_provider_state(
        "the same key", state, {"seen": 1}, "webhook", organization=GLOBEX, project="alpha"
    )
    assert (job.id, job.status) == (jobs[GLOBEX].id, JobStatus.COMPLETED)
    assert await snapshot(service, jobs[ACME].id) == before


# ---- claims


async def test_no_claim_crosses(service: DurableJobService, spec: Specs, queue: str) -> None:
    jobs = [await _created(service, spec(organization=name)) for _ in range(3) for name in TENANTS]
    for organizations in ([], ["initech"], [""], ["ACME"], ["%"]):
        assert await service.claim_job(A, uuid4(), organizations=organizations) is None
    taken = []
    while outcome := await service.claim_job(A, uuid4(), organizations=[GLOBEX], queues=[queue]):
        assert outcome.job is not None
        taken.append(outcome.job.id)
    assert taken == [job.id for job in jobs if job.organization_id == GLOBEX]
    for job in jobs:
        if job.organization_id == ACME:
            assert await names(service, job.id) == []
    both = [await service.claim_job(B, uuid4(), organizations=[GLOBEX, ACME]) for _ in range(4)]
    assert [bool(outcome) for outcome in both] == [True, True, True, False]


async def test_no_claim_by_id_crosses(service: DurableJobService, spec: Specs) -> None:
    """Queued, held, or left behind in any state: out of scope, and not so much as fenced."""

    async def flagged(service: DurableJobService, asked: JobSpec) -> Job:
        job = await _interrupted(service, asked)
        await service.cancel_job(job.id, "not wanted", "ann")
        return job

    async def marked(service: DurableJobService, asked: JobSpec) -> Job:
        claim = await dispatched(service, asked)
        await expire(service, claim.job_id)
        return await service.get_job(claim.job_id)

    async def spent(service: DurableJobService, asked: JobSpec) -> Job:
        return await _interrupted(service, asked.model_copy(update={"max_attempts": 1}))

    landed = {marked: JobStatus.INDETERMINATE, flagged: JobStatus.CANCELLED, spent: JobStatus.DEAD_LETTER}
    for make in (_queued, _running, _interrupted, marked, flagged, spent, _failed):
        jobs = await of_each(lambda asked, m=make: m(service, asked), spec)  # type: ignore[misc]
        before = await all_of(service, jobs)
        for job in jobs.values():
            for scope in ([other(job.organization_id)], []):
                outcome = await service.claim_job(B, uuid4(), job_id=job.id, organizations=scope)
                assert outcome is not None
                assert (outcome.refusal, outcome.claim) == (ClaimRefusal.OUT_OF_SCOPE, None)
        assert await service.claim_job(B, uuid4(), organizations=["initech"]) is None
        assert await all_of(service, jobs) == before, make.__name__
        if make in landed:
            await service.claim_job(B, uuid4(), job_id=jobs[GLOBEX].id, organizations=[GLOBEX])
            assert (await service.get_job(jobs[GLOBEX].id)).status is landed[make]
            assert await snapshot(service, jobs[ACME].id) == before[ACME]


async def test_a_repeated_claim_asks_for_the_scope_again(service: DurableJobService, spec: Specs) -> None:
    job = await _created(service, spec())
    token = uuid4()
    assert await service.claim_job(A, token, job_id=job.id, organizations=[ACME])
    outcome = await service.claim_job(A, token, job_id=job.id, organizations=[GLOBEX])
    assert outcome is not None
    assert outcome.refusal is ClaimRefusal.OUT_OF_SCOPE
    assert await service.claim_job(A, token, job_id=job.id, organizations=[ACME])


async def test_a_claim_out_of_scope_tells_nothing_of_the_job(service: DurableJobService, spec: Specs) -> None:
    """The refusal is a read as well: payload, identity and claim token are another tenant's."""
    job = await _created(service, spec(payload={"secret": "acme's"}))
    outcome = await service.claim_job(A, uuid4(), job_id=job.id, organizations=[GLOBEX])
    assert outcome is not None
    assert "acme's" not in outcome.model_dump_json()


# ---- sweeps


async def test_no_sweep_crosses(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Lookups, fencing and due follow-ups of one organization: the other's rows are as they were."""
    unsure = await of_each(lambda asked: uncertain(service, asked), spec)

    async def abandoned(asked: JobSpec) -> Job:
        claim = await dispatched(service, asked)
        await expire(service, claim.job_id)
        return await service.get_job(claim.job_id)

    async def resolved(asked: JobSpec) -> Job:
        job = await uncertain(service, asked)
        return await service.resolve_job(job.id, JobStatus.COMPLETED, {"seen": 1}, "ann", result={"total": 7})

    left = await of_each(abandoned, spec)
    due = await of_each(resolved, spec)
    before = [await snapshot(service, each[ACME].id) for each in (unsure, left, due)]
    handler = Asked(LANDED)
    sweep = await swept(service, queue, handler, organizations=[GLOBEX])
    assert sorted(handler.keys) == sorted(f"key:{each[GLOBEX].id}" for each in (unsure, left))
    assert set(sweep.words) == {each[GLOBEX].id for each in (unsure, left, due)}
    assert [await snapshot(service, each[ACME].id) for each in (unsure, left, due)] == before
    assert [job.id for job in await service.list_follow_ups_due({"organizations": [ACME]})] == [due[ACME].id]
    assert await service.list_follow_ups_due({"organizations": [GLOBEX]}) == []
    nobody = await swept(service, queue, handler, organizations=[])
    assert (nobody.summary.looked_at, nobody.told) == (0, [])
    assert [await snapshot(service, each[ACME].id) for each in (unsure, left, due)] == before


async def test_a_sweep_of_one_tenant_does_not_escalate_anothers(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    """Its hook is that organization's own: it would be called with the other's job."""
    jobs = await of_each(lambda asked: uncertain(service, asked), spec, job_type="unhosted")
    for job in jobs.values():
        await untouched_for(service, job.id, hours=1)
    before = await snapshot(service, jobs[ACME].id)
    sweep = await swept(service, queue, Asked(LANDED), organizations=[GLOBEX], policy=ReconciliationPolicy())
    assert set(sweep.words) == {jobs[GLOBEX].id}
    assert await snapshot(service, jobs[ACME].id) == before


# ---- pauses


async def refused_by_id(service: DurableJobService, job: Job) -> ClaimRefusal | None:
    outcome = await service.claim_job(A, uuid4(), job_id=job.id)
    assert outcome is not None
    if outcome.claim is not None:
        await service.release_job(outcome.claim, "only looking")
    return outcome.refusal


async def test_a_pause_of_one_tenant_stops_its_claims_alone(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    jobs = await of_each(lambda asked: _created(service, asked), spec)
    pause: Json = {"actor": "ann", "reason": "a leak"}

    async def paused() -> tuple[bool, bool]:
        found = [await refused_by_id(service, jobs[name]) is ClaimRefusal.PAUSED for name in TENANTS]
        for name, is_paused in zip(TENANTS, found, strict=True):
            outcome = await service.claim_job(A, uuid4(), organizations=[name], queues=[queue])
            assert bool(outcome) is not is_paused
            if outcome is not None and outcome.claim is not None:
                await service.release_job(outcome.claim, "only looking")
        return found[0], found[1]

    assert await paused() == (False, False)
    assert await service.pause_queue(queue, organization=ACME, **pause)
    assert not await service.pause_queue(queue, organization=ACME, **pause)
    assert await paused() == (True, False)
    # Another's resume, and that of the whole queue, are not this pause's.
    assert not await service.resume_queue(queue, organization=GLOBEX, **pause)
    assert not await service.resume_queue(queue, **pause)
    assert not await service.resume_queue(queue, "probe", organization=ACME, **pause)
    assert await paused() == (True, False)
    assert await service.pause_queue(queue, "probe", organization=GLOBEX, **pause)
    assert await service.pause_queue(queue, "other", organization=ACME, **pause)
    assert await paused() == (True, True)
    assert await service.resume_queue(queue, organization=ACME, **pause)
    assert await paused() == (False, True)
    assert await service.pause_queue(queue, **pause)
    assert await service.resume_queue(queue, "probe", organization=GLOBEX, **pause)
    assert await paused() == (True, True)
    assert await service.resume_queue(queue, **pause)
    assert await paused() == (False, False)
    assert await service.resume_queue(queue, "other", organization=ACME, **pause)
    assert await sql(service, "SELECT * FROM durable_jobs.queue_controls") == []
    done = [
        (event["action"], event["data"]["organization"], event["data"]["changed"]) for event in await audit(service)
    ]
    assert done[:3] == [("pause", ACME, True), ("pause", ACME, False), ("resume", GLOBEX, False)]
    assert len(done) == 12


async def test_a_pause_of_nobody_is_not_everybodys(service: DurableJobService, queue: str) -> None:
    """An empty name is what a broken caller passes: the whole queue would stand still."""
    for verb in (service.pause_queue, service.resume_queue):
        with pytest.raises(InvalidInput):
            await verb(queue, actor="eve", reason="because", organization="")


async def test_the_audit_of_a_pause_is_its_tenants(service: DurableJobService, queue: str) -> None:
    await service.pause_queue(queue, actor="ann", reason="a leak", organization=ACME)
    assert [event["organization_id"] for event in await audit(service)] == [ACME]


# ---- workers


class Hosts(Probe):
    """Keeps whose jobs it ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

        async def script(job: JobContext, request: Json) -> Json:
            self.ran.append(job.organization)
            return {"by": job.organization}

        super().__init__(script)


async def test_a_worker_of_one_tenant_claims_its_jobs_alone(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    """On a shared queue: the other's job is left as it is, no attempt consumed, and done by its own worker."""
    mine, theirs = Hosts(), Hosts()
    async with worker(mine, organizations=[ACME]):
        foreign, own = [await jobs.create_job(spec(organization=name)) for name in (GLOBEX, ACME)]
        assert await own.result(timeout=20) == {"by": ACME}
        history = temporal_client.get_workflow_handle(workflow_id(foreign.id))

        async def came_back() -> bool:
            events = (await history.fetch_history()).events
            return EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED in [event.event_type for event in events]

        await eventually(came_back, "the attempt that hosts nothing")
        job = await foreign.job()
        assert (job.status, job.attempt_count, job.lease_generation) == (JobStatus.QUEUED, 0, 0)
        assert await foreign.events() == []
    async with worker(theirs, organizations=[GLOBEX]):
        await foreign.wake()
        assert await foreign.result(timeout=20) == {"by": GLOBEX}
    assert (mine.ran, theirs.ran) == ([ACME], [GLOBEX])


async def test_a_worker_of_one_tenant_tells_its_hook_of_no_other(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str
) -> None:
    """A job that waits for 15 minutes is escalated by whoever finds it; acme's hook is not to hear of globex's."""
    told: list[str] = []
    created = (await jobs.service.create_job(spec(organization=GLOBEX, payload={"secret": "globex's"}))).job
    execute(
        database_url,
        "UPDATE durable_jobs.jobs SET created_at = created_at - interval '1 hour',"
        " scheduled_at = scheduled_at - interval '1 hour'",
    )
    async with worker(Hosts(), organizations=[ACME], on_escalation=lambda job: told.append(job.organization_id)):
        await jobs.handle(created.id).launch()

        async def stands_before_an_operator() -> bool:
            return (await jobs.service.get_job(created.id)).escalated_at is not None

        await eventually(stands_before_an_operator, "the escalation")
        with suppress(AssertionError):

            async def heard() -> bool:
                return bool(told)

            await eventually(heard, "the hook", timeout=1)
    assert told == []


@workflow.defn
class Peeks:
    """A product's workflow that asks the worker's own activities for what is another tenant's."""

    @workflow.run
    async def run(self, activity: str, asked: str) -> Json:
        try:
            return await workflow.execute_activity(
                activity,
                asked,
                start_to_close_timeout=timedelta(seconds=20),
                retry_policy=RetryPolicy(maximum_attempts=1),
            )
        except ActivityError as error:
            return {"refused": type(error.cause).__name__}


async def test_a_workflow_on_a_tenants_worker_reaches_no_other(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    """It reads no result, and makes no job, of an organization that its worker does not host."""
    claim = await dispatched(jobs.service, spec(organization=GLOBEX))
    await jobs.service.complete_job(claim, {"secret": "globex's"})
    made = spec(organization=GLOBEX, idempotency_key="made").model_dump_json()
    plugin = DurableJobsPlugin(database_url, [Hosts()], organizations=[ACME], grace_seconds=1)
    async with Worker(
        temporal_client,
        task_queue=queue,
        workflows=[Peeks],
        plugins=[plugin],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        answers = [
            await temporal_client.execute_workflow(Peeks.run, args=[*ask], id=uuid4().hex, task_queue=queue)
            for ask in ((READ_RESULT, str(claim.job_id)), (CREATE_JOB, made))
        ]
    with suppress(RPCError):
        await temporal_client.get_schedule_handle(schedule_id(queue)).delete()
    assert "globex's" not in str(answers)
    assert await jobs.service.find_by_idempotency_key(GLOBEX, "alpha", "made") is None


# ---- isolation


@asynccontextmanager
async def hosting(
    database_url: str, client: Client, queue: str, handler: JobHandler[Any, Any], **options: Any
) -> AsyncIterator[Worker]:
    """A worker on this very task queue."""
    plugin = DurableJobsPlugin(database_url, [handler], grace_seconds=1, reconcile_every=NEVER, **options)
    async with Worker(client, task_queue=queue, plugins=[plugin]) as running:
        yield running
    with suppress(RPCError):
        await client.get_schedule_handle(schedule_id(queue)).delete()


async def test_an_isolated_job_runs_on_its_tenants_own_queue(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    """End to end, follow-ups and sweep included; the shared queue's worker, which hosts everybody, has no part."""

    class Followed(Hosts):
        def follow_ups(self, job: Job, result: Any) -> Sequence[FollowUp]:
            first = "first" in job.payload
            return [FollowUp(name="next", job_type="probe", payload={"n": 2})] if first else []

        async def provider_state(self, operation_key: str, job: Job) -> Any:
            return ProviderState.succeeded({"by": "the sweep"})

    shared, acme, globex = Followed(), Followed(), Followed()
    made = {name: spec(organization=name, isolated=True, payload={"first": name}) for name in TENANTS}
    unsure = await uncertain(jobs.service, spec(isolated=True))
    async with hosting(database_url, temporal_client, queue, shared):
        handles = {name: await jobs.create_job(asked) for name, asked in made.items()}
        plain = await jobs.create_job(spec())
        assert await plain.result(timeout=20) == {"by": ACME}
        for name, handle in handles.items():
            job = await handle.job()
            assert (job.queue, job.status, await handle.events()) == (f"{queue}@{name}", JobStatus.QUEUED, [])
        async with (
            hosting(database_url, temporal_client, f"{queue}@{ACME}", acme, organizations=[ACME]),
            hosting(database_url, temporal_client, f"{queue}@{GLOBEX}", globex, organizations=[GLOBEX]),
        ):
            for name, handle in handles.items():
                assert await handle.result(timeout=20) == {"by": name}
                child = await jobs.service.find_by_idempotency_key(name, "alpha", f"{handle.id}:next")
                assert child is not None
                assert child.queue == f"{queue}@{name}"
                await until(jobs.service, child.id, JobStatus.COMPLETED)
            summary = await jobs.sweep(f"{queue}@{ACME}")
            assert summary.resolved == {"completed": 1}
    assert (shared.ran, acme.ran, globex.ran) == ([ACME], [ACME] * 2, [GLOBEX] * 2)
    assert (await jobs.service.get_job(unsure.id)).result == {"by": "the sweep"}
    workers = {each.queue: each.organizations for each in await jobs.service.list_workers()}
    assert workers == {queue: None, f"{queue}@{ACME}": [ACME], f"{queue}@{GLOBEX}": [GLOBEX]}


SERVED: list[tuple[str, list[str] | None, bool]] = [
    ("work@acme", ["acme"], True),
    ("work@acme", None, False),
    ("work@acme", [], False),
    ("work@acme", ["globex"], False),
    ("work@acme", ["acme", "globex"], False),
    ("work@acme", ["acme", "acme"], False),
    ("work@acme", ["Acme"], False),
    ("work", ["acme"], True),
    ("work", None, True),
    ("a/b:c@acme.eu/west", ["acme.eu/west"], True),
    ("a/b:c@acme.eu/west", ["acme.eu"], False),
]


async def test_who_may_serve_an_isolated_queue(temporal_client: Client) -> None:
    """A worker that hosts that organization alone, and says so."""
    for number, (name, organizations, hosted) in enumerate(SERVED):
        task_queue = f"{number}{name}"  # a process has one worker for each queue
        plugin = DurableJobsPlugin("postgresql://127.0.0.1:1/none", [Hosts()], organizations=organizations)
        if hosted:
            assert Worker(temporal_client, task_queue=task_queue, plugins=[plugin]).task_queue == task_queue
            continue
        with pytest.raises(InvalidInput) as refused:
            Worker(temporal_client, task_queue=task_queue, plugins=[plugin])
        assert [problem.field for problem in refused.value.problems] == ["organizations"], (task_queue, organizations)


async def test_nobody_names_an_isolated_queue(service: DurableJobService, spec: Specs, database_url: str) -> None:
    """The queue of an isolated job is the organization's own, whichever door it comes by."""
    names_ = ("work@globex", "@globex", "work@", "@", "work@acme@globex")
    for name in names_:
        with pytest.raises(InvalidJob) as refused:
            spec(queue=name)
        assert [problem.field for problem in refused.value.problems] == ["queue"]
        with pytest.raises(InvalidJob):
            spec(queue=name, isolated=True)
        with pytest.raises(InvalidJob):
            FollowUp(name="next", job_type="probe", payload={"n": 1}, queue=name)
        with pytest.raises(InvalidJob):
            spec(organization=name, isolated=True)
        with pytest.raises(InvalidJob):
            await service.create_job(JobSpec.model_construct(**spec().model_dump() | {"queue": name}))
        with pytest.raises(DurableJobsError, match="DJ004"):
            await sql_enqueue(service, queue=name)
        with pytest.raises(DurableJobsError, match="DJ004"):
            await sql_enqueue(service, organization=name, isolated=True)
    assert (await service.list_jobs()).items == []
    await sql_enqueue(service, queue="work", isolated=True)
    (job,) = (await service.list_jobs()).items
    assert job.queue == "work@acme"
    with pytest.raises(InvalidJob, match="isolated"):
        FollowUp(name="next", job_type="probe", payload={"n": 1}, isolated=False)


async def sql_enqueue(
    service: DurableJobService, *, organization: str = ACME, queue: str = "work", isolated: bool = False
) -> None:
    await sql(
        service,
        "SELECT durable_jobs.enqueue(%(organization)s, 'alpha', 'probe', %(key)s, '{\"n\": 1}', queue => %(queue)s,"
        " isolated => %(isolated)s)",
        organization=organization,
        key=uuid4().hex,
        queue=queue,
        isolated=isolated,
    )


async def test_a_follow_up_stays_where_its_parent_is(service: DurableJobService, spec: Specs, queue: str) -> None:
    """Isolated stays isolated, also on another queue; shared stays shared."""
    for isolated in (True, False):
        claim = await dispatched(service, spec(isolated=isolated))
        asked = [
            FollowUp(name="same", job_type="probe", payload={"n": 1}),
            FollowUp(name="other", job_type="probe", payload={"n": 1}, queue="elsewhere"),
        ]
        completion = await service.complete_job(claim, {"ok": True}, asked)
        suffix = f"@{ACME}" if isolated else ""
        assert [each.job.queue for each in completion.follow_ups] == [f"{queue}{suffix}", f"elsewhere{suffix}"]


def test_no_tenants_queue_is_anothers_queue_of_sweeps(spec: Specs) -> None:
    """`<queue>@acme.reconciliation` is where the sweeps of acme's isolated queue are polled for."""
    with pytest.raises(InvalidJob):
        spec(organization="acme.reconciliation", isolated=True)


async def test_an_isolated_job_is_not_run_from_another_queue(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    """Whoever can start a workflow starts the job's own on the shared queue: its workers are not the tenant's."""
    shared = Hosts()
    job = await _created(jobs.service, spec(isolated=True))
    async with hosting(database_url, temporal_client, queue, shared):
        await temporal_client.start_workflow(
            WORKFLOW_TYPE, job_start(job, indexed=False), id=workflow_id(job.id), task_queue=queue
        )
        with suppress(AssertionError):
            await until(jobs.service, job.id, JobStatus.COMPLETED, timeout=3)
    assert shared.ran == []


async def test_a_job_is_not_run_by_a_handler_of_another_type(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    """A consequential job of nobody, started as if it were of a harmless type: it would dispatch unasked."""
    sent: list[str] = []

    async def send(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            sent.append(key)
            return {}

    class Harmless(Probe):
        job_type = "harmless"

    job = await _created(jobs.service, spec())
    plugin = DurableJobsPlugin(database_url, [ConsequentialProbe(send), Harmless(send)], grace_seconds=1)
    async with Worker(temporal_client, task_queue=queue, plugins=[plugin]):
        start = job_start(job, indexed=False)
        start.job_type = "harmless"
        await temporal_client.start_workflow(WORKFLOW_TYPE, start, id=workflow_id(job.id), task_queue=queue)
        with suppress(AssertionError):
            await until(jobs.service, job.id, JobStatus.COMPLETED, JobStatus.FAILED, timeout=3)
    with suppress(RPCError):
        await temporal_client.get_schedule_handle(schedule_id(queue)).delete()
    assert sent == []


async def test_isolation_is_part_of_the_request(service: DurableJobService, spec: Specs) -> None:
    """The same key, shared and isolated, are two requests; isolated twice is one."""
    job = await _created(service, spec(idempotency_key="one", isolated=True))
    again = await service.create_job(spec(idempotency_key="one", isolated=True))
    assert (again.created, again.job.id) == (False, job.id)
    with pytest.raises(IdempotencyKeyConflict):
        await service.create_job(spec(idempotency_key="one"))
    assert spec(isolated=True, execution=identity()).stored_queue == job.queue
