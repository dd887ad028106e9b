"""Submitting and reading jobs."""

import contextlib
import re
import secrets
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query, Request, Response

from durable_jobs.contract.envelope import ExecutionInput, GovernanceInput
from durable_jobs.contract.errors import FieldProblem, InvalidInput, JobOutcomeError, ResultTimeout
from durable_jobs.contract.models import JobHead, TokenRole
from durable_jobs.contract.rules import key_problem
from durable_jobs.contract.specs import JobSpec
from durable_jobs.http.access import Principal, Who, visible_job
from durable_jobs.http.bodies import JobFilter, JobRequest, Position
from durable_jobs.http.doors import door
from durable_jobs.http.problems import BadIdempotencyKey, documented
from durable_jobs.http.state import TheApi
from durable_jobs.http.stream import MEDIA_TYPE, stream_events
from durable_jobs.http.views import (
    CONTROL_STATUS,
    AttemptPage,
    AttemptView,
    EventPage,
    EventView,
    JobPage,
    JobSummary,
    JobView,
)
from durable_jobs.settings import Settings

IDEMPOTENCY_KEY = "Idempotency-Key"
LONGEST_WAIT_SECONDS = 60

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_NAMES = {"job_type": "type", "idempotency_key": IDEMPOTENCY_KEY}
_HEADERS = {
    "parameters": [
        {
            "name": IDEMPOTENCY_KEY,
            "in": "header",
            "required": True,
            "description": "One job per organization, project and key: repeat it to repeat the request.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]([ -~]*[!-~])?$"},
            "example": "submit-execution-2048",
        },
        {
            "name": "traceparent",
            "in": "header",
            "required": False,
            "description": "W3C trace context: its trace is the job's. A new trace without it.",
            "schema": {"type": "string"},
        },
    ]
}

submitting = door(TokenRole.SUBMITTER)
reading = door(TokenRole.READER)


@submitting.post(
    "/jobs",
    status_code=201,
    responses={200: {"model": JobView, "description": "The same job as before."}, **documented(400, 409, 413, 415)},
    openapi_extra=_HEADERS,
)
async def create_job(body: JobRequest, request: Request, response: Response, who: Who, api: TheApi) -> JobView:
    """Create a job, once per idempotency key.

    The key with another request is refused with 422. The job is accepted once it is answered with 201: it is run even
    when Temporal is away at the moment.
    """
    key = _idempotency_key(request)
    created = await api.service.create_job(_spec(body, key, _trace(request), who, api.settings))
    await api.jobs.handle(created.job.id).launch()
    response.status_code = 201 if created.created else 200
    response.headers["Location"] = f"/api/v1/jobs/{created.job.id}"
    return JobView.of(created.job)


def _idempotency_key(request: Request) -> str:
    keys = request.headers.getlist(IDEMPOTENCY_KEY)
    if len(keys) != 1:
        raise BadIdempotencyKey.at(IDEMPOTENCY_KEY, "must be given, once" if not keys else "must be given once")
    problem = "must not be empty" if not keys[0] else key_problem(keys[0])
    if problem is None and not keys[0].isascii():
        problem = "must be ASCII: what else a header holds is read differently by each"
    if problem is not None:
        raise BadIdempotencyKey.at(IDEMPOTENCY_KEY, problem)
    return keys[0]


def _trace(request: Request) -> str:
    """The trace id of a valid `traceparent`, else a new one, as W3C has it."""
    found = _TRACEPARENT.fullmatch(request.headers.get("traceparent", ""))
    return found[1] if found else secrets.token_hex(16)


def _spec(body: JobRequest, key: str, trace: str, who: Principal, settings: Settings) -> JobSpec:
    shared = {name: value for name, value in body if name in JobSpec.model_fields}
    derived = {
        "job_type": body.type,
        "organization": who.organization,
        "project": who.project(body.project),
        "idempotency_key": key,
        "queue": body.queue or settings.type_queues.get(body.type.lower(), settings.default_queue),
        "execution": ExecutionInput(tenant=who.tenant, actor=who.actor, trace=trace, task=body.task, run=body.run),
        "governance": GovernanceInput(**dict(body.governance)) if body.governance else None,
    }
    try:
        return JobSpec(**shared | derived)
    except InvalidInput as error:
        problems = [FieldProblem(_NAMES.get(each.field, each.field), each.problem) for each in error.problems]
        raise type(error)(problems) from None


@reading.get("/jobs")
async def list_jobs(wanted: Annotated[JobFilter, Query()], who: Who, api: TheApi) -> JobPage:
    """List jobs in the order of their creation, without payloads and results."""
    states = None
    if wanted.state is not None or wanted.status is not None:
        states = [
            state
            for state, status in CONTROL_STATUS.items()
            if (wanted.state is None or state in wanted.state) and (wanted.status is None or status in wanted.status)
        ]
    jobs: list[JobHead] = []
    more = False
    for project in who.within(wanted.project):
        page = await api.service.list_jobs(
            organization=who.organization,
            project=project,
            statuses=states,
            queue=wanted.queue,
            job_type=wanted.type,
            escalated=wanted.escalated,
            after=str(wanted.after) if wanted.after else None,
            limit=wanted.limit,
        )
        jobs = sorted([*jobs, *page.items], key=lambda job: job.id)
        more = more or page.next_cursor is not None or len(jobs) > wanted.limit
        jobs = jobs[: wanted.limit]
    return JobPage(items=[JobSummary.of(job) for job in jobs], next_cursor=str(jobs[-1].id) if more else None)


@reading.get("/jobs/{job_id}", responses=documented(404))
async def get_job(
    job_id: UUID,
    who: Who,
    api: TheApi,
    wait: Annotated[
        float,
        Query(ge=0, le=LONGEST_WAIT_SECONDS, allow_inf_nan=False, description="Seconds to wait until it is settled."),
    ] = 0,
) -> JobView:
    """One job; with `wait`, once it is settled or the time is over, as it then stands."""
    job = await visible_job(api, who, job_id)
    if wait and not job.status.is_settled:
        with contextlib.suppress(ResultTimeout, JobOutcomeError):
            await api.jobs.handle(job_id).result(timeout=wait)
        job = await visible_job(api, who, job_id)
    return JobView.of(job)


@reading.get(
    "/jobs/{job_id}/events",
    response_model=EventPage,
    responses={
        200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}},
        204: {"description": "To a stream that is resumed: the job is settled, and nothing is left to tell."},
        **documented(404),
    },
    openapi_extra={
        "parameters": [
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "description": "Of a stream that broke off: where to go on.",
                "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
            }
        ]
    },
)
async def list_events(
    job_id: UUID, position: Annotated[Position, Query()], request: Request, who: Who, api: TheApi
) -> Any:
    """The job's trail. With `Accept: text/event-stream` it is followed, as server-sent events, until it is settled."""
    job = await visible_job(api, who, job_id)
    if MEDIA_TYPE in request.headers.get("accept", ""):
        return await stream_events(api, job, request.headers.get("last-event-id", position.after))
    page = await api.service.list_job_events(
        job_id, organization=who.organization, after=position.after, limit=position.limit
    )
    return EventPage(items=[EventView.of(event) for event in page.items], next_cursor=page.next_cursor)


@reading.get("/jobs/{job_id}/attempts", responses=documented(404))
async def list_attempts(job_id: UUID, position: Annotated[Position, Query()], who: Who, api: TheApi) -> AttemptPage:
    """The job's attempts, by generation: who held it, how each ended."""
    await visible_job(api, who, job_id)
    page = await api.service.list_job_attempts(
        job_id, organization=who.organization, after=position.after, limit=position.limit
    )
    return AttemptPage(items=[AttemptView.of(attempt) for attempt in page.items], next_cursor=page.next_cursor)
