"""What goes into a run and what comes out: frozen, bounded, and storable as JSON."""

from typing import Annotated, Any, Protocol, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from activities.runtime.errors import OutcomeInvalid, RuntimeRefused
from durable_jobs.contract.errors import InvalidInput
from durable_jobs.contract.rules import checked, encode_json, identifier_problem, json_problem, text_problem
from durable_jobs.contract.strict_json import read_json

MAX_REQUEST_BYTES = 1024 * 1024
MAX_EVIDENCE = 256
MAX_TRACE_STEPS = 128
MAX_TEXT = 64 * 1024
MAX_NOTE = 500
MAX_LISTED_PROBLEMS = 5


def _text(limit: int) -> AfterValidator:
    def problem(value: str) -> str | None:
        return text_problem(value, limit)

    return checked(problem)


def _json_object(value: dict[str, Any]) -> dict[str, Any]:
    if problem := json_problem(value, "value"):
        raise ValueError(str(problem))
    return value


Name = Annotated[str, checked(identifier_problem)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_json_object)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AgentRef(_Part):
    """Which agent: the name and the version of its program."""

    name: Name
    version: Name


class Evidence(_Part):
    """One piece of evidence that the agent may use."""

    evidence_id: Name
    kind: Name
    text: Annotated[str, _text(MAX_TEXT)]
    fields: JsonObject = Field(default_factory=dict)


class RuntimeRequest(_Part):
    """One run: all that the agent may know. At most 1 MiB as JSON, with at most 256 pieces of evidence."""

    agent: AgentRef
    case_id: Name
    question: JsonObject
    policy: JsonObject
    evidence: tuple[Evidence, ...] = Field(max_length=MAX_EVIDENCE)
    seed: int = Field(ge=0, lt=2**53, strict=True)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        ids = [piece.evidence_id for piece in self.evidence]
        if twice := sorted({each for each in ids if ids.count(each) > 1}):
            raise ValueError(f"evidence: {twice[0]} stands twice")
        if (size := len(self.encoded())) > MAX_REQUEST_BYTES:
            raise ValueError(f"must be at most {MAX_REQUEST_BYTES} bytes as JSON, is {size}")
        return self

    def encoded(self, **beside: str) -> bytes:
        """As JSON in UTF-8, with further members `beside` its own."""
        return encode_json({**self.model_dump(mode="json"), **beside}).encode()

    def without(self, evidence_id: str) -> Self:
        """The same run with one piece of evidence left out. Raises `RuntimeRefused` when it holds no such piece."""
        left = tuple(piece for piece in self.evidence if piece.evidence_id != evidence_id)
        if len(left) == len(self.evidence):
            raise RuntimeRefused(f"evidence_id: the request holds no {evidence_id}")
        return self.model_copy(update={"evidence": left})


class TraceStep(_Part):
    """One step of how the agent came to its decision, as the agent tells it."""

    model_config = ConfigDict(strict=True)

    note: Annotated[str, _text(MAX_NOTE)]
    evidence_id: Name | None = None
    value: Annotated[float, Field(allow_inf_nan=False)] | None = None


class Answer(_Part):
    """What an agent itself returns."""

    model_config = ConfigDict(strict=True)

    decision: Name
    score: Share
    """How strongly the evidence speaks for what was asked for: 0 not at all, 1 wholly."""
    confidence: Share | None = None
    evidence_used: tuple[Name, ...] = Field(default=(), max_length=MAX_EVIDENCE)
    trace: tuple[TraceStep, ...] = Field(default=(), max_length=MAX_TRACE_STEPS)
    agent: AgentRef | None = None
    """Who it says it is; what it may leave out, but not get wrong."""


class RuntimeOutcome(Answer):
    """The bounded outcome artifact of one run."""

    agent: AgentRef
    build: str = Field(min_length=1, max_length=255)
    """What ran, as the adapter knows it: `sha256:` and the digest of the program, or the model that answered."""


class RuntimeAdapter(Protocol):
    """Runs an agent once."""

    async def run(self, request: RuntimeRequest, *, key: str) -> RuntimeOutcome:
        """The outcome of one run; `key` is the operation key that its caller marked. Raises `RuntimeFailure`s only."""
        ...


def read_object(text: bytes, what: str) -> dict[str, Any]:
    """The JSON object in foreign bytes, storable as such. Raises `OutcomeInvalid`, which names the field."""
    try:
        value = read_json(text)
    except InvalidInput as error:
        raise OutcomeInvalid(f"{what}: {error.message}") from None
    if problem := json_problem(value, what):
        raise OutcomeInvalid(str(problem))
    return value


def read_outcome(value: dict[str, Any], request: RuntimeRequest, *, build: str) -> RuntimeOutcome:
    """The outcome in an agent's answer to `request`.

    Raises `RuntimeRefused` where the agent declined (`{"refused": "<reason>"}`), `OutcomeInvalid` where the answer
    breaks a rule or speaks of evidence that it was not given.
    """
    if isinstance(reason := value.get("refused"), str):
        raise RuntimeRefused(f"the agent refused: {reason}")
    try:
        # JSON has lists where the models have tuples: only JSON input lets strict mode take one for the other.
        answer = Answer.model_validate_json(encode_json(value))
    except ValidationError as error:
        problems = InvalidInput.from_pydantic(error).problems[:MAX_LISTED_PROBLEMS]
        raise OutcomeInvalid("; ".join(map(str, problems))) from None
    if answer.agent not in {None, request.agent}:
        raise OutcomeInvalid(f"agent: must be {request.agent.name} {request.agent.version}")
    used = answer.evidence_used
    if len(set(used)) != len(used):
        raise OutcomeInvalid("evidence_used: an id stands twice")
    mentioned = {*used, *(step.evidence_id for step in answer.trace if step.evidence_id is not None)}
    if unknown := sorted(mentioned - {piece.evidence_id for piece in request.evidence}):
        raise OutcomeInvalid(f"evidence_used, trace: {unknown[0]} is no evidence of this request")
    return RuntimeOutcome(**{**dict(answer), "agent": request.agent}, build=build)
