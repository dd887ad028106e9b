"""What operators, products and providers do over HTTP: each verb wakes the workflow, and leaves who and why."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowFailureError

from durable_jobs import DurableJobs, DurableJobService, JobContext, JobFailed, JobHandle
from durable_jobs.contract.workers import WorkerRecord, WorkerState
from durable_jobs.dev import DevStack
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.http_api import JOBS, calling, fields, problem_of, settings_for
from tests.probes import Probe
from tests.support import ERROR, claimed, expire, sql
from tests.sweeping import audit, escalated, timed_out, uncertain

WHY = {"reason": "the customer asked"}


@pytest_asyncio.fixture
async def client(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a token, for the organization of the fixture `spec`."""
    local = {"local_organization": "acme", "local_project": "alpha"}
    async with calling(settings_for(database_url, durable_jobs_stack, **local)) as client:
        yield client


async def post(client: httpx.AsyncClient, path: str, body: Any = WHY, status: int = 200) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_cancel_by_state(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    queued = (await service.create_job(spec())).job.id
    held = (await claimed(service, spec())).job_id
    over = await claimed(service, spec())
    await service.complete_job(over, {})
    expected = {queued: ("cancelled", "CANCELLED"), held: ("requested", "RUNNING")}
    for job_id, (reply, status) in (expected | {over.job_id: ("already_terminal:completed", "SUCCEEDED")}).items():
        told = await post(client, f"{JOBS}/{job_id}/cancel")
        assert (told["reply"], told["job"]["status"]) == (reply, status)
        (act,) = await audit(service, job_id=job_id)
        assert (act["action"], act["actor"], act["reason"]) == ("cancel", "local", WHY["reason"])
    assert (await service.get_job(held)).cancel_requested_at is not None


async def test_cancel_stops_a_job_that_waits(
    client: httpx.AsyncClient, jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    """The workflow is woken: a job that is not due for a day ends at once, in Temporal as well."""

    async def script(job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("it was cancelled")

    async with worker(Probe(script)), asyncio.timeout(30):
        handle = await jobs.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(days=1)))
        assert (await post(client, f"{JOBS}/{handle.id}/cancel"))["reply"] == "cancelled"
        with pytest.raises(WorkflowFailureError):
            await temporal_client.get_workflow_handle(workflow_id(handle.id)).result()


async def test_retry_runs_again(client: httpx.AsyncClient, jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async def script(job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        if job.intent == 0:
            raise JobFailed("the provider refused", retryable=False)
        return {"intent": job.intent}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        failed = (await client.get(f"{JOBS}/{handle.id}?wait=20")).json()
        assert (failed["status"], failed["error"]["code"]) == ("FAILED", "JOB_FAILED")
        retried = await post(client, f"{JOBS}/{handle.id}/retry")
        assert (retried["intent"], retried["error"]) == (1, None)
        done = (await client.get(f"{JOBS}/{handle.id}?wait=20")).json()
    assert (done["status"], done["result"]) == ("SUCCEEDED", {"intent": 1})


async def test_retry_over_an_operators_word_needs_the_risk_accepted(
    client: httpx.AsyncClient, service: DurableJobService, spec: Specs
) -> None:
    job = await uncertain(service, spec())
    path = f"{JOBS}/{job.id}"
    problem_of(await client.post(f"{path}/retry", json=WHY), 409, "NOT_RETRYABLE")
    await post(client, f"{path}/resolve", {"verdict": "failed", "evidence": {"ticket": "T-1"}})
    problem_of(await client.post(f"{path}/retry", json=WHY), 409, "NOT_RETRYABLE")
    assert (await post(client, f"{path}/retry", WHY | {"accept_duplicate_risk": True}))["status"] == "QUEUED"


async def test_requeue(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    claim = await claimed(service, spec())
    path = f"{JOBS}/{claim.job_id}/requeue"
    problem_of(await client.post(path, json=WHY), 409, "NOT_REQUEUEABLE")
    await expire(service, claim.job_id)
    requeued = await post(client, path)
    assert (requeued["status"], requeued["attempt"]) == ("QUEUED", 0)
    (act,) = await audit(service, action="requeue")
    assert (act["actor"], act["reason"]) == ("local", WHY["reason"])


@pytest.mark.parametrize(("verdict", "status"), [("completed", "SUCCEEDED"), ("failed", "FAILED")])
async def test_resolve(
    client: httpx.AsyncClient, service: DurableJobService, spec: Specs, verdict: str, status: str
) -> None:
    job = await timed_out(service, spec())
    path = f"{JOBS}/{job.id}/resolve"
    result = {"result": {"total": 9007199254740993}} if verdict == "completed" else {}
    resolved = await post(client, path, {"verdict": verdict, "evidence": {"invoice": "R-7"}} | result)
    assert resolved["status"] == status
    assert resolved["result"] == result.get("result")
    assert resolved["reconciliation"] == {"by": "operator", "actor": "local", "evidence": {"invoice": "R-7"}}
    problem_of(await client.post(path, json={"verdict": "failed", "evidence": {"a": 1}}), 409, "NOT_RESOLVABLE")


async def test_recheck(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    here = [await escalated(service, spec()) for _ in range(2)]
    typed = await escalated(service, spec(job_type="other"))
    await escalated(service, spec(organization="other"))
    calm = await uncertain(service, spec())
    assert (await post(client, f"{JOBS}/{here[0].id}/recheck"))["escalated_at"] is None
    problem_of(await client.post(f"{JOBS}/{here[0].id}/recheck", json=WHY), 409, "REFUSED")
    problem_of(await client.post(f"{JOBS}/{calm.id}/recheck", json=WHY), 409, "REFUSED")

    problem = problem_of(await client.post(f"{JOBS}/recheck", json=WHY | {"filter": {}}), 422, "INVALID_INPUT")
    assert fields(problem) == ["filter"]
    sent = await post(client, f"{JOBS}/recheck", WHY | {"filter": {"type": "Other"}})
    assert sent == {"job_ids": [str(typed.id)]}
    assert here[1].escalated_at is not None
    before = {"escalated_before": here[1].escalated_at.isoformat()}
    assert (await post(client, f"{JOBS}/recheck", WHY | {"filter": before}))["job_ids"] == []
    sent = await post(client, f"{JOBS}/recheck", WHY | {"filter": {"project": "alpha"}})
    assert sent == {"job_ids": [str(here[1].id)]}
    assert {act["organization_id"] for act in await audit(service, action="recheck")} == {"acme"}


async def test_bad_control_bodies(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    """Each is refused by field, and changes nothing."""
    job = await escalated(service, spec())
    path = f"{JOBS}/{job.id}"
    good = {"verdict": "failed", "evidence": {"a": 1}}
    cases: list[tuple[str, Any, list[str]]] = [
        (f"{path}/cancel", {}, ["reason"]),
        (f"{path}/cancel", {"reason": ""}, ["reason"]),
        (f"{path}/cancel", {"reason": "  "}, ["reason"]),
        (f"{path}/cancel", {"reason": "a\0b"}, ["reason"]),
        (f"{path}/cancel", {"reason": "x" * 2049}, ["reason"]),
        (f"{path}/cancel", {"reason": ["x"]}, ["reason"]),
        (f"{path}/cancel", WHY | {"actor": "somebody else"}, ["actor"]),
        (f"{path}/retry", WHY | {"accept_duplicate_risk": 1}, ["accept_duplicate_risk"]),
        (f"{path}/resolve", good | {"evidence": {}}, ["evidence"]),
        (f"{path}/resolve", good | {"evidence": []}, ["evidence"]),
        (f"{path}/resolve", good | {"evidence": {"a": {"b": "\0"}}}, ["evidence.a.b"]),
        (f"{path}/resolve", good | {"verdict": "cancelled"}, ["verdict"]),
        (f"{path}/resolve", good | {"verdict": "COMPLETED"}, ["verdict"]),
        (f"{path}/resolve", good | {"result": {"a": 1}}, ["result"]),
        (f"{path}/resolve", good | {"verdict": "completed", "result": {"a": "\0"}}, ["result.a"]),
        (f"{JOBS}/recheck", WHY | {"filter": {"escalated_after": "yesterday"}}, ["filter.escalated_after"]),
        (f"{JOBS}/recheck", WHY | {"filter": {"organization": "other"}}, ["filter.organization"]),
        ("/api/v1/queues/q/pause", {"reason": "x", "type": "a b"}, ["type"]),
        ("/api/v1/queues/a%20b/pause", WHY, ["queue"]),
        ("/api/v1/queues/%00/resume", WHY, ["queue"]),
        ("/api/v1/provider-states", {"operation_key": "a\0", "state": "pending"}, ["operation_key"]),
        ("/api/v1/provider-states", {"operation_key": "k", "state": "perhaps"}, ["state"]),
        ("/api/v1/provider-states", {"operation_key": "k", "state": "failed", "error": "no"}, ["error"]),
        ("/api/v1/provider-states", {"operation_key": "k", "state": "succeeded"}, ["(whole)"]),
        ("/api/v1/provider-states", {"operation_key": "k", "state": "pending", "result": {}}, ["(whole)"]),
        ("/api/v1/provider-states", {"operation_key": "k", "state": "absent", "reason": "gone"}, ["(whole)"]),
        (
            "/api/v1/provider-states",
            {"operation_key": f"key:{job.id}", "state": "succeeded", "result": {"a": "\0"}},
            ["result.a"],
        ),
        (
            "/api/v1/provider-states",
            {"operation_key": f"key:{job.id}", "state": "pending", "evidence": {"a": "\0"}},
            ["evidence.a"],
        ),
    ]
    for target, body, expected in cases:
        problem = problem_of(await client.post(target, json=body), 422, "INVALID_INPUT")
        assert fields(problem) == expected, (target, body)
    nan = await client.post(f"{path}/resolve", content=b'{"verdict": "failed", "evidence": {"a": NaN}}')
    assert fields(problem_of(nan, 422, "INVALID_INPUT")) == ["evidence.a"]
    assert await service.get_job(job.id) == job
    assert await audit(service) == []


PROVIDER_WORDS: list[tuple[dict[str, Any], str, bool]] = [
    ({"state": "succeeded", "result": {"total": 7}}, "completed", False),
    ({"state": "succeeded", "result": {}}, "completed", False),
    ({"state": "failed", "error": {"code": "DECLINED", "message": "card declined"}}, "failed", False),
    ({"state": "pending"}, "indeterminate", False),
    ({"state": "absent"}, "indeterminate", True),
    ({"state": "absent", "send_deadline": "2001-01-01T00:00:00Z"}, "indeterminate", True),
    (
        {"state": "absent", "send_deadline": "2001-01-01T00:00:00Z", "asked_at": "2001-01-02T00:00:00Z"},
        "failed",
        False,
    ),
    ({"state": "unknown", "reason": "not kept so long"}, "indeterminate", True),
]


async def test_a_providers_word(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    for word, state, before_an_operator in PROVIDER_WORDS:
        job = await uncertain(service, spec())
        body = {"operation_key": f"key:{job.id}", "evidence": {"webhook": 17}} | word
        told = await post(client, "/api/v1/provider-states", body)
        assert (told["state"], told["escalated_at"] is not None) == (state, before_an_operator), word
        assert told["result"] == (word.get("result", {}) if state == "completed" else None)
        if state != "indeterminate":
            assert told["reconciliation"]["source"] == "local"
            assert told["reconciliation"]["evidence"] == {"webhook": 17}
            again = await client.post("/api/v1/provider-states", json=body)
            problem_of(again, 409, "NOT_RESOLVABLE")
    nobody = {"operation_key": "nobody's", "state": "pending"}
    problem_of(await client.post("/api/v1/provider-states", json=nobody), 404, "JOB_NOT_FOUND")
    elsewhere = {"operation_key": f"key:{job.id}", "state": "pending", "project": "beta"}
    problem_of(await client.post("/api/v1/provider-states", json=elsewhere), 404, "JOB_NOT_FOUND")


async def test_pause_and_resume(
    client: httpx.AsyncClient, jobs: DurableJobs, worker: Workers, spec: Specs, queue: str
) -> None:
    """Only this organization's jobs stop; they run as soon as the queue is resumed."""
    path = f"/api/v1/queues/{queue}"

    async def script(job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        return {}

    paused = {"queue": queue, "type": None, "paused": True, "woken": 0}
    assert await post(client, f"{path}/pause") == paused | {"changed": True}
    assert await post(client, f"{path}/pause") == paused | {"changed": False}
    async with worker(Probe(script)):
        mine = await jobs.create_job(spec())
        theirs = await jobs.create_job(spec(organization="other"))
        await theirs.result(timeout=20)
        (overview,) = (await client.get("/api/v1/queues")).json()["items"]
        assert (overview["queue"], overview["queued"], overview["paused"]) == (queue, 1, True)
        assert overview["live_workers"] == 1
        resumed = await post(client, f"{path}/resume")
        assert (resumed["changed"], resumed["woken"], resumed["paused"]) == (True, 1, False)
        assert (await client.get(f"{JOBS}/{mine.id}?wait=20")).json()["status"] == "SUCCEEDED"
    assert (await client.get("/api/v1/queues")).json() == {"items": []}
    acts = await audit(jobs.service)
    assert [(act["action"], act["actor"], act["data"]["organization"]) for act in acts] == [
        ("pause", "local", "acme"),
        ("pause", "local", "acme"),
        ("resume", "local", "acme"),
    ]


async def test_a_type_on_an_odd_queue_is_paused(
    client: httpx.AsyncClient, service: DurableJobService, spec: Specs
) -> None:
    """The name of a queue may hold slashes and colons, an isolated one an at sign."""
    for name, made in (("a/b:c", spec(queue="a/b:c")), ("slow@acme", spec(queue="slow", isolated=True))):
        await service.create_job(made)
        switched = await post(client, f"/api/v1/queues/{name}/pause", WHY | {"type": "PROBE"})
        assert (switched["queue"], switched["type"], switched["changed"]) == (name, "probe", True)
    overview = (await client.get("/api/v1/queues")).json()["items"]
    assert {(each["queue"], each["type"], each["paused"]) for each in overview} == {
        ("a/b:c", "probe", True),
        ("slow@acme", "probe", True),
    }


async def test_workers_by_state(client: httpx.AsyncClient, service: DurableJobService, spec: Specs, queue: str) -> None:
    about: dict[str, Any] = {"host": "h", "pid": 1, "version": "1", "queue": queue, "job_types": ["probe"]}
    for name, organizations in {"w1": None, "w2": ["acme"], "w3": None, "w4": ["other"]}.items():
        await service.register_worker(name, **about, organizations=organizations)
    await sql(
        service,
        "UPDATE durable_jobs.workers SET heartbeat_at = heartbeat_at - interval '61 seconds' WHERE id = 'w2'",
    )
    await service.stop_worker("w3")
    await service.create_job(spec())
    await service.create_job(spec(queue="nobodys"))
    await service.create_job(spec(job_type="unheard-of"))
    await service.create_job(spec(organization="other", queue="not-ours"))
    told = (await client.get("/api/v1/workers")).json()
    states = {worker["worker_id"]: worker["state"] for worker in told["items"]}
    assert states == {"w1": "healthy", "w2": "stale", "w3": "stopped"}  # w4 serves another organization alone
    assert told["never_started"] == [
        {"queue": "nobodys", "type": "probe", "queued": 1},
        {"queue": queue, "type": "unheard-of", "queued": 1},
    ]


def test_a_worker_is_stale_beyond_the_limit_only() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    record = WorkerRecord(
        id="w",
        host="h",
        pid=1,
        version="1",
        queue="q",
        job_types=[],
        organizations=None,
        running=0,
        slots=None,
        keeper_lag_seconds=0,
        started_at=now,
        heartbeat_at=now - timedelta(seconds=30),
        stopped_at=None,
        now=now,
    )
    assert record.state(30) is WorkerState.HEALTHY
    assert record.state(29.9) is WorkerState.STALE


async def test_every_change_wakes_its_workflow(
    client: httpx.AsyncClient,
    service: DurableJobService,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each wakes that of the job it changed, and no other; a resume, those of the organization's due jobs."""
    woken: list[UUID] = []

    async def wake(handle: JobHandle) -> bool:
        woken.append(handle.id)
        return True

    monkeypatch.setattr(JobHandle, "wake", wake)
    queued = (await service.create_job(spec())).job
    failed, interrupted = await claimed(service, spec()), await claimed(service, spec())
    await service.fail_job(failed, ERROR, retryable=False)
    await expire(service, interrupted.job_id)
    asked = await uncertain(service, spec())
    late, hopeless = await timed_out(service, spec()), await escalated(service, spec())
    word = {"operation_key": f"key:{asked.id}", "state": "succeeded", "result": {}}
    verdict = {"verdict": "failed", "evidence": {"a": 1}}
    for job_id, path, body in (
        (queued.id, f"{JOBS}/{queued.id}/cancel", WHY),
        (failed.job_id, f"{JOBS}/{failed.job_id}/retry", WHY),
        (interrupted.job_id, f"{JOBS}/{interrupted.job_id}/requeue", WHY),
        (late.id, f"{JOBS}/{late.id}/resolve", verdict),
        (hopeless.id, f"{JOBS}/{hopeless.id}/recheck", WHY),
        (asked.id, "/api/v1/provider-states", word),
    ):
        woken.clear()
        await post(client, path, body)
        assert woken == [job_id], path

    claim = await claimed(service, spec())
    await service.renew_lease(claim)
    await service.complete_job(claim, {}, follow_up_problem="FOLLOW_UPS_FAILED: it raised")
    woken.clear()
    await post(client, f"{JOBS}/{claim.job_id}/recheck", WHY)
    assert woken == []  # its workflow has closed: to wake it would open another

    due = [failed.job_id, interrupted.job_id, (await service.create_job(spec())).job.id]
    await service.create_job(spec(organization="other"))
    await service.create_job(spec(scheduled_at=datetime.now(UTC) + timedelta(days=1)))
    woken.clear()
    assert (await post(client, f"/api/v1/queues/{queue}/resume"))["woken"] == 3
    assert sorted(woken) == sorted(due)


async def test_what_the_row_does_not_allow_is_a_conflict(
    client: httpx.AsyncClient, service: DurableJobService, spec: Specs
) -> None:
    """On a queued job: nothing to retry, requeue, resolve or check again; and no such job at all."""
    job = (await service.create_job(spec())).job
    refusals = {
        "retry": (WHY, "NOT_RETRYABLE"),
        "requeue": (WHY, "NOT_REQUEUEABLE"),
        "resolve": ({"verdict": "failed", "evidence": {"a": 1}}, "NOT_RESOLVABLE"),
        "recheck": (WHY, "REFUSED"),
    }
    for verb, (body, code) in refusals.items():
        problem_of(await client.post(f"{JOBS}/{job.id}/{verb}", json=body), 409, code)
        problem_of(await client.post(f"{JOBS}/{uuid4()}/{verb}", json=body), 404, "JOB_NOT_FOUND")
    assert await service.get_job(job.id) == job
