"""The `JobContext` of a running attempt, and the dispatch boundary as the handler crosses it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from enum import Enum, auto
from typing import Any

from durable_jobs.contract.admission import trusted_identity
from durable_jobs.contract.envelope import ExecutionIdentity, MalformedEnvelope
from durable_jobs.contract.errors import (
    AdmissionRefused,
    AlreadyDispatched,
    LeaseLost,
    RetryTransaction,
    StoreUnavailable,
)
from durable_jobs.contract.models import Claim, Job, LeaseStatus
from durable_jobs.handler import JobContext, JobHandler, ShadowPolicy
from durable_jobs.service import DurableJobService
from durable_jobs.temporal.keeper import HeldLease

logger = logging.getLogger(__name__)

MARK_TRIES = 4
SHADOW_SECONDS = 5.0


class Boundary(Enum):
    """Where the attempt stands; changed without a wait in between, so that nothing slips past an interrupt."""

    BEFORE = auto()
    CROSSING = auto()
    PAST = auto()


class AttemptContext(JobContext):
    """One attempt's context, on the worker's event loop."""

    def __init__(
        self,
        service: DurableJobService,
        claim: Claim,
        job: Job,
        handler: JobHandler[Any, Any],
        lease: HeldLease,
        shadow: ShadowPolicy | None = None,
    ) -> None:
        self.id = job.id
        self.organization = job.organization_id
        self.project = job.project_id
        self.attempt = job.attempt_count
        self.generation = claim.generation
        self.intent = job.intent_number
        self.identity = _identity(job)
        self.boundary = Boundary.BEFORE
        self.said_nothing_sent = False
        self.acknowledged: Job | None = None
        self.refused: AdmissionRefused | None = None
        """Why the dispatch was not admitted: the end of the attempt, whatever the handler makes of it."""
        self._service = service
        self._claim = claim
        self._handler = handler
        self._job = job
        self._shadow = shadow
        self._lease = lease
        self._dispatched = False
        self._closed = False
        self._shutting_down = False

    @property
    def cancel_requested(self) -> bool:
        return self._lease.cancel_requested

    @property
    def shutting_down(self) -> bool:
        return self._shutting_down

    def set_shutting_down(self) -> None:
        self._shutting_down = True

    def close(self) -> None:
        """The attempt ends: from here on nothing may be dispatched."""
        self._closed = True

    async def heartbeat(self, details: dict[str, Any] | None = None) -> LeaseStatus:
        if self._closed:
            return LeaseStatus.LOST
        try:
            status = await self._service.heartbeat(self._claim, details)
        except (StoreUnavailable, RetryTransaction) as error:
            # Progress is for those who watch: it must not end a provider's call. Leases are the keeper's.
            logger.warning("Job %s: its progress could not be recorded: %s", self.id, error)
            return LeaseStatus.LOST if self._lease.lost else LeaseStatus.HELD
        if status is LeaseStatus.CANCEL_REQUESTED:
            self._lease.request_cancellation()
        return status

    def nothing_sent(self) -> None:
        self.said_nothing_sent = True

    async def acknowledge_cancellation(self, provider_confirmed: dict[str, Any] | None = None) -> None:
        self.acknowledged = await self._service.acknowledge_cancellation(self._claim, provider_confirmed)

    def dispatch(self, key: str) -> AbstractAsyncContextManager[str]:
        return self._dispatch(key)

    @asynccontextmanager
    async def _dispatch(self, key: str) -> AsyncIterator[str]:
        if self._dispatched:
            raise AlreadyDispatched("one dispatch() per attempt: two provider calls are two jobs")
        if self._closed or self._lease.lost:
            raise LeaseLost(f"job {self.id}: the attempt of generation {self.generation} has ended")
        self._dispatched = True
        self.boundary = Boundary.CROSSING
        operation_key = f"{key}:retry-{self.intent}" if self.intent else key
        # Until the mark is known to be refused the boundary counts as crossed: the row may hold it.
        marking = asyncio.create_task(self._mark(operation_key))
        try:
            await asyncio.shield(marking)
        finally:
            await _ended(marking)
            error = marking.exception()
            # Only a database that did not answer leaves it open whether the row holds the mark.
            self.boundary = Boundary.PAST if error is None or isinstance(error, StoreUnavailable) else Boundary.BEFORE
            if isinstance(error, AdmissionRefused):
                self.refused = error
        yield operation_key

    async def _mark(self, operation_key: str) -> None:
        """Mark the boundary, also through a lost reply: our own mark found on the row is the one that was sent."""
        if self._shadow is not None:
            await self._run_shadow(self._shadow)
        for tries in range(MARK_TRIES):
            try:
                if tries and await self._own_mark(operation_key):
                    return
                await self._service.mark_provider_dispatched(
                    self._claim, operation_key, consequential=self._handler.consequential
                )
                return
            except StoreUnavailable:
                if tries == MARK_TRIES - 1 or self._lease.lost or time.monotonic() > self._lease.expires:
                    raise
                await asyncio.sleep(0.1 * 2**tries)
            except AlreadyDispatched:
                if tries in (0, MARK_TRIES - 1):
                    raise

    async def _run_shadow(self, policy: ShadowPolicy) -> None:
        """Leave on the trail what the policy in shadow would have decided; it decides nothing, nor does its failure.

        It gets a job of its own, a thread of its own, and so many seconds.
        """
        copied = self._job.model_copy(deep=True)
        asking = asyncio.create_task(asyncio.to_thread(policy, copied))
        await asyncio.wait({asking}, timeout=SHADOW_SECONDS)
        try:
            if not asking.done():
                raise TimeoutError(f"no answer within {SHADOW_SECONDS:g} s")
            decision = asking.result()
            data = {"allowed": decision.allowed, "reasons": list(decision.reasons), "policy": decision.policy}
            await self._service.record_shadow(self._claim, data)
        except (Exception, asyncio.CancelledError):
            logger.exception("Job %s: the policy in shadow failed", self.id)

    async def _own_mark(self, operation_key: str) -> bool:
        job = await self._service.get_job(self.id)
        return (
            job.holds(self._claim)
            and job.dispatched_generation == self.generation
            and job.operation_key == operation_key
            and bool(await self._service.renew_lease(self._claim))
        )


def _identity(job: Job) -> ExecutionIdentity | None:
    """For the handler to read; whether it allows a dispatch is decided on the row, at the boundary."""
    try:
        return trusted_identity(job)
    except MalformedEnvelope:
        return None


async def _ended(task: "asyncio.Task[None]") -> None:
    """Wait for the task, however often the waiting itself is cancelled."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
