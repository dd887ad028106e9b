"""Workers killed before and after every commit of the hand-offs: nothing is lost, and nothing is there twice."""

import asyncio
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pytest
from temporalio.client import Client
from temporalio.service import RPCError

from activities.datasets import load_dataset
from durable_jobs import DurableJobs, JobHandle, JobSpec, JobStatus
from durable_jobs.dev import DevStack
from durable_jobs.temporal.schedule import schedule_id
from tests.app.conftest import TENANT
from tests.app.test_causal_audit import verdict
from tests.app.test_replays import DATASET, PRODUCTION, counts, rows
from tests.probes import eventually

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1500)]

EVALUATION = ["before evaluate", "after evaluate", "after record_execution", "before complete_job:evaluation"]
REPLAY = [
    "before ReplayExecution._commit",
    "after ReplayExecution._commit",
    "before complete_job:replay_execution",
    "after complete_job:replay_execution",
    "before ReplayEvaluation.run",
    "after ReplayEvaluation.run",
]
AUDIT = [
    "before CausalAudit._start",
    "after CausalAudit._start",
    "before start:CausalAudit",
    "after start:CausalAudit",
    "before complete_job:causal_audit",
    "after complete_job:causal_audit",
    "after create_job:replay_execution",
    "before ReplayExecution._commit",
    "after ReplayExecution._commit",
    "after create_job:causal_audit",
    "before CausalAudit._finalize",
    "after CausalAudit._finalize",
]


class Killed:
    """Worker processes of a queue of their own, one after another, each killing itself at the next point of a plan."""

    def __init__(self, jobs: DurableJobs, environment: dict[str, str], folder: Path, points: list[str]) -> None:
        self.queue = f"queue-{uuid4().hex[:12]}"
        self.codes: list[int] = []
        self.plan = folder / self.queue
        self.plan.write_text("\n".join(points))
        self._jobs = jobs
        self._environment = environment | {"APP_QUEUE": self.queue}

    async def __aenter__(self) -> Self:
        self._supervising = asyncio.create_task(self._supervise())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._supervising.cancel()
        await asyncio.wait({self._supervising})
        with suppress(RPCError):
            await self._jobs.temporal.get_schedule_handle(schedule_id(self.queue)).delete()

    async def _supervise(self) -> None:
        command = [sys.executable, "-m", "tests.app.killed_worker", str(self.plan)]
        while True:
            process = await asyncio.create_subprocess_exec(
                *command, env=self._environment, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
            )
            try:
                self.codes.append(await process.wait())
            except asyncio.CancelledError:
                process.kill()
                await process.wait()
                raise

    async def result(self, job_type: str, **payload: Any) -> JobHandle:
        """A job of this queue, once it is completed."""
        handle = await self._jobs.create_job(
            JobSpec(
                organization="acme",
                project="alpha",
                queue=self.queue,
                job_type=job_type,
                idempotency_key=job_type,
                payload=payload,
                execution=TENANT,
                max_attempts=20,
                lease_seconds=1,
            )
        )
        await handle.result(timeout=150)
        return handle

    async def settled(self) -> None:
        """Once no job of this queue is left, and the plan is at its end."""

        async def none_left() -> bool:
            page = await self._jobs.service.list_jobs(queue=self.queue)
            return all(job.status.is_settled for job in page.items) and self.plan.read_text() == ""

        await eventually(none_left, "the rest of the jobs", timeout=120)
        assert set(self.codes) == {-signal.SIGKILL}


async def test_kills_at_every_hand_off_leave_exact_numbers(
    jobs: DurableJobs, product_url: str, durable_jobs_stack: DevStack, temporal_client: Client, tmp_path: Path
) -> None:
    environment = os.environ | {
        "DURABLE_JOBS_DATABASE_URL": product_url,
        "TEMPORAL_ADDRESS": durable_jobs_stack.temporal_address,
        "TEMPORAL_NAMESPACE": temporal_client.namespace,
    }

    def killed(points: list[str]) -> Killed:
        return Killed(jobs, environment, tmp_path, points)

    async with killed(EVALUATION) as evaluating, killed(REPLAY) as replaying, killed(AUDIT) as auditing:
        await evaluating.result("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)
        (execution,) = rows(product_url, "SELECT id::text FROM governance.executions WHERE case_id = 'sa-007'")

        async def audit() -> dict[str, Any]:
            started = await auditing.result("causal_audit", execution_id=execution["id"], samples=1)
            judged = await verdict(jobs, started.id, timeout=150)
            await temporal_client.get_workflow_handle(f"causal-audit:{started.id}").result()
            return judged

        found, _ = await asyncio.gather(audit(), replaying.result("replay_execution", execution_id=execution["id"]))
        await asyncio.gather(*(each.settled() for each in (evaluating, replaying, auditing)))
    assert found["status"] == "COMPLETED", found["reasons"]
    cases, pieces = len(load_dataset(DATASET).cases), 4
    assert counts(product_url) == {
        "executions": cases + 1 + (1 + pieces),
        "replays": 1 + (1 + pieces),
        "evaluations": 1 + 1,
        "comparisons": 1,
        "drift": 1,
        "audits": 1,
        "influences": pieces,
    }
    everything = (await jobs.service.list_jobs(limit=1000)).items
    assert {job.status for job in everything} == {JobStatus.COMPLETED}
    assert Counter(job.job_type for job in everything) == {
        "evaluation": 1,
        "replay_execution": 1 + (1 + pieces),
        "replay_evaluation": 1,
        "causal_audit": 2,
    }
