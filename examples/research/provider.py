"""A research provider that can't be trusted to deduplicate: an HTTP server with its own SQLite file.

    python -m examples.research.provider --port 8765 --database provider.sqlite3 --drop-every 10

It records each call it accepts, works on it for a second or two, and records what came of it, also when the client has
gone. What an earlier process accepted and did not finish, the next one finishes: the same call, not a new one.

    POST /research            {"operation_key", "question", "mode"} -> the report. Each accepted call is one row
    GET  /operations/{key}    succeeded with result, failed with error, pending, absent or unknown
    GET  /stats               accepted calls by state and by operation key
    GET, PUT /rules           what to do wrong, a list of `Rule`; lives as long as the process
"""

import argparse
import asyncio
import contextlib
import logging
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import uvicorn
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from examples.research.ledger import Accepted, Ledger
from examples.research.library import Library

Mode = Literal["quick", "deep"]


class Call(BaseModel, extra="forbid"):
    """The body of `POST /research`."""

    operation_key: str = Field(min_length=1, max_length=512)
    question: str = Field(min_length=1, max_length=2000)
    mode: Mode = "quick"


class Rule(BaseModel, extra="forbid"):
    """What becomes of certain calls, and what their client sees of it. Of several rules the first that hits decides."""

    outcome: Literal["succeed", "fail", "forget"] = "succeed"
    """`forget`: accepted, but afterwards nobody can account for it."""
    reply: Literal["answer", "drop", "error"] = "answer"
    """`drop` and `error`: at once after accepting, the connection breaks or a 502 is sent. The work goes on."""
    contains: str = ""
    """Text of the operation key or the question."""
    every: int = Field(default=1, ge=1)
    """Of the calls that match, only each n-th."""
    times: int | None = Field(default=None, ge=1)
    """How often the rule hits before it is spent."""
    seconds: float | None = Field(default=None, ge=0)
    """How long the work takes, in place of the mode's range."""


class Rules:
    """The rules in force, with a count of the calls that each has matched."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules = rules
        self._matched = [0] * len(rules)

    def pick(self, call: Call) -> Rule:
        """The rule for this call; an ordinary one when none hits."""
        for place, rule in enumerate(self.rules):
            if rule.contains not in call.operation_key and rule.contains not in call.question:
                continue
            self._matched[place] += 1
            hits, rest = divmod(self._matched[place], rule.every)
            if rest == 0 and (rule.times is None or hits <= rule.times):
                return rule
        return Rule()


class BrokenConnection(Response):
    """Sends the headers of a success and no body: uvicorn then closes the connection on a waiting client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})


def _error(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)


class Provider:
    """The ASGI application, as `app`."""

    def __init__(self, database: Path, seconds: dict[str, tuple[float, float]], rules: list[Rule]) -> None:
        self._database = database
        self._seconds = seconds
        self._rules = Rules(rules)
        self._library = Library()
        self._work: set[asyncio.Task[dict[str, Any]]] = set()
        self.app = Starlette(
            routes=[
                Route("/research", self.research, methods=["POST"]),
                Route("/operations/{operation_key:path}", self.operation),
                Route("/stats", self.stats),
                Route("/rules", self.rules, methods=["GET", "PUT"]),
            ],
            lifespan=self._lifespan,
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._ledger = Ledger(self._database)
        for call in self._ledger.pending():
            self._begin(call)
        yield
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._ledger.close()

    async def research(self, request: Request) -> Response:
        try:
            call = Call.model_validate_json(await request.body())
        except ValidationError as error:
            return _error(422, "INVALID_CALL", str(error))
        rule = self._rules.pick(call)
        seconds = random.uniform(*self._seconds[call.mode]) if rule.seconds is None else rule.seconds
        accepted = self._ledger.accept(call.operation_key, call.question, call.mode, rule.outcome, seconds)
        work = self._begin(accepted)
        if rule.reply == "drop":
            return BrokenConnection()
        if rule.reply == "error":
            return _error(502, "BAD_GATEWAY", "the answer got lost on the way")
        body = await asyncio.shield(work)
        return JSONResponse({"error": body}, 422) if rule.outcome == "fail" else JSONResponse(body)

    async def operation(self, request: Request) -> Response:
        return JSONResponse(self._ledger.operation(request.path_params["operation_key"]))

    async def stats(self, request: Request) -> Response:
        return JSONResponse(self._ledger.stats())

    async def rules(self, request: Request) -> Response:
        if request.method == "PUT":
            try:
                self._rules = Rules(TypeAdapter(list[Rule]).validate_json(await request.body()))
            except ValidationError as error:
                return _error(422, "INVALID_RULES", str(error))
        return JSONResponse([rule.model_dump() for rule in self._rules.rules])

    def _begin(self, call: Accepted) -> asyncio.Task[dict[str, Any]]:
        """Starts the work on a task of its own, which doesn't end with the client's request."""
        task = asyncio.create_task(self._perform(call))
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _perform(self, call: Accepted) -> dict[str, Any]:
        await asyncio.sleep(call.seconds)
        if call.outcome == "fail":
            body = {"code": "RESEARCH_FAILED", "message": "the provider failed on purpose"}
            self._ledger.finish(call.id, "failed", body)
        else:
            body = self._library.research(call.question, call.mode)
            self._ledger.finish(call.id, "succeeded", body)
        return body


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.research.provider", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--database", type=Path, default=Path("provider.sqlite3"), metavar="FILE")
    for mode, default in (("quick", (0.5, 1.0)), ("deep", (1.0, 2.0))):
        parser.add_argument(
            f"--{mode}", type=float, nargs=2, default=default, metavar=("MIN", "MAX"), help=f"seconds per {mode} call"
        )
    parser.add_argument("--forget-matching", metavar="TEXT", help="accept, drop the connection and lose all trace")
    parser.add_argument("--fail-matching", metavar="TEXT", help="accept, and fail after the work")
    parser.add_argument("--drop-every", type=int, metavar="N", help="accept each n-th call, and drop the connection")
    parser.add_argument("--error-every", type=int, metavar="N", help="accept each n-th call, and answer 502")
    return parser.parse_args()


def _rules(arguments: argparse.Namespace) -> list[Rule]:
    rules = []
    if arguments.forget_matching:
        rules.append(Rule(outcome="forget", reply="drop", contains=arguments.forget_matching))
    if arguments.fail_matching:
        rules.append(Rule(outcome="fail", contains=arguments.fail_matching))
    if arguments.drop_every:
        rules.append(Rule(reply="drop", every=arguments.drop_every))
    if arguments.error_every:
        rules.append(Rule(reply="error", every=arguments.error_every))
    return rules


def main() -> None:
    """Serves until SIGTERM or Ctrl-C, prints its address on one line, and exits with 0."""
    arguments = _arguments()
    try:
        # Listening before the address is printed: whoever reads it can connect.
        listener = socket.create_server((arguments.host, arguments.port), backlog=1024)
    except OSError as error:
        sys.exit(f"research provider: {error}")
    seconds = {"quick": tuple(arguments.quick), "deep": tuple(arguments.deep)}
    provider = Provider(arguments.database, seconds, _rules(arguments))
    # Broken connections are meant here; all else that uvicorn reports is not.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing response" not in record.msg)
    # uvicorn stops at a signal, then raises it once more.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    print(f"research provider listening on http://{arguments.host}:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(provider.app, access_log=False, log_level="warning", timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
