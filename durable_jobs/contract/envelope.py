"""Identity that can't be forged: the two reserved envelopes of a payload, who writes them and who reads them.

`execution` says whose work a job is; `governance` says what was allowed, as established when it was submitted. Only the
typed inputs write them (`seal_payload`), one function reads each, and anything that disagrees with the row, with
its own seals, or with the version that this code knows is refused, never guessed.

Each field of an envelope has a seal, a digest over the job's id, the field's name and its value, so that a change
made behind the service's back is found and named. A seal is no signature: whoever may write the table can write seals.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, TypeVar
from uuid import UUID

from opentelemetry import trace
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from durable_jobs.contract import rules
from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.errors import FieldProblem, InvalidInput
from durable_jobs.contract.models import Job

VERSION = 1
EXECUTION, GOVERNANCE = "execution", "governance"

SQL_DIGEST = "sql:"
"""How the digest of a row begins that SQL's `enqueue` made: only the database can take it again."""

Model = TypeVar("Model", bound=BaseModel)


class MalformedEnvelope(InvalidInput):
    """A stored envelope is not what the service wrote; `problems` name the fields."""

    code = "MALFORMED_ENVELOPE"
    http_status = 409


def _stored_time(value: object) -> datetime:
    if not isinstance(value, str):
        raise ValueError("must be a time")
    return datetime.fromisoformat(value)


def _version(value: int) -> int:
    if isinstance(value, bool) or value != VERSION:
        raise ValueError(f"must be {VERSION}: a newer one is refused, not guessed")
    return value


def _facts(value: dict[str, Any]) -> dict[str, Any]:
    if problem := rules.json_problem(value, "facts"):
        raise ValueError(str(problem))
    return value


Text = Annotated[str, rules.checked(rules.key_problem)]
Time = Annotated[datetime, rules.checked(rules.time_problem)]
StoredTime = Annotated[Time, BeforeValidator(_stored_time)]
Version = Annotated[int, AfterValidator(_version)]
Facts = Annotated[dict[str, Any], AfterValidator(_facts)]


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, revalidate_instances="always")


class _Lineage(_Input):
    tenant: Text
    actor: Text
    trace: Text
    """A W3C trace id where OpenTelemetry is active."""
    task: Text | None = None
    run: Text | None = None
    attempt: Text | None = None
    action_intent: Text | None = None
    admission_decision: Text | None = None
    approval: Text | None = None
    parent_job: Text | None = None
    """The job that this one follows."""
    parent_run: Text | None = None


class ExecutionInput(_Lineage):
    """Whose work a job is, as its submitter types it; the row gives organization, project and job.

    `trace` may be left out inside an OpenTelemetry span: it is that span's W3C trace id then.
    """

    @model_validator(mode="before")
    @classmethod
    def _trace_of_span(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "trace" in data:
            return data
        context = trace.get_current_span().get_span_context()
        return {**data, "trace": trace.format_trace_id(context.trace_id)} if context.is_valid else data


class ExecutionIdentity(_Lineage):
    """Whose work a job is, as read from its envelope: the whole lineage, or an error."""

    version: Version
    organization: Text
    project: Text
    job: Text
    governance: Text | None = None
    """The digest of the governance envelope that was submitted with it."""


class _Governed(_Input):
    action_intent: Text
    capability: Facts
    policy: Facts
    budget: Facts
    approval: Text | None = None
    """The id of an approval, checked live and consumed at dispatch."""


class GovernanceInput(_Governed):
    """What was allowed, as the authority established it before the job was submitted. Facts are JSON objects."""

    issued_at: Time
    expires_at: Time
    """Not dispatched from this time on, on the database's clock."""


class GovernanceFacts(_Governed):
    """What was allowed, as read from its envelope."""

    version: Version
    job: Text
    issued_at: StoredTime
    expires_at: StoredTime
    digest: Text = Field(min_length=64, max_length=64)


def build_execution_envelope(
    execution: ExecutionInput, *, organization: str, project: str, job_id: UUID, governance: str | None = None
) -> dict[str, Any]:
    """The execution envelope: the typed input's lineage, the record's own organization, project and id, and the digest
    of the governance envelope beside it."""
    row = {"organization": organization, "project": project, "job": str(job_id), "governance": governance}
    return _sealed(job_id, {"version": VERSION, **execution.model_dump(), **row})


def build_governance_envelope(governance: GovernanceInput, *, job_id: UUID) -> dict[str, Any]:
    """The governance envelope: the facts, and a SHA-256 over their RFC 8785 form."""
    facts = {"version": VERSION, "job": str(job_id), **governance.model_dump()}
    facts |= {name: facts[name].isoformat() for name in ("issued_at", "expires_at")}
    return _sealed(job_id, facts | {"digest": request_digest(facts)})


def seal_payload(
    payload: dict[str, Any],
    execution: ExecutionInput | None,
    governance: GovernanceInput | None,
    *,
    organization: str,
    project: str,
    job_id: UUID,
) -> dict[str, Any]:
    """What is stored: the raw payload, which holds no reserved key, and the envelopes."""
    stored = dict(payload)
    if governance is not None:
        stored[GOVERNANCE] = build_governance_envelope(governance, job_id=job_id)
    if execution is not None:
        digest = stored[GOVERNANCE]["digest"] if governance is not None else None
        stored[EXECUTION] = build_execution_envelope(
            execution, organization=organization, project=project, job_id=job_id, governance=digest
        )
    return stored


def raw_payload(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The work to do, without the envelopes: what a handler gets as its request."""
    return {key: value for key, value in payload.items() if key not in rules.RESERVED_PAYLOAD_KEYS}


def read_execution_identity(job: Job) -> ExecutionIdentity | None:
    """The identity in the job's envelope; None when it has none. Raises `MalformedEnvelope`, never reads a part."""
    return _read(job, EXECUTION, ExecutionIdentity)


def read_governance(job: Job) -> GovernanceFacts | None:
    """The governed facts in the job's envelope; None when it has none. Raises `MalformedEnvelope`."""
    return _read(job, GOVERNANCE, GovernanceFacts)


def job_digest(
    job_type: str,
    queue: str,
    payload: Mapping[str, Any],
    lineage: ExecutionInput | ExecutionIdentity | None,
    governance: GovernanceInput | GovernanceFacts | None,
) -> str:
    """The request digest of a job, as submitted or as stored. Trace, lineage beyond tenant and actor, times, priority
    and schedule, which differ between honest retries, are not part of it."""
    intent = lineage.action_intent if lineage else None
    return request_digest(
        {
            "job_type": job_type,
            "queue": queue,
            "payload": payload,
            "tenant": lineage.tenant if lineage else None,
            "actor": lineage.actor if lineage else None,
            "action_intent": governance.action_intent if governance else intent,
            "capability": governance.capability if governance else None,
            "policy": governance.policy if governance else None,
            "budget": governance.budget if governance else None,
        }
    )


def stored_digest(job: Job) -> str:
    """The request digest of what the row holds now. Raises `MalformedEnvelope`."""
    identity, governance = read_execution_identity(job), read_governance(job)
    return job_digest(job.job_type, job.queue, raw_payload(job.payload), identity, governance)


def _read(job: Job, name: str, model: type[Model]) -> Model | None:
    if name not in job.payload:
        return None
    stored = job.payload[name]
    if not isinstance(stored, dict):
        raise MalformedEnvelope.at(name, "is not an object")
    seals = stored.get("seals")
    fields = {key: value for key, value in stored.items() if key != "seals"}
    if not isinstance(seals, dict):
        raise MalformedEnvelope.at(f"{name}.seals", "is missing")
    try:
        read = model.model_validate(fields)
    except ValidationError as error:
        raise MalformedEnvelope(
            FieldProblem(f"{name}.{problem.field}", problem.problem)
            for problem in MalformedEnvelope.from_pydantic(error).problems
        ) from error
    changed = [field for field, value in fields.items() if seals.get(field) != _seal(job.id, field, value)]
    if changed or seals.keys() != fields.keys():
        named = changed or sorted(seals.keys() - fields.keys())
        raise MalformedEnvelope.at(f"{name}.{named[0]}", "was changed after creation")
    return read


def _sealed(job_id: UUID, fields: dict[str, Any]) -> dict[str, Any]:
    return {**fields, "seals": {field: _seal(job_id, field, value) for field, value in fields.items()}}


def _seal(job_id: UUID, field: str, value: Any) -> str:
    return request_digest({"job": str(job_id), "field": field, "value": value})[:16]
