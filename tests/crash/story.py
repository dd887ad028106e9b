"""One crash run: the story begins, the worker dies at its point, another one finishes it, and all is checked."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import psycopg
from temporalio.client import WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from durable_jobs import JobError, JobHandle, JobHead, JobSpec, JobStatus
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.contract.models import Claim
from durable_jobs.contract.states import ACTIVE
from durable_jobs.temporal.messages import workflow_id
from tests.crash.points import HOST, Target, passed
from tests.crash.shapes import LEASE_SECONDS, Cue, Story
from tests.crash.stage import CrashWorker, Scene, Stage, scene
from tests.processes.harness import until
from tests.soak.checks import REACHED, Found, ask_provider, read_tables, told_to_clients, trails_that_differ, violations
from tests.soak.clients import OPERATOR, is_open
from tests.soak.shapes import key_of, operation_key
from tests.support import until_lease_is_dead

PATIENCE = 90.0
"""Seconds from the start of a run in which all must be settled; most of it takes less than ten."""
STOPPED_SECONDS = 6.0
"""How long a stopped worker stays so where nobody can take its job: it holds the row's lock."""
QUESTION = "How do mountains form?"


@dataclass
class Run:
    """How one run went."""

    story: str
    target: Target | None
    reached: bool = False
    """Whether the point was passed; if not, the run was one without a crash."""
    ended: str = ""
    """The status in which the job ended."""
    sends: int = 0
    seconds: float = 0.0
    points: dict[str, list[tuple[bool, str]]] = field(default_factory=dict)
    """What the worker passed, by role."""
    problems: list[str] = field(default_factory=list)
    logs: list[str] = field(default_factory=list)


async def play(stage: Stage, story: Story, target: Target | None) -> Run:
    """Play the story with that crash in it, and return what was found; a run that breaks off is a problem as well."""
    run, started = Run(story.name, target), time.monotonic()
    try:
        async with scene(stage) as present, asyncio.timeout(3 * PATIENCE):
            run.logs = [str(stage.folder / f"{present.name}-*.log")]
            await _play(present, story, target, run)
    except (AssertionError, Exception) as error:
        run.problems.append(f"the run broke off: {type(error).__name__}: {error}")
    if not run.problems:
        for worker in present.workers:
            worker.log.unlink()
    run.seconds = round(time.monotonic() - started, 1)
    return run


async def _play(present: Scene, story: Story, target: Target | None, run: Run) -> None:
    await _before(present, story)
    worker = await present.start_worker(target)
    async with _operated(present):
        if story.before in ("", "expired", "marked") and "sweep" not in story.roles:
            await _begin(present, story)
        if story.before == "committed":
            await _at_rest(worker)  # its own first look at the table is over
            await present.let_time_pass()
        doing = asyncio.create_task(_do(present, story, worker))
        try:
            await _until_crash(present, worker, doing)
            run.points = {role: passed(worker.text, role) for role in story.roles}
            if not worker.runs or worker.stopped:
                if not worker.came_to_its_point and (worker.code != 0 or not story.terminate):
                    run.problems.append(f"the worker ended by itself with {worker.code}")
                await _go_on(present, worker)
            await until("the client has done its part", _done(doing), PATIENCE)
            doing.result()

            async def settled() -> bool:
                # It may come to its point after all was settled, by what it then still had to tell Temporal.
                if not worker.runs and worker is present.workers[-1]:
                    await _go_on(present, worker)
                return await _settled(present)

            await until("all is settled", settled, PATIENCE)
        finally:
            doing.cancel()
    code = await worker.terminate() if worker.runs else 0
    run.reached = worker.came_to_its_point
    if code != 0 and not run.reached:
        run.problems.append(f"the worker ended with {code} after SIGTERM")
    await _account(present, story, run)


async def _before(present: Scene, story: Story) -> None:
    """Bring the job to where the story begins, by the hand of a client and of an earlier holder that is gone."""
    if story.before == "enqueued":
        async with await psycopg.AsyncConnection.connect(present.database_url, autocommit=True) as own:
            spec = _spec(present, story)
            await own.execute(
                "SELECT durable_jobs.enqueue(%s, %s, %s, %s, %s::jsonb, queue => %s, lease_seconds => %s,"
                " backoff_base_seconds => %s, max_attempts => 50)",
                [
                    *(spec.organization, spec.project, spec.job_type, spec.idempotency_key),
                    *(f'{{"shape": "{story.shape.name}", "question": "{QUESTION}"}}', spec.queue),
                    *(spec.lease_seconds, spec.backoff_base_seconds),
                ],
            )
        return
    if not story.before:
        return
    service = present.jobs.service
    job = (await service.create_job(_spec(present, story))).job
    if story.before == "committed":
        return
    outcome = await service.claim_job("earlier:0:gone", uuid4(), job.id)
    assert outcome
    assert outcome.claim
    if story.before != "expired":
        await _earlier_call(present, story, outcome.claim)
    if story.before in ("expired", "marked"):
        await until_lease_is_dead(present.database_url, job.id)


async def _earlier_call(present: Scene, story: Story, claim: Claim) -> None:
    service, http = present.jobs.service, present.clients.provider
    key = operation_key(story.shape.name, claim.job_id)
    await service.mark_provider_dispatched(claim, key, consequential=False)
    body = {"operation_key": key, "question": QUESTION, "mode": "quick"}
    (await http.post("/research", json=body)).raise_for_status()
    if story.before in ("uncertain", "resolved"):
        await service.mark_indeterminate(claim, JobError.of("LOST", "the answer was lost"))
    if story.before == "resolved":
        said = await present.clients.operation(await present.job())
        evidence = {"provider": said["state"]}
        await service.resolve_job(claim.job_id, JobStatus.COMPLETED, evidence, OPERATOR, result=said["result"])


async def _begin(present: Scene, story: Story) -> JobHandle:
    """Create the job, or launch the one that is there already."""
    handle = await present.jobs.create_job(_spec(present, story))
    await handle.launch()
    return handle


def _spec(present: Scene, story: Story) -> JobSpec:
    fields: dict[str, Any] = {
        "organization": "acme",
        "project": "alpha",
        "queue": present.queue,
        "job_type": story.shape.job_type,
        "idempotency_key": key_of(story.name, story.shape.name),
        "payload": {"shape": story.shape.name, "question": QUESTION},
        "lease_seconds": LEASE_SECONDS,
        "timeout_seconds": 60.0,
        "backoff_base_seconds": 0.2,
        # Crashes spend attempts as well, and are not to end jobs: only what the story says is.
        "max_attempts": 50,
    }
    return JobSpec(**(fields | story.shape.spec))


@asynccontextmanager
async def _operated(present: Scene) -> AsyncIterator[None]:
    """With an operator at hand, as in the soak."""
    operating = asyncio.create_task(present.clients.operate())
    try:
        yield
    finally:
        operating.cancel()
        with suppress(asyncio.CancelledError):
            await operating


async def _at_rest(worker: CrashWorker) -> None:
    """Returns once the worker has done nothing beside its jobs for half a second."""
    before = -1
    while (now := len(passed(worker.text, HOST))) != before:
        before = now
        await asyncio.sleep(0.5)


async def _do(present: Scene, story: Story, worker: CrashWorker) -> None:
    """What the story has a client, or whoever runs the worker, do."""
    if story.cancel:
        job = await until(f"the job is {story.cancel}", lambda: _cue(present, story.cancel), PATIENCE)
        handle = present.jobs.handle(job.id)
        reply = await present.clients.answered(lambda: handle.cancel("not wanted any more", "carl"))
        present.clients.cancels.append((job.id, reply))
    if story.terminate:

        async def due() -> bool:
            return not worker.runs or worker.stopped or bool(await _cue(present, story.terminate))

        await until("the worker is to be ended", due, PATIENCE)
        worker.send(signal.SIGTERM)


async def _cue(present: Scene, cue: Cue) -> JobHead | None:
    job = await present.job()
    came = job.lease_generation > 0 if cue == "claimed" else job.dispatched_at is not None
    return job if came or job.status.is_terminal else None


async def _until_crash(present: Scene, worker: CrashWorker, doing: "asyncio.Task[None]") -> None:
    """Returns once the worker has ended, or stopped, or has carried the story to its end."""

    async def look() -> bool:
        return not worker.runs or worker.stopped or (doing.done() and await _settled(present))

    await until("the worker dies at its point, or all is settled", look, PATIENCE)


async def _go_on(present: Scene, worker: CrashWorker) -> None:
    """Another worker takes over. A stopped one goes on beside whoever took its job, or where nobody could."""
    if worker.stopped:
        # By hand: Temporal goes on handing tasks to the polls of a process that stands still, until each times out.
        with suppress(AssertionError):
            await until("another one holds the job", lambda: _taken_over(present), STOPPED_SECONDS)
        worker.send(signal.SIGCONT)
    await present.start_worker()
    await present.let_time_pass()


async def _taken_over(present: Scene) -> bool:
    """Whether a holder who is never heard of again has the job, or it has ended. Waits no more than a lock's time."""
    service = present.jobs.service
    with suppress(StoreUnavailable):
        outcome = await service.claim_job("next:0:gone", uuid4(), (await present.job()).id)
        if outcome and outcome.claim:
            return bool(await service.renew_lease(outcome.claim))
    return (await present.job()).status.is_terminal


def _done(task: "asyncio.Task[None]") -> Any:
    async def look() -> bool:
        return task.done()

    return look


async def _settled(present: Scene) -> bool:
    """Whether nothing is left to do, and every workflow knows."""
    jobs = await present.all_jobs()
    if not jobs or any(map(is_open, jobs)):
        return False
    for job in jobs:
        try:
            described = await present.stage.temporal.get_workflow_handle(workflow_id(job.id)).describe()
        except RPCError as error:
            if error.status is RPCStatusCode.NOT_FOUND:
                continue
            raise
        if described.status is WorkflowExecutionStatus.RUNNING:
            return False
    return True


async def _account(present: Scene, story: Story, run: Run) -> None:
    found = await asyncio.to_thread(read_tables, present.database_url)
    mine = tuple(f":{job_id}" for job_id in found.jobs)
    await ask_provider(found, present.clients.provider, lambda key: any(each in key for each in mine))
    job = next(iter(found.jobs.values()))
    run.ended, run.sends = job["status"], sum(found.sends.values())
    reached = {**REACHED, story.shape.name: set(story.reached)}
    run.problems += [*present.clients.problems, *violations(found, reached), *_by_its_holder(found)]
    run.problems += told_to_clients(found, {}, present.clients.cancels, [])
    run.problems += await trails_that_differ(present.jobs.service, found)


def _by_its_holder(found: Found) -> Iterator[str]:
    """A result that names who got it was written by the holder of that generation, while it held it."""
    for job in found.jobs.values():
        signed = (job["result"] or {}).get("generation")
        if signed is not None and signed != job["lease_generation"]:
            yield f"job {job['id']} of generation {job['lease_generation']} has the result of generation {signed}"
        if job["status"] in ACTIVE:
            yield f"job {job['id']} is held"
