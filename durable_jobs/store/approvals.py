"""The approvals' statements. Takes a connection, never commits."""

from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.models import Approval

_APPROVAL = "organization_id = %(organization)s AND project_id = %(project)s AND id = %(approval)s"

RECORD = """
INSERT INTO {s}.approvals (organization_id, project_id, id, action_intent, granted_at, granted_by, expires_at)
VALUES (%(organization)s, %(project)s, %(approval)s, %(action_intent)s, clock_timestamp(), %(actor)s, %(expires_at)s)
ON CONFLICT (organization_id, project_id, id) DO NOTHING
"""

REVOKE = f"""
UPDATE {{s}}.approvals SET revoked_at = clock_timestamp(), revoked_by = %(actor)s, revoke_reason = %(reason)s
WHERE {_APPROVAL} AND revoked_at IS NULL AND consumed_at IS NULL
"""

# One row, one winner: a racing job waits on the row's lock, and then finds it consumed.
CONSUME = f"""
WITH locked AS MATERIALIZED (SELECT * FROM {{s}}.approvals WHERE {_APPROVAL} FOR UPDATE),
judged AS MATERIALIZED (SELECT l.*, clock_timestamp() AS now FROM locked l)
UPDATE {{s}}.approvals a SET consumed_at = g.now, consumed_by = %(job_id)s
FROM judged g WHERE (a.organization_id, a.project_id, a.id) = (g.organization_id, g.project_id, g.id)
    AND g.action_intent = %(action_intent)s AND g.revoked_at IS NULL AND g.consumed_at IS NULL
    AND (g.expires_at IS NULL OR g.expires_at > g.now)
"""

READ = f"SELECT * FROM {{s}}.approvals WHERE {_APPROVAL}"


async def execute(connection: AsyncConnection, template: str, schema: str, **parameters: Any) -> int:
    """Run one of this module's writes; returns how many rows it touched."""
    return (await connection.exec_driver_sql(template.replace("{s}", schema), parameters)).rowcount


async def read(
    connection: AsyncConnection, schema: str, *, organization: str, project: str, approval: str
) -> Approval | None:
    """The approval, or None."""
    parameters = {"organization": organization, "project": project, "approval": approval}
    row = (await connection.exec_driver_sql(READ.replace("{s}", schema), parameters)).mappings().first()
    return Approval.model_validate(dict(row)) if row else None
