"""`execution` and `governance` in a raw payload: refused at every door, with nothing written; elsewhere left alone."""

import json
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
import pytest_asyncio
from psycopg.types.json import Jsonb
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from temporalio import workflow
from temporalio.client import Client
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from durable_jobs import (
    DurableJobs,
    DurableJobService,
    DurableJobsPlugin,
    FollowUp,
    Job,
    JobContext,
    JobSpec,
    JobStatus,
)
from durable_jobs.contract.errors import InvalidBatch, InvalidJob, ReservedPayloadKey
from durable_jobs.store.migrate import driver_url
from durable_jobs.temporal import messages
from durable_jobs.workflow import run_job
from tests.conftest import Specs, Workers
from tests.governing import governance, governed, identity, resealed
from tests.probes import Probe
from tests.support import all_jobs, connection, dispatched

Json = dict[str, Any]

RESERVED: dict[str, tuple[Json, list[str]]] = {
    "execution": ({"n": 1, "execution": {"tenant": "globex"}}, ["payload.execution"]),
    "governance": ({"n": 1, "governance": {"approval": "mine"}}, ["payload.governance"]),
    "both": ({"execution": {}, "governance": {}}, ["payload.execution", "payload.governance"]),
    "null": ({"execution": None}, ["payload.execution"]),
    "empty text": ({"governance": ""}, ["payload.governance"]),
    "false": ({"execution": False, "n": 1}, ["payload.execution"]),
    "a whole envelope": (
        {"execution": resealed(uuid4(), {"version": 1, "tenant": "t", "actor": "a", "trace": "x"})},
        ["payload.execution"],
    ),
}

FREE: list[Json] = [
    {"work": {"execution": {"tenant": "globex"}, "governance": None}},
    {"list": [{"execution": 1}, "execution"]},
    {"Execution": 1, "GOVERNANCE": 2, "execution ": 3, " governance": 4, "executions": 5},
    {"tenant": "globex", "actor": "eve", "trace": "x", "seals": {}, "version": 2, "identity": {"tenant": "globex"}},
]
"""What only looks like an envelope is the product's own."""


@pytest_asyncio.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """A product's own engine."""
    engine = create_async_engine(driver_url(database_url))
    yield engine
    await engine.dispose()


async def payloads(service: DurableJobService) -> list[Json]:
    """Every job's payload, in the order of creation."""
    return [job.payload for job in await all_jobs(service)]


def in_order(payloads: Sequence[Json]) -> list[Json]:
    return sorted(payloads, key=lambda payload: json.dumps(payload, sort_keys=True))


def reserved_in(error: BaseException) -> list[str]:
    assert isinstance(error, ReservedPayloadKey)
    assert (error.code, error.http_status, error.retryable) == ("RESERVED_PAYLOAD_KEY", 422, False)
    return [problem.field for problem in error.problems]


@pytest.mark.parametrize("case", RESERVED)
def test_a_spec_with_a_reserved_key_is_not_made(spec: Specs, case: str) -> None:
    payload, fields = RESERVED[case]
    with pytest.raises(ReservedPayloadKey) as refused:
        spec(payload=payload)
    assert reserved_in(refused.value) == fields
    with pytest.raises(ReservedPayloadKey) as refused:
        spec(payload=payload, execution=identity(), governance=governance())
    assert reserved_in(refused.value) == fields
    with pytest.raises(ReservedPayloadKey) as refused:
        JobSpec.model_validate_json(json.dumps(spec().model_dump(mode="json") | {"payload": payload}))
    assert reserved_in(refused.value) == fields
    with pytest.raises(ReservedPayloadKey) as refused:
        FollowUp(name="next", job_type="probe", payload=payload)
    assert reserved_in(refused.value) == fields


def test_a_model_that_dumps_to_a_reserved_key_is_no_way_in(spec: Specs) -> None:
    class Work(BaseModel):
        execution: dict[str, str] = {"tenant": "globex"}

    class Extra(BaseModel, extra="allow"):
        n: int = 1

    with pytest.raises(ReservedPayloadKey):
        spec(payload=Work())
    with pytest.raises(ReservedPayloadKey):
        spec(payload=Extra(governance={"approval": "mine"}))
    with pytest.raises(ReservedPayloadKey):
        FollowUp(name="next", job_type="probe", payload=Work())
    assert spec(payload=Extra(n=2)).payload == {"n": 2}


async def test_every_python_door_refuses_a_payload_that_was_changed_since(
    jobs: DurableJobs, spec: Specs, engine: AsyncEngine
) -> None:
    """A spec is checked when it is made; the service takes no word for it."""
    service = jobs.service
    for payload, fields in RESERVED.values():

        def late(payload: Json = payload) -> JobSpec:
            made = spec(payload={"n": 1}, execution=identity())
            made.payload.clear()
            made.payload.update(payload)
            return made

        unchecked = JobSpec.model_construct(**spec().model_dump() | {"payload": payload})
        for bad in (late(), unchecked):
            with pytest.raises(ReservedPayloadKey) as refused:
                await service.create_job(bad)
            assert reserved_in(refused.value) == fields
            with pytest.raises(ReservedPayloadKey) as refused:
                await jobs.create_job(bad)
            assert reserved_in(refused.value) == fields
            async with engine.begin() as own:
                with pytest.raises(ReservedPayloadKey) as refused:
                    await service.create_job(bad, connection=own)
                assert reserved_in(refused.value) == fields
        raw = spec().model_dump() | {"payload": payload}
        for create in (service.create_jobs, jobs.create_jobs):
            with pytest.raises(InvalidBatch) as batch:
                await create([spec(), late(), raw, spec(), unchecked])
            assert {index: reserved_in(error) for index, error in batch.value.errors.items()} == {
                1: fields,
                2: fields,
                4: fields,
            }
    assert await payloads(service) == []


async def test_what_only_looks_like_an_envelope_is_stored_as_it_came(service: DurableJobService, spec: Specs) -> None:
    for payload in FREE:
        await service.create_job(spec(payload=payload))
    await service.create_jobs([spec(payload=payload) for payload in FREE])
    assert in_order(await payloads(service)) == in_order(FREE + FREE)


async def test_a_handler_sees_the_work_and_not_the_envelopes(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    seen: dict[UUID, Json] = {}

    async def script(job: JobContext, request: Json) -> Json:
        seen[job.id] = request
        return {}

    async with worker(Probe(script)):
        governing = {"execution": identity(), "governance": governance(approval=None)}
        handles = await jobs.create_jobs([spec(payload=payload, **governing) for payload in FREE])
        for handle in handles:
            await handle.result(timeout=20)
    assert [seen[handle.id] for handle in handles] == FREE
    assert {"execution", "governance"} < (await handles[0].job()).payload.keys()


# ---- follow-ups


class Copies(Probe):
    """Names a follow-up that takes its parent's whole payload along, as one does without thinking."""

    def __init__(self) -> None:
        async def script(job: JobContext, request: Json) -> Json:
            return {"of": str(job.id)}

        super().__init__(script)

    def follow_ups(self, job: Job, result: Any) -> Sequence[FollowUp]:
        return [FollowUp(name="copy", job_type="probe", payload=job.payload)]


async def test_a_follow_up_that_copies_its_parents_envelopes_is_refused(
    jobs: DurableJobs, worker: Workers, spec: Specs
) -> None:
    """The completion stands, nothing is created, and an operator is told why."""
    async with worker(Copies()):
        handle = await jobs.create_job(spec(execution=identity()))
        assert await handle.result(timeout=20) == {"of": str(handle.id)}
    job = await handle.job()
    assert job.status is JobStatus.COMPLETED
    assert job.escalation_reason is not None
    assert job.escalation_reason.startswith("FOLLOW_UPS_FAILED: ReservedPayloadKey: payload.execution: is reserved")
    assert len(await payloads(jobs.service)) == 1


async def test_a_follow_up_that_was_changed_since_is_refused(service: DurableJobService, spec: Specs) -> None:
    for payload, fields in RESERVED.values():
        claim = await dispatched(service, spec(execution=identity()))
        follow_up = FollowUp(name="next", job_type="probe", payload={"n": 1})
        follow_up.payload.update(payload)
        completion = await service.complete_job(claim, {"ok": True}, [follow_up])
        assert (completion.job.status, completion.follow_ups) == (JobStatus.COMPLETED, [])
        refused = "; ".join(f"{field}: is reserved: only typed inputs write it" for field in fields)
        assert completion.job.escalation_reason == f"FOLLOW_UPS_FAILED: {refused}"
    assert len(await payloads(service)) == len(RESERVED)


# ---- a product's own workflow


@workflow.defn
class Smuggles:
    """Changes the payload between the check of the spec and the call, or goes to the activity past all checks."""

    @workflow.run
    async def run(self, how: str, spec: Json) -> Json:
        try:
            if how == "run_job":
                made = JobSpec.model_validate(spec | {"payload": {"n": 1}})
                made.payload.update(spec["payload"])
                return await run_job(made)
            return await workflow.execute_activity(
                messages.CREATE_JOB, json.dumps(spec), start_to_close_timeout=timedelta(seconds=20)
            )
        except (ActivityError, ApplicationError) as error:
            cause = error.cause if isinstance(error, ActivityError) else error
            if not isinstance(cause, ApplicationError):
                raise
            return {"type": cause.type, "non_retryable": cause.non_retryable, "said": cause.message}


REFUSED_IN_A_WORKFLOW = {
    "type": "RESERVED_PAYLOAD_KEY",
    "non_retryable": True,
    "said": "payload.governance: is reserved: only typed inputs write it",
}


async def test_a_workflow_is_refused(
    jobs: DurableJobs, spec: Specs, database_url: str, temporal_client: Client, queue: str
) -> None:
    plugin = DurableJobsPlugin(database_url, [Copies()], grace_seconds=1)
    async with Worker(
        temporal_client,
        task_queue=queue,
        workflows=[Smuggles],
        plugins=[plugin],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        given = spec(execution=identity()).model_dump(mode="json") | {"payload": {"governance": {"approval": "mine"}}}
        for how in ("run_job", "activity"):
            said = await temporal_client.execute_workflow(
                Smuggles.run, args=[how, given], id=uuid4().hex, task_queue=queue
            )
            assert said == REFUSED_IN_A_WORKFLOW
    assert await payloads(jobs.service) == []


# ---- SQL

INSERT = """
INSERT INTO durable_jobs.jobs (
    id, organization_id, project_id, queue, job_type, payload, idempotency_key, request_digest, status, priority,
    intent_number, attempt_count, max_attempts, backoff_base_seconds, lease_seconds, timeout_seconds,
    lease_generation, scheduled_at, created_at, updated_at, lookup_tries, follow_ups_due, release_count)
SELECT %(id)s, 'acme', 'alpha', 'default', 'probe', %(payload)s, %(id)s::text, repeat('a', 64), 'queued', 0,
    0, 0, 3, 30, 60, 3600, 0, now(), now(), now(), 0, false, 0
"""


async def insert(own: psycopg.AsyncConnection[Json], payload: Any, job_id: UUID | None = None) -> None:
    await own.execute(INSERT, {"id": job_id or uuid4(), "payload": Jsonb(payload)})


async def refused_insert(own: psycopg.AsyncConnection[Json], payload: Any, job_id: UUID | None = None) -> str:
    """The key that the database names, in refusing the row."""
    with pytest.raises(psycopg.DatabaseError) as refused:
        await insert(own, payload, job_id)
    assert refused.value.sqlstate == "DJ003"
    message = str(refused.value.diag.message_primary)
    assert message.endswith("is reserved: only typed inputs write it")
    return message.split(" ", maxsplit=1)[0].removeprefix("payload.")


async def test_a_row_with_a_raw_reserved_key_is_not_inserted(service: DurableJobService, database_url: str) -> None:
    async with connection(database_url) as own:
        for role in ("origin", "replica"):  # replica passes over ordinary triggers
            await own.execute(f"SET session_replication_role = {role}")
            for raw in (None, True, 0, 7, "", "x", [], ["execution"], {}, {"tenant": "globex"}, {"seals": {}}):
                assert await refused_insert(own, {"n": 1, "execution": raw}) == "execution"
                assert await refused_insert(own, {"n": 1, "governance": raw}) == "governance"
                assert await refused_insert(own, {"execution": raw, "governance": raw}) == "execution"
        await own.execute("SET session_replication_role = origin")
        for payload in FREE:
            await insert(own, payload)
    assert in_order(await payloads(service)) == in_order(FREE)


async def test_an_envelope_of_another_row_is_not_inserted(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """Each thing that binds an envelope to its row, in turn, is another row's."""
    original = (await service.create_job(governed(spec()))).job
    other = uuid4()
    execution, facts = original.payload["execution"], original.payload["governance"]
    own_execution = resealed(other, execution | {"job": str(other)})
    own_facts = resealed(other, facts | {"job": str(other)})
    cases = {
        "copied whole": (original.payload, "execution"),
        "the job's": ({"execution": execution}, "execution"),
        "sealed anew": ({"execution": resealed(other, execution)}, "execution"),
        "of an organization": ({"execution": own_execution | {"organization": "globex"}}, "execution"),
        "of no organization": ({"execution": own_execution | {"organization": None}}, "execution"),
        "of a project": ({"execution": own_execution | {"project": "beta"}}, "execution"),
        "without seals": ({"execution": own_execution | {"seals": None}}, "execution"),
        "with a list of seals": ({"execution": own_execution | {"seals": []}}, "execution"),
        "facts alone": ({"governance": own_facts}, "governance"),
        "facts of the other": ({"execution": own_execution, "governance": facts}, "governance"),
        "facts without seals": ({"execution": own_execution, "governance": own_facts | {"seals": "x"}}, "governance"),
        "facts without a digest": (
            {"execution": own_execution, "governance": own_facts | {"digest": None}},
            "governance",
        ),
        "facts that are a list": ({"execution": own_execution, "governance": [own_facts]}, "governance"),
    }
    async with connection(database_url) as own:
        found = {what: await refused_insert(own, payload, other) for what, (payload, _) in cases.items()}
        assert found == {what: key for what, (_, key) in cases.items()}
        await insert(own, {"n": 1, "execution": own_execution, "governance": own_facts}, other)
    assert len(await payloads(service)) == 2


async def test_no_other_way_to_insert_is_open(service: DurableJobService, spec: Specs, database_url: str) -> None:
    """COPY, INSERT … SELECT of an honest row, and several rows of which one is bad."""
    job = (await service.create_job(spec(execution=identity()))).job
    columns = [name for name in Job.model_fields if name != "id"]
    listed = ", ".join(columns)
    copy = f"SELECT gen_random_uuid(), {listed.replace('idempotency_key', 'gen_random_uuid()::text')}"
    async with connection(database_url) as own:
        for statement in (
            f"INSERT INTO durable_jobs.jobs (id, {listed}) {copy} FROM durable_jobs.jobs",
            f"INSERT INTO durable_jobs.jobs (id, {listed}) {copy.replace(' payload', plain())} FROM durable_jobs.jobs"
            f" UNION ALL {copy} FROM durable_jobs.jobs",
        ):
            with pytest.raises(psycopg.DatabaseError) as refused:
                await own.execute(statement)
            assert refused.value.sqlstate == "DJ003"
        await own.execute("CREATE TEMP TABLE dump (line text)")
        async with own.cursor() as cursor:
            async with cursor.copy(f"COPY (SELECT {listed} FROM durable_jobs.jobs) TO STDOUT") as out:
                lines = b"".join([bytes(part) async for part in out])
            lines = lines.replace(job.idempotency_key.encode(), b"another")
            with pytest.raises(psycopg.DatabaseError) as refused:
                async with cursor.copy(f"COPY durable_jobs.jobs (id, {listed}) FROM STDIN") as into:
                    await into.write(str(uuid4()).encode() + b"\t" + lines)
        assert refused.value.sqlstate == "DJ003"
    assert len(await payloads(service)) == 1


def plain() -> str:
    return " '{\"n\": 1}'::jsonb"


async def test_a_reserved_key_is_not_written_later(service: DurableJobService, spec: Specs, database_url: str) -> None:
    job = (await service.create_job(spec())).job
    given = {"id": job.id, "payload": Jsonb({"n": 1}), "raw": Jsonb({"n": 1, "execution": {"tenant": "globex"}})}
    async with connection(database_url) as own:
        for statement in (
            "UPDATE durable_jobs.jobs SET payload = %(raw)s WHERE id = %(id)s",
            f"{INSERT} ON CONFLICT (id) DO UPDATE SET payload = %(raw)s",
        ):
            with pytest.raises(psycopg.DatabaseError) as refused:
                await own.execute(statement, given)
            assert str(refused.value.sqlstate).startswith("DJ")
    assert await payloads(service) == [{"n": 1}]


async def test_the_door_for_sql_refuses_them(service: DurableJobService, database_url: str) -> None:
    enqueue = "SELECT durable_jobs.enqueue('acme', 'alpha', 'probe', %s, %s, tenant => 't', actor => 'a', trace => 'x')"
    async with connection(database_url) as own:
        for payload, _ in RESERVED.values():
            with pytest.raises(psycopg.DatabaseError) as refused:
                await own.execute(enqueue, [uuid4().hex, Jsonb(payload)])
            assert refused.value.sqlstate == "DJ004"
            assert str(refused.value.diag.message_primary).startswith("payload: execution and governance are reserved")
        for payload in FREE:
            await own.execute(enqueue, [uuid4().hex, Jsonb(payload)])
    stored = await payloads(service)
    work = [{name: value for name, value in each.items() if name != "execution"} for each in stored]
    assert in_order(work) == in_order(FREE)
    assert {each["execution"]["tenant"] for each in stored} == {"t"}


def test_another_defect_of_the_payload_is_told_apart(spec: Specs) -> None:
    for payload in ({}, {"a": float("nan")}):
        with pytest.raises(InvalidJob) as refused:
            spec(payload=payload)
        assert type(refused.value) is InvalidJob
