"""Servers that are there to be broken: stopped, restarted and killed, apart from those that the suite shares."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from durable_jobs._processes import free_port
from durable_jobs.dev import DATABASE_URL_VARIABLE, TEMPORAL_ADDRESS_VARIABLE, DevStack
from durable_jobs.store.migrate import migrate
from tests.probes import execute


def scratch_folder(prefix: str) -> Path:
    """A new folder that Postgres, which doesn't run as root, can get into. Whoever made it removes it."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o711)
    return folder


@contextmanager
def own_servers(folder: Path, *, persistent: bool = True) -> Iterator[DevStack]:
    """A Postgres and a Temporal server, whatever the environment names; `persistent` as in `DevStack`."""
    folder.mkdir(exist_ok=True)
    # Random ports: a well-known one, given up in a restart, may be taken by another stack.
    ports = {name: free_port() for name in ("postgres", "temporal", "ui")}
    (folder / "state.json").write_text(json.dumps({"ports": ports}))
    with mock.patch.dict(os.environ):
        for variable in (DATABASE_URL_VARIABLE, TEMPORAL_ADDRESS_VARIABLE):
            os.environ.pop(variable, None)
        stack = DevStack(folder, persistent=persistent)
    with stack:
        yield stack


@contextmanager
def scratch_servers(*, persistent: bool) -> Iterator[DevStack]:
    """`own_servers` in a folder that goes with them."""
    folder = scratch_folder("durable-jobs-failures-")
    try:
        with own_servers(folder / "servers", persistent=persistent) as stack:
            yield stack
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def template_database(stack: DevStack) -> str:
    """Make a database that holds the schema and no rows, for each test's to be a clone of; its name."""
    name = "durable_jobs_template"
    execute(stack.database_url, f"CREATE DATABASE {name}")
    migrate(stack.database_url.rpartition("/")[0] + f"/{name}")
    return name
