"""Fifty clients at once, every call of theirs recorded: most submit, cancel and look; ten work on jobs by hand.

Those who work by hand use the verbs as a worker does, without its keeper: now and then one dawdles past its lease, or
between a step and the next, and goes on as if nothing had happened.
"""

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from uuid import UUID, uuid4

import httpx

from durable_jobs import DurableJobs, Job, JobHead, JobSpec
from durable_jobs.contract.errors import (
    CancellationRequested,
    DurableJobsError,
    NotResolvable,
    StoreUnavailable,
)
from durable_jobs.contract.models import Claim, ClaimOutcome, CreatedJob
from durable_jobs.contract.states import SETTLED, JobStatus
from examples.research.handler import ResearchProvider, ResearchRequest
from tests.proof.history import History
from tests.soak.clients import Clients, Key
from tests.soak.shapes import BY_HAND, PROJECTS, operation_key

T = TypeVar("T")

CLIENTS, OF_THEM_BY_HAND = 50, 10
PAUSE_SECONDS = 0.1
"""Between two calls of a client, on average."""
SAME_KEY = 3
"""So many creations of each key, by whoever comes."""
DAWDLING_SECONDS = 2.5


class RecordedClients(Clients):
    """In place of those of the soak. `submit` returns when every job that is worked on by hand is settled."""

    def __init__(
        self,
        jobs: DurableJobs,
        provider: httpx.AsyncClient,
        alive: Callable[[], set[int]],
        *,
        history: History,
        seconds: float,
        by_hand: int,
    ) -> None:
        super().__init__(jobs, provider, alive)
        self.history = history
        self.seconds = seconds
        self.by_hand = by_hand
        """How many jobs are to be worked on by hand."""
        self.known: list[tuple[UUID, str]] = []
        """Acknowledged jobs, and their shapes."""
        self.sending: set[Claim] = set()
        """Of those who work by hand: who asked for a mark, and may still send."""
        self.by_hand_keys: set[Key] = set()
        self.launches: list[asyncio.Task[bool]] = []
        self.over = False

    async def submit(self, specs: list[JobSpec], seconds: float, chance: random.Random) -> None:
        """All the clients, for the length of the history; then those who work by hand, until nothing is left."""
        plan = [*specs, *(hand_spec(chance, number) for number in range(self.by_hand))]
        chance.shuffle(plan)
        asked = [each for each in plan for _ in range(SAME_KEY)]
        queue = iter(asked)
        pace = self.seconds / len(asked)
        research = ResearchProvider(str(self.provider.base_url))
        loop = asyncio.get_running_loop()
        began = loop.time()

        def due() -> JobSpec | None:
            """The next creation, when its time has come."""
            nonlocal handed
            if loop.time() - began < handed * pace:
                return None
            handed += 1
            return next(queue, None)

        handed = 0
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(OF_THEM_BY_HAND):
                    group.create_task(self._carefully(self._work(f"hand-{number}", research, random.Random(number))))
                group.create_task(self._carefully(self._account("accountant")))
                others = [
                    group.create_task(
                        self._carefully(self._submit(f"client-{number}", due, began, random.Random(chance.random())))
                    )
                    for number in range(CLIENTS - OF_THEM_BY_HAND)
                ]
                await asyncio.gather(*others)
                for spec in plan:  # what nobody came to, or nobody was answered about
                    if self._key(spec) not in self._acknowledged_keys:
                        await self.answered(lambda spec=spec: self._create_recorded("straggler", spec))
                self.over = True
        finally:
            self.over = True
            await asyncio.gather(*self.launches, return_exceptions=True)
            await research.aclose()

    # Submitting, cancelling, looking

    async def _submit(self, name: str, due: Callable[[], JobSpec | None], began: float, chance: random.Random) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() - began < self.seconds:
            with suppress(DurableJobsError):  # recorded, and for the checker to judge
                if spec := due():
                    await self._create_recorded(name, spec, other_request=chance.random() < 0.03)
                elif self.known:
                    await self._look_or_cancel(name, chance)
            await asyncio.sleep(chance.uniform(0, 2 * PAUSE_SECONDS))

    async def _look_or_cancel(self, name: str, chance: random.Random) -> None:
        job_id, shape = chance.choice(self.known[-200:])
        service, luck = self.jobs.service, chance.random()
        if luck < 0.05 and shape in ("cancelled", BY_HAND):
            # That of a handle wakes the job's workflow, which one that is worked on by hand has not.
            cancel = partial(service.cancel_job, job_id) if shape == BY_HAND else self.jobs.handle(job_id).cancel
            reply = await self.history.call(
                name, "cancel", {"id": str(job_id)}, lambda: cancel("not wanted", name), lambda it: {"reply": it}
            )
            self.cancels.append((job_id, reply))
        elif luck < 0.2:
            job = await self._get(name, job_id)
            key = (job.organization_id, job.project_id, job.idempotency_key)
            call = lambda: service.find_by_idempotency_key(*key)  # noqa: E731
            await self.history.call(name, "find", {"key": key}, call, lambda it: told(it) if it else {"id": None})
        else:
            await self._get(name, job_id)

    async def _get(self, name: str, job_id: UUID) -> Job:
        get = self.jobs.service.get_job
        return await self.history.call(name, "get", {"id": str(job_id)}, lambda: get(job_id), told)

    @staticmethod
    def _key(spec: JobSpec) -> Key:
        return (spec.organization, spec.project, spec.idempotency_key)

    @property
    def _acknowledged_keys(self) -> set[Key]:
        return self.acknowledged.keys() | self.by_hand_keys

    async def _create_recorded(self, name: str, spec: JobSpec, *, other_request: bool = False) -> None:
        key, shape = self._key(spec), spec.payload["shape"]
        variant = "other" if other_request and key in self._acknowledged_keys else "first"
        if variant == "other":
            spec = spec.model_copy(update={"payload": spec.payload | {"question": "Another one?"}})

        def answer(made: CreatedJob) -> dict[str, Any]:
            return told(made.job) | {"created": made.created}

        create: Callable[[], Awaitable[CreatedJob]] = lambda: self.jobs.service.create_job(spec)  # noqa: E731
        made = await self.history.call(name, "create", {"key": key, "variant": variant}, create, answer)
        if key not in self._acknowledged_keys:
            self.known.append((made.job.id, shape))
            if shape != BY_HAND:
                # As `DurableJobs.create_job` does next. Temporal may be away: then the launch sweep starts it.
                self.launches.append(asyncio.create_task(self.jobs.handle(made.job.id).launch()))
        if shape == BY_HAND:
            self.by_hand_keys.add(key)
        else:
            self.acknowledged.setdefault(key, made.job.id)

    # Working by hand

    async def _work(self, name: str, research: ResearchProvider, chance: random.Random) -> None:
        """Claim, mark, send, complete; until the run is over and nothing is left to claim."""
        worker = f"{name}:{os.getpid()}:{uuid4().hex[:8]}"
        while not (self.over and await self.answered(self._nothing_left)):
            outcome = await self._claim(name, worker)
            if not outcome or outcome.job is None:
                await asyncio.sleep(chance.uniform(0, 4 * PAUSE_SECONDS))
                continue
            assert outcome.claim is not None
            try:
                await self._attempt(name, outcome.claim, outcome.job, research, chance)
            except (DurableJobsError, httpx.HTTPError) as error:
                self.counts[f"by hand: {type(error).__name__}"] += 1  # left to whoever comes next
            finally:
                self.sending.discard(outcome.claim)

    async def _attempt(
        self, name: str, claim: Claim, job: Job, research: ResearchProvider, chance: random.Random
    ) -> None:
        service, at = self.jobs.service, {"id": str(claim.job_id), "generation": claim.generation}
        call = self.history.call
        await self._dawdle(chance)
        if chance.random() < 0.3:
            renew: Callable[[], Awaitable[Any]] = lambda: service.renew_lease(claim)  # noqa: E731
            await call(name, "renew", at, renew, lambda it: {"lease": str(it)})
        key = operation_key(BY_HAND, job.id)
        mark: Callable[[], Awaitable[Job]] = lambda: service.mark_provider_dispatched(  # noqa: E731
            claim, key, consequential=False
        )
        self.sending.add(claim)
        try:
            await call(name, "mark", at | {"operation_key": key}, mark, told)
        except CancellationRequested:
            acknowledge: Callable[[], Awaitable[Job]] = lambda: service.acknowledge_cancellation(claim)  # noqa: E731
            await call(name, "acknowledge", at, acknowledge, told)
            return
        # An unknown answer raises: then nothing is sent.
        await self._dawdle(chance)
        try:
            report = await research.run(ResearchRequest(question=job.payload["question"]), key=key)
        finally:
            self.sending.discard(claim)
        await self._dawdle(chance)
        result = report.model_dump(mode="json")
        complete: Callable[[], Awaitable[Any]] = lambda: service.complete_job(claim, result)  # noqa: E731
        for _ in range(20):
            with suppress(StoreUnavailable):
                await call(name, "complete", at | {"result": result}, complete, lambda it: told(it.job))
                return
            await asyncio.sleep(0.2)

    async def _claim(self, name: str, worker: str) -> ClaimOutcome | None:
        """Repeated with the same token while nobody answers."""
        token = uuid4()
        claim = self.jobs.service.claim_job

        def told_of_claim(outcome: ClaimOutcome | None) -> dict[str, Any] | None:
            return told(outcome.job) | {"granted": bool(outcome)} if outcome and outcome.job else None

        return await self.answered(
            lambda: self.history.call(
                name,
                "claim",
                {"worker": worker, "token": str(token)},
                lambda: claim(worker, token, queues=[BY_HAND]),
                told_of_claim,
            )
        )

    async def _dawdle(self, chance: random.Random) -> None:
        """Mostly not at all; else at times longer than the lease."""
        if chance.random() < 0.15:
            await asyncio.sleep(chance.uniform(0, DAWDLING_SECONDS))

    async def _hand_jobs(self, *statuses: JobStatus) -> list[JobHead]:
        page = await self.jobs.service.list_jobs(queue=BY_HAND, statuses=statuses or None, limit=1000)
        return page.items

    async def _nothing_left(self) -> bool:
        jobs = await self._hand_jobs()
        return all(job.status in SETTLED and not job.follow_ups_due for job in jobs)

    async def _account(self, name: str) -> None:
        """No worker hosts these jobs, so no sweep looks them up: what is uncertain of them is told as by a webhook,
        and resolved by an operator where the call never left and its sender has given up."""
        while not (self.over and await self.answered(self._nothing_left)):
            await asyncio.sleep(0.5)
            with suppress(StoreUnavailable):
                for job in await self._hand_jobs(JobStatus.INDETERMINATE):
                    with suppress(NotResolvable):
                        await self._settle(name, job)
                for each in await self._hand_jobs(JobStatus.COMPLETED):
                    if each.follow_ups_due:
                        parent = await self.jobs.service.get_job(each.id)
                        await self.jobs.service.create_follow_ups_due(parent, lambda _: ([], None), name)
                for job in await self._hand_jobs(JobStatus.CLAIMED, JobStatus.RUNNING):
                    if job.cancel_requested_at is not None and not self._may_send(job):
                        await self._claim_by_id(name, job)

    async def _claim_by_id(self, name: str, job: JobHead) -> None:
        """A lost one whose cancellation is requested is no claimer's next job: asked for by id, it lands."""
        token = uuid4()
        arguments = {"id": str(job.id), "worker": name, "token": str(token)}
        claim = self.jobs.service.claim_job
        await self.history.call(
            name,
            "claim",
            arguments,
            lambda: claim(name, token, job_id=job.id),
            lambda it: told(it.job) | {"granted": bool(it)} if it and it.job else None,
        )

    def _may_send(self, job: JobHead) -> bool:
        return any(claim.job_id == job.id for claim in self.sending)

    async def _settle(self, name: str, job: JobHead) -> None:
        if self._may_send(job) or job.operation_key is None:
            return
        state = await self.operation(job)
        evidence = {"provider": state["state"], "operation_key": job.operation_key}
        service, at = self.jobs.service, {"id": str(job.id)}
        match state["state"]:
            case "succeeded":
                verdict, result = JobStatus.COMPLETED, state["result"]
            case "absent":
                verdict, result = JobStatus.FAILED, None
            case _:
                return
        resolve: Callable[[], Awaitable[Job]] = lambda: service.resolve_job(  # noqa: E731
            job.id, verdict, evidence, name, result=result
        )
        await self.history.call(name, "resolve", at | {"verdict": str(verdict)}, resolve, told)


def told(job: Job) -> dict[str, Any]:
    """What an answer says of the row."""
    return {
        "id": str(job.id),
        "status": str(job.status),
        "generation": job.lease_generation,
        "intent": job.intent_number,
    }


def hand_spec(chance: random.Random, number: int) -> JobSpec:
    organization, project = chance.choice(PROJECTS)
    return JobSpec(
        organization=organization,
        project=project,
        queue=BY_HAND,
        job_type=BY_HAND,
        idempotency_key=f"hand-{number}",
        payload={"shape": BY_HAND, "question": "What is the water cycle?"},
        lease_seconds=1,
        timeout_seconds=60,
        max_attempts=1000,
    )
