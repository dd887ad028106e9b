"""The whole story on real input: `python -m examples.research.demo`.

Starts the servers, the provider and a worker as separate processes, submits all questions twice, kills the worker with
SIGKILL while its calls are in flight, starts another, and counts at the provider what was sent. The last line is one
JSON object. Exits with 1 when a job was lost or an operation key was sent twice.
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

import httpx
from rich.markup import escape

from durable_jobs import DurableJobs, JobSpec
from durable_jobs.contract.models import Job
from durable_jobs.contract.states import ACTIVE, JobStatus
from durable_jobs.dev import DevStack, DevStackError
from examples.research.handler import QUEUE, ResearchReport, ResearchRequest
from examples.research.processes import Child, Children, DemoError
from examples.research.screen import Screen, Snapshot
from examples.research.worker import PROVIDER_URL_VARIABLE, connect_temporal

QUESTIONS = Path(__file__).parent / "questions.jsonl"
ORGANIZATION = "acme"
SECONDS_ALLOWED = 110
# The worker dies once so many jobs are done, and while so many calls are in flight.
DONE_BEFORE_KILL, CALLS_AT_KILL = 15, 4


@dataclass(frozen=True)
class Question:
    id: str
    request: ResearchRequest


@dataclass(frozen=True)
class Outcome:
    """What the demo ends with."""

    counts: dict[str, int | float]
    """The last line."""
    problems: list[str]
    """What did not go as promised."""
    example: UUID | None
    """The job whose trail was shown."""


def read_questions(path: Path = QUESTIONS) -> list[Question]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [Question(row.pop("id"), ResearchRequest.model_validate(row)) for row in rows]


class Demo:
    """One run; its jobs are in a project of their own, so that a server may serve any number of runs."""

    def __init__(
        self,
        jobs: DurableJobs,
        provider: httpx.AsyncClient,
        children: Children,
        screen: Screen,
        questions: list[Question],
    ) -> None:
        self.jobs = jobs
        self.provider = provider
        self.children = children
        self.screen = screen
        self.questions = questions
        self.project = f"demo-{secrets.token_hex(4)}"
        self.caught: list[UUID] = []
        """The jobs that were past their boundary when their worker was killed."""

    async def run(self) -> Outcome:
        submission = asyncio.create_task(self.submit_twice())
        worker = await self.start_worker()
        with self.screen:
            try:
                await self.watch(submission, worker)
                if not submission.done():
                    raise DemoError("the questions could not all be submitted in time")
            finally:
                submission.cancel()
        return await self.conclude(submission.result())

    async def start_worker(self) -> Child:
        worker = await self.children.start("worker", "examples.research.worker")
        await worker.prints(r"is (polling)")
        self.screen.say(f"worker {worker.pid} is running")
        return worker

    async def submit_twice(self) -> dict[UUID, Question]:
        """Submits every question, and all of them once more; returns them by job id."""
        handles = await asyncio.gather(*(self.jobs.create_job(self.spec(question)) for question in self.questions))
        self.screen.say(f"{len(handles)} questions submitted, {sum(handle.created for handle in handles)} jobs created")
        again = await self.jobs.create_jobs([self.spec(question) for question in self.questions])
        created = sum(handle.created for handle in again)
        self.screen.say(f"{len(again)} questions submitted once more, {created} jobs created")
        if created or [handle.id for handle in again] != [handle.id for handle in handles]:
            raise DemoError("the second submission made jobs of its own")
        return {handle.id: question for handle, question in zip(handles, self.questions, strict=True)}

    def spec(self, question: Question) -> JobSpec:
        # A short lease, so that what the killed worker held is soon taken over.
        return JobSpec(
            organization=ORGANIZATION,
            project=self.project,
            queue=QUEUE,
            job_type="research",
            idempotency_key=question.id,
            payload=question.request.model_dump(),
            lease_seconds=5,
            timeout_seconds=60,
        )

    async def watch(self, submission: asyncio.Task[dict[UUID, Question]], worker: Child) -> None:
        """Until every job has come to its end, or the time is up; in between the worker is killed."""
        while self.screen.seconds < SECONDS_ALLOWED:
            await asyncio.sleep(0.2)
            self.children.check()
            jobs = await self.all_jobs()
            pending = await self.pending_calls()
            done = sum(job.status.is_terminal for job in jobs)
            self.screen.update(Snapshot(Counter(job.status for job in jobs), pending), done)
            if not self.caught and done >= DONE_BEFORE_KILL and pending >= CALLS_AT_KILL:
                worker = await self.kill(worker)
            # A failed submission shows itself here.
            if submission.done() and done == len(submission.result()):
                return

    async def kill(self, worker: Child) -> Child:
        await self.children.kill(worker)
        jobs = await self.all_jobs()
        self.caught = [job.id for job in jobs if job.status in ACTIVE and job.dispatched_at]
        self.screen.say(f"[bold red]worker {worker.pid} killed with SIGKILL[/], {len(self.caught)} calls in flight")
        return await self.start_worker()

    async def all_jobs(self) -> list[Job]:
        """The jobs of this run, as the table has them."""
        found: list[Job] = []
        after: str | None = None
        while True:
            page = await self.jobs.service.list_jobs(
                organization=ORGANIZATION, project=self.project, limit=100, after=after
            )
            found += page.items
            after = page.next_cursor
            if after is None:
                return found

    async def pending_calls(self) -> int:
        return int((await self.provider.get("/stats")).json()["pending"])

    async def conclude(self, submitted: dict[UUID, Question]) -> Outcome:
        """Counts in the table and at the provider, and shows both."""
        jobs = {job.id: job for job in await self.all_jobs()}
        sends: dict[str, int] = (await self.provider.get("/stats")).json()["sends"]
        # A key marked in the table that the provider never saw counts as sent 0 times.
        sends = {job.operation_key: 0 for job in jobs.values() if job.operation_key} | sends
        statuses = Counter(job.status for job in jobs.values())
        ended = [job.id for job in jobs.values() if job.status.is_settled or job.status is JobStatus.INDETERMINATE]
        lost = len(submitted.keys() - set(ended))
        most = max(sends.values(), default=0)

        self.screen.results(statuses, sends.values())
        await self.show_one_answer(jobs.values())
        if self.caught:
            trail = await self.jobs.service.list_job_events(self.caught[0])
            self.screen.trail(jobs[self.caught[0]], trail.items)
        checks = {
            f"{lost} jobs are lost": lost == 0,
            f"{len(jobs)} jobs stand for {len(submitted)} questions": len(jobs) == len(submitted),
            "an operation key was sent more than once": most <= 1,
            "no call was in flight when the worker was killed": bool(self.caught),
        }
        return Outcome(
            counts={
                "submitted": 2 * len(submitted),
                "jobs": len(jobs),
                "completed": statuses[JobStatus.COMPLETED],
                "indeterminate": statuses[JobStatus.INDETERMINATE],
                "lost": lost,
                "max_sends_per_key": most,
                "seconds": round(self.screen.seconds, 1),
            },
            problems=[problem for problem, fine in checks.items() if not fine],
            example=self.caught[0] if self.caught else None,
        )

    async def show_one_answer(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.result:
                report = ResearchReport.model_validate(job.result)
                self.screen.say(f"[bold]{escape(job.payload['question'])}[/] {escape(report.answer)}")
                return


async def run(stack: DevStack, folder: Path, screen: Screen, questions: list[Question]) -> Outcome:
    """The demo, on running servers."""
    environment = {
        **os.environ,
        "DURABLE_JOBS_DATABASE_URL": stack.database_url,
        "TEMPORAL_ADDRESS": stack.temporal_address,
        "TEMPORAL_NAMESPACE": stack.namespace,
    }
    async with Children(folder, environment) as children:
        database = str(folder / "provider.sqlite3")
        provider = await children.start("provider", "examples.research.provider", "--database", database)
        url = await provider.prints(r"listening on (\S+)")
        screen.say(f"the provider, process {provider.pid}, listens on {url}")
        children.environment[PROVIDER_URL_VARIABLE] = url
        temporal = await connect_temporal(environment)
        async with (
            await DurableJobs.connect(stack.database_url, temporal) as jobs,
            httpx.AsyncClient(base_url=url) as http,
        ):
            return await Demo(jobs, http, children, screen, questions).run()


def where_to_look(stack: DevStack, job_id: UUID) -> str:
    """How to see a job's workflow: its address in Temporal's UI, else a command."""
    workflow = f"durable-job/{job_id}"
    if stack.ui_url is None:
        return f"temporal workflow show --address {stack.temporal_address} --workflow-id {workflow}"
    return f"{stack.ui_url}/namespaces/{stack.namespace}/workflows/{quote(workflow, safe='')}"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.research.demo", description=__doc__)
    parser.add_argument("--stay", action="store_true", help="leave the servers running at the end, until Ctrl-C")
    stay = parser.parse_args().stay
    # A plain kill cleans up as Ctrl-C does, also in the background, where shells have Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    questions = read_questions()
    screen = Screen(len(questions))
    try:
        with tempfile.TemporaryDirectory(prefix="durable-jobs-demo-") as name:
            folder = Path(name)
            # Postgres, which refuses to run as root, must get through to its own folder as another user.
            folder.chmod(0o711)
            screen.say("starting Postgres and Temporal")
            with DevStack(folder / "stack") as stack:
                screen.say(f"Postgres: {stack.database_url.rpartition('@')[2]}, Temporal: {stack.temporal_address}")
                outcome = asyncio.run(run(stack, folder, screen, questions))
                for problem in outcome.problems:
                    screen.say(f"[bold red]not as promised:[/] {problem}")
                if outcome.example:
                    print(f"That job in Temporal: {where_to_look(stack, outcome.example)}")
                print("The servers stay up until Ctrl-C." if stay else "With --stay the servers stay up.")
                print(json.dumps(outcome.counts), flush=True)
                if stay:
                    with contextlib.suppress(KeyboardInterrupt):
                        signal.pause()
                return 1 if outcome.problems else 0
    except KeyboardInterrupt:
        return 130
    except (DemoError, DevStackError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
