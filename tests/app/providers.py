"""A provider whose model answers as a test tells it to, by what it is asked."""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.openai_server import REFUSED, OpenAIServer

COMPLETIONS = "/v1/chat/completions"


class Model(OpenAIServer):
    """Each of `refuses`, `loses` and `hides` tells of a request's messages whether it is refused, whether its answer is
    lost after it was stored, and whether it is stored without ever being listed."""

    def __init__(self, answer: str = "It depends.") -> None:
        super().__init__()
        self.answer = answer
        self.refuses: Callable[[str], bool] = lambda _: False
        self.loses: Callable[[str], bool] = lambda _: False
        self.hides: Callable[[str], bool] = lambda _: False
        self.sent: list[str | None] = []
        """The operation keys, in the order in which they came."""

    async def complete(self, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        said = json.dumps(body["messages"], ensure_ascii=False)
        metadata = body.get("metadata") or {}
        self.sent.append(metadata.get("operation_key"))
        if self.refuses(said):
            return JSONResponse(REFUSED, 404)
        if self.hides(said):
            return PlainTextResponse("bad gateway", 502)
        completion = self.store(metadata, self.answer)
        return PlainTextResponse("bad gateway", 502) if self.loses(said) else JSONResponse(completion)
