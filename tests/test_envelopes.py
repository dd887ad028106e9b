"""The two envelopes: what may be typed, what is written, and what is read back or refused, field by field."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from pydantic import ValidationError

from durable_jobs import DurableJobService, ExecutionInput, FollowUp, GovernanceInput, Job, JobSpec
from durable_jobs.contract.admission import admission, validate_execution_identity_for_dispatch
from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.envelope import (
    MalformedEnvelope,
    build_execution_envelope,
    build_governance_envelope,
    raw_payload,
    read_execution_identity,
    read_governance,
)
from durable_jobs.contract.errors import InvalidBatch, InvalidInput, InvalidJob
from durable_jobs.contract.rules import key_problem
from tests.conftest import Specs
from tests.governing import FACTS, INTENT, LINEAGE, TRACE, as_row, governance, governed, identity, redigested, resealed

Json = dict[str, Any]

MISSING = object()
JOB_ID = UUID("01890a5d-ac96-774b-bcce-b302099a8057")
ISSUED = datetime(2026, 3, 1, 12, tzinfo=UTC)
REQUIRED = ("tenant", "actor", "trace")

UNUSABLE_TEXTS: dict[str, Any] = {
    "empty": "",
    "blank": "   ",
    "no-break space": "\u00a0",
    "256 characters": "x" * 256,
    "a line": "a\nb",
    "U+0000": "a\x00b",
    "a lone surrogate": "a\ud800",
    "no width": "a\u200bb",
    "right to left": "a\u202eb",
    "bytes": b"a",
    "a number": 7,
    "a boolean": True,
    "a list": ["a"],
    "an object": {"a": 1},
}
UNUSABLE_FACTS: dict[str, Any] = {
    "null": None,
    "text": "{}",
    "a list": [],
    "a number": 1,
    "NaN": {"a": float("nan")},
    "U+0000": {"a": "\x00"},
    "a lone surrogate": {"\ud800": 1},
    "401 digits": {"a": 10**400},
    "no JSON": {"a": {1, 2}},
    "a key that is no text": {1: 2},
}
UNUSABLE_TIMES: dict[str, Any] = {
    "null": None,
    "no zone": datetime(2030, 1, 1),  # noqa: DTZ001 - the very thing refused
    "text": "2030-01-01T00:00:00Z",
    "a number": 1_900_000_000,
    "before 2000": datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC),
    "after 2200": datetime(2201, 1, 1, tzinfo=UTC),
}


def blamed(make: Callable[[], Any]) -> list[str]:
    """The fields that pydantic names; empty when nothing is wrong."""
    try:
        make()
    except ValidationError as error:
        return [".".join(str(step) for step in each["loc"]) for each in error.errors()]
    return []


# ---- what may be typed


def test_every_field_of_an_identity_is_checked() -> None:
    unusable = {name: UNUSABLE_TEXTS | ({"null": None} if name in REQUIRED else {}) for name in LINEAGE}
    found = {
        (name, what): blamed(lambda n=name, v=value: ExecutionInput(**LINEAGE | {n: v}))  # type: ignore[misc]
        for name, values in unusable.items()
        for what, value in values.items()
    }
    assert found == {(name, what): [name] for name, what in found}
    assert len(found) == 11 * 14 + 3
    assert ExecutionInput(**LINEAGE).model_dump() == LINEAGE
    longest = dict.fromkeys(LINEAGE, "x" * 255)
    assert ExecutionInput(**longest).model_dump() == longest


@pytest.mark.parametrize("name", LINEAGE)
def test_what_an_identity_must_have(name: str) -> None:
    without = {field: value for field, value in LINEAGE.items() if field != name}
    if name in REQUIRED:
        assert blamed(lambda: ExecutionInput(**without)) == [name]
    else:
        assert ExecutionInput(**without).model_dump() == LINEAGE | {name: None}


@pytest.mark.parametrize(
    "name", ["organization", "project", "job", "version", "governance", "seals", "digest", "tenant_id", "Tenant"]
)
def test_nobody_types_what_the_row_says(name: str) -> None:
    """Organization, project and job are the record's to say; version and seals the writer's."""
    assert blamed(lambda: ExecutionInput(**LINEAGE | {name: "globex"})) == [name]
    assert blamed(lambda: ExecutionInput(**LINEAGE | {name: None})) == [name]


def test_every_field_of_the_facts_is_checked() -> None:
    unusable: dict[str, Json] = {
        "action_intent": UNUSABLE_TEXTS | {"null": None},
        "approval": UNUSABLE_TEXTS,
        "capability": UNUSABLE_FACTS,
        "policy": UNUSABLE_FACTS,
        "budget": UNUSABLE_FACTS,
        "issued_at": UNUSABLE_TIMES,
        "expires_at": UNUSABLE_TIMES,
    }
    typed = FACTS | {"issued_at": ISSUED, "expires_at": ISSUED + timedelta(hours=1)}
    found = {
        (name, what): blamed(lambda n=name, v=value: GovernanceInput(**typed | {n: v}))  # type: ignore[misc]
        for name, values in unusable.items()
        for what, value in values.items()
    }
    # A key that is no text is named with its place.
    assert {
        each: fields for each, fields in found.items() if [field.split(".")[0] for field in fields] != [each[0]]
    } == {}
    assert len(found) == 15 + 14 + 3 * 10 + 2 * 6
    for name in unusable:
        without = {field: value for field, value in typed.items() if field != name}
        assert blamed(lambda w=without: GovernanceInput(**w)) == ([] if name == "approval" else [name])  # type: ignore[misc]
    for name in ("job", "organization", "version", "digest", "seals", "tenant", "expires"):
        assert blamed(lambda n=name: GovernanceInput(**typed | {n: "x"})) == [name]  # type: ignore[misc]


def test_a_spec_names_the_field_of_the_input(spec: Specs) -> None:
    with pytest.raises(InvalidJob) as refused:
        spec(execution={"tenant": "", "actor": "ada", "trace": TRACE})
    assert [problem.field for problem in refused.value.problems] == ["execution.tenant"]
    with pytest.raises(InvalidJob) as refused:
        spec(execution={"tenant": "t", "actor": "ada", "trace": TRACE, "organization": "globex"})
    assert [problem.field for problem in refused.value.problems] == ["execution.organization"]
    with pytest.raises(InvalidJob) as refused:
        spec(execution=identity(), governance={"action_intent": INTENT})
    assert [problem.field for problem in refused.value.problems] == [
        f"governance.{name}" for name in ("capability", "policy", "budget", "issued_at", "expires_at")
    ]


EXPIRY = ("governance.expires_at", "governance.expires_at must be after governance.issued_at")
PAIRS: dict[str, tuple[Json, tuple[str, str]]] = {
    "governance alone": (
        {"governance": governance()},
        ("governance", "governance goes with execution: whose work is it?"),
    ),
    "another intent": (
        {"execution": identity(action_intent="payout"), "governance": governance()},
        ("execution.action_intent", "execution.action_intent 'payout' is not governance.action_intent 'refund'"),
    ),
    "another approval": (
        {"execution": identity(approval="grant-2"), "governance": governance()},
        ("execution.approval", "execution.approval 'grant-2' is not governance.approval 'grant-1'"),
    ),
    "an approval that the facts don't name": (
        {"execution": identity(approval="grant-2"), "governance": governance(approval=None)},
        ("execution.approval", "execution.approval 'grant-2' is not governance.approval None"),
    ),
    "expires as it is issued": (
        {"execution": identity(), "governance": governance(issued_at=ISSUED, expires_at=ISSUED)},
        EXPIRY,
    ),
    "expires before, in another zone": (
        {
            "execution": identity(),
            "governance": governance(
                issued_at=ISSUED, expires_at=datetime(2026, 3, 1, 13, 59, tzinfo=timezone(timedelta(hours=2)))
            ),
        },
        EXPIRY,
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_execution_and_governance_agree(spec: Specs, pair: str) -> None:
    typed, problem = PAIRS[pair]
    with pytest.raises(InvalidJob) as refused:
        spec(**typed)
    assert [(each.field, each.problem) for each in refused.value.problems] == [problem]
    agreeing = identity(action_intent=INTENT, approval="grant-1")
    assert spec(execution=agreeing, governance=governance()).execution == agreeing


async def test_a_pair_that_disagrees_is_named_in_a_batch(service: DurableJobService, spec: Specs) -> None:
    batch = [spec(), *(spec().model_dump() | typed for typed, _ in PAIRS.values()), spec()]
    with pytest.raises(InvalidBatch) as refused:
        await service.create_jobs(batch)
    assert {index: type(error) for index, error in refused.value.errors.items()} == dict.fromkeys(
        range(1, 7), InvalidJob
    )


def forged(spec: JobSpec, **fields: Any) -> JobSpec:
    """The spec with an identity that no check has seen."""
    execution = identity().model_copy(update=fields)
    return spec.model_copy(update={"execution": execution})


def spoiled(spec: JobSpec, **facts: Any) -> JobSpec:
    """The spec with facts that were changed since they were checked."""
    assert spec.governance is not None
    for name, value in facts.items():
        getattr(spec.governance, name).update(value)
    return spec


async def test_the_service_checks_the_inputs_again(service: DurableJobService, spec: Specs) -> None:
    """As it does the payload: whatever became of the inputs since, nothing is written that can't be read."""

    def made() -> JobSpec:
        return spec(execution=identity(), governance=governance(capability={}, policy={}, budget={}))

    cases = {
        "execution.tenant": forged(spec(), tenant=""),
        "execution.actor": forged(spec(), actor=7),
        "execution.trace": forged(spec(), trace=None),
        "execution.task": forged(spec(), task="x" * 256),
        "governance.capability": spoiled(made(), capability={"a": float("nan")}),
        "governance.policy": spoiled(made(), policy={"a": "\x00"}),
        "governance.budget": spoiled(made(), budget={"a": object()}),
    }
    found = {}
    for name, case in cases.items():
        try:
            await service.create_job(case)
            found[name] = ["written"]
        except InvalidJob as error:
            found[name] = [problem.field for problem in error.problems]
        except Exception as error:
            found[name] = [type(error).__name__]
    assert found == {name: [name] for name in cases}


# ---- the trace


def active_span(trace_id: int, span_id: int = 0x00F067AA0BA902B7) -> Any:
    """Within it, OpenTelemetry is active with this trace."""
    return trace.use_span(NonRecordingSpan(SpanContext(trace_id, span_id, False, TraceFlags(TraceFlags.SAMPLED))))


def test_the_trace_is_that_of_the_active_span(spec: Specs) -> None:
    with active_span(int(TRACE, 16)):
        assert ExecutionInput(tenant="t", actor="a").trace == TRACE
        assert spec(execution={"tenant": "t", "actor": "a"}).execution.trace == TRACE
        with active_span(0x1):
            assert ExecutionInput(tenant="t", actor="a").trace == "0" * 31 + "1"
    assert blamed(lambda: ExecutionInput(tenant="t", actor="a")) == ["trace"]


def test_a_typed_trace_is_not_overruled_by_the_span() -> None:
    with active_span(int(TRACE, 16)):
        assert ExecutionInput(tenant="t", actor="a", trace="mine").trace == "mine"
        assert blamed(lambda: ExecutionInput(tenant="t", actor="a", trace=None)) == ["trace"]  # type: ignore[arg-type]
        assert blamed(lambda: ExecutionInput(tenant="t", actor="a", trace="")) == ["trace"]


@pytest.mark.parametrize(
    ("trace_id", "span_id"), [(0, 1), (1, 0), (1 << 128, 1)], ids=["no trace", "no span", "too long"]
)
def test_an_invalid_span_gives_no_trace(trace_id: int, span_id: int) -> None:
    with active_span(trace_id, span_id):
        assert blamed(lambda: ExecutionInput(tenant="t", actor="a")) == ["trace"]


# ---- what is written


def test_the_execution_envelope_in_full() -> None:
    """Version 1, byte for byte: whoever changes it changes what stored jobs are read by."""
    written = build_execution_envelope(ExecutionInput(**LINEAGE), organization="acme", project="alpha", job_id=JOB_ID)
    row = {"organization": "acme", "project": "alpha", "job": str(JOB_ID), "governance": None}
    assert written == resealed(JOB_ID, {"version": 1} | LINEAGE | row)
    assert written["seals"]["version"] == "6d06204128e08033"


def test_the_governance_envelope_in_full() -> None:
    facts = governance(issued_at=ISSUED, expires_at=ISSUED + timedelta(hours=1))
    written = build_governance_envelope(facts, job_id=JOB_ID)
    fields = {
        **FACTS,
        "version": 1,
        "job": str(JOB_ID),
        "issued_at": "2026-03-01T12:00:00+00:00",
        "expires_at": "2026-03-01T13:00:00+00:00",
    }
    assert written == resealed(JOB_ID, redigested(fields))
    assert written["digest"] == "28c1ae8ba439b66ea573405c8b95efa7843992ab7ed646e101a1b4efb29c4f80"


def test_the_identity_holds_which_facts_were_submitted_with_it(spec: Specs) -> None:
    """Their digest: facts that are taken away, or put there later, are not those."""
    governed_row, plain = rows(spec), as_row(spec(execution=identity()))
    digest = governed_row.payload["governance"]["digest"]
    found = read_execution_identity(governed_row)
    assert found is not None
    assert found.governance == digest
    without = {name: value for name, value in governed_row.payload.items() if name != "governance"}
    facts = build_governance_envelope(governance(), job_id=plain.id)
    now = datetime.now(UTC)
    for row, payload in ((governed_row, without), (plain, plain.payload | {"governance": facts})):
        assert admission(row, now).reasons == []
        assert admission(row.model_copy(update={"payload": payload}), now).reasons == [
            "governance: is not what was submitted with the identity"
        ]


def test_a_seal_is_of_its_job_its_field_and_its_value() -> None:
    """The same value has another seal in another field, and in another job."""
    typed = identity(task="same", run="same")
    one = build_execution_envelope(typed, organization="acme", project="alpha", job_id=JOB_ID)["seals"]
    other = build_execution_envelope(typed, organization="acme", project="alpha", job_id=uuid4())["seals"]
    assert len(set(one.values()) | set(other.values())) == 2 * 16


def test_without_inputs_the_payload_is_stored_as_it_came(spec: Specs) -> None:
    payload = {"tenant": "evil", "seals": {}, "nested": {"execution": {"tenant": "evil"}, "governance": 1}}
    row = as_row(spec(payload=payload))
    assert row.payload == payload
    assert (read_execution_identity(row), read_governance(row)) == (None, None)
    assert raw_payload(row.payload) == payload


# ---- what is read


def rows(spec: Specs) -> Job:
    """A row with both envelopes, every field of them filled."""
    made = spec(execution=ExecutionInput(**LINEAGE), governance=governance())
    return as_row(made)


def altered(row: Job, envelope: str, name: str, value: Any, *, sealed: bool) -> Job:
    """The row with one field of an envelope changed; with `sealed`, by somebody who can make seals."""
    stored = dict(row.payload[envelope])
    if value is MISSING:
        del stored[name]
    else:
        stored[name] = value
    if sealed:
        stored = resealed(row.id, stored)
    return row.model_copy(update={"payload": row.payload | {envelope: stored}})


def malformed(row: Job, envelope: str) -> list[str]:
    """The fields that reading the envelope blames, which must be all that it gives."""
    read = read_execution_identity if envelope == "execution" else read_governance
    with pytest.raises(MalformedEnvelope) as refused:
        read(row)
    assert isinstance(refused.value, InvalidInput)
    return [problem.field for problem in refused.value.problems]


STORED_EXECUTION = ("version", *LINEAGE, "organization", "project", "job", "governance")
STORED_GOVERNANCE = ("version", "job", *FACTS, "issued_at", "expires_at", "digest")
# What JSON in a database may hold; the rest of the texts can't be stored.
STORED_TEXTS = {
    what: value for what, value in UNUSABLE_TEXTS.items() if what not in ("U+0000", "a lone surrogate", "bytes")
}
STORED_FACTS: Json = {"null": None, "text": "{}", "a list": [], "a number": 1, "401 digits": {"a": 10**400}}
STORED_TIMES: Json = {
    "null": None,
    "empty": "",
    "no time": "tomorrow",
    "no zone": "2030-01-01T00:00:00",
    "a date": "2030-01-01",
    "a number": 1_900_000_000,
    "before 2000": "1999-12-31T23:59:59+00:00",
    "after 2200": "2201-01-01T00:00:00+00:00",
    "the first year, east": "0001-01-01T00:00:00+23:59",
    "the last year, west": "9999-12-31T23:59:59-23:59",
}
STORED_VERSIONS: Json = {"0": 0, "2": 2, "1.5": 1.5, "text": "1", "null": None, "a list": [1], "-1": -1, "huge": 10**30}
STORED_DIGESTS: Json = {"63 digits": "a" * 63, "65 digits": "a" * 65, "null": None, "a number": 1}


def unusable(envelope: str, name: str) -> Json:
    if name == "version":
        return STORED_VERSIONS
    if name in ("capability", "policy", "budget"):
        return STORED_FACTS
    if name in ("issued_at", "expires_at"):
        return STORED_TIMES
    if name == "digest":
        return STORED_DIGESTS
    optional = name in {*LINEAGE, "governance"} - {*REQUIRED} - (
        {"action_intent"} if envelope == "governance" else set()
    )
    return STORED_TEXTS | ({} if optional else {"null": None})


@pytest.mark.parametrize("sealed", [False, True], ids=["as it was sealed", "sealed anew"])
@pytest.mark.parametrize(
    ("envelope", "name"),
    [("execution", name) for name in STORED_EXECUTION] + [("governance", name) for name in STORED_GOVERNANCE],
)
def test_every_stored_field_is_checked(spec: Specs, envelope: str, name: str, sealed: bool) -> None:
    """Malformed, whoever sealed it: an error that names the field, never a part of an identity."""
    row = rows(spec)
    for what, value in unusable(envelope, name).items():
        found = malformed(altered(row, envelope, name, value, sealed=sealed), envelope)
        assert [each.split("[")[0] for each in found] == [f"{envelope}.{name}"], what


@pytest.mark.parametrize(
    ("envelope", "name"),
    [("execution", name) for name in STORED_EXECUTION] + [("governance", name) for name in STORED_GOVERNANCE],
)
def test_every_stored_field_must_be_there_and_bear_its_seal(spec: Specs, envelope: str, name: str) -> None:
    row = rows(spec)
    assert malformed(altered(row, envelope, name, MISSING, sealed=False), envelope) == [f"{envelope}.{name}"]
    changed: Json = {"issued_at": "2026-01-01T00:00:00+00:00", "expires_at": "2190-01-01T00:00:00+00:00"}
    changed |= {facts: {"name": "everything"} for facts in ("capability", "policy", "budget")} | {"digest": "a" * 64}
    if name != "version":
        other = altered(row, envelope, name, changed.get(name, "another"), sealed=False)
        assert malformed(other, envelope) == [f"{envelope}.{name}"]
    stored = row.payload[envelope]
    for seals in (
        {field: value for field, value in stored["seals"].items() if field != name},
        stored["seals"] | {name: "0" * 16},
        stored["seals"] | {name: stored["seals"]["job"] if name != "job" else stored["seals"]["version"]},
        stored["seals"] | {name: None},
        stored["seals"] | {name: [stored["seals"][name]]},
    ):
        assert malformed(altered(row, envelope, "seals", seals, sealed=False), envelope) == [f"{envelope}.{name}"]


@pytest.mark.parametrize("envelope", ["execution", "governance"])
def test_what_does_not_belong_is_refused(spec: Specs, envelope: str) -> None:
    row = rows(spec)
    for name in ("extra", "Tenant", "tenant ", "model_config", "__class__"):
        found = malformed(altered(row, envelope, name, "x", sealed=True), envelope)
        assert found == [f"{envelope}.{name}"], name
    stored = row.payload[envelope]
    more = altered(row, envelope, "seals", stored["seals"] | {"extra": "0" * 16}, sealed=False)
    assert malformed(more, envelope) == [f"{envelope}.extra"]
    for seals in (MISSING, None, [], "x", 1):
        assert malformed(altered(row, envelope, "seals", seals, sealed=False), envelope) == [f"{envelope}.seals"]
    for whole in (None, [], "x", 1, True):
        assert malformed(row.model_copy(update={"payload": row.payload | {envelope: whole}}), envelope) == [envelope]


@pytest.mark.parametrize("envelope", ["execution", "governance"])
def test_a_newer_version_is_refused_whatever_else_it_says(spec: Specs, envelope: str) -> None:
    """Not guessed: a version that this code does not know may mean other things by the same names."""
    row = rows(spec)
    for version in (2, 3, 10**9):
        newer = altered(row, envelope, "version", version, sealed=True)
        assert malformed(newer, envelope) == [f"{envelope}.version"]
        more = altered(newer, envelope, "new_in_2", "x", sealed=True)
        assert malformed(more, envelope) == [f"{envelope}.version", f"{envelope}.new_in_2"]


def test_true_is_no_version(spec: Specs) -> None:
    assert malformed(altered(rows(spec), "execution", "version", True, sealed=True), "execution") == [
        "execution.version"
    ]


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("organization", "organization_id", "globex"),
        ("organization", "organization_id", "Acme"),
        ("project", "project_id", "beta"),
        ("job", "id", uuid4()),
    ],
)
def test_the_envelope_and_the_row_must_agree(spec: Specs, name: str, column: str, value: Any) -> None:
    """Well-formed, sealed, and of another row: no dispatch, and the reason says which."""
    row = as_row(spec(execution=identity()))
    assert validate_execution_identity_for_dispatch(row) == []
    elsewhere = row.model_copy(update={column: value})
    if column == "id":
        elsewhere = elsewhere.model_copy(
            update={"payload": elsewhere.payload | {"execution": resealed(value, row.payload["execution"])}}
        )
    typed = row.payload["execution"][name]
    assert validate_execution_identity_for_dispatch(elsewhere) == [
        f"execution.{name}: {typed!r} is not the row's {str(value)!r}"
    ]


def test_an_envelope_of_another_job_bears_no_seal_of_this_one(spec: Specs) -> None:
    """Copied whole, with what it says of its job corrected: the other seals are still the other job's."""
    theirs, mine = rows(spec), rows(spec)
    for envelope in ("execution", "governance"):
        stolen = mine.model_copy(update={"payload": mine.payload | {envelope: theirs.payload[envelope]}})
        assert len(malformed(stolen, envelope)) == 1
        own = altered(stolen, envelope, "job", str(mine.id), sealed=False)
        assert len(malformed(own, envelope)) == 1


def test_the_reasons_name_all_that_is_missing(spec: Specs) -> None:
    row = as_row(spec(execution=identity()))
    stored = {name: value for name, value in row.payload["execution"].items() if name not in REQUIRED}
    reasons = validate_execution_identity_for_dispatch(
        row.model_copy(update={"payload": row.payload | {"execution": stored}})
    )
    assert [reason.split(":")[0] for reason in reasons] == [f"execution.{name}" for name in REQUIRED]
    nothing = as_row(spec())
    assert validate_execution_identity_for_dispatch(nothing) == [
        "execution: missing; a consequential job needs an execution identity"
    ]


def test_expiry_is_from_that_instant_on(spec: Specs) -> None:
    expires = datetime(2030, 1, 1, tzinfo=UTC)
    row = as_row(spec(execution=identity(), governance=governance(issued_at=ISSUED, expires_at=expires)))
    instant = timedelta(microseconds=1)
    assert admission(row, expires - instant).reasons == []
    expired = [f"governance.expires_at: expired at {expires.isoformat()}"]
    assert admission(row, expires).reasons == expired
    assert admission(row, expires.astimezone(timezone(timedelta(hours=-5))) + instant).reasons == expired


# ---- whatever is typed is read back

PRINTABLE = st.characters(codec="utf-8", exclude_categories=["C", "Z"]) | st.just(" ")
TEXTS = st.text(PRINTABLE, min_size=1, max_size=255).filter(lambda text: key_problem(text) is None)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**40), 10**40)
    | st.floats(-(2.0**53), 2.0**53, allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
ENVELOPE_NAMES = st.sampled_from(
    [*STORED_EXECUTION, *STORED_GOVERNANCE, "seals", "Execution", "GOVERNANCE", "__proto__"]
)
OBJECTS = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES, lambda child: st.lists(child, max_size=3) | st.dictionaries(NAMES, child, max_size=3), max_leaves=8
    ),
    max_size=4,
)
PAYLOADS = st.dictionaries(
    (NAMES | ENVELOPE_NAMES).filter(lambda name: name not in ("execution", "governance")),
    LEAVES | OBJECTS | st.fixed_dictionaries({"execution": OBJECTS, "governance": OBJECTS}),
    min_size=1,
    max_size=5,
)
TIMES = st.datetimes(
    datetime(2000, 1, 2),  # noqa: DTZ001 - the zone is drawn apart
    datetime(2200, 12, 30),  # noqa: DTZ001
    timezones=st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
LINEAGES = st.fixed_dictionaries(
    dict.fromkeys(REQUIRED, TEXTS), optional={name: TEXTS for name in LINEAGE if name not in REQUIRED}
).map(lambda typed: ExecutionInput(**typed))
GOVERNANCES = st.fixed_dictionaries(
    {
        "action_intent": TEXTS,
        "capability": OBJECTS,
        "policy": OBJECTS,
        "budget": OBJECTS,
        "approval": st.none() | TEXTS,
        "issued_at": TIMES,
        "expires_at": TIMES,
    }
).map(lambda typed: GovernanceInput(**typed))


@st.composite
def inputs(draw: st.DrawFn) -> tuple[ExecutionInput, GovernanceInput | None]:
    """A pair that agrees."""
    execution = draw(LINEAGES)
    if draw(st.booleans()):
        return execution, None
    facts = draw(GOVERNANCES)
    if facts.issued_at == facts.expires_at:
        facts = facts.model_copy(update={"expires_at": facts.expires_at + timedelta(seconds=1)})
    elif facts.issued_at > facts.expires_at:
        facts = facts.model_copy(update={"issued_at": facts.expires_at, "expires_at": facts.issued_at})
    links = {"action_intent": facts.action_intent, "approval": facts.approval}
    named = {name: value for name, value in links.items() if getattr(execution, name) is not None}
    return execution.model_copy(update=named), facts


def assert_read_back(
    row: Job, execution: ExecutionInput, facts: GovernanceInput | None, payload: Json, *, before: datetime
) -> None:
    found = read_execution_identity(row)
    assert found is not None
    governing = read_governance(row)
    bound = {"organization": row.organization_id, "project": row.project_id, "job": str(row.id)}
    link = {"governance": governing.digest if governing else None}
    assert found.model_dump() == execution.model_dump() | bound | link | {"version": 1}
    if facts is None:
        assert governing is None
    else:
        assert governing is not None
        assert governing.model_dump(exclude={"digest"}) == facts.model_dump() | {"version": 1, "job": str(row.id)}
    assert raw_payload(row.payload) == payload
    assert validate_execution_identity_for_dispatch(row) == []
    assert admission(row, before).reasons == []


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(typed=inputs(), payload=PAYLOADS, other=PAYLOADS)
def test_what_is_read_back_is_what_was_typed(
    typed: tuple[ExecutionInput, GovernanceInput | None], payload: Json, other: Json
) -> None:
    """And the raw payload, whatever it calls itself, has no part in it."""
    execution, facts = typed
    spec = JobSpec(
        organization="acme",
        project="alpha",
        job_type="probe",
        idempotency_key="k",
        payload=payload,
        execution=execution,
        governance=facts,
    )
    row = as_row(spec)
    assert_read_back(row, execution, facts, json.loads(json.dumps(payload)), before=datetime(1999, 1, 1, tzinfo=UTC))
    stored, beside = spec.stored_payload(JOB_ID), spec.model_copy(update={"payload": other}).stored_payload(JOB_ID)
    envelopes = {"execution", "governance"}
    assert {name: stored.get(name) for name in envelopes} == {name: beside.get(name) for name in envelopes}


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
@given(typed=inputs(), payload=PAYLOADS)
async def test_what_is_read_back_after_postgres_is_what_was_typed(
    service: DurableJobService, typed: tuple[ExecutionInput, GovernanceInput | None], payload: Json
) -> None:
    execution, facts = typed
    spec = JobSpec(
        organization="acme",
        project="alpha",
        job_type="probe",
        idempotency_key=uuid4().hex,
        payload=payload,
        execution=execution,
        governance=facts,
    )
    row = await service.get_job((await service.create_job(spec)).job.id)
    assert_read_back(row, execution, facts, payload, before=datetime(1999, 1, 1, tzinfo=UTC))


NUMBERS = [1e300, 1e23, -1e22, 2.0**53, 2.0**53 + 2, 2**53 + 1, 10**399, -0.0, 5e-324, 1.0, 0.1, 1e-7, 123456789.125]


async def test_numbers_keep_their_seals_through_postgres(service: DurableJobService, spec: Specs) -> None:
    """jsonb writes 1e300 as an integer of 301 digits: the facts are still those that were sealed and digested."""
    facts = governance(capability={"numbers": NUMBERS}, approval=None)
    row = (await service.create_job(spec(execution=identity(), governance=facts, payload={"numbers": NUMBERS}))).job
    row = await service.get_job(row.id)
    assert admission(row, datetime.now(UTC)).reasons == []
    read = read_governance(row)
    assert read is not None
    assert request_digest(read.capability) == request_digest({"numbers": NUMBERS})


def test_a_follow_up_has_no_way_to_type_an_identity() -> None:
    fields: Json = {"name": "next", "job_type": "probe", "payload": {"n": 1}}
    for name in ("execution", "tenant", "actor", "trace", "organization", "project", "parent_job", "isolated"):
        with pytest.raises(InvalidJob) as refused:
            FollowUp(**fields | {name: "globex"})
        assert [problem.field for problem in refused.value.problems] == [name]
    assert FollowUp(**fields, task="task-2").task == "task-2"


def test_the_digests_of_governed_requests(spec: Specs) -> None:
    """A spec that is governed is another request than one that only names the same intent."""
    named = spec(idempotency_key="k", execution=identity(action_intent=INTENT))
    assert governed(spec(idempotency_key="k")).digest() != named.digest()
    assert spec(idempotency_key="k", execution=identity()).digest() != named.digest()
    assert named.digest() == spec(idempotency_key="other", execution=identity(action_intent=INTENT)).digest()
