"""What operators see of the whole; retention, quarantine, and the tokens of the HTTP API."""

import hashlib
import secrets
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.errors import InvalidInput, RetentionRoleMissing, TokenNotFound
from durable_jobs.contract.models import ApiToken, TokenRole
from durable_jobs.contract.quarantine import quarantine
from durable_jobs.contract.rules import identifier_problem, time_problem
from durable_jobs.contract.workers import QueueOverview, QueuePause
from durable_jobs.service.base import ServicePart, require_keys, require_text
from durable_jobs.service.registry import STALE_SECONDS
from durable_jobs.store import operations, registry
from durable_jobs.store.database import Database
from durable_jobs.store.operations import OperationStore

_PAGE = 500


class Operations(ServicePart):
    def __init__(self, database: Database, **options: Any) -> None:
        super().__init__(database, **options)
        self._operations = OperationStore(database.schema)

    async def list_queues(
        self, *, organization: str | None = None, stale_seconds: float = STALE_SECONDS
    ) -> list[QueueOverview]:
        """Every queue and type that has unsettled jobs: depth, age, pause, live workers; of one organization those that
        serve it."""
        return await self.database.run(
            lambda own: self._operations.queues(own, organization, stale_seconds), control=True
        )

    async def list_pauses(self, queue: str | None = None) -> list[QueuePause]:
        """The pauses that stand, of one queue or of all: each is lifted by a `resume_queue` that names the same."""
        rows = await self.database.run(
            lambda own: self._operations.rows(own, operations.PAUSES, {"queue": queue}), control=True
        )
        return [QueuePause.model_validate(row) for row in rows]

    async def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Counts for monitoring: jobs that aren't settled by queue, type and status; ages; events of the last five
        minutes by name; and what workers have counted."""

        async def work(connection: AsyncConnection) -> dict[str, list[dict[str, Any]]]:
            return {
                "jobs": await self._operations.rows(connection, operations.OPEN_COUNTS, {"organization": ""}),
                "ages": await self._operations.rows(connection, operations.AGES),
                "events": await self._operations.rows(connection, operations.EVENT_COUNTS),
                "counters": await self._operations.rows(connection, registry.COUNTERS),
            }

        return await self.database.run(work, control=True)

    async def count_settled_jobs(self) -> list[dict[str, Any]]:
        """Settled jobs by queue, type and status: reads the whole table, which takes long where it is large."""
        return await self.database.run(lambda own: self._operations.rows(own, operations.SETTLED_COUNTS), control=True)

    async def database_clock(self) -> datetime:
        """The database's clock, now: what every time of a row is judged by."""
        return await self.database.run(self._store.clock, control=True)

    async def database_facts(self) -> dict[str, Any]:
        """What a doctor asks of the server: durability settings, clock, oldest snapshot, dead tuples."""
        (facts,) = await self.database.run(lambda own: self._operations.rows(own, operations.FACTS), control=True)
        return facts

    async def prune(self, before: datetime, *, organization: str | None = None, limit: int = 1000) -> int:
        """Delete one batch of settled jobs that finished before `before`, with trail and attempts; returns how many.

        Never an unsettled or an escalated one. The idempotency keys go with the rows. Runs as the role
        `<schema>_retention`, which `migrate --roles` makes: nobody else may delete from the trail.

        Raises `InvalidInput`; `RetentionRoleMissing`.
        """
        if problem := time_problem(before):
            raise InvalidInput.at("before", problem)

        async def work(connection: AsyncConnection) -> int:
            try:
                await connection.exec_driver_sql(f"SET LOCAL ROLE {self.database.schema}_retention")
            except DBAPIError as error:
                raise RetentionRoleMissing from error
            return await self._operations.execute(
                connection, operations.PRUNE, before=before, organization=organization, limit=limit
            )

        return await self.database.run(work, control=True)

    async def quarantine(self, since: datetime, *, actor: str, reason: str) -> list[UUID]:
        """After a restore or an unsafe failover: every job that may have been dispatched since `since` is uncertain.

        All that are queued and due, claimed or running become `indeterminate`, each in a transaction of its own; to be
        run before workers start again. Returns their ids. Raises `InvalidInput`.
        """
        require_text(actor=actor, reason=reason)
        if problem := time_problem(since):
            raise InvalidInput.at("since", problem)
        return await self._each(
            partial(self._operations.unsettled, limit=_PAGE),
            _PAGE,
            partial(self._quarantine, since=since, actor=actor, reason=reason),
        )

    async def _quarantine(self, job_id: UUID, since: datetime, actor: str, reason: str) -> bool:
        async def work(connection: AsyncConnection) -> bool:
            job, now = await self._store.lock(connection, job_id)
            changes = quarantine(job, since=since, actor=actor, now=now)
            for change in changes:
                job = await self._store.apply(connection, job, change, now)
            if changes:
                await self._store.record_control(
                    connection, "quarantine", actor=actor, reason=reason, job=job, since=since.isoformat()
                )
            return bool(changes)

        return await self.database.run(work, control=True)

    async def create_token(
        self,
        name: str,
        role: TokenRole,
        organization: str,
        *,
        projects: Sequence[str] | None = None,
        tenant: str | None = None,
        actor: str | None = None,
        expires_at: datetime | None = None,
    ) -> tuple[ApiToken, str]:
        """A token of the HTTP API and its secret, which is told this once and kept as a SHA-256 only.

        `tenant` and `actor`, by default the organization and the token's name, are the identity of what it submits.
        Raises `InvalidInput`.
        """
        require_keys(name=name, tenant=tenant or organization, actor=actor or name)
        for field, value in [("organization", organization), *(("projects", each) for each in projects or ())]:
            if problem := identifier_problem(value):
                raise InvalidInput.at(field, problem)
        if expires_at is not None and (problem := time_problem(expires_at)):
            raise InvalidInput.at("expires_at", problem)
        secret = f"dj_{secrets.token_urlsafe(32)}"
        (row,) = await self.database.run(
            lambda own: self._operations.rows(
                own,
                operations.ADD_TOKEN,
                {
                    "id": uuid4(),
                    "name": name,
                    "digest": _digest(secret),
                    "role": str(TokenRole(role)),
                    "organization": organization,
                    "projects": list(dict.fromkeys(projects)) if projects is not None else None,
                    "tenant": tenant or organization,
                    "actor": actor or name,
                    "expires_at": expires_at,
                },
            ),
            control=True,
        )
        return ApiToken.model_validate(row), secret

    async def find_token(self, secret: str) -> ApiToken | None:
        """The live token with this secret. Found by its digest and compared in constant time."""
        digest = _digest(secret)
        rows = await self.database.run(
            lambda own: self._operations.rows(own, operations.TOKEN_BY_DIGEST, {"digest": digest})
        )
        if not rows or not secrets.compare_digest(bytes(rows[0]["token_sha256"]), digest):
            return None
        return ApiToken.model_validate(rows[0])

    async def list_tokens(self, organization: str | None = None) -> list[ApiToken]:
        """All tokens, revoked and expired ones as well, the oldest first."""
        return await self.database.run(lambda own: self._operations.tokens(own, organization), control=True)

    async def revoke_token(self, token_id: UUID) -> None:
        """From the commit on the token is refused. Again is no error. Raises `TokenNotFound`."""
        revoked = await self.database.run(
            lambda own: self._operations.execute(own, operations.REVOKE_TOKEN, id=token_id), control=True
        )
        if not revoked:
            raise TokenNotFound(f"no token {token_id}")


def _digest(secret: str) -> bytes:
    # A lone surrogate, as a form may carry it, is in no secret of ours.
    return hashlib.sha256(secret.encode(errors="replace")).digest()
