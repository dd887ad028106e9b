"""One-request batches at OpenAI. Needs the extra `openai`."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from openai import APIStatusError, AsyncOpenAI, NotFoundError, OpenAIError
from openai.types import Batch, FileObject

from durable_jobs.contract.models import JobError
from durable_jobs.contract.provider import ProviderState
from durable_jobs.providers import Provider, Sent
from durable_jobs.providers._answers import SKEW, encoded, not_sent, nothing_found
from durable_jobs.providers._openai import KEY, refusal, sending

ResultT = TypeVar("ResultT")

Endpoint = Literal["/v1/responses", "/v1/chat/completions", "/v1/embeddings", "/v1/completions"]

REQUEST = "request-1"
"""The `custom_id` of a batch's one request."""

VISIBLE_WITHIN = timedelta(minutes=5)
KEPT_FOR = timedelta(days=30)


class OpenAIBatch(Provider[ResultT]):
    """Sends a request as a batch of its own, with the operation key in the batch's metadata.

    The request is the body for `endpoint`; `read` makes the result of the response's body.

    Found by reading the list of batches back to the dispatch, less ten minutes for clocks that differ:

    - succeeded, failed, pending: the batch carries exactly this key. Its output file is there for 30 days, the default
      for files of this purpose (`openai.types.FileCreateParams`); once it is gone a batch that ended is unknown.
    - failed: the batch was refused as it was validated, or its one request has an error, or it expired or was cancelled
      with nothing executed.
    - absent: no batch since the dispatch carries the key. The list is not documented to show a new batch at once, hence
      nothing is concluded for 5 minutes, nor how long a batch is listed, hence nothing after 30 days. A sender that is
      still at work may create it after the look: OpenAI has no deadline for a key.
    - unknown: several batches carry the key, or one ended without a trace of its request.

    Reading costs one call for each hundred batches of the account's project since the dispatch, and two for the batch.
    """

    def __init__(self, client: AsyncOpenAI, endpoint: Endpoint, *, read: Callable[[Any], ResultT]) -> None:
        self._client = client
        self._sending = sending(client)
        self._endpoint: Endpoint = endpoint
        self._read = read

    async def send(self, operation_key: str, request: dict[str, Any]) -> Sent[ResultT]:
        """Upload the request, and create its batch. An upload starts nothing: the client may repeat it."""
        line = encoded({"custom_id": REQUEST, "method": "POST", "url": self._endpoint, "body": request})
        input_file_id = await self._upload(line.encode())
        try:
            batch: Any = await self._sending.batches.create(
                input_file_id=input_file_id,
                endpoint=self._endpoint,
                completion_window="24h",
                metadata={KEY: operation_key},
            )
        except APIStatusError as error:
            if definite := refusal(error):
                raise definite from error
            raise
        if not isinstance(batch, Batch) or not batch.id:
            raise ValueError("the answer to the batch's creation can't be read")
        batch_id = batch.id
        return Sent(batch_id, lambda: self._state_of(batch_id))

    async def _upload(self, content: bytes) -> str:
        try:
            uploaded: Any = await self._client.files.create(file=("request.jsonl", content), purpose="batch")
        except OpenAIError as error:
            raise not_sent(f"the batch's input could not be uploaded: {error}") from error
        if not isinstance(uploaded, FileObject) or not uploaded.id:
            raise not_sent("the answer to the upload of the batch's input can't be read")
        return uploaded.id

    async def state(self, operation_key: str, dispatched_at: datetime | None) -> ProviderState[ResultT]:
        """As `Provider.state`."""
        if dispatched_at is None:
            return ProviderState.unknown("when the batch was dispatched is not known: no list can be read back to it")
        found = await self._carrying(operation_key, dispatched_at - SKEW)
        if len(found) > 1:
            return ProviderState.unknown(f"batches {', '.join(sorted(found))} carry {operation_key!r}")
        if not found:
            return nothing_found("the list of batches", dispatched_at, visible_within=VISIBLE_WITHIN, kept_for=KEPT_FOR)
        return await self._state_of(found.pop())

    async def _carrying(self, operation_key: str, since: datetime) -> set[str]:
        """The ids of the batches since then that carry the key; the list is read newest first."""
        found: set[str] = set()
        page = await self._client.batches.list(limit=100)
        while True:
            found.update(batch.id for batch in page.data if (batch.metadata or {}).get(KEY) == operation_key)
            # A whole page that is older, not the first older batch: the order is not documented.
            if all(datetime.fromtimestamp(batch.created_at, UTC) < since for batch in page.data):
                return found
            if not page.has_next_page():
                return found
            page = await page.get_next_page()

    async def _state_of(self, batch_id: str) -> ProviderState[ResultT]:
        batch = await self._client.batches.retrieve(batch_id)
        status: str = batch.status
        match status:
            case "validating" | "in_progress" | "finalizing" | "cancelling":
                return ProviderState.pending()
            case "completed" | "failed" | "expired" | "cancelled":
                return await self._ended(batch)
        return ProviderState.unknown(f"batch {batch.id} has the unheard-of status {status!r}")

    async def _ended(self, batch: Batch) -> ProviderState[ResultT]:
        """A batch that expired or was cancelled may have executed its request before: the files come first."""
        try:
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id and (line := await self._line(file_id)) is not None:
                    return self._of_line(batch, line)
        except NotFoundError as error:
            return ProviderState.unknown(f"batch {batch.id} is {batch.status}, and its file is gone: {error}")
        counts = batch.request_counts
        if batch.status == "completed" or (counts is not None and counts.completed):
            return ProviderState.unknown(f"batch {batch.id} is {batch.status}, and its files don't hold its request")
        problems = [f"{each.code}: {each.message}" for each in (batch.errors and batch.errors.data) or ()]
        reason = "; ".join(problems) or f"batch {batch.id} {batch.status}, nothing executed"
        return ProviderState.failed(JobError.of(f"BATCH_{batch.status.upper()}", reason))

    async def _line(self, file_id: str) -> dict[str, Any] | None:
        """The request's line in a file of results. Raises `ValueError` for one that can't be read."""
        content = await self._client.files.content(file_id)
        lines = [json.loads(text) for text in content.text.splitlines() if text.strip()]
        return next((line for line in lines if line["custom_id"] == REQUEST), None)

    def _of_line(self, batch: Batch, line: dict[str, Any]) -> ProviderState[ResultT]:
        response, error = line.get("response") or {}, line.get("error")
        status, body = response.get("status_code"), response.get("body")
        if not error and isinstance(status, int) and 200 <= status < 300:
            return ProviderState.succeeded(self._read(body))
        details = error or (body.get("error") if isinstance(body, dict) else None)
        if isinstance(details, dict) or (isinstance(status, int) and status >= 400):
            described = details if isinstance(details, dict) else {}
            reason = f"batch {batch.id}, HTTP {status}: {described.get('message') or 'no message'}"
            return ProviderState.failed(JobError.of(str(described.get("code") or "PROVIDER_FAILED"), reason))
        raise ValueError(f"batch {batch.id}: the line of its request can't be read")
