"""What the demo does, step by step, and what it counts at the end."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from rich.console import Console
from rich.table import Table

from durable_jobs import DurableJobs, ExecutionInput, JobHandle, JobSpec
from examples.research.processes import Child, Children

QUEUE = "governance"
DATASET, PRODUCTION, CANDIDATE = "support-agent", "production-ai-policy", "candidate-ai-policy"
AUDITED = ("sa-001", "sa-007", "sa-013")
SAMPLES = 2
SECONDS = 180
_TABLES = ("executions", "replays", "evaluations", "comparisons", "drift", "audits", "influences")


class Story:
    """One run of the demo. `counts` and `problems` are there once `run` has returned."""

    def __init__(self, jobs: DurableJobs, children: Children, console: Console, database_url: str) -> None:
        self.counts: dict[str, int] = {}
        self.problems: list[str] = []
        self._jobs = jobs
        self._children = children
        self._console = console
        self._database_url = database_url
        self._workers = 0

    async def run(self) -> None:
        worker = await self._start_worker()
        await self._evaluate()
        worker = await self._experiment(worker)
        await self._replay()
        await self._audit(worker)
        await self._count()

    async def _evaluate(self) -> None:
        handle = await self._create("evaluation", "evaluation", dataset_id=DATASET, policy_id=PRODUCTION)
        result = await handle.result(SECONDS)
        self._console.print(
            f"evaluation: {result['correct']} of {result['cases']} cases of {DATASET} decided as expected under"
            f" {PRODUCTION}, mean score {result['mean_score']}"
        )

    async def _experiment(self, worker: Child) -> Child:
        """The worker dies between two cases; the next one goes on at the first case that is not recorded."""
        handle = await self._create("experiment", "experiment", dataset_id=DATASET, policy_ids=[PRODUCTION, CANDIDATE])
        recorded = "SELECT count(*) AS n FROM governance.executions WHERE job_id = %(id)s"
        await self._until(lambda: self._rows(recorded, id=handle.id)[0]["n"] >= 20)
        before = self._rows(recorded, id=handle.id)[0]["n"]
        worker = await self._replace(worker, f"in the middle of the experiment, after {before} cases")
        result = await handle.result(SECONDS)
        (comparison,) = result["comparisons"]
        self._console.print(
            f"experiment: {CANDIDATE} agrees with {PRODUCTION} in {comparison['agreements']} of"
            f" {result['baseline']['cases']} cases, {comparison['correct_delta']:+} correct, score"
            f" {comparison['score_delta']}; attempts: {(await handle.job()).attempt_count}"
        )
        return worker

    async def _replay(self) -> None:
        execution = self._execution(AUDITED[0])
        handle = await self._create("replay", "replay_execution", execution_id=execution, policy_id=CANDIDATE)
        result = await handle.result(SECONDS)
        drift = await (await self._under(f"{handle.id}:evaluation")).result(SECONDS)
        self._console.print(
            f"replay of {AUDITED[0]} under {CANDIDATE}: {result['decision']} {result['score']}, drift:"
            f" {drift['drift']} ({drift['score_delta']})"
        )

    async def _audit(self, worker: Child) -> None:
        started = [
            await self._create(f"audit-{case}", "causal_audit", execution_id=self._execution(case), samples=SAMPLES)
            for case in AUDITED
        ]
        done = "SELECT count(*) AS n FROM governance.audit_samples WHERE execution_id IS NOT NULL"
        await self._until(lambda: self._rows(done)[0]["n"] >= 5)
        await self._replace(worker, f"in the middle of the audits, after {self._rows(done)[0]['n']} replays")
        for case, handle in zip(AUDITED, started, strict=True):
            final = await self._under(f"{handle.id}:final")
            result = await final.result(SECONDS)
            if result["status"] != "COMPLETED":
                self.problems.append(f"the audit of {case} is {result['status']}: {result['reasons']}")
                continue
            table = Table(title=f"causal audit of {case}: {result['classification']}", title_justify="left")
            for heading in ("evidence", "influence", "flips", "role"):
                table.add_column(heading, justify="right" if heading in ("influence", "flips") else "left")
            for each in result["influences"]:
                flips = f"{each['flips']} of {SAMPLES}"
                table.add_row(each["evidence_id"], each["influence"], flips, each["role"])
            self._console.print(table)

    async def _count(self) -> None:
        await self._until(lambda: self._rows(_UNSETTLED)[0]["n"] == 0)
        self.counts = {name: self._rows(f"SELECT count(*) AS n FROM governance.{name}")[0]["n"] for name in _TABLES}
        jobs = self._rows("SELECT status, count(*) AS n FROM durable_jobs.jobs GROUP BY status")
        self.counts["jobs"] = sum(row["n"] for row in jobs)
        self.counts["workers_killed"] = self._workers - 1
        pieces = {case: self._pieces(case) for case in AUDITED}
        replays = 1 + sum(SAMPLES * (1 + number) for number in pieces.values())
        cases = self._rows("SELECT count(*) AS n FROM governance.cases")[0]["n"]
        expected = {
            "executions": 3 * cases + replays,
            "replays": replays,
            "evaluations": 4,
            "comparisons": 2,
            "drift": 1,
            "audits": len(AUDITED),
            "influences": sum(pieces.values()),
            "jobs": 3 + 1 + 2 * len(AUDITED) + replays - 1,
        }
        for name, number in expected.items():
            if self.counts[name] != number:
                self.problems.append(f"{self.counts[name]} {name}, not {number}")
        for row in jobs:
            if row["status"] != "completed":
                self.problems.append(f"{row['n']} jobs ended {row['status']}")

    def _pieces(self, case_id: str) -> int:
        found = self._rows("SELECT count(*) AS n FROM governance.evidence WHERE case_id = %(case)s", case=case_id)
        return int(found[0]["n"])

    def _execution(self, case_id: str) -> str:
        """The recorded execution of the case by the evaluation."""
        (row,) = self._rows(
            "SELECT e.id::text FROM governance.executions e JOIN durable_jobs.jobs j ON j.id = e.job_id"
            " WHERE j.idempotency_key = 'evaluation' AND e.case_id = %(case)s",
            case=case_id,
        )
        return str(row["id"])

    async def _create(self, key: str, job_type: str, **payload: Any) -> JobHandle:
        return await self._jobs.create_job(
            JobSpec(
                organization="acme",
                project="support",
                queue=QUEUE,
                job_type=job_type,
                idempotency_key=key,
                payload=payload,
                execution=ExecutionInput(tenant="acme-eu", actor="the demo", trace=f"demo-{key}"),
                lease_seconds=3,
            )
        )

    async def _under(self, key: str) -> JobHandle:
        """The job that another one created, once it is there."""
        found = "SELECT id FROM durable_jobs.jobs WHERE idempotency_key = %(key)s"
        await self._until(lambda: bool(self._rows(found, key=key)))
        job_id: UUID = self._rows(found, key=key)[0]["id"]
        return self._jobs.handle(job_id)

    async def _start_worker(self) -> Child:
        self._workers += 1
        worker = await self._children.start(f"worker-{self._workers}", "worker")
        await worker.prints(r"(hosting) ", seconds=60)
        self._console.print(f"worker {self._workers}, process {worker.pid}, works")
        return worker

    async def _replace(self, worker: Child, when: str) -> Child:
        await self._children.kill(worker)
        self._console.print(f"[bold]worker {self._workers} killed[/] {when}")
        return await self._start_worker()

    async def _until(self, look: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not look():
                self._children.check()
                await asyncio.sleep(0.1)

    def _rows(self, statement: str, **parameters: Any) -> list[dict[str, Any]]:
        with psycopg.connect(self._database_url, row_factory=dict_row) as connection:
            return connection.execute(statement, parameters).fetchall()


_UNSETTLED = """
SELECT count(*) AS n FROM durable_jobs.jobs
WHERE status NOT IN ('completed', 'failed', 'cancelled', 'dead_letter', 'halt_unsafe')
"""
