"""The operator's console: pages rendered on the server, forms that post, and nothing for a browser to build.

A sign-in keeps the token of the API in a cookie that scripts and other sites can't read; the same roles hold as for the
API. Every form carries a value derived from that token, which another site can't know.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Coroutine
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode
from uuid import UUID

from fastapi import APIRouter, Depends, Form, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from fastapi.templating import Jinja2Templates

from durable_jobs.contract.errors import DurableJobsError, InvalidInput
from durable_jobs.contract.models import Job, JobHead, TokenRole
from durable_jobs.contract.states import UNRESOLVED, JobStatus
from durable_jobs.contract.verbs import legal_verbs
from durable_jobs.http.access import Principal, require_loopback, visible_job
from durable_jobs.http.doors import bounded_body
from durable_jobs.http.problems import Forbidden
from durable_jobs.http.queues import serving
from durable_jobs.http.state import Api, TheApi, api_of
from durable_jobs.service import RecheckFilter
from durable_jobs.temporal.messages import workflow_id

COOKIE = "durable_jobs_console"
ATTENTION = 50
_LOCAL_SECRET = secrets.token_urlsafe(32)
"""Where the API asks for no token: this process's own."""

MAX_FORM_BYTES = 1024 * 1024
"""The largest form: a result or evidence that somebody pastes."""
_SIGN_IN = "/console/sign-in"


class ConsoleRoute(APIRoute):
    """Finds out who asks before it reads a form, which is bounded and of one media type."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def enter(request: Request) -> Response:
            if self.path != _SIGN_IN:
                request.state.session = await session_of(request, api_of(request))
            return await handle(await _read_form(request) if request.method == "POST" else request)

        return enter


async def _read_form(request: Request) -> Request:
    """Raises `BodyTooLarge`, `InvalidInput`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/x-www-form-urlencoded":
        raise InvalidInput.at("(whole)", "must be a form, application/x-www-form-urlencoded")
    body = await bounded_body(request, MAX_FORM_BYTES)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


router = APIRouter(prefix="/console", include_in_schema=False, route_class=ConsoleRoute)
templates = Jinja2Templates(Path(__file__).parent / "templates")


class SignIn(Exception):
    """Nobody is signed in: the sign-in page is shown instead."""


class Session:
    """Who looks, by the cookie; and the value that this visitor's forms must carry."""

    def __init__(self, who: Principal, secret: str, *, signed_in: bool) -> None:
        self.who = who
        self.signed_in = signed_in
        self.csrf = hashlib.sha256(f"csrf:{secret}".encode()).hexdigest()

    def require(self, role: TokenRole, csrf: str) -> None:
        """Raises `Forbidden`."""
        if not secrets.compare_digest(csrf.encode(), self.csrf.encode()):
            raise Forbidden("the form did not come from this console")
        self.who.require_role(role)


async def session_of(request: Request, api: TheApi) -> Session:
    """Raises `SignIn`, or `LoopbackOnly` where no token is asked for."""
    if api.settings.http_tokens == "off":
        require_loopback(request)
        return Session(Principal.local(api.settings), _LOCAL_SECRET, signed_in=False)
    secret = request.cookies.get(COOKIE, "")
    token = await api.service.find_token(secret) if secret else None
    if token is None:
        raise SignIn
    return Session(Principal.of_token(token), secret, signed_in=True)


async def _found(request: Request) -> Session:
    """The session that `ConsoleRoute` found."""
    session: Session = request.state.session
    return session


Here = Annotated[Session, Depends(_found)]
Csrf = Annotated[str, Form()]


def show_sign_in(request: Request, error: Exception) -> Response:
    """The handler of `SignIn`."""
    return templates.TemplateResponse(request, "sign_in.html", status_code=401)


@router.post("/sign-in")
async def sign_in(request: Request, api: TheApi, token: Annotated[str, Form()]) -> Response:
    if await api.service.find_token(token.strip()) is None:
        refused = {"refused": "No live token has this secret."}
        return templates.TemplateResponse(request, "sign_in.html", refused, status_code=401)
    answer = RedirectResponse("/console", status_code=303)
    # A proxy that ends TLS says so; who claims it falsely gets a cookie that is kept back from plain HTTP.
    secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
    answer.set_cookie(COOKIE, token.strip(), path="/console", httponly=True, samesite="strict", secure=secure)
    return answer


@router.post("/sign-out")
async def sign_out(here: Here, csrf: Csrf) -> Response:
    here.require(TokenRole.READER, csrf)
    answer = RedirectResponse("/console", status_code=303)
    answer.delete_cookie(COOKIE, path="/console")
    return answer


@router.get("")
async def overview(request: Request, api: TheApi, here: Here, said: str = "") -> Response:
    """What needs a person first; for a token of the whole organization its queues and workers."""
    values: dict[str, Any] = {
        "attention": await _attention(api, here.who),
        "whole": here.who.projects is None,
        "may_switch": here.who.role is TokenRole.OPERATOR,
    }
    if here.who.projects is None:
        stale = api.settings.worker_stale_seconds
        workers = await serving(api, here.who)
        values["queues"] = await api.service.list_queues(organization=here.who.organization, stale_seconds=stale)
        values["workers"] = [(worker, str(worker.state(stale))) for worker in workers]
    return await _page(request, api, here, "overview.html", said=said, **values)


@router.get("/jobs")
async def list_jobs(
    request: Request, api: TheApi, here: Here, state: str = "", queue: str = "", type: str = "", after: str = ""
) -> Response:
    statuses = [JobStatus(state)] if state in set(JobStatus) else None
    page = await api.service.list_jobs(
        organization=here.who.organization,
        statuses=statuses,
        queue=queue or None,
        job_type=type or None,
        after=after or None,
    )
    page = page.model_copy(update={"items": [job for job in page.items if here.who.sees(job)]})
    chosen = {"state": state, "queue": queue, "type": type}
    query = urlencode({**chosen, "after": page.next_cursor or ""})
    return await _page(
        request, api, here, "jobs.html", page=page, states=list(JobStatus), chosen=chosen, next_query=query
    )


@router.get("/jobs/{job_id}")
async def show_job(request: Request, api: TheApi, here: Here, job_id: UUID, said: str = "") -> Response:
    await visible_job(api, here.who, job_id)
    return await _job_page(request, api, here, job_id, said=said)


@router.post("/jobs/{job_id}/{action}")
async def act(
    request: Request,
    api: TheApi,
    here: Here,
    job_id: UUID,
    action: str,
    csrf: Csrf,
    operator: Annotated[str, Form()],
    reason: Annotated[str, Form()] = "",
    verdict: Annotated[str, Form()] = "",
    evidence: Annotated[str, Form()] = "",
    result: Annotated[str, Form()] = "",
    accept_duplicate_risk: Annotated[str, Form()] = "",
) -> Response:
    """One of the legal actions, with its reason and who acts; refused ones are shown on the job's page."""
    here.require(_role_for(action), csrf)
    await visible_job(api, here.who, job_id)
    handle, actor = api.jobs.handle(job_id), _named(operator, here.who)
    try:
        match action:
            case "cancel":
                said = f"Cancellation: {await handle.cancel(reason, actor)}."
            case "retry":
                await handle.retry(actor, reason, accept_duplicate_risk=accept_duplicate_risk == "yes")
                said = "It is queued again, as a new intent."
            case "requeue":
                await handle.requeue(actor, reason)
                said = "It is queued again."
            case "recheck":
                await api.service.recheck_job(RecheckFilter(job_id=job_id), actor, reason)
                said = "It stands before the operator no more."
            case "resolve":
                outcome = _object("result", result) if result.strip() else None
                await handle.resolve(JobStatus(verdict), _object("evidence", evidence), actor, result=outcome)
                said = f"It is {verdict} now."
            case _:
                raise InvalidInput.at("action", "is none of this console")
    except (DurableJobsError, ValueError) as error:
        return await _job_page(request, api, here, job_id, status_code=409, refused=str(error))
    return RedirectResponse(f"/console/jobs/{job_id}?{urlencode({'said': said})}", status_code=303)


@router.post("/queues/{action}")
async def switch_queue(
    api: TheApi,
    here: Here,
    action: str,
    csrf: Csrf,
    queue: Annotated[str, Form()],
    job_type: Annotated[str, Form()],
    reason: Annotated[str, Form()],
) -> Response:
    here.require(TokenRole.OPERATOR, csrf)
    here.who.require_whole_organization()
    scope = {"actor": here.who.actor, "reason": reason, "organization": here.who.organization}
    said = f"{job_type} on {queue}: {action}d."
    if action == "pause":
        await api.service.pause_queue(queue, job_type, **scope)
    elif await api.service.resume_queue(queue, job_type, **scope):
        await api.jobs.wake_due(queue, job_type, organization=here.who.organization)
    else:
        said = f"{job_type} on {queue}: no pause of yours stood there; the deployer's, or that of the queue, stands."
    return RedirectResponse(f"/console?{urlencode({'said': said})}", status_code=303)


async def _attention(api: Api, who: Principal) -> list[JobHead]:
    """Escalated jobs first, then uncertain ones, those created first before the others."""
    found: list[JobHead] = []
    kinds: tuple[dict[str, Any], ...] = ({"escalated": True}, {"escalated": False, "statuses": sorted(UNRESOLVED)})
    for wanted in kinds:
        for project in who.within(None):
            page = await api.service.list_jobs(
                organization=who.organization, project=project, limit=ATTENTION, **wanted
            )
            found += page.items
    return sorted(found, key=lambda job: (job.escalated_at is None, job.escalated_at or job.created_at))[:ATTENTION]


async def _job_page(
    request: Request, api: Api, here: Session, job_id: UUID, *, status_code: int = 200, **values: Any
) -> Response:
    job, now = await api.service.get_job_and_clock(job_id)
    attempts = await api.service.list_job_attempts(job_id)
    return await _page(
        request,
        api,
        here,
        "job.html",
        status_code=status_code,
        job=job,
        events=await api.jobs.handle(job_id).events(),
        attempts=attempts.items,
        actions=[verb for verb in legal_verbs(job, now) if here.who.role.includes(_role_for(verb))],
        by_operator=job.settled_by_operator,
        temporal_url=_temporal_url(api, job),
        now=now,
        **values,
    )


async def _page(
    request: Request, api: Api, here: Session, name: str, *, status_code: int = 200, **values: Any
) -> HTMLResponse:
    if "now" not in values:
        values["now"] = await api.service.database_clock()
    context = {"who": here.who, "csrf": here.csrf, "signed_in": here.signed_in, **values}
    answer = templates.TemplateResponse(request, name, context, status_code=status_code)
    answer.headers["Content-Security-Policy"] = (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    )
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Referrer-Policy"] = "no-referrer"
    return answer


def _role_for(action: str) -> TokenRole:
    return TokenRole.SUBMITTER if action == "cancel" else TokenRole.OPERATOR


def _temporal_url(api: Api, job: Job) -> str | None:
    base = api.settings.temporal_ui_url
    if base is None:
        return None
    return (
        f"{base.rstrip('/')}/namespaces/{api.jobs.temporal.namespace}/workflows/{quote(workflow_id(job.id), safe='')}"
    )


def _named(operator: str, who: Principal) -> str:
    """Who acts: the name given, and the token's own where they differ, so that no name alone is trusted."""
    name = operator.strip()
    return who.actor if not name or name == who.actor else f"{name} (by the token of {who.actor})"


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidInput.at(name, f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInput.at(name, "must be a JSON object")
    return value


def _ago(moment: datetime | None, now: datetime) -> str:
    return "" if moment is None else _duration(abs((now - moment).total_seconds()))


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


_TONES = {JobStatus.COMPLETED: "good", JobStatus.INDETERMINATE: "doubt", JobStatus.TIMED_OUT: "doubt"} | dict.fromkeys(
    (JobStatus.FAILED, JobStatus.DEAD_LETTER, JobStatus.HALT_UNSAFE), "bad"
)
templates.env.filters |= {
    "ago": _ago,
    "duration": _duration,
    "tone": lambda status: _TONES.get(status, ""),
    "json": lambda value: json.dumps(value, indent=1, ensure_ascii=False),
}
