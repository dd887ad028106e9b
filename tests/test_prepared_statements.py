"""Prepared statements: on connections to the server itself, never through a pooler; and a migration in between."""

import asyncio
from unittest import mock
from uuid import uuid4

import pytest
from psycopg import ConnectionInfo
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs import Database, DurableJobService, JobStatus
from tests.conftest import Specs
from tests.probes import execute
from tests.support import sql

PREPARED = "SELECT statement FROM pg_prepared_statements"


async def whole_job(service: DurableJobService, spec: Specs) -> None:
    """Take one job through its verbs."""
    job = (await service.create_job(spec())).job
    outcome = await service.claim_job("worker", uuid4(), job_id=job.id)
    assert outcome is not None
    assert outcome.claim is not None
    await service.mark_provider_dispatched(outcome.claim, f"op:{job.id}", consequential=False)
    await service.complete_job(outcome.claim, {"answer": 42})
    assert (await service.get_job(job.id)).status is JobStatus.COMPLETED


async def test_what_every_job_goes_through_is_prepared_on_a_direct_connection(
    service: DurableJobService, spec: Specs
) -> None:
    await whole_job(service, spec)
    prepared = [row["statement"] for row in await sql(service, PREPARED)]
    assert len(prepared) == 5, prepared
    assert all("durable_jobs.jobs" in statement for statement in prepared)


async def test_nothing_is_prepared_where_a_pooler_answers(
    service: DurableJobService, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler tells its clients a process id that is none of the server's sessions."""
    monkeypatch.setattr(ConnectionInfo, "backend_pid", mock.PropertyMock(return_value=1))
    await whole_job(service, spec)
    await whole_job(service, spec)
    assert await sql(service, PREPARED) == []


async def test_a_migration_under_prepared_statements_goes_unnoticed(
    service: DurableJobService, spec: Specs, database_url: str
) -> None:
    """The server refuses a prepared statement whose rows have got another column; on every connection of the pool."""
    await asyncio.gather(*(whole_job(service, spec) for _ in range(20)))
    for number in range(2):
        await asyncio.to_thread(execute, database_url, f"ALTER TABLE durable_jobs.jobs ADD COLUMN later_{number} text")
        await asyncio.gather(*(whole_job(service, spec) for _ in range(20)))


async def test_a_pooler_that_was_taken_for_the_server_is_found_out(database_url: str, spec: Specs) -> None:
    """Its sessions are others' as well: one of theirs holds the name that we prepare under, and nothing is prepared
    from then on."""
    database = Database(database_url, pool_size=1)
    service = DurableJobService(database)

    async def of_another(connection: AsyncConnection) -> None:
        await connection.exec_driver_sql("PREPARE _pg3_0 AS SELECT 1")

    try:
        await database.run(of_another)
        await whole_job(service, spec)
        await whole_job(service, spec)
        assert await sql(service, PREPARED) == []
    finally:
        await database.close()
