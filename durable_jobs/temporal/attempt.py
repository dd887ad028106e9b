"""One attempt at one job: claim, run the handler, write the outcome. Every write is fenced by the claim's generation.

The handler runs in a task of its own. Before the boundary it is interrupted when the attempt has to end; past the
boundary never, until the outcome that ends it is written: an exception there would make a landed call look failed.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar
from uuid import UUID, uuid4

from pydantic import ValidationError

from durable_jobs.contract.envelope import raw_payload
from durable_jobs.contract.errors import (
    AdmissionRefused,
    CancellationRequested,
    HaltUnsafe,
    IllegalTransition,
    JobFailed,
    LeaseLost,
    NotStorable,
    OperationKeyConflict,
    RetryTransaction,
    StoreUnavailable,
)
from durable_jobs.contract.models import Claim, ClaimOutcome, ClaimRefusal, Job, JobError
from durable_jobs.contract.rules import evidence_of, storable_text
from durable_jobs.contract.specs import FollowUp
from durable_jobs.handler import JobHandler, ShadowPolicy
from durable_jobs.service import DurableJobService
from durable_jobs.service.sweep import named_follow_ups
from durable_jobs.temporal.context import AttemptContext, Boundary
from durable_jobs.temporal.keeper import HeldLease, LeaseKeeper
from durable_jobs.temporal.tally import Counted, Tally

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNWIND_SECONDS = 5.0
"""How long an interrupted handler has to clean up before the outcome is written without waiting for it."""


class Interrupt(Enum):
    """Why an attempt ends although its handler has not."""

    CANCELLED = auto()
    LEASE_LOST = auto()
    TIMEOUT = auto()
    SHUTDOWN = auto()


@dataclass(frozen=True)
class Ended:
    """How the attempt ended: the row as written, None where the lease was lost, and the follow-ups to launch."""

    job: Job | None
    follow_ups: tuple[Job, ...] = ()


class Attempt:
    """Runs on the worker's event loop. `shut_down` may be called at any time; `run` once, with a fresh claim."""

    def __init__(
        self,
        service: DurableJobService,
        keeper: LeaseKeeper,
        handler: JobHandler[Any, Any],
        claim: Claim,
        job: Job,
        tally: Tally,
        shadow: ShadowPolicy | None = None,
    ) -> None:
        self._service = service
        self._tally = tally
        self._handler = handler
        self._claim = claim
        self._job = job
        self._keeper = keeper
        self._started = time.monotonic()
        self._stirred = asyncio.Event()
        self._grace_ends: float | None = None
        self._lease: HeldLease = keeper.hold(claim, job, self._stirred.set)
        try:
            self._context = AttemptContext(service, claim, job, handler, self._lease, shadow)
        except BaseException:
            keeper.drop(self._lease)
            raise

    def shut_down(self) -> None:
        """The worker stops: the handler runs on through the grace period, then the attempt ends."""
        if self._grace_ends is None:
            self._grace_ends = time.monotonic() + self._service.grace_seconds
            self._context.set_shutting_down()
            self._stirred.set()

    async def run(self) -> Ended:
        """Carry the attempt to its outcome. Raises `StoreUnavailable` when the outcome could not be written before
        the lease was gone: the row then goes the way of an expired lease."""
        try:
            return await self._run()
        except LeaseLost as lost:
            self._tally.add(Counted.STALE_REFUSALS)
            logger.info("Job %s: LEASE_LOST, changing nothing: %s", self._job.id, lost)
            return Ended(None)
        finally:
            self._keeper.drop(self._lease)

    async def _run(self) -> Ended:
        try:
            request = self._handler.parse_request(raw_payload(self._job.payload))
        except ValidationError as error:
            problems = JobError.of("PAYLOAD_INVALID", error, type="ValidationError")
            return await self._write(lambda: self._service.fail_job(self._claim, problems, retryable=False))
        except Exception as error:
            broke = _described("HANDLER_ERROR", error)
            return await self._write(lambda: self._service.fail_job(self._claim, broke, retryable=True))
        task = asyncio.create_task(self._handler.run(self._context, request), name=f"job {self._job.id}")
        interrupt = await self._watch(task)
        if self._context.acknowledged is not None:
            await self._unwind(task)
            return Ended(self._context.acknowledged)
        if interrupt is None:
            return await self._finish(task)
        return await self._interrupted(task, interrupt)

    async def _watch(self, task: "asyncio.Task[Any]") -> Interrupt | None:
        """Wait until the handler is done (None), or the attempt has to end without it."""
        while not task.done():
            interrupt, wakes_at = self._judge()
            if interrupt is not None:
                return interrupt
            stirred = asyncio.create_task(self._stirred.wait())
            timeout = max(0.0, wakes_at - time.monotonic())
            await asyncio.wait({task, stirred}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            stirred.cancel()
            self._stirred.clear()
        return None

    def _judge(self) -> tuple[Interrupt | None, float]:
        """Whether to end now, and when to look again at the latest (monotonic seconds)."""
        now = time.monotonic()
        past = self._context.boundary is Boundary.PAST
        deadline = self._started + self._job.timeout_seconds
        if self._context.boundary is Boundary.CROSSING:
            return None, now + 0.05  # the mark is under way: a statement, soon answered
        if self._lease.lost and not past:
            return Interrupt.LEASE_LOST, now
        if self._lease.cancel_requested and not past:
            return Interrupt.CANCELLED, now
        if now >= deadline:
            return Interrupt.TIMEOUT, now
        if self._grace_ends is not None and now >= self._grace_ends:
            return Interrupt.SHUTDOWN, now
        return None, min(deadline, self._grace_ends or deadline)

    async def _interrupted(self, task: "asyncio.Task[Any]", interrupt: Interrupt) -> Ended:
        past = self._context.boundary is Boundary.PAST
        self._context.close()
        if not past:
            await self._unwind(task)
        try:
            return await self._write(self._ending(interrupt, past))
        finally:
            await self._unwind(task)

    def _ending(self, interrupt: Interrupt, past: bool) -> Callable[[], Awaitable[Job]]:
        service, claim = self._service, self._claim
        if interrupt is Interrupt.LEASE_LOST:
            raise LeaseLost(f"job {self._job.id}: the keeper found generation {claim.generation} fenced")
        if interrupt is Interrupt.CANCELLED:
            return lambda: service.acknowledge_cancellation(claim)
        if interrupt is Interrupt.TIMEOUT:
            error = JobError.of("HANDLER_TIMEOUT", f"the handler ran longer than {self._job.timeout_seconds:g} s")
            if past:
                return lambda: service.mark_timed_out(claim, error)
            return lambda: service.fail_job(claim, error, retryable=True)
        if past:
            error = JobError.of("WORKER_SHUTDOWN", "the worker's grace period ended past the boundary")
            return lambda: service.mark_indeterminate(claim, error)
        return lambda: service.release_job(claim, "shutdown")

    async def _unwind(self, task: "asyncio.Task[Any]") -> None:
        """Interrupt the handler and give it a moment to clean up; whatever it raises has no say any more."""
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=UNWIND_SECONDS)
        if not task.done():
            logger.warning("Job %s: its handler goes on although its attempt has ended", self._job.id)
        elif not task.cancelled() and (error := task.exception()):
            logger.info("Job %s: its handler ended with %r after its attempt had", self._job.id, error)

    async def _finish(self, task: "asyncio.Task[Any]") -> Ended:
        """The handler is done: its result or its exception decides."""
        if self._context.refused is not None:
            return await self._refused(self._context.refused, task)
        try:
            result = task.result()
        except CancellationRequested:
            return await self._write(lambda: self._service.acknowledge_cancellation(self._claim))
        except LeaseLost:
            raise
        except HaltUnsafe as error:
            halted = _described(error.code, error)
            return await self._write(lambda: self._service.mark_halt_unsafe(self._claim, halted))
        except JobFailed as error:
            failed, retryable = _described(error.code, error), error.retryable
            return await self._write(lambda: self._service.fail_job(self._claim, failed, retryable=retryable))
        except OperationKeyConflict as error:
            # No other try can mend it, and nothing was sent.
            taken = JobError.of(error.code, error.message, type=type(error).__name__)
            return await self._write(lambda: self._service.fail_job(self._claim, taken, retryable=False))
        except (Exception, asyncio.CancelledError) as error:
            raised = _described("HANDLER_ERROR", error)
            return await self._write(lambda: self._service.fail_job(self._claim, raised, retryable=True))
        return await self._completed(result)

    async def _refused(self, refusal: AdmissionRefused, task: "asyncio.Task[Any]") -> Ended:
        """The dispatch was not admitted: nothing was sent, and what the handler made of it has no say."""
        await self._unwind(task)
        return await self._write(lambda: self._service.refuse_dispatch(self._claim, refusal))

    async def _completed(self, result: object) -> Ended:
        past = self._context.boundary is Boundary.PAST
        if self._lease.cancel_requested and not past:
            return await self._write(lambda: self._service.acknowledge_cancellation(self._claim))
        if self._handler.consequential and not past and not self._context.said_nothing_sent:
            error = JobError.of("DISPATCH_NOT_RECORDED", "a consequential handler returned without having dispatched")
            return await self._write(lambda: self._service.mark_indeterminate(self._claim, error))
        try:
            dumped: Any = self._handler.dump_result(result)
        except Exception as error:
            return await self._unstorable(error, result)
        follow_ups, problem = named_follow_ups(self._handler, self._job.model_copy(update={"result": dumped}))
        created: list[Job] = []

        async def complete() -> Job:
            completion = await self._service.complete_job(self._claim, dumped, follow_ups, follow_up_problem=problem)
            created.extend(answer.job for answer in completion.follow_ups)
            return completion.job

        try:
            ended = await self._write(complete)
        except NotStorable as error:
            return await self._unstorable(error, dumped)
        if ended.job is not None and not created and follow_ups:
            # The reply that named them was lost.
            created = await self._existing(ended.job, follow_ups)
        return Ended(ended.job, tuple(created))

    async def _existing(self, parent: Job, follow_ups: list[FollowUp]) -> list[Job]:
        """The follow-ups as the table has them."""
        found: list[Job] = []
        for each in follow_ups:
            key = f"{parent.id}:{each.name}"
            if job := await self._service.find_by_idempotency_key(parent.organization_id, parent.project_id, key):
                found.append(job)
        return found

    async def _unstorable(self, problem: Exception, result: object) -> Ended:
        """The result can't be stored: past the boundary the call landed, and a text form is kept as evidence."""
        text = f"{problem}; the result read: {evidence_of(result, 3500)}"
        error = JobError.of(NotStorable.code, text, type=type(result).__name__)
        if self._context.boundary is Boundary.PAST:
            return await self._write(lambda: self._service.mark_indeterminate(self._claim, error))
        return await self._write(lambda: self._service.fail_job(self._claim, error, retryable=False))

    async def _write(self, write: Callable[[], Awaitable[Job]]) -> Ended:
        """Write the outcome, through an absent database until the lease is gone, with the same generation.

        A refusal after a lost reply may be the echo of our own success: the attempt's row tells.
        """
        unsure = False

        async def once() -> Job:
            nonlocal unsure
            try:
                return await write()
            except StoreUnavailable:
                unsure = True
                raise
            except (LeaseLost, IllegalTransition):
                if unsure and await self._own_outcome() is not None:
                    return await self._service.get_job(self._job.id)
                raise

        return Ended(await self._outlast(once))

    async def _own_outcome(self) -> str | None:
        outcome = await self._service.attempt_outcome(self._job.id, self._claim.generation)
        return None if outcome == "lease_expired" else outcome

    async def _outlast(self, call: Callable[[], Awaitable[T]]) -> T:
        pause = 0.1
        while True:
            try:
                return await call()
            except (StoreUnavailable, RetryTransaction) as error:
                if self._lease.lost or time.monotonic() + pause > self._lease.expires:
                    raise
                logger.warning("Job %s: the outcome could not be written, trying again: %s", self._job.id, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, 2.0)


async def claim_for_attempt(
    service: DurableJobService,
    worker_id: str,
    job_id: UUID,
    *,
    organizations: Sequence[str] | None,
    queue: str,
    job_type: str,
) -> ClaimOutcome:
    """Claim the job for a new attempt, if it is of this queue and type. Raises `StoreUnavailable` when the database
    stays away.

    The token is drawn here, in memory: ids and run ids repeat under Temporal's resets, and gave two sends.
    """
    token = uuid4()
    for pause in (0.1, 0.5, 1.0, 2.0, None):
        try:
            outcome = await service.claim_job(
                worker_id, token, job_id=job_id, organizations=organizations, queues=[queue], job_types=[job_type]
            )
            return outcome if outcome is not None else ClaimOutcome(refusal=ClaimRefusal.NOT_FOUND)
        except StoreUnavailable:
            if pause is None:
                raise
            await asyncio.sleep(pause)
    raise AssertionError("unreachable")


def _described(code: str, error: BaseException) -> JobError:
    """An exception as an error of the job; its own text may raise."""
    name = type(error).__name__
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:
        trace = f"{name}, whose traceback can't be told"
    return JobError.of(code, storable_text(error, 4096) or name, type=name, traceback=trace)
