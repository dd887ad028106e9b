"""The verbs of products and operators on a job: cancel, retry. Each leaves an audit row, and runs on its own pool."""

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from durable_jobs.contract import decisions
from durable_jobs.contract.models import Job
from durable_jobs.service.base import ServicePart, require_text


class Control(ServicePart):
    async def cancel_job(self, job_id: UUID, reason: str, actor: str) -> str:
        """Queued: cancelled at once. Claimed or running: plants the flag that its holder must acknowledge.

        Replies `cancelled`, `requested`, or `already_terminal:<status>`. Raises `InvalidInput`, `JobNotFound`.
        """
        require_text(reason=reason, actor=actor)

        async def work(connection: AsyncConnection) -> str:
            job, now = await self._store.lock(connection, job_id)
            answer = decisions.cancel(job, reason=reason, actor=actor, now=now)
            if answer.change:
                await self._store.apply(connection, job, answer.change, now)
            elif answer.columns:
                await self._store.set_columns(connection, job, answer.columns, now)
            await self._store.record_control(
                connection, "cancel", actor=actor, reason=reason, job=job, reply=answer.reply
            )
            return answer.reply

        return await self.database.run(work, control=True)

    async def retry_job(self, job_id: UUID, actor: str, reason: str, *, accept_duplicate_risk: bool = False) -> Job:
        """Queue a failed job again as a new intent, whose send has an operation key of its own.

        Raises `NotRetryable` (see `contract.decisions.retry`), `InvalidInput`, `JobNotFound`.
        """
        require_text(actor=actor, reason=reason)
        return await self._decided(
            job_id,
            lambda job, now: decisions.retry(
                job, actor=actor, reason=reason, accept_duplicate_risk=accept_duplicate_risk, now=now
            ),
            control=True,
            action="retry",
            actor=actor,
            reason=reason,
            accept_duplicate_risk=accept_duplicate_risk,
        )
