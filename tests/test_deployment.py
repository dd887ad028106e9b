"""The deployment: its compose file against what the code reads, and its commands as real processes."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml

from activities.settings import AppSettings
from durable_jobs import DurableJobService
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DevStack
from durable_jobs.settings import Settings

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OURS = ("migrate", "api", "tables", "worker")
CLI = [sys.executable, "-c", "from durable_jobs.cli import main; main()"]


def test_every_setting_of_the_compose_file_is_read() -> None:
    known = {*Settings.variables(), *AppSettings.variables(), "TEMPORAL_ADDRESS", "TEMPORAL_NAMESPACE"}
    for name in OURS:
        assert set(COMPOSE["services"][name]["environment"]) <= known


def test_no_password_has_a_default() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for variable in re.findall(r"\$\{(\w*(?:PASSWORD|TOKEN|SECRET)\w*)([^}]*)\}", text):
        assert variable[1].startswith(":?"), variable
    secrets = re.findall(r"^(\w*(?:PASSWORD|TOKEN)\w*)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    assert secrets
    assert all(not value for _, value in secrets)


def test_what_is_published_listens_on_loopback() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("${PUBLISH_ON:-127.0.0.1}:") for port in published)


def test_processes_wait_for_what_they_need_and_may_finish() -> None:
    services = COMPOSE["services"]
    for name in ("api", "worker"):
        assert services[name]["depends_on"]["migrate"]["condition"] == "service_completed_successfully"
    grace = float(services["worker"]["environment"]["DURABLE_JOBS_WORKER_GRACE_SECONDS"])
    assert services["worker"]["stop_grace_period"] == "1m"
    assert grace + 15 <= 60
    assert all("healthcheck" in services[name] for name in ("postgres", "temporal", "api"))


def test_alerts_and_dashboard_name_metrics_that_exist() -> None:
    source = (ROOT / "durable_jobs/http/metrics.py").read_text()
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())
    expressions = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    dashboard = json.loads((ROOT / "deploy/grafana/durable-jobs.json").read_text())
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for metric in {name for expression in expressions for name in re.findall(r"durable_jobs_\w+", expression)}:
        name = metric.removeprefix("durable_jobs_").removesuffix("_total")
        assert (
            f'"{name}"' in source or f'"durable_jobs_{name}"' in source or f'"{name.removeprefix("queue_")}"' in source
        ), metric
    runbook = (ROOT / "docs/operations.md").read_text()
    assert all(f"### {rule['alert']}" in runbook for group in rules["groups"] for rule in group["rules"])


@pytest.fixture
def environment(database_url: str, durable_jobs_stack: DevStack) -> dict[str, str]:
    """What the compose file gives the processes, for this test's servers."""
    given = {
        "DURABLE_JOBS_DATABASE_URL": database_url,
        "TEMPORAL_ADDRESS": durable_jobs_stack.temporal_address,
        "TEMPORAL_NAMESPACE": durable_jobs_stack.namespace,
        "DURABLE_JOBS_METRICS_TOKEN": "metrics-token-of-a-test",
        "DURABLE_JOBS_WORKER_APP": "examples.hello:handlers",
        "DURABLE_JOBS_WORKER_GRACE_SECONDS": "5",
    }
    assert set(COMPOSE["services"]["api"]["environment"]) <= set(given)
    return os.environ | given


async def test_the_commands_of_the_compose_file_run_a_job(
    environment: dict[str, str], service: DurableJobService, queue: str
) -> None:
    """migrate, tables, api and worker by hand, with the file's own words: a job goes in over HTTP and comes out."""
    for name in ("migrate", "tables"):
        assert await asyncio.wait_for((await started(environment, name)).wait(), 60) == 0
    port = free_port()
    environment |= {"DURABLE_JOBS_WORKER_QUEUES": queue, "GOVERNANCE_ISOLATION": "filter"}
    _, secret = await service.create_token("product", TokenRole.SUBMITTER, "acme", projects=["alpha"])
    api = await started(environment, "api", {"8080": str(port)})
    worker = await started(environment, "worker")
    try:
        transport = httpx.AsyncHTTPTransport(retries=10)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=40) as client:
            await until_ready(client)
            headers = {"Authorization": f"Bearer {secret}", "Idempotency-Key": "e-1"}
            payload = {"dataset_id": "support-agent", "policy_id": "production-ai-policy"}
            body = {"type": "evaluation", "payload": payload, "queue": queue}
            submitted = await client.post("/api/v1/jobs", json=body, headers=headers)
            assert submitted.status_code == 201, submitted.text
            job = await client.get(f"/api/v1/jobs/{submitted.json()['job_id']}?wait=30", headers=headers)
            assert (job.json()["status"], job.json()["result"]["correct"]) == ("SUCCEEDED", 49)
            scraped = await client.get("/metrics", headers={"Authorization": "Bearer metrics-token-of-a-test"})
            assert f'durable_jobs_jobs{{job_type="evaluation",queue="{queue}",state="completed"}} 1.0' in scraped.text
    finally:
        for process in (worker, api):
            process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(worker.wait(), 30) == 0
    assert await asyncio.wait_for(api.wait(), 30) in (0, -signal.SIGTERM)


def test_an_operators_day(environment: dict[str, str], database_url: str) -> None:
    """A worker dies, doctor says so, the job is escalated and resolved, another is requeued, a queue is paused and
    resumed, all by command line, all in the audit trail."""

    def said(*arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            [*CLI, *arguments],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def durable_jobs(*arguments: str, code: int = 0) -> Any:
        return json.loads(said(*arguments, "--json", code=code))

    with psycopg.connect(database_url, autocommit=True) as connection:
        dead_end, interrupted, waiting = (
            str(connection.execute(_ENQUEUE, [key]).fetchone()[0])  # type: ignore[index]
            for key in ("sent", "interrupted", "waiting")
        )
        connection.execute(_DEAD_WORKER)
        connection.execute(_CLAIM, {"id": dead_end})
        connection.execute(_DISPATCH, {"id": dead_end})
        connection.execute(_CLAIM, {"id": interrupted})
        findings = {each["check"]: each for each in durable_jobs("doctor", code=7)["findings"]}
        assert findings["workers"]["level"] == "warning"
        assert findings["queue orphans, greet"]["found"] == "no live worker"
        assert [each["health"] for each in durable_jobs("workers")["workers"]] == ["stale"]

        connection.execute(_LAND, {"id": dead_end})
        assert [job["id"] for job in durable_jobs("jobs", "escalated")["jobs"]] == [dead_end]
        for command in (["jobs", "escalated"], ["jobs", "show", dead_end]):
            assert "nobody hosts [/it]" in said(*command)  # as it was written, not as the table's own markup
        who = ("--actor", "ann", "--reason", "the worker died")
        shown = durable_jobs("jobs", "show", dead_end)
        assert shown["next_steps"][0].startswith(f"durable-jobs jobs resolve {dead_end}")
        refused = durable_jobs("jobs", "requeue", dead_end, *who, code=5)
        assert "resolve_job applies" in refused["error"]["message"]
        evidence = ("--actor", "ann", "--evidence", '{"seen": "the provider has it"}', "--result", '{"text": "hi"}')
        assert durable_jobs("jobs", "resolve", dead_end, "completed", *evidence)["state"] == "completed"
        assert durable_jobs("jobs", "requeue", interrupted, *who)["state"] == "queued"
        assert durable_jobs("queues", "pause", "orphans", *who)["changed"]
        assert durable_jobs("queues", "list")["queues"][0]["paused"]
        other = durable_jobs("queues", "resume", "orphans", "--type", "greet", *who)
        assert (other["changed"], [each["job_type"] for each in other["still_paused"]]) == (False, [None])
        paused = {each["check"]: each for each in durable_jobs("doctor", code=7)["findings"]}["queue orphans"]
        assert paused["do"].startswith("durable-jobs queues resume orphans --actor")
        assert durable_jobs("queues", "resume", "orphans", *who)["woken"] == 2
        assert "does not stand" in durable_jobs("jobs", "recheck", waiting, *who, code=5)["error"]["message"]
        assert durable_jobs("jobs", "recheck", "00000000-0000-7000-8000-000000000000", *who, code=4)
        assert durable_jobs("jobs", "cancel", waiting, *who)["reply"] == "cancelled"
        assert durable_jobs("jobs", "show", "00000000-0000-7000-8000-000000000000", code=4)
        audit = connection.execute("SELECT action, actor FROM durable_jobs.control_events ORDER BY id").fetchall()
    assert audit == [(action, "ann") for action in ("resolve", "requeue", "pause", "resume", "resume", "cancel")]


_ENQUEUE = """SELECT durable_jobs.enqueue('acme', 'alpha', 'greet', %s, '{"name": "Ada"}', queue => 'orphans')"""
_DEAD_WORKER = """
INSERT INTO durable_jobs.workers (id, host, pid, version, queue, job_types, running, started_at, heartbeat_at)
VALUES ('gone:1:a', 'gone', 1, '0', 'orphans', '{greet}', 2, now() - interval '1 hour', now() - interval '10 minutes')
"""
_CLAIM = """
WITH job AS (
    UPDATE durable_jobs.jobs SET status = 'claimed', lease_generation = 1, attempt_count = 1, claimed_by = 'gone:1:a',
        lease_id = 'gone:1:a', lease_expires_at = now() - interval '9 minutes', started_at = now()
    WHERE id = %(id)s RETURNING *)
INSERT INTO durable_jobs.job_attempts (job_id, generation, organization_id, project_id, intent_number, worker_id,
    claimed_at)
SELECT id, 1, organization_id, project_id, 0, claimed_by, now() FROM job
"""
_DISPATCH = """
UPDATE durable_jobs.jobs SET status = 'running', dispatched_at = now(), dispatched_generation = 1,
    operation_key = 'greet:1'
WHERE id = %(id)s
"""
_LAND = """
UPDATE durable_jobs.jobs SET status = 'indeterminate', finished_at = now(), lease_expires_at = NULL, lease_id = NULL,
    escalated_at = now(), escalation_reason = 'NO_HANDLER: nobody hosts [/it]' WHERE id = %(id)s
"""


async def started(
    environment: dict[str, str], service: str, replaced: dict[str, str] | None = None
) -> asyncio.subprocess.Process:
    """A service of the compose file, by its own words or by the image's."""
    words = COMPOSE["services"][service]
    entrypoint = [sys.executable, *words["entrypoint"][1:]] if "entrypoint" in words else CLI
    command = [(replaced or {}).get(part, part) for part in words.get("command", ())]
    return await asyncio.create_subprocess_exec(*entrypoint, *command, env=environment, cwd=ROOT)


async def until_ready(client: httpx.AsyncClient) -> None:
    """Both servers answer, as the compose file's health check asks."""
    for _ in range(100):
        try:
            if (await client.get("/readyz")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise AssertionError("the API did not become ready")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
