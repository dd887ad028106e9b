"""Ready lookups: providers that can be asked what became of a call by the caller's own operation key.

Each module but this one needs its provider's client, an optional extra; importing this one loads none of them.

    class Summarize(JobHandler[Request, Report]):
        async def run(self, job, request):
            async with job.dispatch(f"summary:{job.id}") as operation_key:
                sent = await self.provider.send(operation_key, {"model": …, "messages": …})
            return await sent.result(job)

        async def provider_state(self, operation_key, job):
            return await self.provider.state(operation_key, job.dispatched_at)
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar, cast

from durable_jobs.contract.backoff import doubled
from durable_jobs.contract.errors import JobFailed, LeaseLost, StoreUnavailable
from durable_jobs.contract.models import JobError, LeaseStatus
from durable_jobs.contract.provider import ProviderAnswer, ProviderState
from durable_jobs.handler import JobContext

__all__ = ["NotVisibleYet", "OutcomeUnclear", "Provider", "Sent"]

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

LONGEST_POLL = 30.0
LONGEST_BEAT = 600.0
LOOKS = 5
"""So many looks in a row may fail before a wait gives up."""


class NotVisibleYet(Exception):
    """The provider shows nothing under the key, but may be late in showing what it has: no answer. To be asked again,
    as a sweep does with each lookup that raises."""


class OutcomeUnclear(Exception):
    """The provider can't say what became of an operation that it had accepted."""


class Sent(Generic[ResultT]):
    """An operation that the provider has accepted. It may still be at work."""

    def __init__(self, reference: str, look: Callable[[], Awaitable[ProviderState[ResultT]]]) -> None:
        self.reference = reference
        """The provider's own name for the operation, such as a batch's id."""
        self._look = look

    async def state(self) -> ProviderState[ResultT]:
        """What the provider says of the operation now. It only reads; raises what the provider's client does."""
        return await self._look()

    async def result(self, job: JobContext, *, longest_poll: float = LONGEST_POLL) -> ResultT:
        """Wait for the end of the operation, and return its result.

        Looks at once, then after pauses that double from half a second up to `longest_poll` seconds. Meanwhile
        heartbeats leave the operation's reference on the job's trail: one at once, then after pauses that double from
        half a minute up to ten. The job's own `timeout_seconds` limits the wait: give it more than the provider may
        take. A worker that shuts down ends the wait as well, and the sweep then finds the result under the key.

        Raises `JobFailed(retryable=False)` when the operation failed for good; `OutcomeUnclear` when the provider no
        longer knows; what the look raised when several in a row did; `LeaseLost`.
        """
        watch = _Watch(job, self.reference)
        polls = failures = 0
        while True:
            try:
                state, failures = await self._look(), 0
            except Exception as error:
                failures += 1
                if failures == LOOKS:
                    raise
                logger.info("Job %s: %s could not be looked at, trying again: %r", job.id, self.reference, error)
            else:
                if state.answer is not ProviderAnswer.PENDING:
                    return _settled(state)
            await watch.beat()
            polls += 1
            await asyncio.sleep(doubled(0.5, polls, longest_poll))


class Provider(Protocol[ResultT]):
    """A provider under whose operation keys calls can be found again.

    Each implementation's docstring says what its answers prove, for how long, and from which source.
    """

    async def send(self, operation_key: str, request: dict[str, Any]) -> Sent[ResultT]:
        """Send the request, once, under the key; return as soon as the provider has accepted it.

        The key must be unique at the provider, which knows no projects: let it hold the job's id.

        To be called inside `job.dispatch()`. Raises `JobFailed(retryable=False)` only where nothing was or will be
        done: the provider itself refused (`PROVIDER_REFUSED`), the key is another's there (`OPERATION_KEY_TAKEN`), or
        something failed before the call that starts the operation (`NOT_SENT`). All else (a broken connection, a
        timeout, a 5xx, an answer that can't be read) may hide a call that landed, and is raised as it comes.
        """
        ...

    async def state(self, operation_key: str, dispatched_at: datetime | None) -> ProviderState[ResultT]:
        """Ask the provider what became of the key. It only reads.

        `dispatched_at` is the job's own: the provider is searched from then on, and how long ago it was decides what an
        empty answer proves. Raises `NotVisibleYet` and what the provider's client raises.
        """
        ...


class _Watch:
    """Heartbeats of a wait: they name what is waited for, and find out whether anybody still wants it."""

    def __init__(self, job: JobContext, reference: str) -> None:
        self._job = job
        self._reference = reference
        self._started = time.monotonic()
        self._due = self._started
        self._beats = 0

    async def beat(self) -> None:
        """Heartbeat if one is due. Raises `LeaseLost`; a database that is away is no reason to stop waiting."""
        now = time.monotonic()
        if now < self._due:
            return
        self._beats += 1
        self._due = now + doubled(30.0, self._beats, LONGEST_BEAT)
        details = {"waiting_for": self._reference, "seconds": round(now - self._started)}
        with suppress(StoreUnavailable):
            if await self._job.heartbeat(details) is LeaseStatus.LOST:
                raise LeaseLost(f"job {self._job.id}: its lease was lost while it waited for {self._reference}")


def _settled(state: ProviderState[ResultT]) -> ResultT:
    match state.answer:
        case ProviderAnswer.SUCCEEDED:
            return cast("ResultT", state.result)
        case ProviderAnswer.FAILED:
            error = state.error or JobError.of("PROVIDER_FAILED", "the provider reports failure")
            raise JobFailed(error.message, retryable=False, code=error.code)
    raise OutcomeUnclear(state.reason or "the provider knows of no such operation any more")
