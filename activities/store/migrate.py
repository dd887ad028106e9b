"""Brings the product's schema to its newest revision: `python -m activities.store.migrate`."""

import os
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.pool import NullPool

from durable_jobs import Database
from durable_jobs.contract.errors import SchemaMissing
from durable_jobs.store.migrate import checked_schema, driver_url

SCHEMA = "governance"
DATABASE_URL_VARIABLE = "DURABLE_JOBS_DATABASE_URL"


def migrate(database_url: str, *, schema: str = SCHEMA) -> str:
    """Create the schema beside that of the jobs, or bring it up to date; returns its revision.

    In one transaction under an advisory lock: of several at once one does the work.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    engine = create_engine(driver_url(database_url), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:n, 0))"), {"n": f"migrate {schema}"})
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {checked_schema(schema)}"))
        config.attributes.update(connection=connection, schema=schema)
        command.upgrade(config, "head")
        revision = connection.execute(text(f"SELECT version_num FROM {schema}.schema_version")).scalar_one()
    engine.dispose()
    return str(revision)


async def check(database: Database) -> None:
    """Raises `SchemaMissing` on a database that has no tables of the product."""

    async def look(connection: AsyncConnection) -> bool:
        found = await connection.exec_driver_sql(f"SELECT to_regclass('{SCHEMA}.schema_version')")
        return found.scalar() is not None

    if not await database.run(look, control=True):
        raise SchemaMissing(f"schema {SCHEMA!r} is not there: run `python -m activities.store.migrate`")


if __name__ == "__main__":
    print(f"schema {SCHEMA} is at {migrate(os.environ[DATABASE_URL_VARIABLE])}")
