"""Starting, waking and cancelling the workflows of jobs. The table decides identity; Temporal only runs them."""

import hashlib
import logging
from datetime import datetime, timedelta
from typing import Any

from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.client import Client
from temporalio.common import (
    Priority,
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.service import RPCError, RPCStatusCode

from durable_jobs.contract.models import Job
from durable_jobs.temporal import messages
from durable_jobs.temporal.messages import JobStart, workflow_id

logger = logging.getLogger(__name__)

_QUEUE = SearchAttributeKey.for_keyword(messages.QUEUE_ATTRIBUTE)
_FAIRNESS_KEY_BYTES = 64
RPC_TIMEOUT = timedelta(seconds=5)
"""The row is committed by then: with Temporal away its workflow is launched later."""


def job_start(job: Job, *, indexed: bool) -> JobStart:
    """The input of the job's workflow."""
    return JobStart(
        job_id=str(job.id),
        job_type=job.job_type,
        organization=job.organization_id,
        lease_seconds=job.lease_seconds,
        timeout_seconds=job.timeout_seconds,
        indexed=indexed,
    )


def job_priority(job: Job) -> Priority:
    """-2…2 as Temporal's keys 5…1; fairness among organizations, whose longer names enter as a digest."""
    name = job.organization_id
    fairness = name if len(name) <= _FAIRNESS_KEY_BYTES else hashlib.sha256(name.encode()).hexdigest()
    return Priority(priority_key=3 - job.priority, fairness_key=fairness)


def job_summary(job: Job) -> str:
    """What the Temporal UI shows beside the workflow."""
    return f"{job.job_type} · {job.organization_id}/{job.project_id}"


class Launcher:
    """Acts on the workflows of jobs through one Temporal client."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._indexed: bool | None = None

    async def start(self, job: Job, *, now: datetime | None = None) -> None:
        """Start the job's workflow, due at its schedule, unless it runs already. Raises `RPCError`.

        `now`, on the database's clock, is when the row was read; by default its creation.
        """
        delay = job.scheduled_at - (now or job.created_at)
        await self._start(job, start_delay=delay if delay > timedelta(0) else None)

    async def wake(self, job: Job) -> None:
        """Make the job's workflow look at the row, starting it if need be. Raises `RPCError`.

        Signal-with-start: a plain signal neither wakes a start delay nor reaches a run that is closing.
        """
        await self._start(job, start_signal=messages.WAKE)

    async def tell(self, job: Job) -> None:
        """Make the workflow of a job that was changed look at the row. Raises `RPCError`.

        A settled job's is told if it runs: signal-with-start would open one that has closed.
        """
        await (self.nudge(job) if job.status.is_settled else self.wake(job))

    async def nudge(self, job: Job) -> None:
        """Make the workflow of a settled job look at the row, if one still runs. Raises `RPCError`."""
        try:
            await self.client.get_workflow_handle(workflow_id(job.id)).signal(messages.WAKE)
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise

    async def _start(self, job: Job, **how: Any) -> None:
        indexed = await self.indexed()
        await self.client.start_workflow(
            messages.WORKFLOW_TYPE,
            job_start(job, indexed=indexed),
            id=workflow_id(job.id),
            task_queue=job.queue,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            priority=job_priority(job),
            static_summary=job_summary(job),
            search_attributes=TypedSearchAttributes([SearchAttributePair(_QUEUE, job.queue)])
            if indexed
            else TypedSearchAttributes.empty,
            rpc_timeout=RPC_TIMEOUT,
            **how,
        )

    async def close_as_cancelled(self, job_id: str) -> None:
        """Ask Temporal to cancel the job's workflow, after its row is cancelled. Raises `RPCError`."""
        try:
            await self.client.get_workflow_handle(workflow_id(job_id)).cancel()
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND:
                raise

    async def indexed(self) -> bool:
        """Whether the namespace knows the search attributes; they are created where it allows that."""
        if self._indexed is None:
            self._indexed = await self._ensure_search_attributes()
        return self._indexed

    async def _ensure_search_attributes(self) -> bool:
        operator, namespace = self.client.operator_service, self.client.namespace
        try:
            asked = ListSearchAttributesRequest(namespace=namespace)
            listed = await operator.list_search_attributes(asked, timeout=RPC_TIMEOUT)
            known = {name for name, kind in listed.custom_attributes.items() if kind == _KEYWORD}
            missing = [name for name in messages.SEARCH_ATTRIBUTES if name not in known]
            if missing:
                wanted = dict.fromkeys(missing, _KEYWORD)
                await operator.add_search_attributes(
                    AddSearchAttributesRequest(namespace=namespace, search_attributes=wanted), timeout=RPC_TIMEOUT
                )
        except RPCError as error:
            if error.status in (RPCStatusCode.UNAVAILABLE, RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED):
                raise
            logger.info("Without search attributes, as the namespace refused them: %s", error)
            return False
        return True


_KEYWORD = IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD
