"""Running the statements of this folder: `{s}` stands for the schema, the tenant goes into every one."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.lineage import Tenant
from activities.store.migrate import SCHEMA


async def rows(
    connection: AsyncConnection, statement: str, tenant: Tenant, fields: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The rows that a statement returns."""
    answer = await connection.exec_driver_sql(statement.replace("{s}", SCHEMA), tenant._asdict() | dict(fields))
    return [dict(row) for row in answer.mappings()]


async def one(
    connection: AsyncConnection, statement: str, tenant: Tenant, fields: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The first row, if there is any."""
    found = await rows(connection, statement, tenant, fields)
    return found[0] if found else None


async def write(connection: AsyncConnection, statement: str, tenant: Tenant, fields: Mapping[str, Any]) -> int:
    """Run a write; returns how many rows it touched."""
    answer = await connection.exec_driver_sql(statement.replace("{s}", SCHEMA), tenant._asdict() | dict(fields))
    return answer.rowcount
