"""What a provider says of an operation key."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Generic, TypeVar

from durable_jobs.contract.models import JobError

ResultT = TypeVar("ResultT")


class ProviderAnswer(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PENDING = "pending"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ProviderState(Generic[ResultT]):
    """A provider's answer about one operation key; made by the five class methods."""

    answer: ProviderAnswer
    result: ResultT | None = None
    error: JobError | None = None
    reason: str | None = None
    send_deadline: datetime | None = None

    @classmethod
    def succeeded(cls, result: ResultT) -> "ProviderState[ResultT]":
        """The call landed and has this result."""
        return cls(ProviderAnswer.SUCCEEDED, result=result)

    @classmethod
    def failed(cls, error: JobError | str) -> "ProviderState[ResultT]":
        """The call landed and failed for good, or the provider refused it."""
        described = error if isinstance(error, JobError) else JobError.of("PROVIDER_FAILED", error)
        return cls(ProviderAnswer.FAILED, error=described)

    @classmethod
    def pending(cls) -> "ProviderState[ResultT]":
        """The call landed and is still at work."""
        return cls(ProviderAnswer.PENDING)

    @classmethod
    def absent(cls, send_deadline: datetime | None = None) -> "ProviderState[ResultT]":
        """The provider knows of no such call. This proves nothing while a paused sender may still send, unless the
        provider itself refuses this key after `send_deadline`, a time with a zone."""
        return cls(ProviderAnswer.ABSENT, send_deadline=send_deadline)

    @classmethod
    def unknown(cls, reason: str) -> "ProviderState[ResultT]":
        """The provider can't say."""
        return cls(ProviderAnswer.UNKNOWN, reason=reason)
