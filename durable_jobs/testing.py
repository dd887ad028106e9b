"""Pytest fixtures for products, and for this library's own suite: real servers, and a fresh database for each test.

    pytest_plugins = ["durable_jobs.testing"]  # in the top conftest.py; needs the extra `test`

Where `DURABLE_JOBS_DATABASE_URL` or `TEMPORAL_ADDRESS` is set, the fixtures use that server: databases are made on it,
by a role that must be allowed to.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit

import psycopg
import pytest
import pytest_asyncio
from psycopg import sql
from temporalio.client import Client
from temporalio.envconfig import ClientConfig

from durable_jobs.dev import TEMPORAL_ADDRESS_VARIABLE, DevStack

__all__ = ["database_url", "durable_jobs_stack", "durable_jobs_template", "temporal_client"]


@pytest.fixture(scope="session")
def durable_jobs_stack() -> Iterator[DevStack]:
    """A Postgres and an in-memory Temporal server for the run; no schema in it yet."""
    # Not one of pytest's own folders: the next run takes away the right to pass through these, which Postgres needs.
    folder = Path(tempfile.mkdtemp(prefix="durable-jobs-"))
    folder.chmod(0o711)
    try:
        with DevStack(folder, persistent=False, migrate=False) as stack:
            yield stack
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def durable_jobs_template(durable_jobs_stack: DevStack) -> Iterator[str]:
    """The name of a database that holds the schema and no rows; each test's own is a clone of it."""
    from durable_jobs.store.migrate import migrate  # noqa: PLC0415 - the fixtures above need no schema

    name = f"durable_jobs_template_{token_hex(6)}"
    _execute(durable_jobs_stack, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        migrate(_url(durable_jobs_stack, name))
        yield name
    finally:
        _drop(durable_jobs_stack, name)


@pytest.fixture
def database_url(durable_jobs_stack: DevStack, durable_jobs_template: str) -> Iterator[str]:
    """The URL of a database for this test alone, schema in place; dropped afterwards, whoever is still connected."""
    name = f"durable_jobs_test_{token_hex(6)}"
    create = sql.SQL("CREATE DATABASE {} TEMPLATE {}")
    _execute(durable_jobs_stack, create.format(sql.Identifier(name), sql.Identifier(durable_jobs_template)))
    try:
        yield _url(durable_jobs_stack, name)
    finally:
        _drop(durable_jobs_stack, name)


@pytest_asyncio.fixture
async def temporal_client(durable_jobs_stack: DevStack) -> Client:
    """A client of the run's Temporal server. All tests share the server: use task queues of your own."""
    if os.environ.get(TEMPORAL_ADDRESS_VARIABLE):
        return await Client.connect(**ClientConfig.load_client_connect_config())
    return await Client.connect(durable_jobs_stack.temporal_address, namespace=durable_jobs_stack.namespace)


def _url(stack: DevStack, database: str) -> str:
    return urlsplit(stack.database_url)._replace(path=f"/{database}").geturl()


def _execute(stack: DevStack, statement: sql.Composed) -> None:
    with psycopg.connect(stack.database_url, autocommit=True) as connection:
        connection.execute(statement)


def _drop(stack: DevStack, name: str) -> None:
    _execute(stack, sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
