"""Submitting over HTTP: once per key, with what the token says, and nothing that two readers could read differently."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import httpx
import pytest
import pytest_asyncio

from durable_jobs import DurableJobService, JobSpec
from durable_jobs.contract.envelope import read_execution_identity, read_governance
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DevStack
from durable_jobs.http.bodies import Governance, JobRequest
from tests.http_api import JOBS, SUBMISSION, calling, fields, problem_of, raw, serving, settings_for, submit, token
from tests.support import sql

KEY = {"Idempotency-Key": "submit-execution-2048"}


@pytest_asyncio.fixture
async def client(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a token, of the API that asks for none."""
    async with calling(settings_for(database_url, durable_jobs_stack)) as client:
        yield client


async def rows(service: DurableJobService) -> int:
    (row,) = await sql(service, "SELECT count(*) AS jobs FROM durable_jobs.jobs")
    return int(row["jobs"])


SEED = """\
POST /api/v1/jobs
Idempotency-Key: submit-execution-2048

{
  "type": "evaluation",
  "payload": { "dataset_id": "support-agent", "policy_id": "production-ai-policy" }
}
"""


@pytest.mark.parametrize("tokens", ["off", "required"])
async def test_the_seeds_request_word_for_word(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService, tokens: str
) -> None:
    """Only what HTTP itself asks for is added: its version, the host, the body's length; and the token where needed."""
    start, key = SEED.encode().split(b"\n")[:2]
    body = SEED.encode().partition(b"\n\n")[2]
    lines = [start + b" HTTP/1.1", key]
    if tokens == "required":
        secret = await token(service, TokenRole.SUBMITTER, projects=["alpha"])
        lines.append(f"Authorization: Bearer {secret}".encode())
    async with serving(settings_for(database_url, durable_jobs_stack, http_tokens=tokens)) as url:
        created, again = await raw(url, lines, body), await raw(url, lines, body)
    assert (created.status_code, again.status_code) == (201, 200)
    assert created.json() == again.json()
    assert created.json()["status"] == "QUEUED"
    assert await rows(service) == 1


async def test_fifty_at_once_with_one_key(client: httpx.AsyncClient, service: DurableJobService) -> None:
    """Case 23: one row, 50 equal ids, and one of the 50 is told that it made the job."""
    start = asyncio.Event()

    async def one() -> httpx.Response:
        await start.wait()
        return await client.post(JOBS, json=SUBMISSION, headers=KEY)

    asking = [asyncio.create_task(one()) for _ in range(50)]
    start.set()
    answers = await asyncio.gather(*asking)
    assert sorted(answer.status_code for answer in answers) == [200] * 49 + [201]
    assert len({answer.json()["job_id"] for answer in answers}) == 1
    assert await rows(service) == 1


async def test_token_gives_the_identity_and_the_type_its_queue(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService
) -> None:
    secret = await token(service, TokenRole.SUBMITTER, projects=["alpha"], tenant="customer-7", actor="svc:studio")
    settings = settings_for(
        database_url, durable_jobs_stack, http_tokens="required", type_queues={"evaluation": "evaluations"}
    )
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with calling(settings, secret) as client:
        answer = await client.post(
            JOBS, json=SUBMISSION, headers=KEY | {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
        )
        told = answer.json()
        assert answer.headers["location"] == f"{JOBS}/{told['job_id']}"
        other = await submit(client, "other", {"type": "Other", "payload": {"n": 1}, "task": "t-1", "run": "r-1"})
    job = await service.get_job(UUID(told["job_id"]))
    identity = read_execution_identity(job)
    assert identity is not None
    assert (job.organization_id, job.project_id, job.queue) == ("acme", "alpha", "evaluations")
    assert (identity.tenant, identity.actor, identity.trace) == ("customer-7", "svc:studio", trace)
    assert told["execution"] == identity.model_dump()
    assert told["payload"] == SUBMISSION["payload"]
    assert (told["status"], told["state"], told["type"]) == ("QUEUED", "queued", "evaluation")
    lineage = read_execution_identity(await service.get_job(UUID(other["job_id"])))
    assert lineage is not None
    assert (lineage.task, lineage.run) == ("t-1", "r-1")
    assert (other["type"], other["queue"]) == ("other", "default")


@pytest.mark.parametrize(
    "traceparent", [None, "rubbish", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "00-4BF92F-00f067aa0ba902b7-01"]
)
async def test_without_a_valid_traceparent_a_trace_begins(client: httpx.AsyncClient, traceparent: str | None) -> None:
    headers = {"traceparent": traceparent} if traceparent else {}
    traces = {(await submit(client, key, **headers))["execution"]["trace"] for key in ("a", "b")}
    assert len(traces) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", trace) for trace in traces)


async def test_every_optional_field(client: httpx.AsyncClient, service: DurableJobService) -> None:
    scheduled = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    facts = {"action_intent": "refund", "capability": {"tool": "pay"}, "policy": {"id": 7}, "budget": {"eur": 10}}
    times = {"issued_at": "2030-01-01T00:00:00Z", "expires_at": "2030-01-02T00:00:00+01:00"}
    given = {
        "project": "beta",
        "queue": "slow",
        "priority": 2,
        "scheduled_at": scheduled.isoformat(),
        "max_attempts": 7,
        "backoff_base_seconds": 1.5,
        "lease_seconds": 90,
        "timeout_seconds": 120,
        "isolated": True,
        "task": "task-1",
        "run": "run-1",
        "governance": facts | times,
    }
    told = await submit(client, "all", SUBMISSION | given)
    job = await service.get_job(UUID(told["job_id"]))
    assert (job.project_id, job.queue, job.priority, job.scheduled_at) == ("beta", "slow@local", 2, scheduled)
    assert (job.max_attempts, job.backoff_base_seconds, job.lease_seconds) == (7, 1.5, 90)
    assert job.timeout_seconds == 120
    governance = read_governance(job)
    assert governance is not None
    assert (governance.action_intent, governance.budget) == ("refund", {"eur": 10})
    assert (governance.expires_at - governance.issued_at) == timedelta(hours=23)


def test_the_limits_in_the_document_are_the_contracts() -> None:
    """`JobRequest` says them again, for the OpenAPI document; these must not drift from `JobSpec`."""
    contract, http = JobSpec.model_json_schema()["properties"], JobRequest.model_json_schema()["properties"]
    limits = ("type", "default", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    shared = contract.keys() & http.keys() - {"queue", "project", "payload", "governance"}
    assert {"priority", "max_attempts", "backoff_base_seconds", "lease_seconds", "timeout_seconds"} <= shared
    for name in shared:
        assert {k: contract[name].get(k) for k in limits} == {k: http[name].get(k) for k in limits}, name
    governed = JobSpec.model_json_schema()["$defs"]["GovernanceInput"]
    assert governed["properties"].keys() == Governance.model_fields.keys()
    assert set(governed["required"]) == set(Governance.model_json_schema()["required"])


@pytest.mark.parametrize(
    "other",
    [
        SUBMISSION | {"payload": {"dataset_id": "another"}},
        SUBMISSION | {"type": "experiment"},
        SUBMISSION | {"queue": "elsewhere"},
    ],
)
async def test_key_with_another_request(
    client: httpx.AsyncClient, service: DurableJobService, other: dict[str, Any]
) -> None:
    first = await submit(client, "k")
    answer = await client.post(JOBS, json=other, headers={"Idempotency-Key": "k"})
    problem = problem_of(answer, 422, "IDEMPOTENCY_KEY_CONFLICT")
    assert first["job_id"] in problem["detail"]
    assert await rows(service) == 1


async def test_order_and_spacing_do_not_matter_integers_are_exact(client: httpx.AsyncClient) -> None:
    """Cases 25 and 31."""
    numbers = [9007199254740993, 9223372036854775807, -(10**399)]
    body = json.dumps({"payload": {"b": numbers, "a": 1}, "type": "exact"}, indent=3)
    headers = KEY | {"Content-Type": "application/json"}
    first = await client.post(JOBS, content=body, headers=headers)
    assert first.status_code == 201
    assert first.json()["payload"] == {"b": numbers, "a": 1}
    again = await client.post(
        JOBS, content=json.dumps({"type": "exact", "payload": {"a": 1.0, "b": numbers}}), headers=headers
    )
    assert again.status_code == 200
    assert again.json()["job_id"] == first.json()["job_id"]
    read = await client.get(f"{JOBS}/{first.json()['job_id']}")
    assert read.json()["payload"]["b"] == numbers


def submission(payload: str, more: str = "") -> bytes:
    return b'{"type": "bad", "payload": ' + payload.encode() + more.encode() + b"}"


DEEP = 100_000

BAD_BODIES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["(whole)"]),
    "no object": (b"[]", ["(whole)"]),
    "null": (b"null", ["(whole)"]),
    "cut off": (b'{"type": "bad", "payload": {"n": 1}', ["(whole)"]),
    "two values": (b'{"type": "bad", "payload": {"n": 1}} {}', ["(whole)"]),
    "a byte order mark": (b"\xef\xbb\xbf" + submission('{"n": 1}'), ["(whole)"]),
    "latin-1": ('{"type": "bad", "payload": {"n": "é"}}'.encode("latin-1"), ["(whole)"]),
    "utf-16": (submission('{"n": 1}').decode().encode("utf-16"), ["(whole)"]),
    "no type": (b'{"payload": {"n": 1}}', ["type"]),
    "no payload": (b'{"type": "bad"}', ["payload"]),
    "nothing": (b"{}", ["type", "payload"]),
    "payload empty": (submission("{}"), ["payload"]),
    "payload a list": (submission("[1]"), ["payload"]),
    "payload null": (submission("null"), ["payload"]),
    "reserved": (submission('{"execution": {"tenant": "other"}}'), ["payload.execution"]),
    "reserved too": (submission('{"n": 1, "governance": null}'), ["payload.governance"]),
    "key twice": (b'{"type": "bad", "type": "good", "payload": {"n": 1}}', ["type"]),
    "key twice within": (submission('{"a": [{"b": 1}, {"c": {"d": 1, "d": 1}}]}'), ["payload.a[1].c.d"]),
    "key twice, escaped": (submission('{"a": 1, "\\u0061": 2}'), ["payload.a"]),
    "payload twice": (submission('{"n": 1}', ', "payload": {"n": 1}'), ["payload"]),
    "lone surrogate": (submission('{"a": {"b": "\\ud800"}}'), ["payload.a.b"]),
    "lone surrogate as key": (submission('{"a": {"\\udfff": 1}}'), ["payload.a"]),
    "lone surrogate as type": (b'{"type": "\\ud800", "payload": {"n": 1}}', ["type"]),
    "lone surrogate as unknown field": (submission('{"n": 1}', ', "\\ud800": 1'), ["(whole)"]),
    "U+0000": (submission('{"a": ["\\u0000"]}'), ["payload.a[0]"]),
    "NaN": (submission('{"a": NaN}'), ["payload.a"]),
    "Infinity": (submission('{"a": [1, Infinity]}'), ["payload.a[1]"]),
    "-Infinity": (submission('{"a": -Infinity}'), ["payload.a"]),
    "1e400": (submission('{"a": 1e400}'), ["payload.a"]),
    "1e100000": (submission('{"a": -1e100000}'), ["payload.a"]),
    "401 digits": (submission('{"a": 1' + "0" * 400 + "}"), ["payload.a"]),
    "a million digits": (submission('{"a": 1' + "0" * 1_000_000 + "}"), ["payload.a"]),
    "depth 65": (submission('{"a": ' * 65 + "1" + "}" * 65), ["payload" + ".a" * 64]),
    "depth 100,000": (submission('{"a": ' + "[" * DEEP + "]" * DEEP + "}"), ["payload"]),
    "depth 100,000 of objects": (submission('{"a": ' * DEEP + "1" + "}" * DEEP), ["payload"]),
    "depth 100,000, not closed": (submission("[" * DEEP), ["payload"]),
    "depth 100,000 beside the payload": (submission('{"n": 1}', ', "task": ' + "[" * DEEP + "]" * DEEP), ["task"]),
    "depth 100,000 of the whole": (b"[" * DEEP + b"]" * DEEP, ["(whole)"]),
    "9 MiB, not of the payload alone": (submission('{"n": 1}', ', "task": "' + "x" * 1_000_000 + '"'), ["task"]),
    "unknown field": (submission('{"n": 1}', ', "organization": "other"'), ["organization"]),
    "another's tenant": (submission('{"n": 1}', ', "tenant": "other", "actor": "root"'), ["tenant", "actor"]),
    "type not a text": (b'{"type": 7, "payload": {"n": 1}}', ["type"]),
    "type with a line break": (b'{"type": "bad\\n", "payload": {"n": 1}}', ["type"]),
    "queue of another": (submission('{"n": 1}', ', "queue": "q@other"'), ["queue"]),
    "reserved queue": (submission('{"n": 1}', ', "queue": "q.reconciliation"'), ["queue"]),
    "priority a text": (submission('{"n": 1}', ', "priority": "1"'), ["priority"]),
    "priority true": (submission('{"n": 1}', ', "priority": true'), ["priority"]),
    "priority 1.5": (submission('{"n": 1}', ', "priority": 1.5'), ["priority"]),
    "priority 3": (submission('{"n": 1}', ', "priority": 3'), ["priority"]),
    "priority of 5,000 digits": (submission('{"n": 1}', ', "priority": ' + "9" * 5000), ["priority"]),
    "no attempts": (submission('{"n": 1}', ', "max_attempts": 0'), ["max_attempts"]),
    "lease NaN": (submission('{"n": 1}', ', "lease_seconds": NaN'), ["lease_seconds"]),
    "timeout 1e400": (submission('{"n": 1}', ', "timeout_seconds": 1e400'), ["timeout_seconds"]),
    "time without a zone": (submission('{"n": 1}', ', "scheduled_at": "2030-01-01T00:00:00"'), ["scheduled_at"]),
    "time a number": (submission('{"n": 1}', ', "scheduled_at": 1893456000'), ["scheduled_at"]),
    "time of another age": (submission('{"n": 1}', ', "scheduled_at": "1999-01-01T00:00:00Z"'), ["scheduled_at"]),
    "task blank": (submission('{"n": 1}', ', "task": " "'), ["task"]),
    "governance in part": (
        submission('{"n": 1}', ', "governance": {"action_intent": "a"}'),
        [f"governance.{name}" for name in ("capability", "policy", "budget", "issued_at", "expires_at")],
    ),
}


async def test_bad_bodies(client: httpx.AsyncClient, service: DurableJobService) -> None:
    """Each is refused with the fields named, and leaves no row; the API goes on."""
    for name, (body, expected) in BAD_BODIES.items():
        headers = KEY | {"Content-Type": "application/json"}
        answer = await client.post(JOBS, content=body, headers=headers)
        code = "RESERVED_PAYLOAD_KEY" if "reserved" in name and "queue" not in name else answer.json()["code"]
        problem = problem_of(answer, 422, code)
        assert code in {"INVALID_INPUT", "INVALID_JOB", "RESERVED_PAYLOAD_KEY"}, name
        assert fields(problem) == expected, (name, problem)
    assert await rows(service) == 0
    assert (await submit(client, "fine"))["status"] == "QUEUED"


async def test_too_large(client: httpx.AsyncClient, service: DurableJobService) -> None:
    """A payload of 8 MiB is taken; 9 MiB, announced or in chunks, are refused, and so is a body without an end."""
    room = 8 * 1024 * 1024 - len('{"n":""}')
    fits = await client.post(JOBS, json={"type": "large", "payload": {"n": "x" * room}}, headers=KEY)
    assert fits.status_code == 201

    other = {"Idempotency-Key": "other"}
    one_more = await client.post(JOBS, json={"type": "large", "payload": {"n": "x" * (room + 1)}}, headers=other)
    assert fields(problem_of(one_more, 422, "INVALID_JOB")) == ["payload"]

    body = json.dumps({"type": "large", "payload": {"n": "x" * 9 * 1024 * 1024}}).encode()
    assert fields(problem_of(await client.post(JOBS, content=body, headers=other), 413, "BODY_TOO_LARGE")) == [
        "(whole)"
    ]

    async def chunks(number: int) -> AsyncIterator[bytes]:
        for start in range(number):
            yield body[:100_000] if start else b'{"type": "'

    problem_of(await client.post(JOBS, content=chunks(95), headers=other), 413, "BODY_TOO_LARGE")
    assert await rows(service) == 1


async def test_a_client_that_leaves_in_mid_body_is_no_failure(
    client: httpx.AsyncClient, service: DurableJobService, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = client.base_url.host, client.base_url.port
    for _ in range(5):
        _, writer = await asyncio.open_connection(host, port)
        head = f"POST {JOBS} HTTP/1.1\r\nHost: {host}\r\nIdempotency-Key: k\r\nContent-Length: 1000\r\n\r\n"
        writer.write(head.encode() + b'{"type": "')
        await writer.drain()
        writer.close()
    await submit(client, "afterwards")
    assert await rows(service) == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_content_types(client: httpx.AsyncClient) -> None:
    body = json.dumps(SUBMISSION)
    for taken in ("application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
        answer = await client.post(JOBS, content=body, headers=KEY | {"Content-Type": taken})
        assert answer.status_code in (200, 201), taken
    for refused in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
        answer = await client.post(JOBS, content=body, headers=KEY | {"Content-Type": refused})
        problem_of(answer, 415, "NOT_JSON")


BAD_KEYS: dict[str, list[bytes]] = {
    "absent": [],
    "empty": [b"Idempotency-Key: "],
    "blank": [b"Idempotency-Key:  \t "],
    "10 kB": [b"Idempotency-Key: " + b"k" * 10_000],
    "256 characters": [b"Idempotency-Key: " + b"k" * 256],
    "repeated": [b"Idempotency-Key: a", b"Idempotency-Key: a"],
    "repeated in another case": [b"Idempotency-Key: a", b"IDEMPOTENCY-KEY: b"],
    "UTF-8": ["Idempotency-Key: schlüssel".encode()],
    "Latin-1": ["Idempotency-Key: schlüssel".encode("latin-1")],
    "tab within": [b"Idempotency-Key: a\tb"],
    "soft hyphen": ["Idempotency-Key: a\xadb".encode("latin-1")],
}
POST = f"POST {JOBS} HTTP/1.1".encode()
BODY = json.dumps(SUBMISSION).encode()


async def test_bad_keys(client: httpx.AsyncClient, service: DurableJobService) -> None:
    """Case 13 and its like: 400, and no row."""
    url = str(client.base_url).rstrip("/")
    for name, headers in BAD_KEYS.items():
        answer = await raw(url, [POST, *headers], BODY)
        assert fields(problem_of(answer, 400, "BAD_IDEMPOTENCY_KEY")) == ["Idempotency-Key"], name
    # These never get as far as the application.
    for value in (b"a\x00b", b"a\x7fb", b"a\nb"):
        assert (await raw(url, [POST, b"Idempotency-Key: " + value], BODY)).status_code == 400
    assert await rows(service) == 0


async def test_odd_keys_are_keys(client: httpx.AsyncClient, service: DurableJobService) -> None:
    """Space around a header is no part of it; anything printable within is."""
    url = str(client.base_url).rstrip("/")
    odd = ['"quoted"', "a, a", "k" * 255, "'; DROP TABLE jobs; --", "%00", "{}"]
    for key in odd:
        answer = await raw(url, [POST, f"Idempotency-Key: {key}".encode()], BODY)
        assert (answer.status_code, answer.json()["idempotency_key"]) == (201, key)
    again = await raw(url, [POST, b"idempotency-key: \t a, a  "], BODY)
    assert (again.status_code, again.json()["idempotency_key"]) == (200, "a, a")
    assert await rows(service) == len(odd)
