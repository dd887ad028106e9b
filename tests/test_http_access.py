"""Who may do what: every route, by role, organization and project; and what is served without tokens."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
from starlette.requests import Request

from durable_jobs import DurableJobService
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DevStack
from durable_jobs.http import create_app
from durable_jobs.http.access import require_loopback
from durable_jobs.http.problems import LoopbackOnly
from tests.conftest import Specs
from tests.http_api import JOBS, SUBMISSION, calling, problem_of, raw, serving, settings_for, submit, token
from tests.support import sql
from tests.sweeping import audit, uncertain

READER, SUBMITTER, OPERATOR = TokenRole.READER, TokenRole.SUBMITTER, TokenRole.OPERATOR
WHY = {"reason": "because"}
KEY = {"Idempotency-Key": "k"}


@dataclass(frozen=True)
class Route:
    """One route: the least role that it needs, and what it takes."""

    method: str
    path: str
    role: TokenRole
    body: dict[str, Any] | None = None
    whole_organization: bool = False
    """Refused to a token of some projects alone."""

    @property
    def names_a_job(self) -> bool:
        return "{job_id}" in self.path or self.path.endswith("provider-states")

    async def call(self, client: httpx.AsyncClient, job_id: UUID, secret: str | None) -> httpx.Response:
        headers = {"Idempotency-Key": uuid4().hex} | ({"Authorization": f"Bearer {secret}"} if secret else {})
        body = {
            k: v.replace("{job_id}", str(job_id)) if isinstance(v, str) else v for k, v in (self.body or {}).items()
        }
        path = self.path.replace("{job_id}", str(job_id)).replace("{queue}", "q")
        return await client.request(self.method, path, headers=headers, json=body if self.body is not None else None)


ROUTES = [
    Route("POST", "/api/v1/jobs", SUBMITTER, SUBMISSION | {"project": "alpha"}),
    Route("GET", "/api/v1/jobs", READER),
    Route("GET", "/api/v1/jobs/{job_id}", READER),
    Route("GET", "/api/v1/jobs/{job_id}/events", READER),
    Route("GET", "/api/v1/jobs/{job_id}/attempts", READER),
    Route("POST", "/api/v1/jobs/{job_id}/cancel", SUBMITTER, WHY),
    Route("POST", "/api/v1/jobs/{job_id}/retry", OPERATOR, WHY),
    Route("POST", "/api/v1/jobs/{job_id}/requeue", OPERATOR, WHY),
    Route("POST", "/api/v1/jobs/{job_id}/recheck", OPERATOR, WHY),
    Route("POST", "/api/v1/jobs/recheck", OPERATOR, WHY | {"filter": {"type": "probe"}}),
    Route(
        "POST",
        "/api/v1/provider-states",
        OPERATOR,
        {"operation_key": "key:{job_id}", "state": "pending", "project": "alpha"},
    ),
    Route("POST", "/api/v1/jobs/{job_id}/resolve", OPERATOR, {"verdict": "failed", "evidence": {"a": 1}}),
    Route("GET", "/api/v1/queues", READER, whole_organization=True),
    Route("POST", "/api/v1/queues/{queue}/pause", OPERATOR, WHY, whole_organization=True),
    Route("POST", "/api/v1/queues/{queue}/resume", OPERATOR, WHY, whole_organization=True),
    Route("GET", "/api/v1/workers", READER, whole_organization=True),
]
OPEN = {("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics")}
RANKS = [READER, SUBMITTER, OPERATOR]


def test_the_table_holds_every_route(database_url: str, durable_jobs_stack: DevStack) -> None:
    document = create_app(settings_for(database_url, durable_jobs_stack)).openapi()
    routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert routes == {(route.method, route.path) for route in ROUTES} | OPEN
    secured = {
        (method.upper(), path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if operation.get("security") == [{"HTTPBearer": []}]
    }
    assert secured == routes - OPEN


SCOPES: dict[str, dict[str, Any]] = {
    "organization": {},
    "projects": {"projects": ["alpha", "gamma"]},
    "other project": {"projects": ["beta"]},
    "other project than any": {"projects": []},
    "other organization": {"organization": "other"},
}


def refusal(route: Route, role: TokenRole, scope: str) -> tuple[int, str] | None:
    """What a token of this role and scope is told about the job of acme/alpha; None where it may go on."""
    forbidden = (403, "FORBIDDEN")
    if RANKS.index(role) < RANKS.index(route.role):
        return forbidden
    if route.whole_organization and "project" in scope:
        return forbidden
    if scope.startswith("other project") and "project" in (route.body or {}):
        return forbidden  # it named a project that is not its own: that says nothing of what is there
    if scope.startswith("other") and route.names_a_job:
        return (404, "JOB_NOT_FOUND")
    return None


async def test_every_route_by_role_and_scope(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService, spec: Specs
) -> None:
    """Each refusal comes before anything is done; what another tenant or project may not see is not there."""
    job = await uncertain(service, spec())
    secrets = {(role, scope): await token(service, role, **about) for scope, about in SCOPES.items() for role in RANKS}
    async with calling(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as client:
        for scope in reversed(SCOPES):
            for route in ROUTES:
                problem_of(await route.call(client, job.id, None), 401, "UNAUTHENTICATED")
                for role in RANKS:
                    answer = await route.call(client, job.id, secrets[role, scope])
                    if expected := refusal(route, role, scope):
                        problem_of(answer, *expected)
                    else:
                        assert answer.status_code in (200, 201, 409), (route, role, scope, answer.text)
                        assert not scope.startswith("other") or str(job.id) not in answer.text, (route, role, scope)
            if scope.startswith("other"):
                assert await service.get_job(job.id) == job
    assert {act["actor"] for act in await audit(service, job_id=job.id)} <= {f"{role} of acme" for role in RANKS}


async def test_project_of_a_submission(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> None:
    """The token's, where it names one alone; else the body's, which must be one of the token's."""
    settings = settings_for(database_url, durable_jobs_stack, http_tokens="required")
    async with calling(settings) as client:

        async def ask(projects: list[str] | None, **body: str) -> httpx.Response:
            secret = await token(service, SUBMITTER, projects=projects)
            headers = {"Idempotency-Key": uuid4().hex, "Authorization": f"Bearer {secret}"}
            return await client.post(JOBS, json=SUBMISSION | body, headers=headers)

        assert (await ask(["alpha"])).json()["project"] == "alpha"
        assert (await ask(["alpha"], project="alpha")).json()["project"] == "alpha"
        assert (await ask(["alpha", "beta"], project="beta")).json()["project"] == "beta"
        assert (await ask(None, project="gamma")).json()["project"] == "gamma"
        problem_of(await ask(["alpha"], project="beta"), 403, "FORBIDDEN")
        for several in (None, ["alpha", "beta"], []):
            problem = problem_of(await ask(several), 422, "INVALID_INPUT")
            assert problem["errors"][0]["field"] == "project"
        problem_of(await ask([], project="alpha"), 403, "FORBIDDEN")


async def test_one_key_in_two_tenants_and_projects(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> None:
    """A key is a job's within its organization and project: nobody learns that another has used it."""
    async with calling(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as client:
        ids = set()
        for organization, project in (("acme", "alpha"), ("acme", "beta"), ("other", "alpha")):
            secret = await token(service, SUBMITTER, organization, projects=[project])
            job = await submit(client, "same", SUBMISSION, Authorization=f"Bearer {secret}")
            ids.add(job["job_id"])
        assert len(ids) == 3


async def test_bad_credentials(database_url: str, durable_jobs_stack: DevStack, service: DurableJobService) -> None:
    """401 for all that is no live token, whatever it looks like; and the challenge that HTTP asks for."""
    good = await token(service)
    record, revoked = await service.create_token("revoked", OPERATOR, "acme")
    expired = await token(service, expires_at=datetime.now(UTC) + timedelta(hours=1))
    await sql(
        service,
        "UPDATE durable_jobs.api_tokens SET expires_at = clock_timestamp() WHERE expires_at IS NOT NULL",
    )
    async with serving(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as url:

        async def ask(*values: bytes) -> httpx.Response:
            return await raw(url, [b"GET /api/v1/jobs HTTP/1.1", *(b"Authorization: " + value for value in values)])

        secret = good.encode()
        for accepted in (b"Bearer " + secret, b"bearer  " + secret, b"BEARER " + secret + b" "):
            assert (await ask(accepted)).status_code == 200
        assert (await ask(b"Bearer " + revoked.encode())).status_code == 200
        await service.revoke_token(record.id)
        refused: list[tuple[bytes, ...]] = [
            (),
            (b"Bearer",),
            (b"Bearer ",),
            (b"",),
            (secret,),
            (b"Basic " + secret,),
            (b"Bearer " + secret[:-1],),
            (b"Bearer " + secret + b"x",),
            (b"Bearer " + secret.upper(),),
            (b"Bearer " + revoked.encode(),),
            (b"Bearer " + expired.encode(),),
            (b"Bearer " + secret, b"Bearer " + secret),
            (b"Bearer \xff\xfe",),
            (b"Bearer " + b"x" * 20_000,),
            (b"Bearer ' OR 1=1 --",),
        ]
        for values in refused:
            answer = await ask(*values)
            problem_of(answer, 401, "UNAUTHENTICATED")
            assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_body_is_not_read_from_whoever_may_not_send_it(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> None:
    """The refusal comes before a byte of the body."""
    reader = await token(service, READER)
    async with serving(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as url:
        for line, status, code in (
            (b"X: 1", 401, "UNAUTHENTICATED"),
            (b"Authorization: Bearer " + reader.encode(), 403, "FORBIDDEN"),
        ):
            # Chunks are announced, and none comes.
            head = [b"POST /api/v1/jobs HTTP/1.1", b"Transfer-Encoding: chunked", b"Idempotency-Key: k", line]
            problem_of(await raw(url, head, sized=False), status, code)


async def test_without_tokens_loopback_alone(database_url: str, durable_jobs_stack: DevStack) -> None:
    """A page of another site, a name that points here, and a proxy's clients are not this machine's own programs."""
    async with serving(settings_for(database_url, durable_jobs_stack)) as url:
        host = url.removeprefix("http://").encode()
        port = host.split(b":")[1]

        async def ask(*lines: bytes, host: bytes = host) -> httpx.Response:
            return await raw(url, [b"GET /api/v1/jobs HTTP/1.1", *lines], host=host)

        for good in (host, b"localhost:" + port, b"localhost", b"[::1]:" + port):
            assert (await ask(host=good)).status_code == 200, good
        assert (await ask(b"Origin: http://" + host)).status_code == 200
        for named in (
            b"evil.example",
            b"evil.example:" + port,
            b"127.0.0.1.evil.example",
            b"10.0.0.1",
            b"",
            b"[",
            b"[::1",
        ):
            problem_of(await ask(host=named), 403, "LOOPBACK_ONLY")
        for line in (
            b"Origin: http://evil.example",
            b"Origin: null",
            b"Origin: http://[",
            b"Origin: " + host,
            b"Origin: http://localhost:3000",
            b"X-Forwarded-For: 127.0.0.1",
            b"Forwarded: for=127.0.0.1",
        ):
            problem_of(await ask(line), 403, "LOOPBACK_ONLY")


async def test_peers_by_address() -> None:
    for peer, served in (
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.7", False),
        ("::ffff:10.0.0.7", False),
        ("fe80::1", False),
        ("testclient", False),
        (None, False),
    ):
        client = (peer, 1234) if peer else None
        request = Request({"type": "http", "headers": [(b"host", b"localhost")], "client": client})
        try:
            require_loopback(request)
            assert served, peer
        except LoopbackOnly:
            assert not served, peer


async def test_who_reads_metrics(database_url: str, durable_jobs_stack: DevStack, service: DurableJobService) -> None:
    """They tell of every organization, so no organization's token opens them."""
    operator = await token(service)
    settings = settings_for(database_url, durable_jobs_stack, http_tokens="required")
    line = b"GET /metrics HTTP/1.1"
    async with serving(settings) as url:
        assert (await raw(url, [line])).status_code == 200
        proxied = [line, b"X-Forwarded-For: 10.0.0.7", b"Authorization: Bearer " + operator.encode()]
        problem_of(await raw(url, proxied), 403, "LOOPBACK_ONLY")
    scraper = "a-secret-of-the-deployment"
    async with serving(settings_for(database_url, durable_jobs_stack, metrics_token=scraper)) as url:
        for secret in (operator, scraper + "x", ""):
            problem_of(await raw(url, [line, f"Authorization: Bearer {secret}".encode()]), 401, "UNAUTHENTICATED")
        problem_of(await raw(url, [line]), 401, "UNAUTHENTICATED")
        assert (await raw(url, [line, f"Authorization: Bearer {scraper}".encode()])).status_code == 200


async def test_what_is_not_there(database_url: str, durable_jobs_stack: DevStack) -> None:
    async with calling(settings_for(database_url, durable_jobs_stack)) as client:
        for path in ("/", "/api/v1", "/api/v1/job", "/docs", "/redoc", "/api/v1/jobs/", "//api/v1/jobs"):
            problem_of(await client.get(path), 404, "NOT_FOUND")
        for method, path in (("DELETE", "/api/v1/jobs"), ("PUT", "/healthz"), ("GET", "/api/v1/queues/q/pause")):
            answer = await client.request(method, path)
            problem_of(answer, 405, "METHOD_NOT_ALLOWED")
            assert answer.headers["allow"]
