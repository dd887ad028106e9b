"""`durable-jobs migrate`: bring a database's schema up to date."""

from typing import Annotated

import typer

from durable_jobs.cli.output import JsonOption, fail, say


def migrate(
    database_url: Annotated[
        str, typer.Option(envvar="DURABLE_JOBS_DATABASE_URL", help="Of Postgres itself, not of a pooler.")
    ],
    schema: Annotated[
        str, typer.Option(envvar="DURABLE_JOBS_SCHEMA", help="Holds the tables; made if it isn't there.")
    ] = "durable_jobs",
    roles: Annotated[
        bool, typer.Option("--roles", help="Also make an owner, a service and a tenant role, with row-level security.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring the schema to the newest revision. Safe when several start at once, and after one was killed.

    Exits with 0 when the schema is up to date, 1 when the migration failed.
    """
    # Imported here so that help needn't wait for the database libraries.
    from alembic.util import CommandError  # noqa: PLC0415
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    from durable_jobs.contract.errors import InvalidInput  # noqa: PLC0415
    from durable_jobs.store import migrate as migration  # noqa: PLC0415

    try:
        revision = migration.migrate(database_url, schema=schema, roles=roles)
    except InvalidInput as error:
        fail(as_json, "INVALID_INPUT", str(error))
    except (CommandError, SQLAlchemyError) as error:
        fail(as_json, "MIGRATION_FAILED", str(error))
    say(as_json, f"schema {schema} is at revision {revision}", schema=schema, revision=revision)
