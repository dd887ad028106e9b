"""What the providers share: a refusal, a request that can't be sent, and what it means that nothing was found."""

from datetime import UTC, datetime, timedelta
from typing import Any

from durable_jobs.contract.errors import JobFailed
from durable_jobs.contract.provider import ProviderState
from durable_jobs.contract.rules import encode_json
from durable_jobs.providers import NotVisibleYet

SKEW = timedelta(minutes=10)
"""How far the provider's clock may be from the database's. What began earlier than that before the dispatch is not
ours."""


def refused(reason: str) -> JobFailed:
    """The provider itself said no: nothing was done."""
    return JobFailed(reason, retryable=False, code="PROVIDER_REFUSED")


def key_taken(reason: str) -> JobFailed:
    """The provider said no, as it has something else under the key: nothing was done."""
    return JobFailed(reason, retryable=False, code="OPERATION_KEY_TAKEN")


def not_sent(reason: str) -> JobFailed:
    """The call that starts the operation was never made."""
    return JobFailed(reason, retryable=False, code="NOT_SENT")


def encoded(request: dict[str, Any]) -> str:
    """The request as JSON text. Raises `JobFailed` where it has no such form."""
    try:
        text = encode_json(request)
        text.encode()
    except (TypeError, ValueError) as error:
        raise not_sent(f"the request has no JSON form: {error}") from error
    return text


def began_before(begun: datetime, dispatched_at: datetime | None) -> bool:
    """Whether what began at `begun`, on the provider's clock, can't be what was dispatched at `dispatched_at`."""
    return dispatched_at is not None and begun < dispatched_at - SKEW


def nothing_found(
    where: str, dispatched_at: datetime | None, *, visible_within: timedelta, kept_for: timedelta
) -> ProviderState[Any]:
    """What it means that the provider shows nothing under the key.

    Until `visible_within` after the dispatch nothing, as it may be late in showing what it has: raises `NotVisibleYet`.
    From `kept_for` on nothing either, as it may have forgotten: unknown. In between it is absent.
    """
    if dispatched_at is None:
        return ProviderState.unknown(f"{where} shows nothing, and when the call was dispatched is not known")
    age = datetime.now(UTC) - dispatched_at
    if age < visible_within:
        raise NotVisibleYet(f"{where} shows nothing yet; it may take {visible_within} from the dispatch")
    if age > kept_for - SKEW:
        return ProviderState.unknown(f"{where} shows nothing, but keeps what it had for {kept_for} only")
    return ProviderState.absent()
