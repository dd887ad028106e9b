"""An execution at AWS Step Functions. Needs the extra `aws`."""

import asyncio
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from durable_jobs.contract.models import JobError
from durable_jobs.contract.provider import ProviderState
from durable_jobs.providers import Provider, Sent
from durable_jobs.providers._answers import (
    began_before,
    encoded,
    key_taken,
    not_sent,
    nothing_found,
    refused,
)

ResultT = TypeVar("ResultT")

VISIBLE_WITHIN = timedelta(minutes=5)
KEPT_FOR = timedelta(days=90)
THREADS = 32
"""Calls at a time; a sweep asks so many."""

# AWS's own words for a StartExecution that it did not carry out. A status alone could be a proxy's.
_REFUSALS = frozenset(
    {
        "AccessDeniedException",
        "ExecutionLimitExceeded",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidArn",
        "InvalidClientTokenId",
        "InvalidExecutionInput",
        "InvalidName",
        "InvalidSignatureException",
        "KmsAccessDeniedException",
        "KmsInvalidStateException",
        "MissingAuthenticationTokenException",
        "OptInRequired",
        "StateMachineDeleting",
        "StateMachineDoesNotExist",
        "ThrottlingException",
        "UnrecognizedClientException",
        "ValidationException",
    }
)

_LITERAL = re.compile(r"[0-9A-Za-z_-]{1,80}")
_HASHED = re.compile(r".*-[0-9a-f]{64}")


def execution_name(operation_key: str) -> str:
    """The execution's name for an operation key: the same each time, and never that of another key.

    The key itself where it fits: 1 to 80 of `0-9 A-Z a-z - _`, which CloudWatch Logs takes as well. Else what is
    legible of its first 15 characters, and its SHA-256; a key that looks like one of these is hashed too.
    """
    if _LITERAL.fullmatch(operation_key) and not _HASHED.fullmatch(operation_key):
        return operation_key
    legible = re.sub(r"[^0-9A-Za-z_-]", "-", operation_key[:15])
    return f"{legible}-{sha256(operation_key.encode()).hexdigest()}"


class StepFunctions(Provider[ResultT]):
    """Starts an execution whose name is made of the operation key; `read` makes the result of the execution's output.

    The state machine must be of type STANDARD: an EXPRESS one neither deduplicates a name nor can be described. The
    request is the execution's input. Needs the rights `states:StartExecution`, `states:DescribeExecution` and
    `states:DescribeStateMachine`.

    Found by describing the execution of that name:

    - succeeded, failed, pending: exact, until 90 days after the end. Failed is: failed, timed out or aborted. Don't
      redrive such an execution once its job has settled.
    - absent: no execution has the name. Descriptions are eventually consistent, hence nothing is concluded for 5
      minutes; nor after 90 days from the dispatch, as an execution may end at once and be forgotten that long after. A
      sender that is still at work may start it after the look: Step Functions has no deadline for a name.
    - unknown: past the 90 days, or the execution was started before the dispatch, or its output can't be read.

    Source: the service model in botocore, operations `StartExecution` and `DescribeExecution`.
    """

    def __init__(
        self,
        state_machine_arn: str,
        *,
        read: Callable[[Any], ResultT],
        session: boto3.Session | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        """`session` has the credentials and the region; the default session's without. Raises `ValueError`."""
        parts = state_machine_arn.split(":")
        if len(parts) not in (7, 8) or parts[5] != "stateMachine":
            raise ValueError(f"{state_machine_arn!r} is not the ARN of a state machine")
        self._arn = state_machine_arn
        self._unqualified = ":".join(parts[:7])
        self._execution_arn = ":".join([*parts[:5], "execution", parts[6]])
        self._read = read
        session = session or boto3.Session()
        # total_max_attempts counts the first: a start is never repeated.
        once = Config(retries={"total_max_attempts": 1}, max_pool_connections=THREADS)
        soon = Config(connect_timeout=5, read_timeout=10, max_pool_connections=THREADS)
        self._sending = session.client("stepfunctions", endpoint_url=endpoint_url, config=once)
        self._reading = session.client("stepfunctions", endpoint_url=endpoint_url, config=soon)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="durable-jobs-stepfunctions")
        self._standard = False

    async def send(self, operation_key: str, request: dict[str, Any]) -> Sent[ResultT]:
        """As `Provider.send`.

        A start is refused when an execution of the name has ended or has another input (`ExecutionAlreadyExists`). One
        with our input that began since stands for ours.
        """
        text, name, began = encoded(request), execution_name(operation_key), datetime.now(UTC)
        await self._require_standard()
        start = partial(self._sending.start_execution, stateMachineArn=self._arn, name=name, input=text)
        try:
            answer = await self._call(start)
        except ClientError as error:
            code = _code(error)
            if code == "ExecutionAlreadyExists":
                await self._require_ours(name, request, began, error)
            elif code in _REFUSALS:
                raise refused(f"{code}: {error}") from error
            else:
                raise
        else:
            if not answer.get("executionArn"):
                raise ValueError("the answer to the start can't be read")
        return Sent(f"{self._execution_arn}:{name}", lambda: self.state(operation_key, began))

    async def state(self, operation_key: str, dispatched_at: datetime | None) -> ProviderState[ResultT]:
        """As `Provider.state`."""
        name = execution_name(operation_key)
        try:
            execution = await self._describe(name)
        except ClientError as error:
            if _code(error) != "ExecutionDoesNotExist":
                raise
            return nothing_found("the state machine", dispatched_at, visible_within=VISIBLE_WITHIN, kept_for=KEPT_FOR)
        begun, status = execution["startDate"], execution["status"]
        if began_before(begun, dispatched_at):
            return ProviderState.unknown(f"execution {name} was started at {begun}, before the dispatch")
        match status:
            case "RUNNING" | "PENDING_REDRIVE":
                return ProviderState.pending()
            case "SUCCEEDED" if execution.get("output") is None:
                return ProviderState.unknown(f"execution {name} succeeded, and its output is not shown")
            case "SUCCEEDED":
                return ProviderState.succeeded(self._read(json.loads(execution["output"])))
            case "FAILED" | "TIMED_OUT" | "ABORTED":
                reason = f"execution {status.lower()}: {execution.get('cause') or 'no cause given'}"
                return ProviderState.failed(JobError.of(execution.get("error") or "PROVIDER_FAILED", reason))
        return ProviderState.unknown(f"execution {name} has the unheard-of status {status!r}")

    async def _require_standard(self) -> None:
        """Nothing is started of a state machine whose executions could not be found again."""
        if self._standard:
            return
        describe = partial(self._reading.describe_state_machine, stateMachineArn=self._unqualified)
        try:
            kind = (await self._call(describe))["type"]
        except (BotoCoreError, ClientError) as error:
            raise not_sent(f"the type of the state machine can't be read: {error}") from error
        if kind != "STANDARD":
            raise not_sent(f"the state machine is of type {kind}: its executions can't be looked up")
        self._standard = True

    async def _require_ours(self, name: str, request: dict[str, Any], began: datetime, refusal: ClientError) -> None:
        """Whether the execution that has the name is what was just asked for; where it can't be seen, the refusal."""
        try:
            execution = await self._describe(name)
        except (BotoCoreError, ClientError):
            raise refusal from None
        if execution.get("input") is None:
            raise refusal
        if began_before(execution["startDate"], began):
            raise key_taken(f"execution {name} was started at {execution['startDate']}, before the send") from refusal
        if json.loads(execution["input"]) != request:
            raise key_taken(f"execution {name} has another input") from refusal

    async def _describe(self, name: str) -> dict[str, Any]:
        describe = partial(self._reading.describe_execution, executionArn=f"{self._execution_arn}:{name}")
        return await self._call(describe)

    async def _call(self, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """In a thread: boto3 blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code"))
