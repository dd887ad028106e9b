"""A server that stores chat completions and lists them by their metadata, and shows batches as a test made them."""

import json
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

REFUSED = {"error": {"message": "no such model", "type": "invalid_request_error", "code": "model_not_found"}}

FILE = {
    "id": "file-in",
    "object": "file",
    "bytes": 1,
    "created_at": 1,
    "filename": "request.jsonl",
    "purpose": "batch",
    "status": "processed",
}


class OpenAIServer:
    """Keeps what it was sent. `app` is the ASGI application; paths as OpenAI's, below `/v1`."""

    def __init__(self) -> None:
        self.completions: list[dict[str, Any]] = []
        self.batches: list[dict[str, Any]] = []
        """Newest first."""
        self.files: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []
        """The (method, path) of each, but for files' contents."""
        self.refuse: dict[str, Response] = {}
        """What a POST to this path is answered with, in place of being obeyed."""
        self.hide: dict[str, Response] = {}
        """What a POST to this path is answered with, after it was obeyed."""
        self.filters = True
        """Whether the list of completions obeys the filter by metadata."""
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.list_completions),
                Route("/v1/files", self.upload, methods=["POST"]),
                Route("/v1/files/{id}/content", self.content),
                Route("/v1/batches", self.create_batch, methods=["POST"]),
                Route("/v1/batches", self.list_batches),
                Route("/v1/batches/{id}", self.batch),
            ]
        )

    def store(self, metadata: dict[str, str] | None, text: str = "7") -> dict[str, Any]:
        """A stored completion of that text."""
        message = {"role": "assistant", "content": text}
        completion = {
            "id": f"chatcmpl-{uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "any",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
            "metadata": metadata,
        }
        self.completions.append(completion)
        return completion

    def show_batch(self, status: str, key: str | None, *, age: float = 0, **fields: Any) -> dict[str, Any]:
        """List a batch of that status, created `age` seconds ago, before (so, newer than) those there are."""
        batch = {
            "id": f"batch_{uuid4().hex}",
            "object": "batch",
            "endpoint": "/v1/chat/completions",
            "input_file_id": "file-in",
            "completion_window": "24h",
            "status": status,
            "created_at": int(time.time() - age),
            "metadata": {"operation_key": key} if key else None,
        } | fields
        self.batches.insert(0, batch)
        return batch

    def show_file(self, *lines: Any) -> str:
        """Keep a file of these lines; its id."""
        file_id = f"file-{uuid4().hex}"
        self.files[file_id] = "".join(json.dumps(line) + "\n" for line in lines)
        return file_id

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        return self._obey(request, lambda: self.store(body["metadata"] if body.get("store") else None))

    async def upload(self, request: Request) -> Response:
        return self._obey(request, lambda: FILE)

    async def create_batch(self, request: Request) -> Response:
        body = await request.json()
        return self._obey(request, lambda: self.show_batch("validating", body["metadata"]["operation_key"]))

    def _obey(self, request: Request, act: Callable[[], dict[str, Any]]) -> Response:
        path = request.url.path
        self.requests.append((request.method, path))
        if path in self.refuse:
            return self.refuse[path]
        answer = JSONResponse(act())
        return self.hide.get(path, answer)

    async def list_completions(self, request: Request) -> Response:
        self.requests.append((request.method, request.url.path))
        wanted = {
            name.removeprefix("metadata[").removesuffix("]"): value
            for name, value in request.query_params.items()
            if name.startswith("metadata[")
        }
        stored = [each for each in self.completions if each["metadata"] is not None]
        if self.filters:
            stored = [each for each in stored if wanted.items() <= each["metadata"].items()]
        return _page(stored, request)

    async def content(self, request: Request) -> Response:
        text = self.files.get(request.path_params["id"])
        return PlainTextResponse(text) if text is not None else JSONResponse(REFUSED, 404)

    async def list_batches(self, request: Request) -> Response:
        self.requests.append((request.method, request.url.path))
        return _page(self.batches, request)

    async def batch(self, request: Request) -> Response:
        found = [each for each in self.batches if each["id"] == request.path_params["id"]]
        return JSONResponse(found[0]) if found else JSONResponse(REFUSED, 404)


def _page(items: list[dict[str, Any]], request: Request) -> Response:
    after = request.query_params.get("after")
    start = 1 + [each["id"] for each in items].index(after) if after else 0
    limit = int(request.query_params.get("limit", 20))
    page, rest = items[start : start + limit], items[start + limit :]
    ids = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, "has_more": bool(rest)} | ids)
