"""What a provider says of an operation key."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Generic, TypeVar

from durable_jobs.contract.errors import FieldProblem
from durable_jobs.contract.models import JobError
from durable_jobs.contract.rules import storable_text, text_problem, time_problem

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
        """The provider can't say; the reason is for the operator."""
        return cls(ProviderAnswer.UNKNOWN, reason=storable_text(reason, 1024))


def state_problem(state: Any) -> FieldProblem | None:
    """What keeps `state` from being what a provider said: rubbish is no answer. Its result apart."""
    if not isinstance(state, ProviderState):
        return FieldProblem("state", f"must be a ProviderState, not {type(state).__name__}")
    answer, error, deadline = _untyped(state)
    if not isinstance(answer, ProviderAnswer):
        return FieldProblem("state.answer", "must be a ProviderAnswer")
    if error is not None and not isinstance(error, JobError):
        return FieldProblem("state.error", "must be a JobError")
    texts: dict[str, Any] = {"state.reason": state.reason}
    if error is not None:
        texts |= {f"state.error.{name}": value for name, value in error.model_dump().items()}
    for field, text in texts.items():
        if text is not None and (not isinstance(text, str) or text_problem(text, 16_384)):
            return FieldProblem(field, "must be text that can be stored")
    if deadline is None:
        return None
    problem = time_problem(deadline) if isinstance(deadline, datetime) else "must be a time"
    return FieldProblem("state.send_deadline", problem) if problem else None


def _untyped(state: ProviderState[Any]) -> tuple[Any, Any, Any]:
    """Its fields as whatever they are: a dataclass checks nothing."""
    return state.answer, state.error, state.send_deadline
