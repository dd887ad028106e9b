"""Reading over HTTP: listings, one job, its trail and attempts, waiting for it, and following it."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
import pytest_asyncio

from durable_jobs import DurableJobs, DurableJobService, JobContext, JobStatus
from durable_jobs.dev import DevStack
from durable_jobs.http import stream
from durable_jobs.http.views import CONTROL_STATUS, ControlStatus
from tests.conftest import Specs, Workers
from tests.http_api import JOBS, calling, fields, problem_of, settings_for, submit, token
from tests.probes import Gate, Probe
from tests.support import TERMINAL_BY_VERB, claimed, dispatched, end_in, running

LAST_ID = "Last-Event-ID"
STREAM = {"Accept": "text/event-stream"}


@pytest_asyncio.fixture
async def client(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a token, for the organization of the fixture `spec`."""
    local = {"local_organization": "acme", "local_project": "alpha"}
    async with calling(settings_for(database_url, durable_jobs_stack, **local)) as client:
        yield client


async def test_every_state_in_both_words(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    ids: dict[JobStatus, UUID] = {
        JobStatus.QUEUED: (await service.create_job(spec())).job.id,
        JobStatus.CLAIMED: (await claimed(service, spec())).job_id,
        JobStatus.RUNNING: (await running(service, spec())).job_id,
    }
    for state in TERMINAL_BY_VERB:
        claim = await running(service, spec(max_attempts=1))
        ids[state] = (await end_in(service, claim, state)).id
    assert ids.keys() == set(JobStatus)
    words = {
        ControlStatus.QUEUED: {"queued"},
        ControlStatus.RUNNING: {"claimed", "running"},
        ControlStatus.SUCCEEDED: {"completed"},
        ControlStatus.FAILED: {"failed", "dead_letter", "halt_unsafe"},
        ControlStatus.CANCELLED: {"cancelled"},
        ControlStatus.UNCERTAIN: {"indeterminate", "timed_out"},
    }
    for status, states in words.items():
        listed = (await client.get(JOBS, params={"status": status})).json()["items"]
        assert {job["state"] for job in listed} == states
        assert {job["status"] for job in listed} == {status}
    for state, job_id in ids.items():
        (listed_job,) = (await client.get(JOBS, params={"state": state})).json()["items"]
        read = (await client.get(f"{JOBS}/{job_id}")).json()
        assert listed_job["job_id"] == read["job_id"] == str(job_id)
        assert (read["status"], read["state"]) == (CONTROL_STATUS[state], state)
        assert listed_job.items() <= read.items()
        assert "payload" not in listed_job
    both = {"status": ["FAILED", "QUEUED"], "state": ["failed", "running"]}
    assert [job["state"] for job in (await client.get(JOBS, params=both)).json()["items"]] == ["failed"]


async def test_pages_of_one_and_of_several_projects(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService, spec: Specs
) -> None:
    """Each job once, in the order of creation, whatever the page's length and however the projects interleave."""
    made = [
        (await service.create_job(spec(project=project))).job
        for project in ("alpha", "beta", "gamma", "beta", "alpha", "alpha", "gamma", "beta")
    ]
    await service.create_job(spec(organization="other"))
    settings = settings_for(database_url, durable_jobs_stack, http_tokens="required")
    for projects in (None, ["alpha"], ["beta", "alpha"], ["alpha", "nothing", "gamma"]):
        expected = [str(job.id) for job in made if projects is None or job.project_id in projects]
        async with calling(settings, await token(service, projects=projects)) as client:
            for limit in (1, 2, 3, len(expected), 100):
                found: list[str] = []
                cursor: dict[str, str] = {}
                while True:
                    page = (await client.get(JOBS, params={"limit": limit} | cursor)).json()
                    assert len(page["items"]) <= limit
                    found += [job["job_id"] for job in page["items"]]
                    if page["next_cursor"] is None:
                        break
                    cursor = {"after": page["next_cursor"]}
                assert found == expected, (projects, limit)


async def test_filters(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    one = (await service.create_job(spec(queue="a/b:c", job_type="One"))).job
    isolated = (await service.create_job(spec(queue="slow", isolated=True, project="beta"))).job

    async def ids(**params: Any) -> list[str]:
        answer = await client.get(JOBS, params=params)
        assert answer.status_code == 200, answer.text
        return [job["job_id"] for job in answer.json()["items"]]

    assert await ids(queue="a/b:c") == await ids(type="ONE") == await ids(project="alpha") == [str(one.id)]
    assert await ids(queue="slow@acme") == await ids(project="beta") == [str(isolated.id)]
    assert await ids(project="beta", type="one") == await ids(queue="slow") == []


BAD_PARAMETERS = [
    (f"{JOBS}?limit=0", "limit"),
    (f"{JOBS}?limit=101", "limit"),
    (f"{JOBS}?limit=ten", "limit"),
    (f"{JOBS}?after=1", "after"),
    (f"{JOBS}?status=queued", "status[0]"),
    (f"{JOBS}?state=QUEUED", "state[0]"),
    (f"{JOBS}?statuss=QUEUED", "statuss"),
    (f"{JOBS}?queue=a%00b", "queue"),
    (f"{JOBS}?project=%F0%9F%92%A9", "project"),
    (f"{JOBS}?organization=other", "organization"),
    (f"{JOBS}/job-5521", "job_id"),
    (f"{JOBS}/{{id}}?wait=-1", "wait"),
    (f"{JOBS}/{{id}}?wait=61", "wait"),
    (f"{JOBS}/{{id}}?wait=nan", "wait"),
    (f"{JOBS}/{{id}}/events?after=-1", "after"),
    (f"{JOBS}/{{id}}/events?after=9999999999999999999", "after"),
    (f"{JOBS}/{{id}}/events?limit=1001", "limit"),
    (f"{JOBS}/{{id}}/attempts?after=x", "after"),
    (f"{JOBS}/{{id}}/attempts?after=٣", "after"),
]


async def test_bad_parameters(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    for path, field in BAD_PARAMETERS:
        answer = await client.get(path.replace("{id}", str(job.id)))
        assert fields(problem_of(answer, 422, "INVALID_INPUT")) == [field], path


async def test_trail_and_attempts(client: httpx.AsyncClient, service: DurableJobService, spec: Specs) -> None:
    claim = await dispatched(service, spec())
    await service.heartbeat(claim, {"done": 9007199254740993})
    await service.complete_job(claim, {"n": 1})
    path = f"{JOBS}/{claim.job_id}"
    events = (await client.get(f"{path}/events")).json()
    assert [event["event"] for event in events["items"]] == ["claimed", "dispatched", "heartbeat", "completed"]
    assert [event["status"] for event in events["items"]] == ["RUNNING", "RUNNING", "RUNNING", "SUCCEEDED"]
    assert events["items"][2]["data"] == {"done": 9007199254740993}
    assert "claim_token" not in json.dumps(events)
    assert events["next_cursor"] is None
    first = (await client.get(f"{path}/events", params={"limit": 3})).json()
    rest = (await client.get(f"{path}/events", params={"after": first["next_cursor"]})).json()
    assert first["items"] + rest["items"] == events["items"]

    (attempt,) = (await client.get(f"{path}/attempts")).json()["items"]
    assert (attempt["worker"], attempt["outcome"]) == (claim.worker_id, "completed")
    assert attempt["operation_key"] == f"key:{claim.job_id}"


async def test_waiting(
    client: httpx.AsyncClient, service: DurableJobService, spec: Specs, worker: Workers, jobs: DurableJobs
) -> None:
    """It returns as the job is settled, whatever the end; or as the time is over."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        await gate.wait()
        if request["n"] == 2:
            raise RuntimeError("no")
        return {"n": request["n"]}

    async with worker(Probe(script)):
        good = await jobs.create_job(spec())
        bad = await jobs.create_job(spec(payload={"n": 2}, max_attempts=1))
        await gate.handler_came()
        early = await client.get(f"{JOBS}/{good.id}?wait=0.2")
        assert early.json()["status"] == "RUNNING"
        waiting = [asyncio.create_task(client.get(f"{JOBS}/{each.id}?wait=30")) for each in (good, bad)]
        gate.go_on.set()
        async with asyncio.timeout(25):
            first, second = [(await answer).json() for answer in waiting]
            again = (await client.get(f"{JOBS}/{good.id}?wait=30")).json()
    assert (first["status"], first["result"]) == ("SUCCEEDED", {"n": 1})
    assert (second["status"], second["state"], second["error"]["message"]) == ("FAILED", "dead_letter", "no")
    assert again == first


def told(stream: str) -> list[dict[str, str]]:
    """The messages of an event stream: each its fields."""
    blocks = [block for block in stream.split("\n\n") if block]
    return [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks]


async def test_following_a_job_to_its_end(
    client: httpx.AsyncClient, spec: Specs, worker: Workers, jobs: DurableJobs
) -> None:
    """Events come as they happen; a reader that broke off is told the rest when it is back; then the stream ends."""
    gate = Gate()

    async def script(job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        await job.heartbeat({"step": "one\nline\r\u2028"})
        await gate.wait()
        return {}

    async with worker(Probe(script)), asyncio.timeout(40):
        handle = await jobs.create_job(spec())
        path = f"{JOBS}/{handle.id}/events"
        seen = ""
        async with client.stream("GET", path, headers=STREAM) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for chunk in answer.aiter_text():
                seen += chunk
                if "event: heartbeat" in seen and seen.endswith("\n\n"):
                    break
        broken_off = told(seen)
        assert [message.get("event") for message in broken_off] == [None, "claimed", "heartbeat"]
        assert json.loads(broken_off[-1]["data"])["data"] == {"step": "one\nline\r\u2028"}
        resuming = asyncio.create_task(client.get(path, headers=STREAM | {LAST_ID: broken_off[-1]["id"]}))
        gate.go_on.set()
        rest = told((await resuming).text)
    assert [message.get("event") for message in rest] == [None, "completed", "settled"]
    settled = json.loads(rest[-1]["data"])
    assert (settled["job_id"], settled["status"]) == (str(handle.id), "SUCCEEDED")

    whole = told((await client.get(path, headers=STREAM)).text)
    assert [message.get("event") for message in whole] == [None, "claimed", "heartbeat", "completed", "settled"]
    over = await client.get(path, headers=STREAM | {LAST_ID: rest[-2]["id"]})
    assert (over.status_code, over.content) == (204, b"")  # so that a browser does not come back for ever


async def test_a_stream_ends_in_time_and_speaks_meanwhile(
    client: httpx.AsyncClient, service: DurableJobService, spec: Specs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "LONGEST_SECONDS", 1.2)
    monkeypatch.setattr(stream, "_SILENCE_SECONDS", 0.3)
    job = (await service.create_job(spec())).job
    answer = await client.get(f"{JOBS}/{job.id}/events", headers=STREAM)
    assert answer.status_code == 200
    assert ": nothing new\n\n" in answer.text
    assert "settled" not in answer.text
    problem = problem_of(
        await client.get(f"{JOBS}/{job.id}/events", headers=STREAM | {LAST_ID: "x"}), 422, "INVALID_INPUT"
    )
    assert fields(problem) == [LAST_ID]


async def test_no_such_job(client: httpx.AsyncClient) -> None:
    for path in ("", "?wait=5", "/events", "/attempts"):
        problem_of(await client.get(f"{JOBS}/{uuid4()}{path}"), 404, "JOB_NOT_FOUND")
    problem_of(await client.get(f"{JOBS}/{uuid4()}/events", headers=STREAM), 404, "JOB_NOT_FOUND")
    await submit(client, "k")  # the API goes on
