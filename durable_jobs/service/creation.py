"""Creating jobs, once per idempotency key."""

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract.envelope import SQL_DIGEST, stored_digest
from durable_jobs.contract.errors import (
    DurableJobsError,
    IdempotencyKeyConflict,
    InvalidBatch,
    InvalidInput,
    RetryTransaction,
)
from durable_jobs.contract.models import CreatedJob
from durable_jobs.contract.specs import JobSpec
from durable_jobs.service.base import ServicePart
from durable_jobs.store.database import translated
from durable_jobs.store.jobs import JobStore

BATCH = 500

Key = tuple[str, str, str]


class Creation(ServicePart):
    async def create_job(self, spec: JobSpec, connection: AsyncConnection | None = None) -> CreatedJob:
        """Insert the job, queued; or return the one that its idempotency key already has, with `created=False`.

        With `connection`, an SQLAlchemy connection on the psycopg driver, it joins the caller's transaction, which
        the caller commits; the job does not exist until then, and its workflow is started after.

        Raises `InvalidJob`, `ReservedPayloadKey`; `IdempotencyKeyConflict` when the key has another request, which
        leaves the caller's transaction usable; `RetryTransaction` when the caller's transaction lost a race.
        """
        spec = JobSpec.model_validate(spec)
        if connection is None:
            (answer,) = await self.database.run(lambda own: create_all(self._store, own, [spec]))
        else:
            try:
                (answer,) = await create_all(self._store, connection, [spec])
            except DBAPIError as error:
                raise translated(error) from error
        if isinstance(answer, IdempotencyKeyConflict):
            raise answer
        return answer

    async def create_jobs(self, specs: Iterable[JobSpec | Mapping[str, Any]]) -> list[CreatedJob]:
        """Create many in one transaction, one statement for each 500; all or nothing, in the order given.

        Raises `InvalidBatch`, whose `errors` name each one that can't be created.
        """
        checked: list[JobSpec] = []
        errors: dict[int, DurableJobsError] = {}
        for index, spec in enumerate(specs):
            try:
                checked.append(JobSpec.model_validate(spec))
            except InvalidInput as error:
                errors[index] = error
        if errors:
            raise InvalidBatch(errors)
        return await self.database.run(lambda own: _create_batch(self._store, own, checked))


async def _create_batch(store: JobStore, connection: AsyncConnection, specs: list[JobSpec]) -> list[CreatedJob]:
    answers = await create_all(store, connection, specs)
    errors = {index: answer for index, answer in enumerate(answers) if isinstance(answer, IdempotencyKeyConflict)}
    if errors:
        raise InvalidBatch(errors)
    return [answer for answer in answers if isinstance(answer, CreatedJob)]


async def create_all(
    store: JobStore, connection: AsyncConnection, specs: list[JobSpec]
) -> list[CreatedJob | IdempotencyKeyConflict]:
    """Insert or find each of `specs`, in their order; a conflict stands in the place of its job."""
    ordered = sorted(specs, key=_key)
    found: dict[Key, CreatedJob] = {}
    for start in range(0, len(ordered), BATCH):
        batch = ordered[start : start + BATCH]
        for _ in range(3):
            missing = [spec for spec in batch if _key(spec) not in found]
            if not missing:
                break
            for job in await store.insert(connection, missing):
                found[job.organization_id, job.project_id, job.idempotency_key] = CreatedJob(job=job, created=True)
            # A statement of its own: the insert can't see a winner that committed after it began.
            if taken := [_key(spec) for spec in missing if _key(spec) not in found]:
                for job in await store.existing(connection, taken):
                    key = (job.organization_id, job.project_id, job.idempotency_key)
                    found[key] = CreatedJob(job=job, created=False)
    answers: list[CreatedJob | IdempotencyKeyConflict] = []
    seen: set[Key] = set()
    for spec in specs:
        answer = found.get(_key(spec))
        if answer is None:
            raise RetryTransaction(
                f"idempotency key {spec.idempotency_key!r} is taken by a job this transaction can't see"
            )
        # A row made in SQL bears a digest that only SQL can take: this door's is of what the row holds.
        from_sql = answer.job.request_digest.startswith(SQL_DIGEST)
        if (stored_digest(answer.job) if from_sql else answer.job.request_digest) != spec.digest():
            answers.append(IdempotencyKeyConflict(spec.idempotency_key, answer.job.id))
        else:
            answers.append(answer if _key(spec) not in seen else answer.model_copy(update={"created": False}))
        seen.add(_key(spec))
    return answers


def _key(spec: JobSpec) -> Key:
    return (spec.organization, spec.project, spec.idempotency_key)
