"""Approvals: granted, revoked, and consumed in the very transaction that marks the boundary, by one job only."""

from datetime import datetime
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.errors import ApprovalConflict, ApprovalNotFound, InvalidInput
from durable_jobs.contract.models import Approval, Job
from durable_jobs.contract.rules import time_problem
from durable_jobs.service.base import ServicePart, require_keys, require_text
from durable_jobs.store import approvals


class ApprovalStore(Protocol):
    """Where approvals are checked live. The Postgres one is the default; another is given to the service."""

    async def consume(self, connection: AsyncConnection, job: Job, approval_id: str, action_intent: str) -> list[str]:
        """Consume the approval for `job`, inside the transaction of `connection`, which is that of the boundary.

        Returns why not, empty when it was consumed. Must not commit; is rolled back with the mark.
        """
        ...

    async def consumed_by(self, connection: AsyncConnection, job: Job, approval_id: str) -> bool:
        """Whether this job consumed it: then it can't be dispatched under it again."""
        ...


class PostgresApprovals:
    """The `approvals` table beside the jobs."""

    def __init__(self, schema: str) -> None:
        self._schema = schema

    async def consume(self, connection: AsyncConnection, job: Job, approval_id: str, action_intent: str) -> list[str]:
        key = {"organization": job.organization_id, "project": job.project_id, "approval": approval_id}
        consumed = await approvals.execute(
            connection, approvals.CONSUME, self._schema, **key, job_id=job.id, action_intent=action_intent
        )
        if consumed:
            return []
        found = await approvals.read(connection, self._schema, **key)
        return [f"governance.approval: {approval_id!r} {_why_not(found, action_intent)}"]

    async def consumed_by(self, connection: AsyncConnection, job: Job, approval_id: str) -> bool:
        found = await approvals.read(
            connection,
            self._schema,
            organization=job.organization_id,
            project=job.project_id,
            approval=approval_id,
        )
        return found is not None and found.consumed_by == job.id


def _why_not(approval: Approval | None, action_intent: str) -> str:
    if approval is None:
        return "does not exist"
    if approval.revoked_at is not None:
        return f"was revoked by {approval.revoked_by}"
    if approval.consumed_at is not None:
        return f"was consumed by job {approval.consumed_by}"
    if approval.action_intent != action_intent:
        return f"is for {approval.action_intent!r}, not {action_intent!r}"
    return "has expired"


class Approvals(ServicePart):
    async def record_approval(
        self,
        organization: str,
        project: str,
        approval_id: str,
        action_intent: str,
        *,
        actor: str,
        expires_at: datetime | None = None,
    ) -> Approval:
        """Grant an approval of one action intent, to be consumed by one job. The same grant again returns the first.

        Raises `ApprovalConflict` when the id stands for another grant, or `InvalidInput`.
        """
        require_keys(organization=organization, project=project, approval_id=approval_id, action_intent=action_intent)
        require_text(actor=actor)
        if expires_at is not None and (problem := time_problem(expires_at)):
            raise InvalidInput.at("expires_at", problem)
        key = {"organization": organization, "project": project, "approval": approval_id}

        async def work(connection: AsyncConnection) -> Approval:
            schema = self.database.schema
            await approvals.execute(
                connection,
                approvals.RECORD,
                schema,
                **key,
                action_intent=action_intent,
                actor=actor,
                expires_at=expires_at,
            )
            found = await approvals.read(connection, schema, **key)
            if found is None or (found.action_intent, found.expires_at) != (action_intent, expires_at):
                raise ApprovalConflict(f"approval {approval_id!r} was granted for another intent or time")
            return found

        return await self.database.run(work, control=True)

    async def revoke_approval(
        self, organization: str, project: str, approval_id: str, *, actor: str, reason: str
    ) -> Approval:
        """Revoke an approval that was not consumed; again is no error.

        Raises `ApprovalNotFound`, `ApprovalConflict` when a job has consumed it, `InvalidInput`.
        """
        require_text(actor=actor, reason=reason)
        require_keys(organization=organization, project=project, approval_id=approval_id)
        key = {"organization": organization, "project": project, "approval": approval_id}

        async def work(connection: AsyncConnection) -> Approval:
            schema = self.database.schema
            await approvals.execute(connection, approvals.REVOKE, schema, **key, actor=actor, reason=reason)
            found = await approvals.read(connection, schema, **key)
            if found is None:
                raise ApprovalNotFound(f"no approval {approval_id!r} in {organization}/{project}")
            if found.consumed_at is not None:
                raise ApprovalConflict(f"approval {approval_id!r} was consumed by job {found.consumed_by}")
            return found

        return await self.database.run(work, control=True)

    async def get_approval(self, organization: str, project: str, approval_id: str) -> Approval:
        """Raises `ApprovalNotFound`, `InvalidInput`."""
        require_keys(organization=organization, project=project, approval_id=approval_id)
        found = await self.database.run(
            lambda own: approvals.read(
                own, self.database.schema, organization=organization, project=project, approval=approval_id
            ),
            control=True,
        )
        if found is None:
            raise ApprovalNotFound(f"no approval {approval_id!r} in {organization}/{project}")
        return found
