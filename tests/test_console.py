"""The operator's console: whom it lets in, what it shows, and what its forms do."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID, uuid4

import httpx
import pytest

from durable_jobs import DurableJobService, JobError, JobStatus
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DevStack
from tests.conftest import Specs
from tests.http_api import calling, settings_for, token
from tests.sweeping import many_uncertain


@asynccontextmanager
async def visiting(
    service: DurableJobService, database_url: str, stack: DevStack, role: TokenRole, organization: str = "acme"
) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has signed in with a token of this role."""
    secret = await token(service, role, organization)
    async with calling(settings_for(database_url, stack, http_tokens="required")) as client:
        answer = await client.post("/console/sign-in", data={"token": secret})
        assert answer.status_code == 303
        cookie = answer.headers["set-cookie"].lower()
        assert all(part in cookie for part in ("httponly", "samesite=strict", "path=/console"))
        yield client


def csrf_in(page: httpx.Response) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', page.text)
    assert found, page.text
    return found[1]


async def uncertain(service: DurableJobService, spec: Specs) -> UUID:
    """A job that stands before an operator."""
    job = (await service.create_job(spec(payload={"note": "<script>alert(1)</script>"}))).job
    outcome = await service.claim_job("worker", uuid4(), job_id=job.id)
    assert outcome is not None
    assert outcome.claim is not None
    await service.mark_provider_dispatched(outcome.claim, f"probe:{job.id}", consequential=False)
    landed = await service.mark_indeterminate(outcome.claim, JobError.of("LOST", "no answer <b>came</b>"))
    assert await service.escalate_job(landed, "UNKNOWN: nobody knows", "sweep")
    return job.id


async def test_nobody_sees_anything_without_signing_in(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs
) -> None:
    job_id = await uncertain(service, spec)
    async with calling(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as client:
        for path in ("/console", "/console/jobs", f"/console/jobs/{job_id}"):
            page = await client.get(path)
            assert (page.status_code, str(job_id) in page.text) == (401, False)
            assert "Sign in" in page.text
        wrong = await client.post("/console/sign-in", data={"token": "dj_wrong"})
        assert wrong.status_code == 401
        assert "set-cookie" not in wrong.headers


async def test_the_overview_puts_first_what_needs_a_person(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs
) -> None:
    job_id = await uncertain(service, spec)
    await service.create_job(spec(organization="globex"))
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.READER) as client:
        page = await client.get("/console")
        assert page.status_code == 200
        assert page.text.index(str(job_id)) < page.text.index("<h2>Queues")
        assert "UNKNOWN: nobody knows" in page.text
        assert "No worker was ever here." in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        listed = await client.get("/console/jobs")
        assert listed.text.count("/console/jobs/0") == 1  # another organization's job is not there


async def test_a_job_page_escapes_what_tenants_wrote_and_offers_what_is_legal(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs
) -> None:
    job_id = await uncertain(service, spec)
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.OPERATOR) as client:
        page = await client.get(f"/console/jobs/{job_id}")
        assert "<script>alert" not in page.text
        assert "<b>came</b>" not in page.text
        assert re.findall(r"<summary>(\w+)</summary>", page.text) == ["Resolve", "Recheck"]
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.READER) as client:
        page = await client.get(f"/console/jobs/{job_id}")
        assert re.findall(r"<summary>(\w+)</summary>", page.text) == []
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.OPERATOR, "globex") as client:
        assert (await client.get(f"/console/jobs/{job_id}")).status_code == 404


async def test_an_operator_resolves_a_job(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs
) -> None:
    job_id = await uncertain(service, spec)
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.OPERATOR) as client:
        page = await client.get(f"/console/jobs/{job_id}")
        form = {"csrf": csrf_in(page), "operator": "Grace Hopper", "verdict": "failed"}
        path = f"/console/jobs/{job_id}/resolve"
        refused = await client.post(path, data=form | {"evidence": "the log says so"})
        assert (refused.status_code, "evidence: is no JSON" in refused.text) == (409, True)
        done = await client.post(path, data=form | {"evidence": '{"seen": "nothing at the provider"}'})
        assert done.status_code == 303
        again = await client.post(path, data=form | {"evidence": '{"seen": "nothing"}'})
        assert (again.status_code, "only an indeterminate or timed out job" in again.text) == (409, True)
    job = await service.get_job(job_id)
    assert job.status is JobStatus.FAILED
    assert job.reconciliation is not None
    assert job.reconciliation["actor"].startswith("Grace Hopper (by the token of operator of acme")


@pytest.mark.parametrize("role", [TokenRole.READER, TokenRole.SUBMITTER])
async def test_a_form_asks_for_the_role_and_for_its_own_origin(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs, role: TokenRole
) -> None:
    job_id = await uncertain(service, spec)
    async with visiting(service, database_url, durable_jobs_stack, role) as client:
        csrf = csrf_in(await client.get("/console"))
        form = {"operator": "Eve", "verdict": "failed", "evidence": '{"a": 1}'}
        for value in (csrf, "0" * 64):
            answer = await client.post(f"/console/jobs/{job_id}/resolve", data=form | {"csrf": value})
            assert answer.status_code == 403
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.OPERATOR) as client:
        answer = await client.post(f"/console/jobs/{job_id}/resolve", data=form | {"csrf": csrf})
        assert answer.status_code == 403  # another visitor's form
    assert (await service.get_job(job_id)).status is JobStatus.INDETERMINATE


async def test_a_queue_is_paused_and_resumed(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs, queue: str
) -> None:
    await service.create_job(spec())
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.OPERATOR) as client:
        form = {"csrf": csrf_in(await client.get("/console")), "queue": queue, "job_type": "probe", "reason": "outage"}
        assert (await client.post("/console/queues/pause", data=form)).status_code == 303
        (overview,) = await service.list_queues(organization="acme")
        assert overview.paused
        assert await service.claim_job("worker", uuid4(), queues=[queue]) is None
        assert (await client.post("/console/queues/resume", data=form)).status_code == 303
        assert await service.claim_job("worker", uuid4(), queues=[queue])


async def test_who_asks_is_found_out_before_a_form_is_read(database_url: str, durable_jobs_stack: DevStack) -> None:
    """What would be too large is not read: the answer is that of a visitor who has not signed in."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    async with calling(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as client:
        for path in (f"/console/jobs/{uuid4()}/cancel", "/console/queues/pause", "/console/sign-out"):
            answer = await client.post(path, content=b"x" * 3_000_000, headers=headers)
            assert (answer.status_code, "Sign in" in answer.text) == (401, True)


async def test_a_form_is_bounded_and_of_one_kind(database_url: str, durable_jobs_stack: DevStack) -> None:
    async with calling(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as client:
        large = await client.post("/console/sign-in", data={"token": "x" * (1024 * 1024 + 1)})
        assert large.status_code == 413
        filed = await client.post("/console/sign-in", files={"token": ("secret.txt", b"dj_x")})
        assert filed.status_code == 422
        headers = {"content-type": "application/x-www-form-urlencoded"}
        odd = await client.post("/console/sign-in", content=b"token=%ED%A0%80%00", headers=headers)
        assert odd.status_code == 401


async def test_a_cookie_behind_a_proxy_that_ends_tls_is_for_tls_alone(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack
) -> None:
    secret = await token(service, TokenRole.READER, "acme")
    async with calling(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as client:
        for headers, secure in (({}, False), ({"x-forwarded-proto": "https"}, True)):
            answer = await client.post("/console/sign-in", data={"token": secret}, headers=headers)
            assert ("secure" in answer.headers["set-cookie"].lower()) is secure


async def test_the_overview_shows_what_the_token_is_for(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs, queue: str
) -> None:
    """Not other organizations' workers; and to a token of some projects no queue, worker or job of the others."""
    escalated = await uncertain(service, spec)
    for name, organizations in (("host-of-globex", ["globex"]), ("host-of-all", None)):
        await service.register_worker(
            name, host=name, pid=1, version="1", queue=queue, job_types=["probe"], organizations=organizations
        )
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.READER) as client:
        page = (await client.get("/console")).text
        assert ("host-of-all" in page, "host-of-globex" in page) == (True, False)
    _, secret = await service.create_token("t", TokenRole.READER, "acme", projects=["beta"])
    async with calling(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as client:
        await client.post("/console/sign-in", data={"token": secret})
        page = (await client.get("/console")).text
    assert "Nothing stands before an operator" in page
    for hidden in ("host-of-all", queue, str(escalated), "<h2>Queues"):
        assert hidden not in page


async def test_what_needs_a_person_is_found_among_many(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs
) -> None:
    """Also a queued job that nobody hosts, behind more uncertain ones than the page shows."""
    await many_uncertain(service, [spec() for _ in range(60)])
    queued = (await service.create_job(spec())).job
    assert await service.escalate_job(queued, "NOT_HOSTED: nobody hosts it", "worker")
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.READER) as client:
        page = (await client.get("/console")).text
        assert page.index(str(queued.id)) < page.index("uncertain; the next sweep looks at it")
        assert (await client.get("/api/v1/jobs", params={"escalated": True})).status_code == 401


async def test_a_pause_that_stands_is_not_called_resumed(
    database_url: str, service: DurableJobService, durable_jobs_stack: DevStack, spec: Specs, queue: str
) -> None:
    await service.create_job(spec())
    await service.pause_queue(queue, actor="the deployer", reason="an upgrade")
    async with visiting(service, database_url, durable_jobs_stack, TokenRole.OPERATOR) as client:
        form = {"csrf": csrf_in(await client.get("/console")), "queue": queue, "job_type": "probe", "reason": "over"}
        answer = await client.post("/console/queues/resume", data=form, follow_redirects=True)
        assert "no pause of yours stood there" in answer.text
