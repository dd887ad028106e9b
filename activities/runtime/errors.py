"""How a run fails. Each error says whether its end is definite, and whether the same run may be tried again."""

from typing import ClassVar

from durable_jobs.contract.rules import storable_text

MAX_MESSAGE = 2048


class RuntimeFailure(Exception):
    """A run that gave no outcome."""

    code: ClassVar[str] = "RUNTIME_FAILURE"

    def __init__(self, message: str, *, definite: bool = True, retryable: bool = False) -> None:
        super().__init__(storable_text(message, MAX_MESSAGE))
        self.definite = definite
        """True: nothing of this run goes on, and nothing more can come of it. False: a request may still be at work."""
        self.retryable = retryable
        """True: the same run may well succeed later. Says nothing about whether it is safe: that is `definite`."""


class RuntimeRefused(RuntimeFailure):
    """No run took place, or the agent declined: the request doesn't fit, the agent is unknown, or it said no."""

    code = "RUNTIME_REFUSED"


class IsolationUnavailable(RuntimeRefused):
    """This machine doesn't permit the isolation that the settings ask for; no agent was started."""

    code = "ISOLATION_UNAVAILABLE"


class RuntimeTimedOut(RuntimeFailure):
    """The run used up its wall or processor time."""

    code = "RUNTIME_TIMED_OUT"


class RuntimeCrashed(RuntimeFailure):
    """The run broke off: the process exited otherwise than with 0, or the connection or the server failed."""

    code = "RUNTIME_CRASHED"


class OutcomeInvalid(RuntimeFailure):
    """The run ended, but what it returned is no outcome of this request; the message names the field."""

    code = "OUTCOME_INVALID"
