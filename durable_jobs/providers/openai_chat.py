"""Stored chat completions at OpenAI, or whatever lists them as it does. Needs the extra `openai`."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, TypeVar

from openai import APIStatusError, AsyncOpenAI
from openai.types.chat import ChatCompletion

from durable_jobs.contract.provider import ProviderState
from durable_jobs.providers import Provider, Sent
from durable_jobs.providers._answers import encoded, not_sent, nothing_found
from durable_jobs.providers._openai import KEY, refusal, sending

ResultT = TypeVar("ResultT")

VISIBLE_WITHIN = timedelta(minutes=15)
KEPT_FOR = timedelta(days=30)


class OpenAIChat(Provider[ResultT]):
    """Sends a chat completion that is stored, with the operation key in its metadata; `read` makes the result of it.

    The request is the body of `POST /chat/completions`, streaming apart; metadata of the product's own is kept.

    Found by the list's metadata filter (`GET /chat/completions?metadata[operation_key]=…`):

    - succeeded: a stored completion carries exactly this key. OpenAI keeps them for 30 days.
    - absent: none does. That does not prove that nothing was sent: what is still being generated, what failed, and all
      of an organization under zero data retention is never listed. Nothing is concluded for 15 minutes, longer than the
      client's own limit of 10 for a call, nor after 30 days. There is no deadline for a key.
    - unknown: several completions carry the key, or the server lists others as well and so has no such filter.

    It never answers failed or pending. A compatible server is as good as its list: one that has none raises.
    """

    def __init__(self, client: AsyncOpenAI, *, read: Callable[[ChatCompletion], ResultT]) -> None:
        self._client = client
        self._sending = sending(client)
        self._read = read

    async def send(self, operation_key: str, request: dict[str, Any]) -> Sent[ResultT]:
        """As `Provider.send`; what it returns has its result at once."""
        if request.get("stream"):
            raise not_sent("a completion that is streamed can't be sent under a key")
        metadata = request.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise not_sent("the request's metadata is no object")
        body = request | {"store": True, "metadata": metadata | {KEY: operation_key}}
        encoded(body)
        try:
            # Not `chat.completions.create`: what it does not know it would refuse before the provider could.
            completion: Any = await self._sending.post("/chat/completions", body=body, cast_to=ChatCompletion)
        except APIStatusError as error:
            if definite := refusal(error):
                raise definite from error
            raise
        if not isinstance(completion, ChatCompletion) or not completion.id:
            raise ValueError("the answer can't be read as a chat completion")
        result = self._read(completion)

        async def look() -> ProviderState[ResultT]:
            return ProviderState.succeeded(result)

        return Sent(completion.id, look)

    async def state(self, operation_key: str, dispatched_at: datetime | None) -> ProviderState[ResultT]:
        """As `Provider.state`."""
        found: dict[str, ChatCompletion] = {}
        async for completion in self._client.chat.completions.list(metadata={KEY: operation_key}, limit=100):
            metadata = getattr(completion, "metadata", None)
            if not isinstance(metadata, dict) or metadata.get(KEY) != operation_key:
                return ProviderState.unknown(
                    f"the list for {operation_key!r} also holds {completion.id}: no such filter"
                )
            found[completion.id] = completion
        if len(found) > 1:
            return ProviderState.unknown(f"completions {', '.join(sorted(found))} carry {operation_key!r}")
        if not found:
            where = "the list of stored completions"
            return nothing_found(where, dispatched_at, visible_within=VISIBLE_WITHIN, kept_for=KEPT_FOR)
        (completion,) = found.values()
        return ProviderState.succeeded(self._read(completion))
