"""One set of rules behind every door: each case goes through Python, SQL and HTTP, and must meet the same answer."""

from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
import pytest_asyncio
from psycopg.types.json import Jsonb

from durable_jobs import DurableJobService, ExecutionInput, Job, JobSpec
from durable_jobs.contract.errors import IdempotencyKeyConflict, InvalidInput
from durable_jobs.contract.models import TokenRole
from durable_jobs.dev import DevStack
from tests.conftest import Specs
from tests.http_api import JOBS, calling, settings_for, token
from tests.support import connection

PLAIN: dict[str, Any] = {
    "organization": "acme",
    "project": "alpha",
    "queue": "doors",
    "job_type": "probe",
    "payload": {"n": 1},
}
IDENTITY = {"tenant": "acme-eu", "actor": "ann", "trace": "t-1"}
LONG = "a" * 128


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"leaf": 1}
    for _ in range(depth - 1):
        value = {"n": value}
    return value


def of_size(size: int) -> dict[str, Any]:
    """A payload of so many bytes in compact JSON, of many small values: jsonb's own text of it is longer."""
    value: dict[str, Any] = {"many": [1] * 1_000_000, "rest": ""}
    base = len('{"many":[') + 1_000_000 * 2 - 1 + len('],"rest":""}')
    return value | {"rest": "x" * (size - base)}


# What is told to the door, beside `PLAIN`: the field that a refusal must name, or None where the job must be created.
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({}, None),
    "organization of 128": ({"organization": LONG}, None),
    "organization of 129": ({"organization": LONG + "a"}, "organization"),
    "organization empty": ({"organization": ""}, "organization"),
    "organization blank": ({"organization": " "}, "organization"),
    "organization with a newline at its end": ({"organization": "acme\n"}, "organization"),
    "organization not ASCII": ({"organization": "äcme"}, "organization"),
    "organization isolated under the reserved suffix": (
        {"organization": "acme.reconciliation", "isolated": True},
        "organization",
    ),
    "project with every letter": ({"project": "A0._:/-z"}, None),
    "project that begins with a dot": ({"project": ".alpha"}, "project"),
    "type folded": ({"job_type": "Probe"}, None),
    "type with a space": ({"job_type": "a b"}, "job_type"),
    "type with an @": ({"job_type": "a@b"}, "job_type"),
    "queue reserved": ({"queue": "doors.reconciliation"}, "queue"),
    "queue with an @": ({"queue": "doors@acme"}, "queue"),
    "queue isolated": ({"isolated": True}, None),
    "key of 255": ({"idempotency_key": "k" * 255}, None),
    "key of 256": ({"idempotency_key": "k" * 256}, "idempotency_key"),
    "key of 10 kB": ({"idempotency_key": "k" * 10_000}, "idempotency_key"),
    "key empty": ({"idempotency_key": ""}, "idempotency_key"),
    "key blank": ({"idempotency_key": "   "}, "idempotency_key"),
    "key with spaces": ({"idempotency_key": "a b c"}, None),
    "key in Greek, Chinese and a smile": ({"idempotency_key": "κλειδί 钥匙 🙂"}, None),
    "key of combining marks": ({"idempotency_key": "e\u0301"}, None),
    "key with a tab": ({"idempotency_key": "a\tb"}, "idempotency_key"),
    "key with a no-break space": ({"idempotency_key": "a\u00a0b"}, "idempotency_key"),
    "key with a zero-width space": ({"idempotency_key": "a\u200bb"}, "idempotency_key"),
    "key with an override of direction": ({"idempotency_key": "a\u202eb"}, "idempotency_key"),
    "key with a line separator": ({"idempotency_key": "a\u2028b"}, "idempotency_key"),
    "key with a byte order mark": ({"idempotency_key": "\ufeffa"}, "idempotency_key"),
    "key with DEL": ({"idempotency_key": "a\x7fb"}, "idempotency_key"),
    "key with a C1 control": ({"idempotency_key": "a\x85b"}, "idempotency_key"),
    "key of private use": ({"idempotency_key": "a\ue000b"}, "idempotency_key"),
    "key of private use beyond the first plane": ({"idempotency_key": "a\U000f0000b"}, "idempotency_key"),
    "key of a character not assigned yet": ({"idempotency_key": "a\u0378b"}, None),
    "key with a noncharacter": ({"idempotency_key": "a\uffffb"}, "idempotency_key"),
    "key with a tag character": ({"idempotency_key": "a\U000e0041b"}, "idempotency_key"),
    "payload empty": ({"payload": {}}, "payload"),
    "payload with execution": ({"payload": {"execution": {}}}, "payload"),
    "payload with governance": ({"payload": {"n": 1, "governance": None}}, "payload"),
    "payload with execution further down": ({"payload": {"n": {"execution": 1}}}, None),
    "payload of depth 64": ({"payload": nested(64)}, None),
    "payload of depth 65": ({"payload": nested(65)}, "payload"),
    "payload of 8 MiB": ({"payload": of_size(8 * 1024 * 1024)}, None),
    "payload of a byte more": ({"payload": of_size(8 * 1024 * 1024 + 1)}, "payload"),
    "integers beyond doubles": (
        {"payload": {"a": 9007199254740993, "b": 9223372036854775807, "c": -(2**63) - 1}},
        None,
    ),
    "integer of 400 digits": ({"payload": {"n": 10**399}}, None),
    "integer of 401 digits": ({"payload": {"n": 10**400}}, "payload"),
    "fractions": ({"payload": {"n": 1.0, "m": 0.1, "small": 5e-324}}, None),
    "text with U+0000": ({"payload": {"n": "\x00"}}, "payload"),
    "key of the payload with U+0000": ({"payload": {"a\x00": 1}}, "payload"),
    "text in every script": ({"payload": {"n": "κλειδί 钥匙 🙂 \u200b\ufeff\u007f"}}, None),
    "priority 2": ({"priority": 2}, None),
    "priority 3": ({"priority": 3}, "priority"),
    "priority -3": ({"priority": -3}, "priority"),
    "no attempts": ({"max_attempts": 0}, "max_attempts"),
    "10,000 attempts": ({"max_attempts": 10_000}, None),
    "10,001 attempts": ({"max_attempts": 10_001}, "max_attempts"),
    "no backoff": ({"backoff_base_seconds": 0}, "backoff_base_seconds"),
    "backoff of an hour": ({"backoff_base_seconds": 3600}, None),
    "backoff of more": ({"backoff_base_seconds": 3600.5}, "backoff_base_seconds"),
    "lease of under a second": ({"lease_seconds": 0.9}, "lease_seconds"),
    "lease of a second": ({"lease_seconds": 1}, None),
    "lease of over a day": ({"lease_seconds": 86_401}, "lease_seconds"),
    "no time": ({"timeout_seconds": 0}, "timeout_seconds"),
    "30 days": ({"timeout_seconds": 30 * 86_400}, None),
    "over 30 days": ({"timeout_seconds": 30 * 86_400 + 1}, "timeout_seconds"),
    "scheduled in 2199": ({"scheduled_at": "2199-12-31T23:59:59Z"}, None),
    "scheduled in 2201": ({"scheduled_at": "2201-01-01T00:00:00Z"}, "scheduled_at"),
    "scheduled in 1999": ({"scheduled_at": "1999-12-31T23:59:59Z"}, "scheduled_at"),
    "identity": (IDENTITY, None),
    "identity with a blank actor": (IDENTITY | {"actor": " "}, "actor"),
    "identity with a tenant of 256": (IDENTITY | {"tenant": "t" * 256}, "tenant"),
}

NOT_SAID_OVER_HTTP = {"organization", "tenant", "actor", "trace", "isolated"}
"""What the token and the headers say there."""


def given(overrides: dict[str, Any]) -> dict[str, Any]:
    return PLAIN | {"idempotency_key": uuid4().hex} | overrides


def spec_of(fields: dict[str, Any]) -> JobSpec:
    """The Python door's words for the same."""
    plain = {name: value for name, value in fields.items() if name not in IDENTITY}
    if "tenant" in fields:
        plain["execution"] = {name: fields[name] for name in IDENTITY}
    if "scheduled_at" in plain:
        plain["scheduled_at"] = datetime.fromisoformat(plain["scheduled_at"])
    return JobSpec(**plain)


async def through_python(service: DurableJobService, fields: dict[str, Any]) -> UUID | str:
    """The job's id, or the field that the refusal names."""
    try:
        return (await service.create_job(spec_of(fields))).job.id
    except IdempotencyKeyConflict:
        return "conflict"
    except InvalidInput as refused:
        return first_part(refused.problems[0].field)


async def through_sql(own: psycopg.AsyncConnection[dict[str, Any]], fields: dict[str, Any]) -> UUID | str:
    arguments = {name: Jsonb(value) if name == "payload" else value for name, value in fields.items()}
    casts = {"scheduled_at": "::timestamptz", "priority": "::integer"}
    said = ", ".join(f"{name} => %({name})s{casts.get(name, '')}" for name in arguments)
    try:
        cursor = await own.execute(f"SELECT durable_jobs.enqueue({said}) AS id", arguments)
    except psycopg.Error as refused:
        if refused.sqlstate == "DJ005":
            return "conflict"
        if refused.sqlstate in ("22P05", "22P02"):
            return "payload"  # jsonb itself has refused it, before the function was called
        if refused.sqlstate != "DJ004":
            raise
        return str(refused.diag.column_name)
    row = await cursor.fetchone()
    assert row is not None
    found: UUID = row["id"]
    return found


async def through_http(client: httpx.AsyncClient, fields: dict[str, Any]) -> UUID | str:
    names = {"job_type": "type"}
    body = {
        names.get(name, name): value
        for name, value in fields.items()
        if name not in ("organization", "idempotency_key")
    }
    key = fields["idempotency_key"].encode()
    answer = await client.post(JOBS, json=body, headers=[(b"Idempotency-Key", key)])
    if answer.is_success:
        return UUID(answer.json()["job_id"])
    problem = answer.json()
    if problem["code"] == IdempotencyKeyConflict.code:
        return "conflict"
    named = {"type": "job_type", "Idempotency-Key": "idempotency_key"}
    field = first_part(problem["errors"][0]["field"]) if problem["errors"] else problem["code"]
    return named.get(field, field)


def first_part(field: str) -> str:
    """`payload` of `payload.a[0]`; an identity's fields are the last part of theirs."""
    first, *rest = field.replace("[", ".").split(".")
    return rest[0] if first == "execution" and rest else first


def said(job: Job) -> dict[str, Any]:
    """What the row holds of the request."""
    fields = {"organization_id", "project_id", "queue", "job_type", "priority", "max_attempts", "backoff_base_seconds"}
    fields |= {"lease_seconds", "timeout_seconds", "status", "lease_generation", "attempt_count", "intent_number"}
    kept: dict[str, Any] = {name: getattr(job, name) for name in sorted(fields)}
    payload = dict(job.payload)
    identity = payload.pop("execution", None)
    bound = {"job", "project", "seals"}
    return kept | {
        "payload": payload,
        "identity": {name: value for name, value in identity.items() if name not in bound} if identity else None,
        "due_now": job.scheduled_at == job.created_at,
    }


@pytest_asyncio.fixture
async def own(database_url: str) -> AsyncIterator[psycopg.AsyncConnection[dict[str, Any]]]:
    async with connection(database_url) as connected:
        yield connected


async def test_python_and_sql_give_the_same_answers(
    service: DurableJobService, own: psycopg.AsyncConnection[dict[str, Any]]
) -> None:
    different = {}
    for name, (overrides, field) in CASES.items():
        answers: dict[str, Any] = {}
        rows = []
        for door, asked in (
            ("python", lambda fields: through_python(service, fields)),
            ("sql", lambda fields: through_sql(own, fields)),
        ):
            # A project for each door: the keys of the cases are fixed.
            fields = given(overrides)
            if field != "project":
                fields["project"] = f"{fields['project']}:{door}"[:128]
            answers[door] = answer = await asked(fields)
            if isinstance(answer, UUID):
                rows.append(said(await service.get_job(answer)) | {"project_id": None})
                answers[door] = None
        if set(answers.values()) != {field} or (rows and rows[0] != rows[-1]):
            different[name] = (answers, rows if len(str(rows)) < 4000 else "long")
    assert different == {}


async def test_http_gives_the_same_answers(
    service: DurableJobService, database_url: str, durable_jobs_stack: DevStack
) -> None:
    secret = await token(service, TokenRole.SUBMITTER)
    settings = settings_for(database_url, durable_jobs_stack, http_tokens="required")
    different = {}
    async with calling(settings, secret) as client:
        for name, (overrides, refused) in CASES.items():
            if overrides.keys() & NOT_SAID_OVER_HTTP:
                continue
            key = overrides.get("idempotency_key", "")
            if key.isspace():
                continue  # a header's value has no blanks at its ends: the client sends none
            field = refused if key.isascii() else "idempotency_key"  # in a header it must be ASCII
            answer = await through_http(client, given(overrides))
            if (None if isinstance(answer, UUID) else answer) != field:
                different[name] = answer
    assert different == {}


# What a repeat may change, and what makes it another request.
REPEATS: dict[str, tuple[dict[str, Any], bool]] = {
    "the same": ({}, True),
    "keys in another order": ({"payload": {"b": {"d": 2, "c": [1, 2]}, "a": 1}}, True),
    "1.0 for 1": ({"payload": {"a": 1.0, "b": {"c": [1, 2.0], "d": 2}}}, True),
    "the type in capitals": ({"job_type": "PROBE"}, True),
    "another priority": ({"priority": 1}, True),
    "another time": ({"scheduled_at": "2199-01-01T00:00:00Z"}, True),
    "other attempts": ({"max_attempts": 7}, True),
    "another trace": ({"trace": "t-2"}, True),
    "another payload": ({"payload": {"a": 2, "b": {"c": [1, 2], "d": 2}}}, False),
    "a list in another order": ({"payload": {"a": 1, "b": {"c": [2, 1], "d": 2}}}, False),
    "text for a number": ({"payload": {"a": "1", "b": {"c": [1, 2], "d": 2}}}, False),
    "one more key": ({"payload": {"a": 1, "b": {"c": [1, 2], "d": 2}, "e": None}}, False),
    "another type": ({"job_type": "other"}, False),
    "another queue": ({"queue": "other"}, False),
    "isolated": ({"isolated": True}, False),
    "another tenant": ({"tenant": "other"}, False),
    "another actor": ({"actor": "eve"}, False),
}
FIRST = {"payload": {"a": 1, "b": {"c": [1, 2], "d": 2}}} | IDENTITY


@pytest.mark.parametrize("first", ["python", "sql"])
@pytest.mark.parametrize("second", ["python", "sql"])
async def test_a_repeat_finds_the_job_whichever_door_made_it(
    service: DurableJobService, own: psycopg.AsyncConnection[dict[str, Any]], first: str, second: str
) -> None:
    """Case 25 of the catalogue, of the kind "idempotent creation", from door to door."""

    async def through(door: str, fields: dict[str, Any]) -> UUID | str:
        return await (through_python(service, fields) if door == "python" else through_sql(own, fields))

    different = {}
    for name, (change, same) in REPEATS.items():
        fields = given(FIRST)
        made = await through(first, fields)
        again = await through(second, fields | change)
        if again != (made if same else "conflict"):
            different[name] = (made, again)
    assert different == {}


async def test_a_governed_job_is_another_request_for_sql(
    service: DurableJobService, own: psycopg.AsyncConnection[dict[str, Any]], spec: Specs
) -> None:
    """The door for SQL writes no governance, so that it can't repeat a request that had some."""
    fields = given(FIRST)
    execution = ExecutionInput(**IDENTITY, action_intent="pay")
    plain = {name: value for name, value in fields.items() if name not in IDENTITY}
    await service.create_job(JobSpec(**plain, execution=execution))
    assert await through_sql(own, fields) == "conflict"
