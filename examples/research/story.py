"""The demo's story: all questions submitted twice, a worker killed, and every job brought to its end."""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Iterable
from typing import Any
from uuid import UUID

import httpx
from rich.markup import escape
from temporalio.client import Client, WorkflowFailureError

from durable_jobs import DurableJobs, JobHead, JobStatus
from durable_jobs.contract.states import ACTIVE
from examples.research.accounts import Accounts, was_reconciled
from examples.research.handler import ResearchReport
from examples.research.plan import ORGANIZATION, RULES, Question
from examples.research.processes import Child, Children, DemoError
from examples.research.screen import Screen, Snapshot

OPERATOR = "grace@acme.example"
SECONDS_ALLOWED = 90
"""For all jobs to end, or to stand before the operator."""
SECONDS_TO_CLOSE = 25
"""For workflows to close after that: Temporal offers a task to a killed worker's cache for 10 seconds."""
DONE_BEFORE_KILL, CALLS_AT_KILL = 15, 3
"""The worker dies once it has settled so many jobs, and while at least so many calls are in flight."""


def workflow_of(job_id: UUID) -> str:
    """The id of a job's workflow."""
    return f"durable-job/{job_id}"


class Story:
    """One run; its jobs are in a project of their own, so that a server may serve any number of runs."""

    def __init__(
        self,
        jobs: DurableJobs,
        temporal: Client,
        provider: httpx.AsyncClient,
        children: Children,
        screen: Screen,
        questions: list[Question],
    ) -> None:
        self.jobs = jobs
        self.temporal = temporal
        self.provider = provider
        self.children = children
        self.screen = screen
        self.questions = questions
        self.project = f"demo-{secrets.token_hex(4)}"
        self.caught: set[UUID] = set()
        """The jobs whose call was in flight when their worker was killed."""
        self.reconciled = 0
        """How many jobs the sweep was seen to have settled."""

    async def run(self) -> Accounts:
        await self.spoil_provider()
        submission = asyncio.create_task(self.submit_twice())
        worker = await self.start_worker()
        with self.screen:
            try:
                await self.watch(submission, worker)
                if not submission.done():
                    raise DemoError("the questions could not all be submitted in time")
            finally:
                submission.cancel()
        escalated = [job for job in await self.all_jobs() if job.escalated_at]
        for job in escalated:
            await self.decide(job)
        self.screen.say("waiting for the workflows to close")
        open_workflows = await self.closing(submission.result())
        self.screen.say(f"{len(self.questions) - len(open_workflows)} workflows have closed")
        accounts = Accounts(
            submitted=submission.result(),
            jobs={job.id: job for job in await self.all_jobs()},
            calls=(await self.calls())["sends"],
            caught=self.caught,
            escalated=[job.id for job in escalated],
            open_workflows=open_workflows,
            seconds=self.screen.seconds,
        )
        await self.show(accounts)
        return accounts

    async def spoil_provider(self) -> None:
        """Tells the provider what to do wrong."""
        rules = [rule.model_dump() for rule in RULES]
        (await self.provider.put("/rules", json=rules)).raise_for_status()
        self.screen.say("the provider is told to fail some calls, to break connections, and to lose track of one call")

    async def start_worker(self) -> Child:
        worker = await self.children.start("worker", "examples.research.worker")
        await worker.prints(r"is (polling)")
        self.screen.say(f"worker {worker.pid} is running")
        return worker

    async def submit_twice(self) -> dict[UUID, Question]:
        """Submits every question, and all of them once more; returns them by job id."""
        specs = [question.spec(self.project) for question in self.questions]
        handles = await asyncio.gather(*map(self.jobs.create_job, specs))
        self.screen.say(f"{len(handles)} questions submitted, {sum(handle.created for handle in handles)} jobs created")
        again = await self.jobs.create_jobs(specs)
        created = sum(handle.created for handle in again)
        self.screen.say(f"{len(again)} questions submitted once more, {created} jobs created")
        if created or [handle.id for handle in again] != [handle.id for handle in handles]:
            raise DemoError("the second submission made jobs of its own")
        return {handle.id: question for handle, question in zip(handles, self.questions, strict=True)}

    async def watch(self, submission: asyncio.Task[dict[UUID, Question]], worker: Child) -> None:
        """Until every job is settled or before the operator, or the time is up; in between the worker is killed."""
        while self.screen.seconds < SECONDS_ALLOWED:
            await asyncio.sleep(0.2)
            self.children.check()
            jobs = await self.all_jobs()
            self.report(jobs, (await self.calls())["pending"])
            settled = sum(job.status.is_settled for job in jobs)
            if not self.caught and settled - self.reconciled >= DONE_BEFORE_KILL:
                worker = await self.kill(worker)
            # A failed submission shows itself here.
            if submission.done() and settled + sum(map(_escalated, jobs)) == len(submission.result()):
                return

    def report(self, jobs: list[JobHead], pending: int) -> None:
        """Shows where things stand."""
        before, self.reconciled = self.reconciled, sum(map(was_reconciled, jobs))
        if self.reconciled > before:
            self.screen.say(f"the sweep asked the provider; uncertain jobs settled: {self.reconciled - before}")
        states = Counter("escalated" if _escalated(job) else str(job.status) for job in jobs)
        self.screen.update(Snapshot(states, pending), sum(job.status.is_settled for job in jobs))

    async def kill(self, worker: Child) -> Child:
        """Kills the worker and starts another, if just now enough of its calls have arrived at the provider.

        Frozen for a moment, it can be looked at: between its boundary and its arrival a call would never arrive.
        """
        worker.freeze()
        await asyncio.sleep(0.1)
        keys = {job.id: job.operation_key for job in await self.all_jobs() if job.status in ACTIVE}
        sends = (await self.calls())["sends"]
        if len(keys) < CALLS_AT_KILL or not all(key in sends for key in keys.values()):
            worker.thaw()
            return worker
        await self.children.kill(worker)
        self.caught = set(keys)
        self.screen.say(f"[bold red]worker {worker.pid} killed with SIGKILL[/], {len(self.caught)} calls in flight")
        return await self.start_worker()

    async def decide(self, job: JobHead) -> None:
        """What an operator does about a job that nobody can account for: looks, decides, and says on what grounds."""
        handle = self.jobs.handle(job.id)
        self.screen.say("a job stands before the operator")
        self.screen.trail(await handle.job(), await handle.events())
        path = f"/operations/{job.operation_key}"
        answer = (await self.provider.get(path)).json()
        finding = "accepted once, but its report is lost" if answer["sends"] else "its sender died before it arrived"
        evidence = {"asked": f"GET {path}", "answer": answer, "finding": finding}
        await handle.resolve(JobStatus.DEAD_LETTER, evidence, OPERATOR)
        self.screen.say(f"{OPERATOR} resolves it as {await handle.status()}: {finding}")
        await self.closing([job.id])
        workflow = await self.temporal.get_workflow_handle(workflow_of(job.id)).describe()
        self.screen.say(f"in Temporal its workflow is {workflow.status.name.lower() if workflow.status else 'unknown'}")

    async def closing(self, job_ids: Iterable[UUID]) -> list[UUID]:
        """Waits until the workflows of the jobs have closed; returns those that have not."""

        async def closed(job_id: UUID) -> None:
            with contextlib.suppress(WorkflowFailureError):
                await self.temporal.get_workflow_handle(workflow_of(job_id)).result()

        waits = {asyncio.create_task(closed(job_id)): job_id for job_id in job_ids}
        done, late = await asyncio.wait(waits, timeout=SECONDS_TO_CLOSE)
        for wait in late:
            wait.cancel()
        for wait in done:
            wait.result()
        return [waits[wait] for wait in late]

    async def all_jobs(self) -> list[JobHead]:
        """The jobs of this run, as the table has them."""
        found: list[JobHead] = []
        after: str | None = None
        while True:
            page = await self.jobs.service.list_jobs(
                organization=ORGANIZATION, project=self.project, limit=100, after=after
            )
            found += page.items
            after = page.next_cursor
            if after is None:
                return found

    async def calls(self) -> dict[str, Any]:
        """What the provider has accepted: how many calls are `pending`, and the `sends` of each operation key."""
        calls: dict[str, Any] = (await self.provider.get("/stats")).json()
        return calls

    async def show(self, accounts: Accounts) -> None:
        """The tables, one answer, and the trail of a job that lived through the kill."""
        self.screen.results(accounts.statuses, accounts.sends)
        if accounts.survivor is None:
            return
        survivor = await self.jobs.service.get_job(accounts.survivor.id)
        report = ResearchReport.model_validate(survivor.result)
        self.screen.say("a call was in flight when its worker was killed; the sweep found what became of it")
        self.screen.trail(survivor, await self.jobs.handle(survivor.id).events())
        self.screen.say(f"[bold]{escape(survivor.payload['question'])}[/] {escape(report.answer)}")


def _escalated(job: JobHead) -> bool:
    return job.escalated_at is not None
