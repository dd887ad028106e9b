"""What stands before an operator: found in whatever status it is, ended with that status, and to be taken back."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from durable_jobs import DurableJobService, JobError, JobStatus
from durable_jobs.contract.models import Claim
from durable_jobs.contract.verbs import legal_verbs
from durable_jobs.service import RecheckFilter
from tests.conftest import Specs
from tests.support import expire, running

REASON = "NO_HANDLER: nobody hosts it"
ERROR = JobError.of("BROKE", "it broke")


async def standing(service: DurableJobService) -> list[UUID]:
    """The ids that an operator is shown, and monitoring counts."""
    listed = [job.id for job in (await service.list_jobs(escalated=True)).items]
    counted = sum(row["escalated"] for row in (await service.metrics())["ages"])
    assert counted == len(listed)
    return listed


async def interrupted(service: DurableJobService, spec: Specs) -> Claim:
    """A job whose worker is away, escalated as nobody hosts it; its holder may still come back."""
    claim = await running(service, spec(max_attempts=1))
    await expire(service, claim.job_id)
    assert await service.escalate_job(await service.get_job(claim.job_id), REASON, "sweep")
    assert await standing(service) == [claim.job_id]
    return claim


async def test_one_that_is_queued_is_listed_and_its_cancellation_ends_it(
    service: DurableJobService, spec: Specs
) -> None:
    job = (await service.create_job(spec())).job
    escalated = await service.escalate_job(job, REASON, "worker")
    assert escalated is not None
    assert legal_verbs(escalated, datetime.now(UTC)) == ["cancel", "recheck"]
    assert await standing(service) == [job.id]
    assert [each.id for each in (await service.list_jobs(escalated=False)).items] == []
    await service.cancel_job(job.id, "the type is retired", "ann")
    assert await standing(service) == []


ENDS: dict[str, Callable[[DurableJobService, Claim], Awaitable[Any]]] = {
    "completed": lambda service, claim: service.complete_job(claim, {"sum": 3}),
    "failed": lambda service, claim: service.fail_job(claim, ERROR, retryable=False),
    "dead_letter": lambda service, claim: service.fail_job(claim, ERROR, retryable=True),
    "queued": lambda service, claim: service.release_job(claim, "shutdown"),
    "halt_unsafe": lambda service, claim: service.mark_halt_unsafe(claim, ERROR),
    "indeterminate": lambda service, claim: service.mark_indeterminate(claim, ERROR),
    "requeued": lambda service, claim: service.requeue_job(claim.job_id, "ann", "its worker is gone"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_it_does_not_outlive_the_state_that_it_was_said_of(
    service: DurableJobService, spec: Specs, end: str
) -> None:
    claim = await interrupted(service, spec)
    await ENDS[end](service, claim)
    job = await service.get_job(claim.job_id)
    assert (job.escalated_at, job.escalation_reason) == (None, None)
    assert await standing(service) == []


async def test_a_landing_of_a_reclaim_ends_it(service: DurableJobService, spec: Specs) -> None:
    """In its last attempt: `dead_letter`. Past its boundary the job is the sweep's again, not the operator's."""
    claim = await interrupted(service, spec)
    assert not await service.claim_job("other", claim.job_id, job_id=claim.job_id)
    assert (await service.get_job(claim.job_id)).status is JobStatus.DEAD_LETTER
    assert await standing(service) == []
    sent = await interrupted(service, spec)
    assert await service.renew_lease(sent)
    await service.mark_provider_dispatched(sent, f"probe:{sent.job_id}", consequential=False)
    await expire(service, sent.job_id)
    assert not await service.claim_job("other", sent.job_id, job_id=sent.job_id)
    landed = await service.get_job(sent.job_id)
    assert (landed.status, landed.escalated_at) == (JobStatus.INDETERMINATE, None)


async def test_one_that_is_completed_is_done_with_by_a_recheck(service: DurableJobService, spec: Specs) -> None:
    """Over its follow-ups: nothing else would ever take it from before the operator, and it was kept from retention."""
    claim = await running(service, spec())
    await service.complete_job(claim, {"sum": 3}, follow_up_problem="FOLLOW_UPS_FAILED: it raised")
    assert await standing(service) == [claim.job_id]
    job = await service.get_job(claim.job_id)
    assert legal_verbs(job, datetime.now(UTC)) == ["recheck"]
    assert await service.recheck_job(RecheckFilter(job_id=job.id), "ann", "made by hand") == [job.id]
    assert await standing(service) == []
    after = await service.get_job(job.id)
    assert after == job.model_copy(
        update={"escalated_at": None, "escalation_reason": None, "updated_at": after.updated_at}
    )


async def test_a_queue_counts_the_workers_that_serve_the_organization(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    await service.create_job(spec())
    about: dict[str, Any] = {"host": "h", "pid": 1, "version": "1", "queue": queue, "job_types": ["probe"]}
    await service.register_worker("of-globex", organizations=["globex"], **about)
    assert [each.live_workers for each in await service.list_queues(organization="acme")] == [0]
    await service.register_worker("of-all", organizations=None, **about)
    assert [each.live_workers for each in await service.list_queues(organization="acme")] == [1]
    assert [each.live_workers for each in await service.list_queues()] == [2]


async def test_the_pauses_that_stand_are_told_one_by_one(service: DurableJobService, spec: Specs, queue: str) -> None:
    await service.create_job(spec())
    for named in ({}, {"job_type": "probe"}, {"job_type": "probe", "organization": "acme"}):
        assert await service.pause_queue(queue, actor="ann", reason="an outage", **named)
    assert not await service.resume_queue(queue, organization="acme", actor="ann", reason="over")
    assert await service.resume_queue(queue, actor="ann", reason="over")
    standing = [(each.job_type, each.organization) for each in await service.list_pauses(queue)]
    assert standing == [("probe", None), ("probe", "acme")]
    assert await service.list_pauses("another") == []
