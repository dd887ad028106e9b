"""The lease keeper: one thread and one connection for each worker, renewing the leases of the attempts it runs, and
the worker's own heartbeat in the registry.

On a thread of its own, so that a handler that holds the event loop doesn't lose its leases; in one statement for all
of them, whatever their number.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from uuid import UUID

import psycopg

from durable_jobs.contract.models import Claim, Job
from durable_jobs.service.registry import HEARTBEAT_SECONDS
from durable_jobs.store.database import BEGIN, CONNECT_ARGS, hang_up
from durable_jobs.store.jobs import renewal
from durable_jobs.store.migrate import conninfo
from durable_jobs.store.registry import BEAT, COUNT, counts
from durable_jobs.store.statements import RENEW, RENEW_ALL, statement
from durable_jobs.store.sweeps import SweepStore
from durable_jobs.temporal.tally import Tally

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 6
RECONNECT_SECONDS = 1.0
ANSWER_SECONDS = 15.0
"""How long a tick may take before its connection is given up for a new one: a quarter of a default lease."""
NEVER = float("inf")


class HeldLease:
    """One attempt's lease, as the keeper knows it. Read on the event loop; written there by the keeper's calls."""

    def __init__(self, claim: Claim, lease_seconds: float, changed: Callable[[], None]) -> None:
        self.claim = claim
        self.lease_seconds = lease_seconds
        self.lost = False
        self.cancel_requested = False
        self.expires = time.monotonic() + lease_seconds
        """On this process's monotonic clock: no earlier than the row's expiry by more than a round trip."""
        self._changed = changed

    def tell(self, answer: str, asked_at: float) -> None:
        """Take in what a renewal that began at `asked_at` answered."""
        if answer in ("held", "cancel_requested"):
            self.expires = asked_at + self.lease_seconds
        if answer == "cancel_requested":
            self.request_cancellation()
        elif answer == "lost" and not self.lost:
            self.lost = True
            self._changed()

    def request_cancellation(self) -> None:
        """Cancellation of the job was requested; from whoever saw it first."""
        if not self.cancel_requested:
            self.cancel_requested = True
            self._changed()


class LeaseKeeper:
    """Renews every held lease each sixth of the shortest one. `hold` and `drop` from the event loop."""

    def __init__(
        self, database_url: str, schema: str, worker_id: str, queue: str, grace_seconds: float, tally: Tally
    ) -> None:
        self._conninfo = conninfo(database_url)
        self._sql = statement(RENEW, schema, **RENEW_ALL)
        self._beat_sql = SweepStore(schema).sql(BEAT)
        self._count_sql = SweepStore(schema).sql(COUNT)
        self._worker_id = worker_id
        self._queue = queue
        self._tally = tally
        self._lag = 0.0
        self._grace_seconds = grace_seconds
        self._held: dict[tuple[UUID, int], HeldLease] = {}
        self._lock = threading.Lock()
        self._stirred = threading.Event()
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="durable-jobs-lease-keeper", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Returns when the thread has ended; whatever is still held is not renewed again."""
        self._stopped = True
        self._stirred.set()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def hold(self, claim: Claim, job: Job, changed: Callable[[], None]) -> HeldLease:
        """Renew this lease from now on; `changed` is called on the event loop when it is lost or to be cancelled."""
        held = HeldLease(claim, job.lease_seconds, changed)
        with self._lock:
            self._held[claim.job_id, claim.generation] = held
        self._stirred.set()
        return held

    def drop(self, held: HeldLease) -> None:
        """The attempt has ended: its lease is not renewed again."""
        with self._lock:
            self._held.pop((held.claim.job_id, held.claim.generation), None)

    def _run(self) -> None:
        connection: psycopg.Connection | None = None
        beat_due = time.monotonic()
        renewal_due = NEVER
        while not self._stopped:
            held = self._snapshot()
            tick = min((lease.lease_seconds for lease in held), default=HEARTBEAT_SECONDS) / RENEWALS_PER_LEASE
            # A new lease may be the shortest. Its claim has just set it, so it is not due before its own sixth.
            renewal_due = min(renewal_due, time.monotonic() + tick) if held else NEVER
            if self._stirred.wait(max(0.0, min(renewal_due, beat_due) - time.monotonic())):
                self._stirred.clear()
                continue
            now = time.monotonic()
            # Those still held: an attempt that ended meanwhile is not renewed once more.
            held = self._snapshot()
            try:
                if connection is None or connection.closed:
                    connection = psycopg.connect(self._conninfo, autocommit=True, **CONNECT_ARGS)
                with _answered(connection):
                    if now >= renewal_due:
                        due, renewal_due = renewal_due, now + tick
                        if held:
                            self._renew(connection, held)
                            self._lag = max(self._lag, time.monotonic() - due)
                    if now >= beat_due:
                        beat_due = now + HEARTBEAT_SECONDS
                        self._beat(connection, len(held))
            except Exception as error:  # whatever it is, such as a limit on threads: leases are lost without this one
                logger.warning(
                    "The keeper of %d leases could not write, and tries again at its next tick: %r", len(held), error
                )
                _close(connection)
                connection = None
                # A database that comes back is not met by a storm of connections.
                pause = now + min(tick, RECONNECT_SECONDS)
                renewal_due, beat_due = (max(due, pause) for due in (renewal_due, beat_due))
        if connection is not None:
            with contextlib.suppress(psycopg.Error), _answered(connection):
                self._beat(connection, 0)
        _close(connection)

    def _beat(self, connection: psycopg.Connection, running: int) -> None:
        lag, self._lag = self._lag, 0.0
        connection.execute(
            self._beat_sql, {"id": self._worker_id, "running": running, "keeper_lag_seconds": round(lag, 3)}
        )
        counted = self._tally.take()
        try:
            if counted:
                by_name = {(name, ""): number for name, number in counted.items()}
                connection.execute(self._count_sql, counts(self._queue, by_name))
        except psycopg.Error:
            self._tally.give_back(counted)
            raise

    def _snapshot(self) -> list[HeldLease]:
        with self._lock:
            return list(self._held.values())

    def _renew(self, connection: psycopg.Connection, held: list[HeldLease]) -> None:
        asked_at = time.monotonic()
        parameters = renewal(self._worker_id, [lease.claim for lease in held], self._grace_seconds)
        connection.execute(BEGIN)
        rows = connection.execute(self._sql, parameters).fetchall()
        connection.execute("COMMIT")
        answers = {(job_id, generation): answer for job_id, generation, answer in rows}
        assert self._loop is not None
        for lease in held:
            answer = answers[lease.claim.job_id, lease.claim.generation]
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody is left to tell
                self._loop.call_soon_threadsafe(lease.tell, answer, asked_at)


@contextlib.contextmanager
def _answered(connection: psycopg.Connection) -> Iterator[None]:
    """Within it a server that says nothing is hung up on, after `ANSWER_SECONDS`."""
    patience = threading.Timer(ANSWER_SECONDS, hang_up, [connection])
    patience.daemon = True
    patience.start()
    try:
        yield
    finally:
        patience.cancel()


def _close(connection: psycopg.Connection | None) -> None:
    if connection is not None:
        with contextlib.suppress(psycopg.Error):
            connection.close()
