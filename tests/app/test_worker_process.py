"""`python worker.py` as a deployment runs it, and every job type submitted over HTTP, run to its end and read back."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from temporalio.client import Client
from temporalio.service import RPCError

import activities
import workflows
from activities.datasets import load_dataset
from durable_jobs import DurableJobService
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DevStack
from durable_jobs.temporal.schedule import schedule_id
from tests.app.providers import Model
from tests.app.test_replays import DATASET, PRODUCTION, rows
from tests.http_api import JOBS, SUBMISSION, calling, served, settings_for, token
from tests.isolation import STRONGEST

ROOT = Path(__file__).parents[2]


@asynccontextmanager
async def worker_process(environment: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "worker.py", env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_every_job_type_over_http(
    product_url: str, durable_jobs_stack: DevStack, temporal_client: Client, service: DurableJobService, queue: str
) -> None:
    model = Model()
    settings = settings_for(
        product_url, durable_jobs_stack, http_tokens="required", default_queue=queue, worker_queues=[queue]
    )
    secret = await token(service, TokenRole.OPERATOR, projects=["alpha"])
    async with served(model.app) as url, calling(settings, secret) as client:
        environment = os.environ | {
            "DURABLE_JOBS_DATABASE_URL": product_url,
            "DURABLE_JOBS_WORKER_QUEUES": queue,
            "DURABLE_JOBS_RECONCILE_SECONDS": "1",
            "TEMPORAL_ADDRESS": durable_jobs_stack.temporal_address,
            "TEMPORAL_NAMESPACE": temporal_client.namespace,
            "GOVERNANCE_PROVIDER_URL": f"{url}/v1",
            "GOVERNANCE_ISOLATION": STRONGEST,
        }
        async with worker_process(environment) as process:

            async def run(key: str, job_type: str, **payload: Any) -> dict[str, Any]:
                body = {"type": job_type, "payload": payload}
                made = await client.post(JOBS, json=body, headers={"Idempotency-Key": key})
                assert made.status_code == 201, made.text
                again = await client.post(JOBS, json=body, headers={"Idempotency-Key": key})
                assert (again.status_code, again.json()["job_id"]) == (200, made.json()["job_id"])
                return await settled(made.json()["job_id"])

            async def settled(job_id: str) -> dict[str, Any]:
                for _ in range(4):
                    job: dict[str, Any] = (await client.get(f"{JOBS}/{job_id}?wait=30")).json()
                    if job["status"] not in ("QUEUED", "RUNNING"):
                        break
                assert job["status"] == "SUCCEEDED", job
                return job

            evaluation = await run("submit-execution-2048", SUBMISSION["type"], **SUBMISSION["payload"])
            assert evaluation["result"]["cases"] == len(load_dataset(DATASET).cases)
            (execution,) = rows(product_url, "SELECT id FROM governance.executions WHERE case_id = 'sa-007'")
            experiment = await run(
                "e", "experiment", dataset_id=DATASET, policy_ids=[PRODUCTION, "candidate-ai-policy"]
            )
            assert len(experiment["result"]["comparisons"]) == 1
            replay = await run("r", "replay_execution", execution_id=str(execution["id"]))
            follow_up = await found(client, f"{replay['job_id']}:evaluation")
            assert (await settled(follow_up))["result"]["drift"] == "none"
            again = await run("re", "replay_evaluation", replay_id=replay["job_id"])
            assert again["result"]["drift"] == "none"
            audit = await run("a", "causal_audit", execution_id=str(execution["id"]), samples=1)
            assert audit["result"]["status"] == "FROZEN"
            judged = await settled(await found(client, f"{audit['job_id']}:final"))
            assert judged["result"]["classification"] == "joint_causes"
            research = await run("q", "research", question="Why is the sky blue?")
            assert research["result"]["text"] == "It depends."
            made = await client.post(
                JOBS,
                json={"type": "deep_research", "payload": {"question": "Why?"}},
                headers={"Idempotency-Key": "d"},
            )
            await batched(model)
            assert (await settled(made.json()["job_id"]))["result"]["text"] == "It rose."

            process.send_signal(signal.SIGTERM)
            out, err = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0, err.decode()
            assert out.decode() == f"hosting {queue}\n"
    with suppress(RPCError):
        await temporal_client.get_schedule_handle(schedule_id(queue)).delete()


async def found(client: httpx.AsyncClient, key: str) -> str:
    """The id of the job under an idempotency key, once it is there."""
    async with asyncio.timeout(60):
        while True:
            page = (await client.get(JOBS, params={"limit": 100})).json()
            for job in page["items"]:
                if job["idempotency_key"] == key:
                    return str(job["job_id"])
            await asyncio.sleep(0.1)


async def batched(model: Model) -> None:
    """Let the batch that is waited for come to its end."""
    async with asyncio.timeout(60):
        while not model.batches:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    (batch,) = model.batches
    body = model.store(None, "It rose.")
    line = {"custom_id": "request-1", "response": {"status_code": 200, "body": body}, "error": None}
    batch |= {"status": "completed", "output_file_id": model.show_file(line), "error_file_id": None}
    batch["request_counts"] = {"total": 1, "completed": 1, "failed": 0}


async def test_without_its_tables_or_with_a_wrong_setting_it_says_what_to_do(
    database_url: str, durable_jobs_stack: DevStack
) -> None:
    environment = os.environ | {
        "DURABLE_JOBS_DATABASE_URL": database_url,
        "TEMPORAL_ADDRESS": durable_jobs_stack.temporal_address,
    }
    for more, told, code in (
        ({}, "python -m activities.store.migrate", 6),
        ({"GOVERNANCE_AGENT_SECONDS": "0"}, "GOVERNANCE_AGENT_SECONDS", 2),
        ({"GOVERNANCE_PROVIDER_URL": "http://"}, "GOVERNANCE_PROVIDER_URL", 2),
    ):
        async with worker_process(environment | more) as process:
            _, err = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == code, err.decode()
            assert told in err.decode()
            assert "Traceback" not in err.decode()


def test_the_lists_of_what_is_hosted_are_whole() -> None:
    """What the folders hold is what `HANDLERS`, `ACTIVITIES` and `HOSTED` name."""
    assert len({handler.job_type for handler in activities.HANDLERS}) == len(activities.HANDLERS) == 7
    for name in ("activities.research", "activities.replay", "activities.causal_audit"):
        defined = vars(sys.modules[name]).values()
        mine = [each for each in defined if isinstance(each, type) and getattr(each, "job_type", None)]
        assert {each for each in mine if each.__module__ == name} <= set(activities.HANDLERS)
    assert {each.__name__ for each in workflows.HOSTED} == {
        "ResearchWorkflow",
        "CausalAuditWorkflow",
        "JobWorkflow",
        "ReconciliationWorkflow",
    }
