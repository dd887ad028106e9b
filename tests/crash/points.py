"""The numbered points of a worker process, and what becomes of the process at one of them.

A point is a step that leaves the process: a statement or COMMIT on its way to Postgres, by whichever driver object; a
call to Temporal that our side makes, or the completion of an activity or of a workflow task; a request to a provider.
Wrapped at the drivers, so that the library knows nothing of it, and where in it a step comes from makes no difference.

Points are numbered for each role apart, as the roles run side by side. CRASH_POINT is `<role>:<number>:<act>`:

    before   SIGKILL instead of the step
    after    SIGKILL once the step is done at the other end, before anybody here has seen the reply
    stop     SIGSTOP instead of the step; whoever sends SIGCONT lets the process go on with it

Each point is printed as it is passed: `point <role> <number> <open or done> <what>`; open are those whose effect still
hangs on a COMMIT, so that to die after one is to die before the next.
"""

import functools
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx
import psycopg
import temporalio.bridge.worker
import temporalio.client
import temporalio.service
from psycopg.pq import TransactionStatus
from temporalio import activity
from temporalio.worker import ActivityInboundInterceptor, ExecuteActivityInput, Interceptor

from durable_jobs.contract.rules import RESERVED_QUEUE_SUFFIX
from durable_jobs.temporal import messages

POINT_VARIABLE = "CRASH_POINT"

STORY, SWEEP, LAUNCH, KEEPER, HOST, IDLE = "story", "sweep", "launch", "keeper", "host", "idle"
"""A job's own workflow and activities; the two activities of the scheduled sweep; the thread that renews leases; what
the worker does beside them, its start, its end and its listener among it; and what comes with the time alone."""

_SWEEPS = {messages.RECONCILIATION_SWEEP: SWEEP, messages.LAUNCH_SWEEP: LAUNCH}
_role: ContextVar[str] = ContextVar("role", default=HOST)


@dataclass(frozen=True)
class Target:
    """Where something is to happen, and what."""

    role: str
    number: int
    act: str

    @classmethod
    def parse(cls, text: str) -> "Target":
        role, number, act = text.split(":")
        return cls(role, int(number), act)

    def __str__(self) -> str:
        return f"{self.role}:{self.number}:{self.act}"


class Points:
    """Counts the points of this process."""

    def __init__(self, target: Target | None) -> None:
        self._target = target
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def around(self, role: str, what: str, step: Callable[[], Awaitable[Any]], *, pending: bool = False) -> Any:
        """Do the step, unless the process is to end here."""
        number = self._before(role, what, pending)
        try:
            return await step()
        finally:
            self._act(role, number, "after")

    def around_now(self, role: str, what: str, step: Callable[[], Any], *, pending: bool) -> Any:
        """`around`, on a thread."""
        number = self._before(role, what, pending)
        try:
            return step()
        finally:
            self._act(role, number, "after")

    def _before(self, role: str, what: str, pending: bool) -> int:
        with self._lock:
            self._counts[role] += 1
            number = self._counts[role]
        _say(f"point {role} {number} {'open' if pending else 'done'} {what}")
        self._act(role, number, "stop")
        self._act(role, number, "before")
        return number

    def _act(self, role: str, number: int, act: str) -> None:
        if self._target == Target(role, number, act):
            _say(f"{'stops' if act == 'stop' else 'dies'} at {self._target}")
            os.kill(os.getpid(), signal.SIGSTOP if act == "stop" else signal.SIGKILL)


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


class TellRole(temporalio.client.Interceptor, Interceptor):
    """Given to the Temporal client: has each activity's work, and all tasks that it starts, know whose it is."""

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:
        """See the base class."""
        return _TellRole(next)


class _TellRole(ActivityInboundInterceptor):
    async def execute_activity(self, input: ExecuteActivityInput) -> Any:
        _role.set(_SWEEPS.get(activity.info().activity_type, STORY))
        return await self.next.execute_activity(input)


def install(target: Target | None) -> None:
    """Put the points round the drivers of this process. Once, before anything is connected."""
    points = Points(target)
    _watch_psycopg(points)
    _watch_temporal(points)
    send = httpx.AsyncClient.send

    async def watched_send(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> Any:
        what = f"provider {request.method} /{request.url.path.split('/')[1]}"
        return await points.around(_role.get(), what, lambda: send(self, request, **options))

    httpx.AsyncClient.send = watched_send  # type: ignore[method-assign, assignment]


def _watch_psycopg(points: Points) -> None:
    execute, execute_now = psycopg.AsyncCursor.execute, psycopg.Cursor.execute

    @functools.wraps(execute)
    async def watched_execute(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        def step() -> Any:
            return execute(self, query, *arguments, **options)

        text = _text(query)
        if _OF_THE_DIALECT.search(text):
            return await step()
        return await points.around(_role.get(), _brief(text), step, pending=_pending(self.connection, text))

    @functools.wraps(execute_now)
    def watched_execute_now(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        text = _text(query)
        # The keeper's thread; a statement outside a transaction is its process's sign of life.
        pending = _pending(self.connection, text)
        role = KEEPER if pending or text == "COMMIT" else IDLE
        return points.around_now(
            role, _brief(text), lambda: execute_now(self, query, *arguments, **options), pending=pending
        )

    psycopg.AsyncCursor.execute = watched_execute  # type: ignore[method-assign]
    psycopg.Cursor.execute = watched_execute_now  # type: ignore[method-assign]
    for name in ("commit", "rollback"):
        setattr(psycopg.AsyncConnection, name, _watched_end(points, getattr(psycopg.AsyncConnection, name), name))


def _watched_end(points: Points, end: Callable[[Any], Awaitable[None]], name: str) -> Callable[[Any], Awaitable[None]]:
    @functools.wraps(end)
    async def watched(self: Any) -> None:
        if self.pgconn.transaction_status == TransactionStatus.IDLE:
            await end(self)  # sends nothing
        else:
            await points.around(_role.get(), name.upper(), lambda: end(self))

    return watched


_OF_THE_DIALECT = re.compile(r"pg_catalog|pg_type|current_schema|^show ", re.IGNORECASE)
"""What SQLAlchemy asks each new connection of its pool."""


def _text(query: object) -> str:
    text = query.decode() if isinstance(query, bytes) else query if isinstance(query, str) else repr(query)
    return " ".join(text.split())


def _brief(text: str) -> str:
    """A statement's verb, and the first table or function of ours that it writes or reads."""
    written = re.search(r"(INSERT INTO|UPDATE) \w+\.(\w+)", text)
    if written:
        return f"{written[1].split()[0]} {written[2]}"
    verb = text.split(maxsplit=1)[0].rstrip(";")
    read = re.search(r"(?:FROM|JOIN) (?:\w+\.)?(\w+)", text)
    return f"{verb} {read[1]}" if read else verb


def _pending(connection: Any, text: str) -> bool:
    """Whether the statement's effect hangs on a COMMIT that is still to come."""
    if text in ("COMMIT", "ROLLBACK"):
        return False
    return text.startswith("BEGIN") or connection.pgconn.transaction_status != TransactionStatus.IDLE


def _watch_temporal(points: Points) -> None:
    service, worker = temporalio.service._BridgeServiceClient, temporalio.bridge.worker.Worker
    call, create = service._rpc_call, worker.create
    complete_activity, complete_task = worker.complete_activity_task, worker.complete_workflow_activation
    queues: dict[int, str] = {}

    async def watched_call(self: Any, rpc: str, *arguments: Any, **options: Any) -> Any:
        return await points.around(_role.get(), f"rpc {rpc}", lambda: call(self, rpc, *arguments, **options))

    def watched_create(client: Any, config: Any) -> Any:
        made = create(client, config)
        queues[id(made)] = config.task_queue
        return made

    def role(core: Any) -> str:
        return IDLE if queues[id(core)].endswith(RESERVED_QUEUE_SUFFIX) else STORY

    async def watched_activity(self: Any, completion: Any) -> None:
        # On the task of the activity, whose role is known; a local activity's end stays within the process.
        await points.around(_role.get(), "activity completion", lambda: complete_activity(self, completion))

    async def watched_task(self: Any, completion: Any) -> None:
        if not completion.successful.commands:
            await complete_task(self, completion)  # such as the eviction of a workflow: nothing is said
            return
        commands = "+".join(str(each.WhichOneof("variant")) for each in completion.successful.commands)
        await points.around(role(self), f"workflow {commands}", lambda: complete_task(self, completion))

    service._rpc_call = watched_call  # type: ignore[method-assign]
    worker.create = staticmethod(watched_create)  # type: ignore[method-assign, assignment]
    worker.complete_activity_task = watched_activity  # type: ignore[method-assign]
    worker.complete_workflow_activation = watched_task  # type: ignore[method-assign]


def passed(log: str, role: str) -> list[tuple[bool, str]]:
    """The points of a role that a process's log tells of: whether each is open, and what it is."""
    return [(state == "open", what) for state, what in re.findall(rf"^point {role} \d+ (open|done) (.+)$", log, re.M)]
