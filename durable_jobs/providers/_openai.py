"""What the two OpenAI providers share."""

from typing import Any

from openai import APIStatusError, AsyncOpenAI

from durable_jobs.contract.errors import JobFailed
from durable_jobs.providers._answers import refused

KEY = "operation_key"
"""The name of the metadata pair that carries the key. A value may have 512 characters, an operation key has fewer."""

# Not 409 or 429: a gateway between may answer so after it has repeated a call of ours that landed.
_REFUSALS = frozenset({400, 401, 403, 404, 422})


def sending(client: AsyncOpenAI) -> AsyncOpenAI:
    """The client for calls that must be made once: by itself it repeats what fails."""
    return client.with_options(max_retries=0)


def refusal(error: APIStatusError) -> JobFailed | None:
    """The provider's own definite no; None for what may hide a call that landed, another's error page included."""
    if error.status_code not in _REFUSALS:
        return None
    try:
        body: Any = error.response.json()
    except ValueError:
        return None
    details = body.get("error") if isinstance(body, dict) else None
    if not isinstance(details, dict) or not isinstance(details.get("message"), str):
        return None
    return refused(f"HTTP {error.status_code}, {details.get('code') or details.get('type')}: {details['message']}")
