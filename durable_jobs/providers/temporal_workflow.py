"""A workflow at Temporal, on the product's own cluster or another's. Needs no extra."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from google.protobuf.any_pb2 import Any as AnyMessage
from temporalio.api.errordetails.v1 import NamespaceNotFoundFailure
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import (
    Client,
    WorkflowContinuedAsNewError,
    WorkflowExecutionDescription,
    WorkflowExecutionStatus,
    WorkflowFailureError,
)
from temporalio.common import WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from durable_jobs.contract.models import JobError
from durable_jobs.contract.provider import ProviderState
from durable_jobs.providers import Provider, Sent
from durable_jobs.providers._answers import began_before, encoded, key_taken, nothing_found, refused

ResultT = TypeVar("ResultT")


class TemporalWorkflow(Provider[ResultT]):
    """Starts a workflow whose id is the operation key; `read` makes the result of what the workflow returns.

    The request is the workflow's one argument. The id is never used twice (`REJECT_DUPLICATE`): the client repeats a
    start by itself, and that does no harm. A start that is refused because the workflow has been started has landed.

    Found by describing the id:

    - succeeded, failed, pending: exact, from the moment of the start until the namespace's retention after the end.
      Failed is: failed, cancelled, terminated or timed out. Don't reset such a workflow once its job has settled.
    - absent: when it was asked no such workflow had been started, nor deleted by hand. It proves so for the namespace's
      retention from the dispatch: a workflow may end at once, and be forgotten that long after. A sender that is still
      at work may start it after the look: Temporal has no deadline for an id. (A namespace that was failed over to
      another cluster may lack what was started last.)
    - unknown: past the retention, or the id is of another workflow type, or was started before the dispatch.

    Source: `temporalio.common.WorkflowIDReusePolicy`, and measured on a Temporal server 1.32.
    """

    def __init__(self, client: Client, workflow: str, *, task_queue: str, read: Callable[[Any], ResultT]) -> None:
        self._client = client
        self._workflow = workflow
        self._task_queue = task_queue
        self._read = read

    async def send(self, operation_key: str, request: dict[str, Any]) -> Sent[ResultT]:
        """As `Provider.send`.

        A missing right is raised as it comes: the client may meet it as it repeats a start that landed.
        """
        encoded(request)
        began = datetime.now(UTC)
        try:
            await self._client.start_workflow(
                self._workflow,
                request,
                id=operation_key,
                task_queue=self._task_queue,
                id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            )
        except WorkflowAlreadyStartedError as error:
            if stranger := self._stranger(await self._describe(operation_key), began):
                raise key_taken(stranger) from error
        except RPCError as error:
            if error.status is RPCStatusCode.INVALID_ARGUMENT or _namespace_missing(error):
                raise refused(f"{error.status.name}: {error.message}") from error
            raise
        return Sent(operation_key, lambda: self.state(operation_key, began))

    async def state(self, operation_key: str, dispatched_at: datetime | None) -> ProviderState[ResultT]:
        """As `Provider.state`."""
        try:
            description = await self._describe(operation_key)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND or _namespace_missing(error):
                raise
            kept_for = await self._retention()
            return nothing_found("the namespace", dispatched_at, visible_within=timedelta(0), kept_for=kept_for)
        if stranger := self._stranger(description, dispatched_at):
            return ProviderState.unknown(stranger)
        match description.status:
            case WorkflowExecutionStatus.RUNNING | WorkflowExecutionStatus.CONTINUED_AS_NEW:
                return ProviderState.pending()
            case None:
                return ProviderState.unknown(f"workflow {operation_key!r} has no status")
        return await self._ended(description)

    async def _describe(self, workflow_id: str) -> WorkflowExecutionDescription:
        return await self._client.get_workflow_handle(workflow_id).describe()

    async def _ended(self, description: WorkflowExecutionDescription) -> ProviderState[ResultT]:
        handle = self._client.get_workflow_handle(description.id, run_id=description.run_id)
        try:
            result = await handle.result(follow_runs=False)
        except WorkflowContinuedAsNewError:
            return ProviderState.pending()
        except WorkflowFailureError as error:
            cause = error.cause
            code = (cause.type if isinstance(cause, ApplicationError) else None) or "PROVIDER_FAILED"
            status = description.status.name.lower() if description.status else "ended"
            return ProviderState.failed(JobError.of(code, f"workflow {status}: {cause}", type=type(cause).__name__))
        return ProviderState.succeeded(self._read(result))

    async def _retention(self) -> timedelta:
        """How long the namespace remembers a workflow that has ended."""
        asked = DescribeNamespaceRequest(namespace=self._client.namespace)
        described = await self._client.workflow_service.describe_namespace(asked, retry=True)
        return described.config.workflow_execution_retention_ttl.ToTimedelta()

    def _stranger(self, description: WorkflowExecutionDescription, dispatched_at: datetime | None) -> str | None:
        """Why the workflow under the key can't be the one that was sent under it; None when it can."""
        if description.workflow_type != self._workflow:
            return f"workflow {description.id!r} is a {description.workflow_type}, not a {self._workflow}"
        first = description.raw_info.first_run_id
        if first == description.run_id and began_before(description.start_time, dispatched_at):
            return f"workflow {description.id!r} was started at {description.start_time}, before the dispatch"
        return None


def _namespace_missing(error: RPCError) -> bool:
    """A missing namespace answers NOT_FOUND as a missing workflow does."""
    return any(_is_namespace_failure(detail) for detail in error.grpc_status.details)


def _is_namespace_failure(detail: AnyMessage) -> bool:
    return bool(detail.Is(NamespaceNotFoundFailure.DESCRIPTOR))
