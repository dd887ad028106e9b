"""The isolated runtime: what an agent is asked, what may come back, and how a run can fail.

An adapter runs one agent once and returns a bounded outcome. `subprocess_adapter` runs a program without network;
`http_adapter` asks a model behind an OpenAI-compatible API.
"""

from activities.runtime.errors import (
    IsolationUnavailable,
    OutcomeInvalid,
    RuntimeCrashed,
    RuntimeFailure,
    RuntimeRefused,
    RuntimeTimedOut,
)
from activities.runtime.models import (
    MAX_EVIDENCE,
    MAX_REQUEST_BYTES,
    MAX_TRACE_STEPS,
    AgentRef,
    Evidence,
    RuntimeAdapter,
    RuntimeOutcome,
    RuntimeRequest,
    TraceStep,
)

__all__ = [
    "MAX_EVIDENCE",
    "MAX_REQUEST_BYTES",
    "MAX_TRACE_STEPS",
    "AgentRef",
    "Evidence",
    "IsolationUnavailable",
    "OutcomeInvalid",
    "RuntimeAdapter",
    "RuntimeCrashed",
    "RuntimeFailure",
    "RuntimeOutcome",
    "RuntimeRefused",
    "RuntimeRequest",
    "RuntimeTimedOut",
    "TraceStep",
]
