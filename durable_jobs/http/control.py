"""What is done to jobs after their submission: by products, operators and providers. Each wakes the job's workflow."""

from uuid import UUID

from durable_jobs.contract.errors import FieldProblem, InvalidInput, Refused
from durable_jobs.contract.models import TokenRole
from durable_jobs.contract.states import JobStatus
from durable_jobs.http.access import Principal, Who, visible_job
from durable_jobs.http.bodies import ProviderWord, Reasoned, Recheck, Resolution, Retry
from durable_jobs.http.doors import door
from durable_jobs.http.problems import documented
from durable_jobs.http.state import Api, TheApi
from durable_jobs.http.views import CancelAnswer, JobView, Rechecked
from durable_jobs.service import RecheckFilter

submitting = door(TokenRole.SUBMITTER)
operating = door(TokenRole.OPERATOR)

_ANSWERS = documented(404, 409, 413, 415)


@submitting.post("/jobs/{job_id}/cancel", responses=_ANSWERS)
async def cancel_job(job_id: UUID, body: Reasoned, who: Who, api: TheApi) -> CancelAnswer:
    """Cancel a queued job, or ask the holder of a running one to stop."""
    await visible_job(api, who, job_id)
    reply = await api.jobs.handle(job_id).cancel(body.reason, who.actor)
    return CancelAnswer(reply=reply, job=await _now(api, who, job_id))


@operating.post("/jobs/{job_id}/retry", responses=_ANSWERS)
async def retry_job(job_id: UUID, body: Retry, who: Who, api: TheApi) -> JobView:
    """Queue a failed job again, as a new intent whose send has an operation key of its own."""
    await visible_job(api, who, job_id)
    risk = body.accept_duplicate_risk
    await api.jobs.handle(job_id).retry(who.actor, body.reason, accept_duplicate_risk=risk)
    return await _now(api, who, job_id)


@operating.post("/jobs/{job_id}/requeue", responses=_ANSWERS)
async def requeue_job(job_id: UUID, body: Reasoned, who: Who, api: TheApi) -> JobView:
    """Queue an interrupted job again, whose lease ran out before its boundary; its attempts are given back."""
    await visible_job(api, who, job_id)
    await api.jobs.handle(job_id).requeue(who.actor, body.reason)
    return await _now(api, who, job_id)


@operating.post("/jobs/{job_id}/resolve", responses=_ANSWERS)
async def resolve_job(job_id: UUID, body: Resolution, who: Who, api: TheApi) -> JobView:
    """Settle an uncertain job on the operator's word, with what it rests on."""
    await visible_job(api, who, job_id)
    verdict = JobStatus(body.verdict)
    await api.jobs.handle(job_id).resolve(verdict, body.evidence, who.actor, result=body.result)
    return await _now(api, who, job_id)


@operating.post("/jobs/{job_id}/recheck", responses=_ANSWERS)
async def recheck_job(job_id: UUID, body: Reasoned, who: Who, api: TheApi) -> JobView:
    """Take an escalated job from before the operator; an uncertain one goes back into the sweep."""
    job = await visible_job(api, who, job_id)
    if not await api.service.recheck_job(RecheckFilter(job_id=job_id), who.actor, body.reason):
        raise Refused(f"job {job_id} is {job.status} and stands before no operator: nothing to check again")
    if not job.status.is_settled:  # a settled one's workflow has closed: to wake it would open another
        await api.jobs.handle(job_id).wake()
    return await _now(api, who, job_id)


@operating.post("/jobs/recheck", responses=documented(413, 415))
async def recheck_jobs(body: Recheck, who: Who, api: TheApi) -> Rechecked:
    """Take all escalated jobs of a filter from before the operator, within the token's projects."""
    wanted = body.filter.model_dump(exclude_none=True)
    if not wanted:
        raise InvalidInput.at("filter", "must name at least one field")
    named = wanted.pop("project", None)
    wanted = {"job_type" if name == "type" else name: value for name, value in wanted.items()}
    rechecked: list[UUID] = []
    for project in who.within(named):
        scope = RecheckFilter(organization=who.organization, project=project, **wanted)
        rechecked += await api.service.recheck_job(scope, who.actor, body.reason)
    # The sweep takes them from here: until it has resolved one, there is nothing new for its workflow to see.
    return Rechecked(job_ids=rechecked)


@operating.post("/provider-states", responses=documented(404, 409, 413, 415))
async def record_provider_state(body: ProviderWord, who: Who, api: TheApi) -> JobView:
    """A provider's own word on an uncertain job, found by its operation key: what a webhook would call."""
    project = who.project(body.project)
    try:
        job = await api.service.record_provider_state(
            body.operation_key,
            body.provider_state(),
            body.evidence,
            who.actor,
            organization=who.organization,
            project=project,
            asked_at=body.asked_at,
        )
    except InvalidInput as error:
        raise InvalidInput(
            FieldProblem(each.field.removeprefix("state."), each.problem) for each in error.problems
        ) from None
    await api.jobs.handle(job.id).wake()
    return JobView.of(job)


async def _now(api: Api, who: Principal, job_id: UUID) -> JobView:
    return JobView.of(await visible_job(api, who, job_id))
