"""Lineage through chains: whose work a follow-up is, on every path to completed, and what a forged parent passes on."""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from temporalio import workflow
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from durable_jobs import (
    DurableJobs,
    DurableJobService,
    DurableJobsPlugin,
    EventName,
    ExecutionIdentity,
    FollowUp,
    Job,
    JobContext,
    JobSpec,
    JobStatus,
    ProviderState,
)
from durable_jobs.contract.admission import validate_execution_identity_for_dispatch
from durable_jobs.contract.envelope import read_execution_identity, read_governance
from durable_jobs.contract.models import Claim
from durable_jobs.workflow import run_job
from tests.conftest import Specs, Workers
from tests.governing import (
    LINEAGE,
    TRACE,
    admissions,
    approval_of,
    dispatch,
    governance,
    governed,
    granted,
    identity,
    resealed,
    store_payload,
)
from tests.probes import ConsequentialProbe, Probe, Provider, eventually, until
from tests.support import all_jobs, claimed, dispatched, reclaimed, sql
from tests.sweeping import LANDED, Parent, Report, follow_up, swept, uncertain

Json = dict[str, Any]

WHOSE = {name: LINEAGE[name] for name in ("tenant", "actor", "trace")}


def inherited(parent: Job, child: Job, **overrides: Any) -> Json:
    """The identity that `child` must have, in full."""
    lineage: Json = dict.fromkeys(LINEAGE) | WHOSE | {"parent_job": str(parent.id)}
    row = {"organization": "acme", "project": "alpha", "job": str(child.id), "version": 1, "governance": None}
    return lineage | row | overrides


def identity_of(job: Job) -> Json:
    found = read_execution_identity(job)
    assert found is not None
    assert validate_execution_identity_for_dispatch(job) == []
    return found.model_dump()


async def children(service: DurableJobService, parent: UUID) -> dict[str, Job]:
    """The follow-ups of the job, by name."""
    found = [job for job in await all_jobs(service) if job.idempotency_key.startswith(f"{parent}:")]
    return {job.idempotency_key.removeprefix(f"{parent}:"): job for job in found}


# ---- through a worker


class Chain(ConsequentialProbe):
    """Sends, keeps the identity that it was given, and is followed by the next of its kind, down to zero."""

    def __init__(self) -> None:
        self.identities: dict[UUID, ExecutionIdentity | None] = {}
        super().__init__(self._send)

    async def _send(self, job: JobContext, request: Json) -> Json:
        self.identities[job.id] = job.identity
        async with job.dispatch(f"send:{job.id}"):
            return {"left": request["left"]}

    def follow_ups(self, job: Job, result: Any) -> Sequence[FollowUp]:
        left = result["left"] - 1
        return [FollowUp(name="next", job_type="probe", payload={"left": left}, task=f"task-{left}")] if left else []


async def test_a_chain_carries_whose_work_it_is(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Three jobs, each with its parent's name: tenant, actor, trace and run stay, and each dispatches under them."""
    handler = Chain()
    first = spec(payload={"left": 3}, execution=identity(**LINEAGE | {"action_intent": None, "approval": None}))
    async with worker(handler):
        handle = await jobs.create_job(first)
        chain = [await until(jobs.service, handle.id, JobStatus.COMPLETED)]
        for _ in range(2):
            (child,) = (await children(jobs.service, chain[-1].id)).values()
            chain.append(await until(jobs.service, child.id, JobStatus.COMPLETED))
    assert await children(jobs.service, chain[-1].id) == {}
    parent, child, grandchild = chain
    assert identity_of(child) == inherited(parent, child, task="task-2", run="run-1", parent_run="run-1")
    assert identity_of(grandchild) == inherited(child, grandchild, task="task-1", run="run-1", parent_run="run-1")
    given = {job_id: found and found.model_dump() for job_id, found in handler.identities.items()}
    assert given == {job.id: identity_of(job) for job in chain}
    for job in chain:
        assert await admissions(jobs.service, job.id) == [{"allowed": True, "approval": None}]
        assert job.operation_key == f"send:{job.id}"


async def test_a_job_of_nobody_has_followers_of_nobody(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """No identity is made up on the way; the handler is told that there is none, and a consequential one stops."""
    seen: list[ExecutionIdentity | None] = []

    async def script(job: JobContext, request: Json) -> Json:
        seen.append(job.identity)
        return {"left": request["left"]}

    class Harmless(Probe):
        follow_ups = Chain.follow_ups

    async with worker(Harmless(script)):
        handle = await jobs.create_job(spec(payload={"left": 2}))
        await handle.result(timeout=20)
        (child,) = (await children(jobs.service, handle.id)).values()
        child = await until(jobs.service, child.id, JobStatus.COMPLETED)
    assert seen == [None, None]
    assert child.payload == {"left": 1}


async def test_what_a_follow_up_says_of_its_task(service: DurableJobService, spec: Specs) -> None:
    """Its own task, or the parent's; and the parent's intent, admission and approval are not its own."""
    claim = await dispatched(service, spec(execution=identity(**LINEAGE | {"approval": None})))
    asked = [follow_up("plain"), FollowUp(name="own", job_type="probe", payload={"n": 1}, task="task-9")]
    completion = await service.complete_job(claim, {"ok": True}, asked)
    plain, own = (created.job for created in completion.follow_ups)
    parent = completion.job
    runs = {"run": "run-1", "parent_run": "run-1"}
    assert identity_of(plain) == inherited(parent, plain, task="task-1", **runs)
    assert identity_of(own) == inherited(parent, own, task="task-9", **runs)
    assert {each.organization_id for each in (plain, own)} == {"acme"}


# ---- through the sweep, an operator and a webhook


async def by_lookup(service: DurableJobService, job: Job, queue: str, handler: Parent) -> None:
    sweep = await swept(service, queue, handler)
    assert sweep.summary.resolved == {"completed": 1}


async def by_operator(service: DurableJobService, job: Job, queue: str, handler: Parent) -> None:
    await service.resolve_job(job.id, JobStatus.COMPLETED, {"seen": "it"}, "ann", result={"total": 7})
    sweep = await swept(service, queue, handler)
    assert sweep.summary.follow_ups == 1


async def by_webhook(service: DurableJobService, job: Job, queue: str, handler: Parent) -> None:
    assert job.operation_key is not None
    state: ProviderState[Json] = ProviderState.succeeded({"total": 7})
    await service.record_provider_state(
        job.operation_key, state, {"seen": "it"}, "webhook", organization="acme", project="alpha"
    )
    sweep = await swept(service, queue, handler)
    assert sweep.summary.follow_ups == 1


@pytest.mark.parametrize("path", [by_lookup, by_operator, by_webhook])
async def test_every_path_to_completed_carries_it(
    service: DurableJobService, spec: Specs, queue: str, path: Callable[..., Any]
) -> None:
    job = await uncertain(service, spec(execution=identity(run="run-1")))
    await path(service, job, queue, Parent(LANDED, "next"))
    (child,) = (await children(service, job.id)).values()
    assert identity_of(child) == inherited(job, child, run="run-1", parent_run="run-1")
    assert child.payload["of"] == "next"
    assert (await service.get_job(job.id)).escalated_at is None


# ---- governed follow-ups


async def test_a_governed_follow_up_is_dispatched_under_its_own_approval(
    service: DurableJobService, spec: Specs
) -> None:
    await granted(service)
    await granted(service, "grant-2")
    claim = await claimed(service, governed(spec()))
    await dispatch(service, claim)
    asked = FollowUp(name="next", job_type="probe", payload={"n": 1}, governance=governance(approval="grant-2"))
    completion = await service.complete_job(claim, {"ok": True}, [asked])
    (child,) = (created.job for created in completion.follow_ups)
    facts = read_governance(child)
    assert facts is not None
    assert (facts.approval, facts.job) == ("grant-2", str(child.id))
    await dispatch(service, await reclaimed(service, child.id))
    assert (await approval_of(service)).consumed_by == claim.job_id
    assert (await approval_of(service, "grant-2")).consumed_by == child.id


def ungoverned(name: str) -> FollowUp:
    """Facts for a job that is nobody's work."""
    return FollowUp(name=name, job_type="probe", payload={"n": 1}, governance=governance())


async def test_a_governed_follow_up_of_nobody_undoes_no_completion(service: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(service, spec())
    completion = await service.complete_job(claim, {"ok": True}, [ungoverned("next")])
    assert (completion.job.status, completion.follow_ups) == (JobStatus.COMPLETED, [])
    assert completion.job.escalation_reason is not None
    assert "governance goes with execution" in completion.job.escalation_reason


class Ungoverned(Parent):
    """Its follow-ups are governed, whoever's work they are."""

    def follow_ups(self, job: Job, result: Report) -> Sequence[FollowUp]:
        return [ungoverned(name) for name in self.names]


async def test_a_governed_follow_up_of_nobody_stops_no_sweep(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    """The oldest job's follow-ups can't be made; the other's are, at this sweep and not never."""
    poison, fine = await uncertain(service, spec()), await uncertain(service, spec(execution=identity()))
    for job in (poison, fine):
        await service.resolve_job(job.id, JobStatus.COMPLETED, {"seen": "it"}, "ann", result={"total": 7})
    sweep = await swept(service, queue, Ungoverned(LANDED, "next"))
    assert sweep.summary.follow_ups == 1
    assert (await service.get_job(poison.id)).escalated_at is not None
    assert len(await children(service, fine.id)) == 1


async def test_a_governed_follow_up_of_nobody_loses_no_result(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Through a worker: the provider has answered, and the answer is kept."""

    class Sends(Probe):
        def follow_ups(self, job: Job, result: Any) -> Sequence[FollowUp]:
            return [ungoverned("next")]

    provider = Provider()

    async def script(job: JobContext, request: Json) -> Json:
        async with job.dispatch(f"send:{job.id}") as key:
            return await provider.call(key)

    async with worker(Sends(script)):
        handle = await jobs.create_job(spec(lease_seconds=1))
        job = await until(jobs.service, handle.id, *(s for s in JobStatus if s.is_terminal))
    assert (job.status, job.result) == (JobStatus.COMPLETED, {"sent": f"send:{job.id}"})


# ---- a tampered parent


async def finished(service: DurableJobService, claim: Claim) -> tuple[Job, list[Job]]:
    """The parent and its children after its completion, which must stand whatever becomes of the children."""
    completion = await service.complete_job(claim, {"ok": True}, [follow_up("next")])
    assert completion.job.status is JobStatus.COMPLETED
    assert (await service.get_job(claim.job_id)).status is JobStatus.COMPLETED
    return completion.job, [created.job for created in completion.follow_ups]


async def test_a_tampered_parent_passes_no_identity_on(service: DurableJobService, spec: Specs) -> None:
    """Each field in turn, changed, removed or added: no child, and an operator is told which field."""
    fields = ("version", *LINEAGE, "organization", "project", "job", "governance")
    for name in (*fields, "extra", "seals"):
        for value in ("globex", None, 2):
            claim = await dispatched(service, spec(execution=identity(**LINEAGE | {"approval": None})))
            job = await service.get_job(claim.job_id)
            stored = job.payload["execution"]
            if value is None and stored.get(name) is None:
                continue
            await store_payload(service, job.id, job.payload | {"execution": stored | {name: value}})
            parent, born = await finished(service, claim)
            assert born == [], (name, value)
            assert parent.escalation_reason is not None
            assert parent.escalation_reason.startswith(f"FOLLOW_UPS_FAILED: execution.{name}: "), (name, value)
    for whole in (None, [], "x"):
        claim = await dispatched(service, spec(execution=identity()))
        job = await service.get_job(claim.job_id)
        await store_payload(service, job.id, job.payload | {"execution": whole})
        parent, born = await finished(service, claim)
        assert (born, parent.escalation_reason) == ([], "FOLLOW_UPS_FAILED: execution: is not an object")


async def test_a_parent_that_disagrees_with_its_row_passes_no_identity_on(
    service: DurableJobService, spec: Specs
) -> None:
    """The row was moved to another organization: its child would carry acme's actor there, with clean seals."""
    found = {}
    for column, value in (("organization_id", "globex"), ("project_id", "beta")):
        claim = await dispatched(service, spec(execution=identity()))
        await sql(
            service,
            f"UPDATE durable_jobs.jobs SET {column} = %(value)s WHERE id = %(id)s",
            value=value,
            id=claim.job_id,
        )
        _, born = await finished(service, claim)
        found[column] = [(child.organization_id, child.project_id, identity_of(child)["tenant"]) for child in born]
    assert found == {"organization_id": [], "project_id": []}


async def test_a_forged_parent_is_not_washed_clean(service: DurableJobService, spec: Specs) -> None:
    """What the parent's own dispatch would be refused for, its child would be admitted with."""
    claim = await dispatched(service, spec(execution=identity()))
    job = await service.get_job(claim.job_id)
    forged = resealed(job.id, job.payload["execution"] | {"tenant": "globex", "actor": "eve"})
    await store_payload(service, job.id, job.payload | {"execution": forged})
    _, born = await finished(service, claim)
    for child in born:
        await dispatch(service, await reclaimed(service, child.id))
    assert [identity_of(child)["tenant"] for child in born] == []


async def identity_in_handler(jobs: DurableJobs, worker: Workers, job: Job) -> list[ExecutionIdentity | None]:
    """What a harmless handler is told of whose work the job is."""
    seen: list[ExecutionIdentity | None] = []

    async def script(context: JobContext, request: Json) -> Json:
        seen.append(context.identity)
        return {}

    async with worker(Probe(script)):
        await jobs.handle(job.id).launch()
        await until(jobs.service, job.id, JobStatus.COMPLETED)
    return seen


async def test_a_handler_is_told_of_no_malformed_identity(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    job = (await jobs.service.create_job(spec(execution=identity()))).job
    forged = job.payload["execution"] | {"tenant": "globex"}
    await store_payload(jobs.service, job.id, job.payload | {"execution": forged})
    assert await identity_in_handler(jobs, worker, job) == [None]


async def test_a_handler_is_told_of_no_identity_that_disagrees_with_the_row(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    job = (await jobs.service.create_job(spec(execution=identity()))).job
    await sql(jobs.service, "UPDATE durable_jobs.jobs SET project_id = 'beta'")
    assert await identity_in_handler(jobs, worker, job) == [None]


# ---- from a product's own workflow


@workflow.defn
class Product:
    @workflow.run
    async def run(self, spec: Json) -> Json:
        return await run_job(JobSpec.model_validate(spec))


async def test_run_job_fills_in_the_workflows_run(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    """Tenant, actor and trace as typed; the run is the workflow's unless one was typed; of nobody stays of nobody."""
    seen: dict[str, ExecutionIdentity | None] = {}

    async def script(job: JobContext, request: Json) -> Json:
        seen[request["what"]] = job.identity
        return request

    specs = {
        "a run of its own": spec(payload={"what": "a run of its own"}, execution=identity(run="mine", task="task-1")),
        "the workflow's": spec(payload={"what": "the workflow's"}, execution=identity()),
        "nobody": spec(payload={"what": "nobody"}),
    }
    plugin = DurableJobsPlugin(database_url, [Probe(script)], grace_seconds=1)
    runs = {}
    async with Worker(
        temporal_client,
        task_queue=queue,
        workflows=[Product],
        plugins=[plugin],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        for what, asked in specs.items():
            # As JSON: what enters a history is no Python object.
            given = asked.model_dump(mode="json", exclude={"scheduled_at"})
            handle = await temporal_client.start_workflow(Product.run, given, id=uuid4().hex, task_queue=queue)
            assert await handle.result() == {"what": what}
            runs[what] = handle.result_run_id
    rows = {job.payload["what"]: job for job in await all_jobs(jobs.service)}
    assert identity_of(rows["the workflow's"]) == inherited(
        rows["the workflow's"], rows["the workflow's"], run=runs["the workflow's"], parent_job=None
    )
    typed = identity_of(rows["a run of its own"])
    assert (typed["run"], typed["task"], typed["trace"]) == ("mine", "task-1", TRACE)
    assert "execution" not in rows["nobody"].payload
    assert {what: found and found.run for what, found in seen.items()} == {
        "a run of its own": "mine",
        "the workflow's": runs["the workflow's"],
        "nobody": None,
    }
    assert seen["nobody"] is None
    assert {job.status for job in rows.values()} == {JobStatus.COMPLETED}


async def test_a_follow_up_of_a_refused_job_does_not_exist(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """A chain ends where its admission does."""
    handler = Chain()
    async with worker(handler):
        handle = await jobs.create_job(spec(payload={"left": 3}))
        await until(jobs.service, handle.id, JobStatus.FAILED)

        async def closed() -> bool:
            return EventName.FAILED in [event.name for event in await handle.events()]

        await eventually(closed, "the refusal")
    assert await children(jobs.service, handle.id) == {}
    assert [job.id for job in (await jobs.service.list_jobs()).items] == [handle.id]
