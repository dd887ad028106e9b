"""The runtimes that this deployment has, and what a failed run means for the job that asked for it."""

from collections.abc import Mapping

from activities.contracts import RuntimeName
from activities.runtime import RuntimeAdapter, RuntimeFailure, RuntimeOutcome, RuntimeRequest
from durable_jobs import JobFailed

ISOLATED: RuntimeName = "isolated"
"""A run in it has no effect outside: it may be repeated, and needs no dispatch boundary."""
MODEL: RuntimeName = "model"

Runtimes = Mapping[RuntimeName, RuntimeAdapter]


def runtime(runtimes: Runtimes, name: RuntimeName) -> RuntimeAdapter:
    """Raises `JobFailed`: no retry can mend it."""
    if name not in runtimes:
        raise JobFailed(f"this deployment has no {name} runtime", retryable=False, code="RUNTIME_NOT_HOSTED")
    return runtimes[name]


async def run(adapter: RuntimeAdapter, request: RuntimeRequest, *, key: str) -> RuntimeOutcome:
    """One run. Raises `JobFailed` for a definite end; an open one is raised as it is, and is uncertain past a boundary.

    Whether the job may be retried is the failure's own word: a crash of an isolated program may pass, a refusal won't.
    """
    try:
        return await adapter.run(request, key=key)
    except RuntimeFailure as failure:
        if not failure.definite:
            raise
        raise JobFailed(str(failure), retryable=failure.retryable, code=failure.code) from failure
