"""Brings a database to the newest schema. The one module of the store that commits."""

import re
from functools import cache
from pathlib import Path
from threading import Lock
from urllib.parse import urlsplit

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg.conninfo import make_conninfo
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import NullPool

from durable_jobs.contract.errors import InvalidInput
from durable_jobs.store.tables import SCHEMA

_MIGRATIONS = Path(__file__).parent / "migrations"
_ALEMBIC = Lock()
"""Its context is one for the whole process."""
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")


def checked_schema(schema: str) -> str:
    """`schema`, which goes into SQL by name. Raises `InvalidInput` unless it is a plain lower-case identifier."""
    if not _SCHEMA_NAME.fullmatch(schema):
        raise InvalidInput.at("schema", f"must match {_SCHEMA_NAME.pattern}")
    return schema


def driver_url(database_url: str) -> str:
    """A `postgres://` or `postgresql://` URL as SQLAlchemy's, with psycopg as the driver. Raises `InvalidInput`."""
    parts = urlsplit(database_url)
    if parts.scheme not in ("postgres", "postgresql", "postgresql+psycopg"):
        raise InvalidInput.at("database_url", "must begin with postgresql://")
    url = f"postgresql+psycopg{database_url[len(parts.scheme) :]}"
    try:
        make_url(url)
    except ArgumentError:
        raise InvalidInput.at("database_url", "must be postgresql://user@host:port/database") from None
    return url


def conninfo(url: str) -> str:
    """What psycopg itself is to be given so that it connects as SQLAlchemy does with `url`: libpq reads URLs in another
    way, and takes a `/` in a password for the end of the host."""
    parsed = make_url(url)
    _, arguments = parsed.get_dialect()().create_connect_args(parsed)
    return make_conninfo(**arguments)


def migrate(database_url: str, *, schema: str = SCHEMA, roles: bool = False) -> str:
    """Create `schema` if need be, bring it to the newest revision, and return that revision.

    With `roles`, also create `<schema>_owner`, `<schema>_service` and `<schema>_tenant`, without login, with the least
    rights that each needs and row-level security: the service role sees all rows, the tenant role those of
    `set_config('durable_jobs.organization', …, true)` alone. Needs a user that may make roles and give ownership away.

    All in one transaction under an advisory lock: of several at once one does the work and the others then find
    nothing to do; one that dies half way leaves nothing behind. Connect to Postgres itself, not through PgBouncer.
    """
    config = _config()
    engine = create_engine(driver_url(database_url), poolclass=NullPool)
    with _ALEMBIC, engine.begin() as connection:
        connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": f"migrate {schema}"}
        )
        connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {checked_schema(schema)}"))
        config.attributes.update(connection=connection, schema=schema)
        command.upgrade(config, "head")
        if roles:
            script = (_MIGRATIONS / "roles.sql").read_text().replace("{s}", schema).replace("{role}", schema)
            connection.exec_driver_sql(script, execution_options={"no_parameters": True})
        revision = connection.execute(text(f"SELECT version_num FROM {schema}.schema_version")).scalar_one()
    engine.dispose()
    return str(revision)


@cache
def newest_revision() -> str:
    """The revision that this version of the library works on; read once, as every readiness check asks for it."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config
