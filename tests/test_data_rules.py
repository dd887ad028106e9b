"""What may be stored: refused by name at the door, escaped on our own way out, and given back exactly as it came."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any

import pytest
import rfc8785
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from durable_jobs import DurableJobService, JobError, JobStatus
from durable_jobs.contract import rules
from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.errors import InvalidInput, InvalidJob, NotStorable
from durable_jobs.contract.models import Claim
from durable_jobs.contract.rules import MAX_DEPTH, MAX_DIGITS, MAX_JSON_BYTES, evidence_of, json_problem, storable_text
from tests.conftest import Specs
from tests.support import claimed, dispatched, reclaimed, running, snapshot

Json = dict[str, Any]
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
on_one_database = settings(unhurried, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
"""Examples may share the test's database: each makes jobs of its own."""


def nested(depth: int) -> Json:
    """An object that is this many containers deep, lists and objects in turn."""
    value: Any = "leaf"
    for level in range(depth - 1):
        value = [value] if level % 2 else {"in": value}
    return {"top": value}


def sized(size: int) -> Json:
    """An object whose JSON text has this many bytes."""
    return {"text": "x" * (size - len('{"text":""}'))}


class Text(str):
    """What a product's own types are to JSON."""


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 10**MAX_DIGITS - 1, 10**MAX_DIGITS, -(10**MAX_DIGITS), 0.5, float("nan"), float("inf")])
    | st.sampled_from(["", "é", "\x00", "\ud83d", Text("own"), Text("\x00"), b"", Decimal(1), nested(MAX_DEPTH)]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(st.sampled_from(["a", "b", "\x00", "\udc00", Text("own"), 1, None]), inner, max_size=4)
    ),
    max_leaves=12,
)


@unhurried
@given(st.dictionaries(st.just("a"), ANYTHING))
@example(nested(MAX_DEPTH))
@example(nested(MAX_DEPTH + 1))
@example(OrderedDict(a="\x00"))
@example({"a": OrderedDict(a=10**MAX_DIGITS)})
def test_the_short_way_passes_what_the_walk_passes(value: Json) -> None:
    """What is all right is seen level by level; whatever isn't, or might not be, the walk looks at and names."""
    found = json_problem(value, "payload")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "_surely_storable", lambda value: False)
        assert json_problem(value, "payload") == found


def test_an_object_of_another_type_is_looked_at_as_well() -> None:
    assert json_problem(OrderedDict(a=float("nan")), "result") is not None


def test_what_holds_itself_is_too_deep() -> None:
    value: Json = {}
    value["often"] = [value] * 5000
    assert "deep" in str(json_problem(value, "payload"))


REFUSED: dict[str, tuple[Json, str | None]] = {
    # Case 29: what jsonb refuses as text.
    "U+0000": ({"a": "x\x00y"}, "a"),
    "U+0000 deep": ({"a": [{"b": "\x00"}]}, "a[0].b"),
    "U+0000 in a key": ({"a": {"k\x00": 1}}, "a"),
    "a lone high surrogate": ({"a": "\ud83d"}, "a"),
    "a lone low surrogate": ({"a": "\ude00"}, "a"),
    "surrogates in the wrong order": ({"a": "\ude00\ud83d"}, "a"),
    "a surrogate in a key": ({"a": {"\ud800": 1}}, "a"),
    # Case 30: what JSON has no number for.
    "NaN": ({"a": {"b": float("nan")}}, "a.b"),
    "Infinity": ({"a": [1, float("inf")]}, "a[1]"),
    "-Infinity": ({"a": float("-inf")}, "a"),
    "1e400": ({"a": json.loads("1e400")}, "a"),
    # Case 31: what jsonb takes and prints as 100 kB.
    "401 digits": ({"a": 10**400}, "a"),
    "-401 digits": ({"a": [-(10**400)]}, "a[0]"),
    "1e100000": ({"a": 10**100_000}, "a"),
    # Case 32 and the rest of the rules.
    "too deep": (nested(MAX_DEPTH + 1), None),
    "far too deep": (nested(5000), None),
    "a byte too many": (sized(MAX_JSON_BYTES + 1), None),
    "far too large": (sized(5 * MAX_JSON_BYTES), None),
    "a key that is a number": ({"a": {1: "x"}}, "a"),
    "a key that is null": ({"a": {None: "x"}}, "a"),
    "a key that is a boolean": ({"a": {True: "x"}}, "a"),
    "bytes": ({"a": b"x"}, "a"),
    "a set": ({"a": {1, 2}}, "a"),
    "a decimal": ({"a": Decimal("1.5")}, "a"),
    "a complex number": ({"a": 1j}, "a"),
}
TAKEN: dict[str, Json] = {
    "2^53": {"a": 9007199254740992},
    "2^53+1": {"a": 9007199254740993},
    "2^63-1": {"a": 9223372036854775807},
    "-2^63": {"a": -9223372036854775808},
    "2^64": {"a": 2**64},
    "400 digits": {"a": 10**400 - 1, "b": -(10**400 - 1)},
    "floats": {"a": 1.5, "b": 1e22, "c": 1.7976931348623157e308, "d": 5e-324, "e": -0.0, "f": 0.1},
    "as deep as may be": nested(MAX_DEPTH),
    "text": {"": "", "é": "😀", "quote": '"\\/\b\f\n\r\t', "del": "\x7f\x01", "\ufffe": "\uffff", "{s}": "%(id)s :x"},
    "empty things": {"a": [], "b": {}, "c": None, "d": False},
    "equal keys but for case": {"a": 1, "A": 2},
}


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: numbers by their decimal value, exactly; keys in any order."""
    if isinstance(one, bool) or isinstance(other, bool) or one is None or other is None:
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return Decimal(repr(one)) == Decimal(repr(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def test_the_measure_is_exact() -> None:
    assert same({"a": [1, 1.0]}, {"a": (1.0, 1)})
    assert not same(1, True)
    assert not same(9007199254740993, 9007199254740992.0)
    assert not same({"a": 1}, {"a": 1, "b": None})
    assert (MAX_DEPTH, MAX_DIGITS, MAX_JSON_BYTES) == (64, 400, 8 * 1024 * 1024)


def named(refused: InvalidInput, root: str, path: str | None) -> None:
    """The refusal names one problem, at this path (None: wherever the limit was passed)."""
    (problem,) = refused.problems
    assert problem.field == f"{root}.{path}" if path else problem.field.startswith(root)


async def test_what_can_not_be_stored_is_refused_as_input(service: DurableJobService, spec: Specs) -> None:
    """Cases 29, 30, 31 and 32 at the door: a typed error that names the path, and nothing written."""
    for value, path in REFUSED.values():
        with pytest.raises(InvalidJob) as refused:
            spec(payload=value)
        named(refused.value, "payload", path)
        with pytest.raises(InvalidJob) as refused:
            await service.create_job(spec().model_copy(update={"payload": value}))
        named(refused.value, "payload", path)
    assert (await service.list_jobs()).items == []


async def test_what_can_not_be_stored_is_refused_as_result(service: DurableJobService, spec: Specs) -> None:
    """Cases 29, 30, 31 and 32 in what a handler returns, reports and confirms: refused by path, the row untouched."""
    claim = await dispatched(service, spec())
    await service.cancel_job(claim.job_id, "not wanted", "ann")
    before = await snapshot(service, claim.job_id)
    verbs: dict[str, Callable[[Json], Awaitable[Any]]] = {
        "result": lambda value: service.complete_job(claim, value),
        "details": lambda value: service.heartbeat(claim, value),
        "provider_confirmed": lambda value: service.acknowledge_cancellation(claim, value),
        "data": lambda value: service.append_job_event(claim.job_id, "heartbeat", "ann", value),
    }
    for value, path in REFUSED.values():
        for root, verb in verbs.items():
            with pytest.raises(NotStorable if root == "result" else InvalidInput) as refused:
                await verb(value)
            named(refused.value, root, path)
        with pytest.raises(InvalidInput):
            await service.keep_late_result(claim, value)
    assert await snapshot(service, claim.job_id) == before


async def test_a_result_is_an_object(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec())
    for value in (None, [1], "text", 7, (1,)):
        with pytest.raises(NotStorable, match="result: must be a JSON object"):
            await service.complete_job(claim, value)  # type: ignore[arg-type]
    assert (await service.complete_job(claim, {})).job.result == {}


async def test_what_can_be_stored_comes_back_exactly(service: DurableJobService, spec: Specs) -> None:
    """Case 31 and every limit from within: exact on the row, in the trail, and under one digest."""
    for case, value in TAKEN.items():
        claim = await running(service, spec(payload=value))
        job = await service.get_job(claim.job_id)
        assert same(job.payload, value), case
        assert spec(payload=job.payload, idempotency_key=job.idempotency_key).digest() == job.request_digest, case
        assert await service.heartbeat(claim, value)
        await service.complete_job(claim, value)
        result = (await service.get_job(claim.job_id)).result
        assert same(result, value), case
        *_, beat, end = (await service.list_job_events(claim.job_id)).items
        assert same(beat.data, value), case
        assert same(end.data, {"result": value}), case


async def test_a_large_result_is_stored(service: DurableJobService, spec: Specs) -> None:
    """Case 32: 3 MB and 5 MB, and up to the last byte allowed, as payload and as result."""
    for size in (3_000_000, 5_000_000, MAX_JSON_BYTES):
        value = sized(size)
        claim = await running(service, spec(payload=value))
        await service.complete_job(claim, value)
        job = await service.get_job(claim.job_id)
        assert job.payload == value
        assert job.result == value


WIDE = {"text": "€" * (MAX_JSON_BYTES // 3 + 1)}
"""8 MiB and a byte or two, in a third as many characters."""


async def test_the_limit_is_in_bytes(service: DurableJobService, spec: Specs) -> None:
    """Case 32: the rule says 8 MiB, whatever the script that the text is in."""
    with pytest.raises(InvalidJob, match="payload"):
        spec(payload=WIDE)
    claim = await running(service, spec())
    with pytest.raises(NotStorable, match="result"):
        await service.complete_job(claim, WIDE)


async def test_an_errors_text_never_keeps_a_job_from_ending(service: DurableJobService, spec: Specs) -> None:
    """Case 29, raised by a handler: escaped and stored, and the transition succeeds."""
    error = JobError.of("A\x00B", "nul \x00 and \ud800 and \udfff", type="T\x00", traceback="line \x00\n\ud800")
    assert error.model_dump() == {
        "code": "A\\u0000B",
        "message": "nul \\u0000 and \\ud800 and \\udfff",
        "type": "T\\u0000",
        "traceback": "line \\u0000\n\\ud800",
    }
    for begin in (claimed, dispatched):
        for retryable in (True, False):
            claim = await begin(service, spec(max_attempts=1))
            job = await service.fail_job(claim, error, retryable)
            assert job == await service.get_job(claim.job_id)
            assert (job.status.is_terminal, job.error) == (True, error)


async def test_an_error_made_by_hand_never_keeps_a_job_from_ending(service: DurableJobService, spec: Specs) -> None:
    """Case 29, the kind: `JobError` is public, and need not come from `JobError.of`."""
    for field in ("code", "message", "type", "traceback"):
        for text in ("nul \x00", "lone \ud800"):
            claim = await dispatched(service, spec())
            error = JobError(**({"code": "CODE", "message": "message"} | {field: text}))
            job = await service.mark_indeterminate(claim, error)
            assert job.status is JobStatus.INDETERMINATE
            assert getattr(job.error, field) == storable_text(text, 100)


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Mute:
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307 - as a handler's own exception may


async def test_an_error_is_made_of_anything(service: DurableJobService, spec: Specs) -> None:
    """Whatever a handler raised: bounded, never empty, stored."""
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for message in (Unprintable(), Mute(), None, "", b"\xff", 10**5000, deep, ValueError("\x00"), "x" * 10_000_000):
        error = JobError.of("CODE", message, traceback="t" * 100_000)
        assert 1 <= len(error.message) <= 4096
        assert error.traceback == "t" * 8192
        claim = await claimed(service, spec())
        assert (await service.fail_job(claim, error, retryable=True)).error == error
    assert JobError.of("", "").model_dump() == {
        "code": "ERROR",
        "message": "(no message)",
        "type": None,
        "traceback": None,
    }


def test_evidence_is_made_of_anything() -> None:
    """Case 32, of a result that can't be stored: a bounded text form, which can."""
    circular: Any = {}
    circular["self"] = circular
    for value in (
        circular,
        nested(100_000),
        {"a": float("nan")},
        object(),
        {1: {2}},
        Unprintable(),
        "\x00\ud800",
        sized(20_000_000),
    ):
        text = evidence_of(value, 1000)
        assert 1 <= len(text) <= 1000
        assert json_problem({"text": text}, "text") is None
    assert evidence_of({"a": "\x00"}) == '{"a": "\\u0000"}'


@unhurried
@given(text=st.text(), limit=st.integers(2, 50))
def test_storable_text_is_storable_and_leaves_the_rest_alone(text: str, limit: int) -> None:
    stored = storable_text(text, limit)
    assert json_problem({"text": stored}, "text") is None
    if len(text) <= limit and json_problem({"text": text}, "text") is None:
        assert stored == text


ANY_TEXT = st.text(alphabet=st.characters(codec=None, exclude_categories=()), max_size=20)
NUMBERS = st.one_of(
    st.integers(),
    st.integers(-(10**MAX_DIGITS) + 1, 10**MAX_DIGITS - 1),
    st.integers(-(2**54), 2**54),
    st.floats(),
    st.floats(2.0**52, 2.0**70),
    st.floats(-1e-300, 1e-300),
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(ANY_TEXT, VALUES, min_size=1, max_size=5)


@on_one_database
@given(value=OBJECTS)
async def test_whatever_the_rules_let_pass_comes_back(service: DurableJobService, spec: Specs, value: Json) -> None:
    """Cases 29, 30 and 31, their whole kind: what passes the rules is stored, comes back equal as JSON, and has the
    same digest as before; what doesn't pass is refused by name."""
    assume(not value.keys() & {"execution", "governance"})
    if problem := json_problem(value, "payload"):
        with pytest.raises(InvalidJob) as refused:
            spec(payload=value)
        assert refused.value.problems == (problem,)
        return
    job = (await service.create_job(spec(payload=value))).job
    stored = (await service.get_job(job.id)).payload
    assert same(stored, value)
    assert request_digest({"payload": stored}) == request_digest({"payload": value})
    assert spec(payload=stored).digest() == job.request_digest
    claim = await reclaimed(service, job.id)
    await service.complete_job(claim, value)
    assert same((await service.get_job(job.id)).result, value)


def reordered(value: Any) -> Any:
    """The same JSON, its keys in the opposite order and its whole numbers in the other form where that is exact."""
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [reordered(child) for child in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


@unhurried
@given(value=OBJECTS)
def test_the_digest_is_of_the_json_not_of_its_form(value: Json) -> None:
    """Case 25, its whole kind: neither the order of keys nor `1` against `1.0` makes another request."""
    assume(json_problem(value, "payload") is None)
    digest = request_digest({"payload": value})
    assert request_digest({"payload": reordered(value)}) == digest
    assert request_digest({"payload": json.loads(json.dumps(value, indent=3))}) == digest


@unhurried
@given(one=OBJECTS, other=OBJECTS)
def test_the_digest_tells_values_apart(one: Json, other: Json) -> None:
    assume(json_problem(one, "payload") is None)
    assume(json_problem(other, "payload") is None)
    assert (request_digest(one) == request_digest(other)) is same(one, other)


@unhurried
@given(value=OBJECTS)
@example(value={"\uffff": 1, "\U00010000": 2, "z": {"é": None, "e": True}})
@example(value={"text": "".join(map(chr, range(1, 0xA1))) + "/\u2028\u2029\ufeff😀", "numbers": [0, -1, 2**53 - 1]})
def test_the_digest_is_of_the_rfc_8785_form(value: Json) -> None:
    """Whoever wrote the bytes: values that are plain go through an encoder of their own."""
    assume(json_problem(value, "payload") is None)
    try:
        canonical = rfc8785.dumps(value)
    except rfc8785.IntegerDomainError:
        assume(False)
    assume(not any_float_beyond_safe(value))
    assert request_digest(value) == hashlib.sha256(canonical).hexdigest()


def any_float_beyond_safe(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(any_float_beyond_safe, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and abs(value) > 2**53 - 1


def test_the_digest_tells_large_numbers_apart() -> None:
    """Beyond ±(2^53−1), where RFC 8785 ends: exact, and never confused with text."""
    values: list[Any] = [2**53 - 1, 2**53, 2**53 + 1, 2**53 + 2, -(2**53), 2**63 - 1, 10**399, 10**399 + 1]
    values += [str(2**53 + 1), f"\\x00{2**53 + 1}", 2.0**60 + 2**10, 1.5, "1.5", 1, True, None, "1", [1], {"1": 1}]
    digests = [request_digest({"a": value}) for value in values]
    assert len(set(digests)) == len(values)
    assert request_digest({"a": 2.0**53}) == request_digest({"a": 2**53})
    assert request_digest({"a": 1e22}) == request_digest({"a": 10**22})
    assert request_digest({"a": -0.0}) == request_digest({"a": 0})


@unhurried
@given(text=ANY_TEXT | st.text(alphabet="\x00\ud800\udfff😀x", max_size=600), limit=st.integers(1, 300))
@example(text="x" * 9 + "\x00" * 20, limit=128)
def test_storable_text_keeps_its_limit_and_is_left_as_it_is(text: str, limit: int) -> None:
    storable = storable_text(text, limit)
    assert len(storable) <= limit
    assert storable_text(storable, limit) == storable


@on_one_database
@given(texts=st.lists(ANY_TEXT | st.text(alphabet="\x00\ud800\udfff😀x", max_size=6000), min_size=4, max_size=4))
@example(texts=["x" * 9 + "\x00" * 20, "", "", ""])
async def test_any_error_is_stored(service: DurableJobService, spec: Specs, texts: list[str]) -> None:
    """Case 29, its whole kind: `JobError.of` never raises, and what it makes is stored as it is."""
    code, message, kind, trace = texts
    error = JobError.of(code, message, type=kind, traceback=trace)
    assert error.code
    assert error.message
    claim: Claim = await claimed(service, spec())
    assert (await service.fail_job(claim, error, retryable=False)).error == error
