"""What the verbs do to the job tables. Every function takes a connection inside a transaction, and never commits."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import uuid_utils.compat
from psycopg.types.json import Jsonb
from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.decisions import LAUNCH_CHECK_SECONDS, Change
from durable_jobs.contract.errors import JobNotFound
from durable_jobs.contract.models import Claim, Job, JobAttempt, JobEvent, JobHead, LeaseStatus
from durable_jobs.contract.rules import encode_json
from durable_jobs.contract.specs import JobSpec
from durable_jobs.contract.states import EventName, JobStatus
from durable_jobs.store import statements
from durable_jobs.store.claim import claim_statements
from durable_jobs.store.database import fetch
from durable_jobs.store.tables import job_attempts, job_events, jobs

_JOB_FIELDS = frozenset(Job.model_fields)


class JobStore:
    """The fenced statements over one schema. Takes a connection, never commits."""

    def __init__(self, schema: str) -> None:
        self.schema = schema

    async def _execute(self, connection: AsyncConnection, template: str, parameters: Mapping[str, Any]) -> int:
        sql = statements.statement(template, self.schema)
        return (await connection.exec_driver_sql(sql, dict(parameters))).rowcount

    async def insert(self, connection: AsyncConnection, specs: Sequence[JobSpec]) -> list[Job]:
        """Insert those of `specs` whose idempotency key is free, in one statement; returns the new rows."""
        ids = [uuid_utils.compat.uuid7() for _ in specs]
        columns: dict[str, list[Any]] = {
            "id": ids,
            "organization_id": [spec.organization for spec in specs],
            "project_id": [spec.project for spec in specs],
            "queue": [spec.stored_queue for spec in specs],
            "payload": [encode_json(spec.stored_payload(id_)) for spec, id_ in zip(specs, ids, strict=True)],
            "request_digest": [spec.digest() for spec in specs],
        }
        for name in ("job_type", "idempotency_key", "priority", "max_attempts", "scheduled_at"):
            columns[name] = [getattr(spec, name) for spec in specs]
        for name in ("backoff_base_seconds", "lease_seconds", "timeout_seconds"):
            columns[name] = [getattr(spec, name) for spec in specs]
        sql = statements.statement(statements.INSERT, self.schema)
        rows = await fetch(connection, sql, columns | {"launch_check_seconds": LAUNCH_CHECK_SECONDS}, prepare=True)
        return [job_of(row) for row in rows]

    async def existing(self, connection: AsyncConnection, keys: Sequence[tuple[str, str, str]]) -> list[Job]:
        """The jobs under these (organization, project, idempotency key)."""
        columns = {
            "organization_id": [key[0] for key in keys],
            "project_id": [key[1] for key in keys],
            "idempotency_key": [key[2] for key in keys],
        }
        rows = await fetch(connection, statements.statement(statements.EXISTING, self.schema), columns)
        return [job_of(row) for row in rows]

    async def claim(
        self,
        connection: AsyncConnection,
        *,
        worker_id: str,
        claim_token: UUID,
        job_id: UUID | None,
        scope: Mapping[str, Sequence[str] | None],
    ) -> tuple[str, Job] | None:
        """Claim by id, waiting for the row's lock, or the next eligible job. Returns the decision and the row as it
        now stands; None when there is no such row."""
        filters: dict[str, Any] = {name: list(values) for name, values in scope.items() if values is not None}
        if len(filters.get("queues", ())) == 1:
            filters["queue"] = filters.pop("queues")[0]  # one value lets the scan follow the index's order
        parameters = {"worker_id": worker_id, "claim_token": claim_token, "job_id": job_id, **filters}
        parameters["launch_check_seconds"] = LAUNCH_CHECK_SECONDS
        for sql in claim_statements(self.schema, job_id is not None, frozenset(filters)):
            if rows := await fetch(connection, sql, parameters, prepare=job_id is not None):
                return rows[0]["decision"], job_of(rows[0])
        return None

    async def mark_dispatched(
        self,
        connection: AsyncConnection,
        claim: Claim,
        operation_key: str,
        grace_seconds: float,
        admission: Mapping[str, Any] | None,
    ) -> tuple[Job, datetime, bool]:
        """Record the boundary if the row allows it, with the `admission` that let it through: the row, the clock it was
        judged by, whether applied."""
        admitted = encode_json(admission) if admission is not None else None
        parameters = {"operation_key": operation_key, "grace_seconds": grace_seconds, "admission": admitted}
        return await self._fenced(connection, statements.MARK, claim, parameters)

    async def complete(
        self, connection: AsyncConnection, claim: Claim, result: str, data: Mapping[str, Any]
    ) -> tuple[Job, datetime, bool]:
        """Complete a running job: the row, the clock it was judged by, whether applied."""
        parameters = {"result": result, "data": encode_json(data)}
        return await self._fenced(connection, statements.COMPLETE, claim, parameters)

    async def _fenced(
        self, connection: AsyncConnection, template: str, claim: Claim, parameters: Mapping[str, Any]
    ) -> tuple[Job, datetime, bool]:
        sql = statements.statement(template, self.schema)
        if rows := await fetch(connection, sql, {**_holder(claim), **parameters}, prepare=True):
            return job_of(rows[0]), rows[0]["updated_at"], True
        job, now = await self.lock(connection, claim.job_id)
        return job, now, False

    async def renew(
        self,
        connection: AsyncConnection,
        claim: Claim,
        *,
        grace_seconds: float,
        details: Mapping[str, Any] | None,
    ) -> LeaseStatus:
        """Extend one lease, waiting for the row's lock; with `details`, leave them as a heartbeat event."""
        sql = statements.statement(statements.RENEW, self.schema, **statements.RENEW_ONE)
        rows = await fetch(connection, sql, renewal(claim.worker_id, [claim], grace_seconds, details))
        return LeaseStatus(rows[0]["answer"])

    async def lock(
        self, connection: AsyncConnection, job_id: UUID, organization: str | None = None
    ) -> tuple[Job, datetime]:
        """The row, locked, and the database's clock read after the lock was held.

        Raises `JobNotFound`, also for another organization's job when one is given.
        """
        parameters = {"job_id": job_id, "organization": organization}
        rows = await fetch(connection, statements.statement(statements.LOCK, self.schema), parameters, prepare=True)
        if not rows:
            raise JobNotFound(f"no job {job_id}")
        return job_of(rows[0]), rows[0]["now"]

    async def apply(self, connection: AsyncConnection, job: Job, change: Change, now: datetime) -> Job:
        """Write a decided change of a locked row, with its event and the end of its attempt, in one statement."""
        attempt = change.attempt or {}
        fences = change.columns.get("lease_generation", job.lease_generation) != job.lease_generation
        sql = statements.change_statement(self.schema, tuple(change.columns), tuple(attempt), fences)
        parameters = {name: _adapted(value) for name, value in change.columns.items()}
        parameters |= {f"attempt_{name}": _adapted(value) for name, value in attempt.items()}
        parameters |= {
            "job_id": job.id,
            "from_status": str(job.status),
            "from_generation": job.lease_generation,
            "event": str(change.event),
            "actor": change.actor,
            "now": now,
            "data": _adapted(change.data),
        }
        (row,) = await fetch(connection, sql, parameters, prepare=True)
        return job_of(row)

    async def set_columns(
        self, connection: AsyncConnection, job: Job, columns: Mapping[str, Any], now: datetime
    ) -> None:
        """Write bookkeeping of a locked row that leaves no event, such as the cancellation flag."""
        await connection.execute(jobs.update().where(jobs.c.id == job.id).values(**columns, updated_at=now))

    async def keep_late_result(self, connection: AsyncConnection, claim: Claim, result: str) -> bool:
        """Keep a fenced holder's result on its attempt row, as evidence; True if it was kept."""
        return bool(await self._execute(connection, statements.KEEP_LATE_RESULT, {**_holder(claim), "result": result}))

    async def append_event(
        self, connection: AsyncConnection, job_id: UUID, name: EventName, actor: str, data: Mapping[str, Any]
    ) -> JobEvent:
        """Append an event that changes nothing. Raises `JobNotFound`."""
        parameters = {"job_id": job_id, "name": str(name), "actor": actor, "data": encode_json(data)}
        rows = await fetch(connection, statements.statement(statements.APPEND_EVENT, self.schema), parameters)
        if not rows:
            raise JobNotFound(f"no job {job_id}")
        return JobEvent.model_validate(dict(rows[0]))

    async def record_control(
        self,
        connection: AsyncConnection,
        action: str,
        *,
        actor: str,
        reason: str | None,
        job: Job | None,
        tenant: str | None = None,
        **data: Any,
    ) -> None:
        """Leave the audit row of a control verb, on a job or on what is a `tenant`'s."""
        parameters = {
            "action": action,
            "actor": actor,
            "reason": reason,
            "job_id": job.id if job else None,
            "organization_id": job.organization_id if job else tenant,
            "project_id": job.project_id if job else None,
            "data": encode_json(data),
        }
        await self._execute(connection, statements.RECORD_CONTROL, parameters)

    async def clock(self, connection: AsyncConnection) -> datetime:
        """The database's clock, now."""
        now: datetime = (await connection.exec_driver_sql("SELECT clock_timestamp()")).scalar_one()
        return now

    async def digest_holds(self, connection: AsyncConnection, job_id: UUID) -> bool:
        """Whether a row that SQL's `enqueue` made still holds what it was made with."""
        sql = "SELECT request_digest = {s}.row_digest(queue, job_type, payload) FROM {s}.jobs WHERE id = %(id)s"
        held = await connection.exec_driver_sql(sql.replace("{s}", self.schema), {"id": job_id})
        return bool(held.scalar_one())

    async def get_with_clock(self, connection: AsyncConnection, job_id: UUID) -> tuple[Job, datetime]:
        """The row, and the database's clock. Raises `JobNotFound`."""
        row = await self._row(connection, job_id, None)
        return job_of(row), row["now"]

    async def get(self, connection: AsyncConnection, job_id: UUID, organization: str | None = None) -> Job:
        """Raises `JobNotFound`, also for another organization's job when one is given."""
        return job_of(await self._row(connection, job_id, organization))

    async def _row(self, connection: AsyncConnection, job_id: UUID, organization: str | None) -> dict[str, Any]:
        sql = statements.statement(statements.READ, self.schema)
        rows = await fetch(connection, sql, {"job_id": job_id, "organization": organization}, prepare=True)
        if not rows:
            raise JobNotFound(f"no job {job_id}")
        return rows[0]

    async def list_jobs(
        self,
        connection: AsyncConnection,
        *,
        organization: str | None,
        project: str | None,
        statuses: Sequence[JobStatus] | None,
        queue: str | None,
        job_type: str | None,
        escalated: bool | None,
        after: UUID | None,
        limit: int,
    ) -> list[JobHead]:
        """At most `limit` jobs by ascending id, which is their order of creation, after `after`."""
        query = select(*(jobs.c[name] for name in JobHead.model_fields)).order_by(jobs.c.id).limit(limit)
        equal = {jobs.c.organization_id: organization, jobs.c.project_id: project, jobs.c.queue: queue}
        for column, wanted in (equal | {jobs.c.job_type: job_type}).items():
            if wanted is not None:
                query = query.where(column == wanted)
        if statuses is not None:
            query = query.where(jobs.c.status.in_([str(status) for status in statuses]))
        if escalated is not None:
            stands = jobs.c.escalated_at
            query = query.where(stands.is_not(None) if escalated else stands.is_(None))
        if after is not None:
            query = query.where(jobs.c.id > after)
        return [JobHead.model_validate(dict(row)) for row in (await connection.execute(query)).mappings()]

    async def list_events(
        self, connection: AsyncConnection, job_id: UUID, *, organization: str | None = None, after: int, limit: int
    ) -> list[JobEvent]:
        """At most `limit` events of the job in their order, after event `after`."""
        table = job_events
        query = select(table).where(table.c.job_id == job_id, table.c.id > after).order_by(table.c.id).limit(limit)
        if organization is not None:
            query = query.where(table.c.organization_id == organization)
        return [JobEvent.model_validate(dict(row)) for row in (await connection.execute(query)).mappings()]

    async def list_attempts(
        self, connection: AsyncConnection, job_id: UUID, *, organization: str | None = None, after: int, limit: int
    ) -> list[JobAttempt]:
        """At most `limit` attempts of the job by generation, after generation `after`."""
        table = job_attempts
        query = select(table).where(table.c.job_id == job_id, table.c.generation > after)
        if organization is not None:
            query = query.where(table.c.organization_id == organization)
        rows = (await connection.execute(query.order_by(table.c.generation).limit(limit))).mappings()
        return [JobAttempt.model_validate(dict(row)) for row in rows]


def renewal(
    worker_id: str, claims: Sequence[Claim], grace_seconds: float, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The parameters of `statements.RENEW`."""
    return {
        "worker_id": worker_id,
        "job_ids": [claim.job_id for claim in claims],
        "generations": [claim.generation for claim in claims],
        "grace_seconds": grace_seconds,
        "data": encode_json(details or {}),
        "progress": details is not None,
    }


def _holder(claim: Claim) -> dict[str, Any]:
    return {"job_id": claim.job_id, "worker_id": claim.worker_id, "generation": claim.generation}


def job_of(row: RowMapping | Mapping[str, Any]) -> Job:
    """The record of a row, whatever else the row carries."""
    return Job.model_validate({name: value for name, value in row.items() if name in _JOB_FIELDS})


def _adapted(value: object) -> object:
    if isinstance(value, StrEnum):
        return str(value)
    return Jsonb(value, dumps=encode_json) if isinstance(value, dict) else value
