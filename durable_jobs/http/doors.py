"""The doors of the API: a router for each role, which admits and reads strictly before FastAPI looks at a request."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request, Response, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from durable_jobs.contract.models import TokenRole
from durable_jobs.contract.rules import MAX_JSON_BYTES
from durable_jobs.contract.strict_json import read_json
from durable_jobs.http.access import admit
from durable_jobs.http.problems import BodyTooLarge, NotJson, documented

MAX_BODY_BYTES = MAX_JSON_BYTES + 64 * 1024
"""The largest payload, and some room for what stands beside it."""
_DRAINED_BYTES = 4 * MAX_BODY_BYTES
"""Of too large a body so much is read and dropped, so that its sender gets to read the refusal."""

_LARGE_BYTES = 64 * 1024

_bearer = HTTPBearer(auto_error=False, description="A token of `durable-jobs tokens create`.")


def door(role: TokenRole) -> APIRouter:
    """A router whose routes need a token of at least this role."""

    class Door(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            takes_body = self.body_field is not None

            async def enter(request: Request) -> Response:
                request.state.principal = await admit(request, role)
                return await handle(await _ReadRequest.of(request) if takes_body else request)

            return enter

    return APIRouter(
        prefix="/api/v1",
        route_class=Door,
        dependencies=[Security(_bearer)],
        responses=documented(401, 403, 422, 503),
    )


class _ReadRequest(Request):
    """A request whose body was read and parsed."""

    _read: dict[str, Any]

    @classmethod
    async def of(cls, request: Request) -> "_ReadRequest":
        """Raises `NotJson`, `BodyTooLarge`, `InvalidInput`."""
        media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if media_type != "application/json" and not (media_type[:12] == "application/" and media_type[-5:] == "+json"):
            raise NotJson
        body = await bounded_body(request, MAX_BODY_BYTES)
        headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
        scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
        read = cls(scope, request.receive)
        # Reading millions of values takes seconds: others are served meanwhile.
        read._read = read_json(body) if len(body) < _LARGE_BYTES else await asyncio.to_thread(read_json, body)
        return read

    async def body(self) -> bytes:
        return b"{}"  # what FastAPI asks of it is whether there is one

    async def json(self) -> Any:
        return self._read


async def bounded_body(request: Request, limit: int) -> bytes:
    """All of it. Raises `BodyTooLarge`."""
    too_large = BodyTooLarge.at("(whole)", f"must be at most {limit} bytes")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > _DRAINED_BYTES:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _DRAINED_BYTES:
            break
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
    if size > limit:
        raise too_large
    return b"".join(chunks)
