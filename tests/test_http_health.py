"""Health, readiness, metrics; the API while one of its servers is away; and a worker beside it, in a real process."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from temporalio.client import Client
from temporalio.service import RPCError

from durable_jobs import DurableJobs, DurableJobService, ExecutionInput, JobContext, JobHandler
from durable_jobs._processes import free_port
from durable_jobs.contract.errors import SchemaMissing, StoreUnavailable
from durable_jobs.contract.states import JobStatus
from durable_jobs.dev import DATABASE_URL_VARIABLE, TEMPORAL_ADDRESS_VARIABLE, DevStack
from durable_jobs.hosting import run_worker
from durable_jobs.http import app, metrics
from durable_jobs.settings import InvalidSettings
from durable_jobs.store import operations
from durable_jobs.temporal.schedule import schedule_id
from tests.conftest import Specs
from tests.http_api import JOBS, SUBMISSION, calling, problem_of, settings_for, submit, token
from tests.probes import eventually, outage
from tests.support import claimed, end_in, running, sql
from tests.sweeping import aged, escalated, uncertain

REPOSITORY = Path(__file__).parent.parent


class Evaluation(JobHandler[dict[str, Any], dict[str, Any]]):
    """What the worker beside the API runs: see `handlers`."""

    job_type = "evaluation"

    async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        async with job.dispatch(f"evaluation:{job.id}") as key:
            return {"key": key, "dataset": request["dataset_id"]}


def handlers() -> list[JobHandler[Any, Any]]:
    return [Evaluation()]


async def forget_schedule(client: Client, queue: str) -> None:
    with suppress(RPCError):
        await client.get_schedule_handle(schedule_id(queue)).delete()


async def test_ready(database_url: str, durable_jobs_stack: DevStack) -> None:
    async with calling(settings_for(database_url, durable_jobs_stack)) as client:
        alive, ready = await client.get("/healthz"), await client.get("/readyz")
        assert (alive.status_code, alive.json()) == (200, {"status": "ok"})
        assert (ready.status_code, ready.json()) == (200, {"postgres": "ok", "temporal": "ok", "worker": None})


@pytest.mark.parametrize("tokens", ["off", "required"])
async def test_while_postgres_is_away(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService, tokens: str
) -> None:
    """Each route says so, as a failure that may be repeated; a stream ends; afterwards all goes on by itself."""
    secret = await token(service, projects=["alpha"])
    settings = settings_for(database_url, durable_jobs_stack, http_tokens=tokens)
    async with calling(settings, secret) as client, asyncio.timeout(60):
        job = await submit(client, "before")
        path = f"{JOBS}/{job['job_id']}"
        async with client.stream("GET", f"{path}/events", headers={"Accept": "text/event-stream"}) as following:
            lines = following.aiter_lines()
            assert await anext(lines) == "retry: 2000"
            with outage(durable_jobs_stack.database_url, database_url):
                assert [line async for line in lines] == [""]
                away = await client.get("/readyz")
                assert (away.status_code, away.json()["postgres"], away.json()["temporal"]) == (503, "away", "ok")
                assert (await client.get("/healthz")).status_code == 200
                key = {"Idempotency-Key": "during"}
                for answer in (
                    await client.get(JOBS),
                    await client.get(path),
                    await client.get(f"{path}/events"),
                    await client.post(JOBS, json=SUBMISSION, headers=key),
                    await client.post(f"{path}/cancel", json={"reason": "x"}),
                ):
                    problem = problem_of(answer, 503, "STORE_UNAVAILABLE")
                    assert problem["retryable"]
                    assert answer.headers["retry-after"] == "1"
                    assert not any(told in answer.text for told in ("127.0.0.1", 'database "', "FATAL"))
                problem_of(await client.get("/metrics"), 503, "STORE_UNAVAILABLE")
        assert (await client.get("/readyz")).status_code == 200
        assert (await client.post(JOBS, json=SUBMISSION, headers=key)).status_code == 201
        assert (await client.get(path)).json()["status"] == "QUEUED"


async def test_while_temporal_is_away(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> None:
    """Jobs are accepted, read, waited for and cancelled: the table is the authority."""
    nowhere = {"target_host": f"127.0.0.1:{free_port()}"}
    settings = settings_for(database_url, durable_jobs_stack, temporal=nowhere)
    async with calling(settings) as client, asyncio.timeout(60):
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["postgres"], ready.json()["temporal"]) == (503, "ok", "away")
        job = await submit(client, "k")
        path = f"{JOBS}/{job['job_id']}"
        assert (await client.get(f"{path}?wait=0.5")).json()["status"] == "QUEUED"
        cancelled = await client.post(f"{path}/cancel", json={"reason": "not wanted"})
        assert cancelled.json()["reply"] == "cancelled"
        assert (await client.get(f"{path}?wait=20")).json()["status"] == "CANCELLED"


async def test_not_migrated(database_url: str, durable_jobs_stack: DevStack) -> None:
    async with calling(settings_for(database_url, durable_jobs_stack, database_schema="elsewhere")) as client:
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["postgres"]) == (503, "away")


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Each sample's value, by its name and the values of its labels, in the order of their names."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {
        (
            sample.name.removeprefix("durable_jobs_"),
            *(sample.labels[name] for name in sorted(sample.labels)),
        ): sample.value
        for family in families
        for sample in family.samples
    }


async def test_metrics(
    database_url: str,
    durable_jobs_stack: DevStack,
    service: DurableJobService,
    spec: Specs,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the tables hold, of every organization; labels that Prometheus would trip over are escaped."""
    monkeypatch.setattr(metrics, "FRESH_SECONDS", 0)
    for organization in ("acme", "other"):
        await service.create_job(spec(organization=organization))
    await claimed(service, spec())
    await running(service, spec())
    await escalated(service, spec())
    old = await uncertain(service, spec())
    await aged(service, old.id, minutes=10)
    about: dict[str, Any] = {"host": "h", "pid": 1, "version": "1", "organizations": None}
    for name in ("w1", "w2", "w3"):
        await service.register_worker(name, queue=queue, job_types=["probe"], **about)
    await sql(service, "UPDATE durable_jobs.workers SET running = 3 WHERE id <> 'w3'")
    await service.stop_worker("w3")
    await service.pause_queue(queue, actor="ann", reason="why")
    odd = 'line\nbreak "quoted" \\'
    await sql(service, "UPDATE durable_jobs.workers SET queue = %(odd)s WHERE id = 'w2'", odd=odd)
    async with calling(settings_for(database_url, durable_jobs_stack)) as client:
        answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = samples(answer.text)
        open_metrics = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert open_metrics.text.endswith("# EOF\n")
    here = ("probe", queue)
    states = {JobStatus.QUEUED: 2, JobStatus.CLAIMED: 1, JobStatus.RUNNING: 1, JobStatus.INDETERMINATE: 2}
    assert {key: value for key, value in found.items() if key[0] == "jobs"} == {
        ("jobs", *here, state): number for state, number in states.items()
    }
    assert found["queue_due", *here] == 2
    assert 0 <= found["queue_oldest_due_seconds", *here] < 60
    assert found["queue_paused", *here] == 1
    assert found["queue_live_workers", *here] == 1
    assert 600 <= found["oldest_unresolved_seconds", *here] < 660
    assert 0 <= found["oldest_escalated_seconds", *here] < 60
    assert found["escalated", *here] == 1
    assert found["events_5m", "claimed"] == 4
    assert found["events_5m", "indeterminate"] == 1  # the other is of ten minutes ago
    assert found["workers", queue, "healthy"] == found["workers", queue, "stopped"] == found["workers", odd, "healthy"]
    assert (found["attempts_in_hand", queue], found["attempts_in_hand", odd]) == (3, 3)


async def test_scrapes_in_quick_succession_share_one_count(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = 0
    count = DurableJobService.metrics

    async def metrics(self: DurableJobService) -> Any:
        nonlocal counted
        counted += 1
        return await count(self)

    monkeypatch.setattr(DurableJobService, "metrics", metrics)
    async with calling(settings_for(database_url, durable_jobs_stack)) as client:
        answers = await asyncio.gather(*[client.get("/metrics") for _ in range(10)])
    assert {answer.status_code for answer in answers} == {200}
    assert counted == 1


async def test_a_long_count_of_settled_jobs_holds_up_no_scrape(
    database_url: str,
    durable_jobs_stack: DevStack,
    service: DurableJobService,
    spec: Specs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last count is given meanwhile; and one that took long is not soon made again."""
    monkeypatch.setattr(metrics, "FRESH_SECONDS", 0)
    monkeypatch.setattr(metrics, "SETTLED_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(metrics, "SETTLED_SHARE", 1e-6)
    await service.create_job(spec())
    await end_in(service, await claimed(service, spec()), JobStatus.COMPLETED)
    count, begun, go_on = DurableJobService.count_settled_jobs, 0, asyncio.Event()

    async def slowly(self: DurableJobService) -> Any:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return await count(self)

    monkeypatch.setattr(DurableJobService, "count_settled_jobs", slowly)
    async with calling(settings_for(database_url, durable_jobs_stack)) as client:

        async def jobs() -> dict[str, float]:
            found = samples((await client.get("/metrics")).text)
            return {key[-1]: value for key, value in found.items() if key[0] == "jobs"}

        assert await jobs() == await jobs() == {"queued": 1}
        go_on.set()

        async def counted() -> bool:
            return await jobs() == {"queued": 1, "completed": 1}

        await eventually(counted, "the count")
        assert await counted()
    assert begun == 1


async def test_what_is_open_is_counted_by_its_indexes(service: DurableJobService, spec: Specs) -> None:
    """However many jobs have settled."""
    await service.create_jobs([spec() for _ in range(3000)])
    cancelled = "UPDATE durable_jobs.jobs SET status = 'cancelled', finished_at = now(), launch_check_at = NULL"
    await sql(service, cancelled)
    await service.create_job(spec())
    await sql(service, "ANALYZE durable_jobs.jobs")
    for statement in (operations.QUEUES, operations.OPEN_COUNTS, operations.AGES):
        explain = f"EXPLAIN (FORMAT JSON) {statement.replace('{s}', 'durable_jobs')}"
        (row,) = await sql(service, explain, organization="", stale_seconds=60)
        scans = list(nodes(row["QUERY PLAN"][0]["Plan"]))
        assert ("Seq Scan", "jobs") not in {(node["Node Type"], node.get("Relation Name")) for node in scans}
        used = {node["Index Name"] for node in scans if node.get("Index Name", "").startswith("jobs_")}
        assert used <= {"jobs_claim", "jobs_active", "jobs_unresolved", "jobs_escalated"}
    await sql(service, "DELETE FROM durable_jobs.jobs")  # their trails are empty


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The node of a plan, and those below it."""
    yield plan
    for each in plan.get("Plans", ()):
        yield from nodes(each)


async def test_a_worker_beside_the_api(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService, queue: str, temporal_client: Client
) -> None:
    """`python -m durable_jobs.http` with DURABLE_JOBS_RUN_WORKER: what it is sent runs in it; SIGTERM ends both."""
    port = free_port()
    environment = os.environ | {
        DATABASE_URL_VARIABLE: database_url,
        TEMPORAL_ADDRESS_VARIABLE: durable_jobs_stack.temporal_address,
        "DURABLE_JOBS_HTTP_TOKENS": "off",
        "DURABLE_JOBS_HTTP_PORT": str(port),
        "DURABLE_JOBS_RUN_WORKER": "true",
        "DURABLE_JOBS_WORKER_APP": "tests.test_http_health:handlers",
        "DURABLE_JOBS_WORKER_GRACE_SECONDS": "2",
        "DURABLE_JOBS_TYPE_QUEUES": f"evaluation={queue}",
        "DURABLE_JOBS_WORKER_QUEUES": queue,
    }
    command = (sys.executable, "-m", "durable_jobs.http")
    process = await asyncio.create_subprocess_exec(*command, env=environment, cwd=REPOSITORY)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            async def ready() -> Any:
                assert process.returncode is None
                with suppress(httpx.TransportError):
                    answer = await client.get("/readyz")
                    return answer.status_code == 200 and answer.json()
                return None

            parts = await eventually(ready, "the API and its worker are ready", timeout=40)
            assert parts == {"postgres": "ok", "temporal": "ok", "worker": "ok"}
            job = await submit(client, "submit-execution-2048")
            done = (await client.get(f"{JOBS}/{job['job_id']}?wait=30")).json()
            assert (done["status"], done["queue"]) == ("SUCCEEDED", queue)
            assert done["result"] == {"key": f"evaluation:{done['job_id']}", "dataset": "support-agent"}
            (worker,) = (await client.get("/api/v1/workers")).json()["items"]
            assert (worker["state"], worker["pid"], worker["types"]) == ("healthy", process.pid, ["evaluation"])
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(40):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await forget_schedule(temporal_client, queue)
    (record,) = await service.list_workers()
    assert record.stopped_at is not None


async def test_a_worker_beside_the_api_outlives_an_outage(
    database_url: str,
    durable_jobs_stack: DevStack,
    service: DurableJobService,
    queue: str,
    temporal_client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Postgres away at its start it is tried again and again; the API says meanwhile that it is not ready."""
    monkeypatch.setattr(app, "_WORKER_PAUSE_SECONDS", 0.2)
    settings = settings_for(
        database_url,
        durable_jobs_stack,
        run_worker=True,
        worker_app="tests.test_http_health:handlers",
        default_queue=queue,
        worker_grace_seconds=1,
    )
    async with AsyncExitStack() as stack:
        with outage(durable_jobs_stack.database_url, database_url):
            client = await stack.enter_async_context(calling(settings))
            away = await client.get("/readyz")
            assert (away.status_code, away.json()) == (503, {"postgres": "away", "temporal": "ok", "worker": "away"})

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await eventually(ready, "the worker polls", timeout=30)
        job = await submit(client, "k")
        assert (await client.get(f"{JOBS}/{job['job_id']}?wait=20")).json()["status"] == "SUCCEEDED"
    await forget_schedule(temporal_client, queue)


async def test_a_worker_that_can_not_start_says_why(
    database_url: str, durable_jobs_stack: DevStack, temporal_client: Client, queue: str
) -> None:
    about = {"worker_app": "tests.test_http_health:handlers", "default_queue": queue, "worker_grace_seconds": 1}

    async def run(**overrides: Any) -> None:
        async with asyncio.timeout(30):
            await run_worker(settings_for(database_url, durable_jobs_stack, **about | overrides), asyncio.Event())

    with pytest.raises(SchemaMissing):
        await run(database_schema="elsewhere")
    with outage(durable_jobs_stack.database_url, database_url), pytest.raises(StoreUnavailable):
        await run()
    with pytest.raises(RuntimeError):
        await run(temporal={"target_host": f"127.0.0.1:{free_port()}"})
    with pytest.raises(InvalidSettings):
        await run(worker_app="tests.test_http_health:nothing")


async def test_a_worker_hosts_all_its_queues_until_it_is_told_to_stop(
    database_url: str, durable_jobs_stack: DevStack, jobs: DurableJobs, spec: Specs, queue: str, temporal_client: Client
) -> None:
    queues = [queue, f"{queue}@acme"]
    settings = settings_for(
        database_url,
        durable_jobs_stack,
        worker_app="tests.test_http_health:handlers",
        worker_queues=queues,
        worker_organizations=["acme"],
        worker_grace_seconds=1,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(run_worker(settings, stop))
    asked = {"job_type": "evaluation", "payload": SUBMISSION["payload"]}
    identity = ExecutionInput(tenant="acme", actor="ann", trace="t")
    handles = [await jobs.create_job(spec(**asked, isolated=each, execution=identity)) for each in (False, True)]
    for handle in handles:
        assert await handle.result(timeout=30) == {"key": f"evaluation:{handle.id}", "dataset": "support-agent"}
    assert sorted(worker.queue for worker in await jobs.service.list_workers()) == queues
    stop.set()
    async with asyncio.timeout(30):
        await running
    assert all(worker.stopped_at is not None for worker in await jobs.service.list_workers())
    for each in queues:
        await forget_schedule(temporal_client, each)
