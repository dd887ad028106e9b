"""Data that databases choke on, as it comes through handlers: refused with a type and a path, or stored exactly."""

import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel

from durable_jobs import DurableJobs, EventName, HaltUnsafe, JobContext, JobFailed, JobHandler, JobStatus
from durable_jobs.contract.errors import InvalidInput, InvalidJob
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers
from tests.probes import Probe, Provider, eventually, trail, until

SURROGATE = "\ud800"

before_and_after = pytest.mark.parametrize("crossed", [False, True], ids=["before the marker", "after it"])


@before_and_after
@pytest.mark.parametrize("text", ["a\x00b", f"a{SURROGATE}b"], ids=["NUL", "lone surrogate"])
async def test_an_error_text_that_no_column_takes(
    jobs: DurableJobs, worker: Workers, spec: Specs, text: str, crossed: bool
) -> None:
    """Case 29 of the catalogue, of the kind "data": escaped and stored on our own failure path."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if crossed:
            async with job.dispatch(f"probe:{job.id}"):
                raise ValueError(text)
        raise ValueError(text)

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(max_attempts=1))
        job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE if crossed else JobStatus.DEAD_LETTER)
    assert job.error is not None
    assert job.error.message == f"a\\u{ord(text[1]):04x}b"
    assert job.error.traceback is not None
    assert text not in job.error.traceback


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (JobFailed("no\x00", retryable=False, code="NO\x00"), JobStatus.FAILED, "NO\\u0000"),
        (HaltUnsafe(f"halt{SURROGATE}", code=f"HALT{SURROGATE}"), JobStatus.HALT_UNSAFE, "HALT\\ud800"),
        (JobFailed("", retryable=False, code=""), JobStatus.FAILED, "ERROR"),
        (JobFailed("x" * 1_000_000, retryable=False, code="C" * 1_000_000), JobStatus.FAILED, "C" * 127 + "…"),
    ],
    ids=["NUL", "lone surrogate", "empty", "a megabyte"],
)
async def test_a_typed_failure_with_such_a_code_and_text(
    jobs: DurableJobs, worker: Workers, spec: Specs, error: Exception, status: JobStatus, code: str
) -> None:
    """Case 29 of the catalogue, of the kind "data"."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        raise error

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, status)
    assert job.error is not None
    assert job.error.code == code
    assert len(job.error.message) <= 4096
    assert job.error.message


class Speechless(Exception):
    """An error that can't even be printed, as some clients raise."""

    def __str__(self) -> str:
        raise RuntimeError("secret words")


@before_and_after
async def test_an_error_without_a_text(jobs: DurableJobs, worker: Workers, spec: Specs, crossed: bool) -> None:
    """Case 29 of the catalogue, of the kind "data": the transition always succeeds."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if crossed:
            async with job.dispatch(f"probe:{job.id}"):
                raise Speechless
        raise Speechless

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(max_attempts=1))
        job = await until(
            jobs.service, handle.id, JobStatus.INDETERMINATE if crossed else JobStatus.DEAD_LETTER, timeout=3
        )
    assert job.error is not None
    assert (job.error.code, job.error.type) == ("HANDLER_ERROR", "Speechless")


UNFIT_DETAILS: list[tuple[dict[str, Any], str]] = [
    ({"note": "a\x00b"}, "details.note"),
    ({"notes": ["fine", SURROGATE]}, "details.notes[1]"),
    ({"done": math.nan}, "details.done"),
    ({"a\x00": 1}, "details"),
    ({"big": 10**400}, "details.big"),
]


async def test_heartbeat_details_that_cannot_be_stored(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Cases 29 to 31 of the catalogue, of the kind "data": refused at the door, with the path; the handler goes on."""
    refused = []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}"):
            for details, _ in UNFIT_DETAILS:
                with pytest.raises(InvalidInput) as refusal:
                    await job.heartbeat(details)
                refused.append(refusal.value.problems[0].field)
            await job.heartbeat({"note": "fine"})
            return {"done": True}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=20) == {"done": True}
    assert refused == [field for _, field in UNFIT_DETAILS]
    beats = [event.data for event in await handle.events() if event.name is EventName.HEARTBEAT and event.data]
    assert beats == [{"note": "fine"}]


UNFIT_VALUES = [
    ("a\x00b", "must hold no U+0000"),
    (SURROGATE, "must hold no U+0000 and no lone surrogate"),
    (math.nan, "must be finite"),
    (-math.inf, "must be finite"),
    (10**400, "must have at most 400 digits"),
    (b"bytes", "must be a JSON value, not bytes"),
    ({1: "one"}, "must have text keys, not int"),
]


@before_and_after
async def test_a_result_that_cannot_be_stored(jobs: DurableJobs, worker: Workers, spec: Specs, crossed: bool) -> None:
    """Cases 29, 30 and 31 of the catalogue, of the kind "data": a typed refusal that names the path."""
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        if crossed:
            async with job.dispatch(f"probe:{job.id}") as key:
                await provider.call(key)
        return {"rows": ["fine", {"cell": UNFIT_VALUES[request["which"]][0]}]}

    async with worker(Probe(script)):
        handles = await jobs.create_jobs([spec(payload={"which": which}) for which in range(len(UNFIT_VALUES))])
        for handle, (_, problem) in zip(handles, UNFIT_VALUES, strict=True):
            job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE if crossed else JobStatus.FAILED)
            assert job.error is not None
            assert job.error.code == "RESULT_NOT_STORABLE"
            assert job.error.message.startswith(f"result.rows[1].cell: {problem}")
            assert await trail(jobs.service, job.id) == [
                EventName.CLAIMED,
                *([EventName.DISPATCHED] if crossed else []),
                EventName(job.status),
            ]
    assert len(provider.keys) == (len(handles) if crossed else 0)


@pytest.mark.parametrize("text", ["a\x00b", SURROGATE], ids=["NUL", "lone surrogate"])
async def test_input_that_cannot_be_stored_is_refused_at_the_door(jobs: DurableJobs, spec: Specs, text: str) -> None:
    """Case 29 of the catalogue, of the kind "data": bad input is a typed error, before anything is written."""
    with pytest.raises(InvalidJob) as refused:
        spec(payload={"rows": [{"cell": text}]})
    assert [problem.field for problem in refused.value.problems] == ["payload.rows[0].cell"]
    handle = await jobs.create_job(spec())
    with pytest.raises(InvalidInput) as refusal:
        await handle.cancel(text, "ann")
    assert [problem.field for problem in refusal.value.problems] == ["reason"]
    assert await handle.status() is JobStatus.QUEUED


NUMBERS = [
    9007199254740993,
    9223372036854775807,
    -9223372036854775809,
    10**399 + 1,
    0.1,
    5e-324,
    1.7976931348623157e308,
    9007199254740992.0,
]


async def test_numbers_are_exact(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """Case 31 of the catalogue, of the kind "data": the same number in the handler, the row, the trail, the result."""
    seen = []

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        seen.extend(request["numbers"])
        async with job.dispatch(f"probe:{job.id}"):
            await job.heartbeat({"numbers": request["numbers"]})
            return {"numbers": request["numbers"]}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(payload={"numbers": NUMBERS}))
        result = await handle.result(timeout=20)
    (beat,) = [event.data for event in await handle.events() if event.name is EventName.HEARTBEAT and event.data]
    for numbers in (seen, result["numbers"], beat["numbers"]):
        # A float that is whole comes back as an integer, as Postgres writes it: the same number when read as a float.
        assert [type(was)(number) for was, number in zip(NUMBERS, numbers, strict=True)] == NUMBERS
        assert all(type(number) is int for number in numbers[:4])
    same = spec(payload={"numbers": NUMBERS}, idempotency_key=(await handle.job()).idempotency_key)
    again = await jobs.create_job(same)
    assert (again.id, again.created) == (handle.id, False)


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "1e100000"])
async def test_a_number_beyond_all_bounds_from_json(spec: Specs, text: str) -> None:
    """Cases 30 and 31 of the catalogue, of the kind "data": what `json` reads as infinite is refused."""
    with pytest.raises(InvalidJob) as refused:
        spec(payload={"deep": {"n": json.loads(text)}})
    assert [problem.field for problem in refused.value.problems] == ["payload.deep.n"]


MB = 1024 * 1024


@pytest.mark.parametrize("size", [3 * MB, 5 * MB], ids=["3 MB", "5 MB"])
async def test_a_large_result_is_stored(jobs: DurableJobs, worker: Workers, spec: Specs, size: int) -> None:
    """Case 32 of the catalogue, of the kind "data": stored; nothing of it passes Temporal, whose limit is 2 MB."""
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            await provider.call(key)
            return {"text": "é" * (size // 2)}

    async with worker(Probe(script)):
        handle = await jobs.create_job(spec(payload={"text": "p" * size}))
        assert await handle.result(timeout=30) == {"text": "é" * (size // 2)}
    assert provider.keys == [f"probe:{handle.id}"]
    completed = (await handle.events())[-1]
    assert completed.data["result_bytes"] == size // 2 * 2 + len('{"text":""}')
    assert completed.data.keys() == {"result_bytes", "result_sha256"}


@pytest.mark.parametrize("size", [9 * MB, 300 * MB], ids=["9 MB", "300 MB"])
async def test_a_result_too_large_is_uncertain_with_evidence(
    jobs: DurableJobs, worker: Workers, spec: Specs, size: int
) -> None:
    """Case 32 of the catalogue, of the kind "data": indeterminate with evidence; one provider call."""
    provider = Provider()

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            await provider.call(key)
            return {"text": "0123456789" * (size // 10)}

    handler = Probe(script)
    async with worker(handler):
        handle = await jobs.create_job(spec(lease_seconds=2))
        job = await until(jobs.service, handle.id, JobStatus.INDETERMINATE, timeout=60)
    assert job.error is not None
    assert job.error.code == "RESULT_NOT_STORABLE"
    assert job.error.message.startswith("result.text: must have at most 8388608 characters, has ")
    assert '{"text": "0123456789012' in job.error.message
    assert (handler.calls, provider.keys, job.lease_generation) == (1, [f"probe:{job.id}"], 1)
    assert await trail(jobs.service, job.id) == [
        EventName.CLAIMED,
        EventName.DISPATCHED,
        EventName.INDETERMINATE,
    ]


class Reading(BaseModel):
    at: datetime
    value: float = 0.0


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class Readings(JobHandler[Reading, Reading]):
    job_type = "probe"
    consequential = False

    async def run(self, job: JobContext, request: Reading) -> Reading:
        return request


@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_models_result_that_cannot_be_stored(
    jobs: DurableJobs, worker: Workers, spec: Specs, value: float
) -> None:
    """Case 30 of the catalogue, of the kind "data": a NaN in a model is refused too, never altered."""

    class Broken(Readings):
        async def run(self, job: JobContext, request: Reading) -> Reading:
            return Reading(at=request.at, value=value)

    async with worker(Broken()):
        handle = await jobs.create_job(spec(payload={"at": NOON.isoformat()}))
        job = await until(jobs.service, handle.id, JobStatus.FAILED, JobStatus.COMPLETED)
    assert job.error is not None
    assert (job.status, job.error.code) == (JobStatus.FAILED, "RESULT_NOT_STORABLE")
    assert job.error.message.startswith("result.value: must be finite")


class Loose(BaseModel):
    values: dict[str, Any]


@dataclass
class LooseData:
    values: Any


CELLS = {"cells": [1.0, math.nan]}


class Looses(JobHandler[dict[str, Any], Loose]):
    job_type = "probe"
    consequential = False

    async def run(self, job: JobContext, request: dict[str, Any]) -> Loose:
        return Loose(values=CELLS)


class LooseDatas(JobHandler[dict[str, Any], LooseData]):
    job_type = "probe"
    consequential = False

    async def run(self, job: JobContext, request: dict[str, Any]) -> LooseData:
        return LooseData(CELLS)


@pytest.mark.parametrize("handler", [Looses(), LooseDatas()], ids=["a model", "a dataclass"])
async def test_a_nan_in_an_untyped_field_of_a_result(
    jobs: DurableJobs, worker: Workers, spec: Specs, handler: JobHandler[Any, Any]
) -> None:
    """Case 30 of the catalogue, of the kind "data": refused, never stored as something else."""
    async with worker(handler):
        handle = await jobs.create_job(spec())
        job = await until(jobs.service, handle.id, JobStatus.FAILED, JobStatus.COMPLETED)
    assert job.error is not None
    assert job.error.code == "RESULT_NOT_STORABLE"
    assert job.error.message.startswith("result.values.cells[1]: must be finite")


def test_a_nan_in_an_untyped_field_of_a_payload(spec: Specs) -> None:
    """Case 30 of the catalogue, of the kind "data": refused, never stored as something else."""
    with pytest.raises(InvalidJob) as refused:
        spec(payload=Loose(values=CELLS))
    assert [problem.field for problem in refused.value.problems] == ["payload.values.cells[1]"]


async def test_a_models_result_is_stored_as_json(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    async with worker(Readings()):
        handle = await jobs.create_job(spec(payload={"at": NOON.isoformat(), "value": 1.5}))
        assert await handle.result(timeout=20) == {"at": "2030-01-01T12:00:00Z", "value": 1.5}


@dataclass
class Point:
    x: int
    at: datetime


class Points(JobHandler[Point, Point]):
    job_type = "probe"
    consequential = False

    async def run(self, job: JobContext, request: Point) -> Point:
        assert isinstance(request, Point)
        return request


class Times(JobHandler[dict[str, datetime], dict[str, datetime]]):
    job_type = "probe"
    consequential = False

    async def run(self, job: JobContext, request: dict[str, datetime]) -> dict[str, datetime]:
        assert request == {"at": NOON}
        return request


@pytest.mark.parametrize(
    ("handler", "document"),
    [
        (Points(), {"x": 1, "at": "2030-01-01T12:00:00Z"}),
        (Times(), {"at": "2030-01-01T12:00:00Z"}),
    ],
    ids=["a dataclass", "a dict of times"],
)
async def test_whatever_pydantic_dumps_is_a_result(
    jobs: DurableJobs, worker: Workers, spec: Specs, handler: JobHandler[Any, Any], document: dict[str, Any]
) -> None:
    """As `JobHandler` promises of its type parameters."""
    async with worker(handler):
        handle = await jobs.create_job(spec(payload=document))
        assert await handle.result(timeout=20) == document


class Strict(BaseModel):
    model_config = {"strict": True}
    at: datetime


class Stricts(JobHandler[Strict, Strict]):
    job_type = "probe"
    consequential = False

    async def run(self, job: JobContext, request: Strict) -> Strict:
        return request


async def test_a_strict_model_takes_json(jobs: DurableJobs, worker: Workers, spec: Specs) -> None:
    """JSON has no datetime: what pydantic reads strictly from JSON, a handler reads from its payload."""
    async with worker(Stricts()):
        handle = await jobs.create_job(spec(payload={"at": NOON.isoformat()}))
        assert await handle.result(timeout=20) == {"at": "2030-01-01T12:00:00Z"}


class BadlyValidated(Probe):
    def parse_request(self, payload: dict[str, Any]) -> Any:
        raise KeyError("a secret of the tenant's")


async def test_a_payload_whose_validation_breaks(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Any
) -> None:
    """A validator that raises something else fails the attempt like the handler itself; no history holds its text."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        return {}

    async with worker(BadlyValidated(script)):
        handle = await jobs.create_job(spec(max_attempts=1))
        failures = []

        async def closed_or_failed() -> bool:
            history = await temporal_client.get_workflow_handle(workflow_id(handle.id)).fetch_history()
            failures[:] = [str(event) for event in history.events if "secret" in str(event)]
            return bool(failures) or (await handle.status()).is_terminal

        await eventually(closed_or_failed, "an outcome", timeout=5)
        assert failures == []
        job = await handle.job()
    assert job.error is not None
    assert job.status in (JobStatus.DEAD_LETTER, JobStatus.FAILED)
