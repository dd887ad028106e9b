"""What the API takes: request bodies, strict, with no field that isn't known. The data rules are the contract's own."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from durable_jobs.contract import rules
from durable_jobs.contract.envelope import Text, Time
from durable_jobs.contract.models import JobError
from durable_jobs.contract.provider import ProviderAnswer, ProviderState
from durable_jobs.contract.states import JobStatus
from durable_jobs.http.views import ControlStatus


def _moment(value: object) -> datetime:
    """A time in JSON is a text with a zone; numbers would be read as seconds by one and milliseconds by another."""
    if not isinstance(value, str):
        raise ValueError("must be a text such as 2030-01-31T12:00:00Z")
    return datetime.fromisoformat(value)


Name = Annotated[str, StringConstraints(pattern=f"^{rules.IDENTIFIER.pattern}$")]
"""Of a project, queue or job type."""
TypeName = Annotated[Name, AfterValidator(str.lower)]
StoredQueue = Annotated[str, StringConstraints(pattern=f"^{rules.IDENTIFIER.pattern}(@{rules.IDENTIFIER.pattern})?$")]
"""A queue as jobs have it: an organization's isolated one is `<queue>@<organization>`."""
Moment = Annotated[Time, BeforeValidator(_moment, json_schema_input_type=datetime)]
Short = Annotated[Text, Field(min_length=1, max_length=rules.MAX_KEY_CHARACTERS)]
"""Printable, not blank."""
OperationKey = Annotated[str, rules.checked(rules.operation_key_problem), Field(min_length=1)]
Object = dict[str, Any]
Cursor = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,18}$")]


class _Body(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Governance(_Body):
    """What was allowed, as the authority established it before the job was submitted."""

    action_intent: Short
    capability: Object
    policy: Object
    budget: Object
    approval: Short | None = None
    """The id of an approval, consumed at dispatch."""
    issued_at: Moment
    expires_at: Moment


class JobRequest(_Body):
    """A job to create. `type` and `payload` suffice: the rest has defaults, or follows from the token."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "evaluation",
                "payload": {"dataset_id": "support-agent", "policy_id": "production-ai-policy"},
            }
        }
    )

    type: Name
    """Which handler runs it; folded to lower case."""
    payload: Object = Field(min_length=1)
    """`execution` and `governance` are reserved keys."""
    project: Name | None = None
    """By default that of the token, which then is for one project alone."""
    queue: Name | None = None
    """By default that of the type."""
    isolated: bool = False
    """Run it on the organization's own task queue."""
    priority: int = Field(default=0, ge=-2, le=2)
    scheduled_at: Moment | None = None
    """Not before this time."""
    max_attempts: int = Field(default=3, ge=1, le=10_000)
    backoff_base_seconds: float = Field(default=30, gt=0, le=3600)
    lease_seconds: float = Field(default=60, ge=1, le=86_400)
    timeout_seconds: float = Field(default=3600, gt=0, le=30 * 86_400)
    task: Short | None = None
    """The task and the run that it belongs to, for the lineage."""
    run: Short | None = None
    governance: Governance | None = None


Reason = Annotated[str, StringConstraints(min_length=1, max_length=2048)]


class Reasoned(_Body):
    """Why, for the audit; who is the token's actor."""

    model_config = ConfigDict(json_schema_extra={"example": {"reason": "the customer asked for it"}})

    reason: Reason


class Retry(Reasoned):
    model_config = ConfigDict(
        json_schema_extra={"example": {"reason": "the provider is back", "accept_duplicate_risk": False}}
    )

    accept_duplicate_risk: bool = False
    """Where an operator's word, not the provider's, made the job failed, a second send could land beside the first."""


class Resolution(_Body):
    """An operator's word on an uncertain job."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"verdict": "completed", "evidence": {"invoice": "R-7"}, "result": {"total": 7}}}
    )

    verdict: Literal["completed", "failed", "dead_letter"]
    evidence: Object = Field(min_length=1)
    """What the word rests on."""
    result: Object | None = None
    """With the verdict `completed`."""


class EscalatedFilter(_Body):
    """Which escalated jobs; at least one field."""

    project: Name | None = None
    queue: StoredQueue | None = None
    type: TypeName | None = None
    escalated_after: Moment | None = None
    escalated_before: Moment | None = None


class Recheck(Reasoned):
    model_config = ConfigDict(
        json_schema_extra={"example": {"reason": "the lookup is mended", "filter": {"type": "evaluation"}}}
    )

    filter: EscalatedFilter


class QueueSwitch(Reasoned):
    type: TypeName | None = None
    """This job type alone."""


class ProviderError(_Body):
    code: Short
    message: str = Field(min_length=1, max_length=4096)


_GOES_WITH = {
    "result": "succeeded",
    "error": "failed",
    "reason": "unknown",
    "send_deadline": "absent",
    "asked_at": "absent",
}


class ProviderWord(_Body):
    """What a provider says of an operation key, as its webhook would."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "operation_key": "refund:R-7",
                "state": "succeeded",
                "result": {"total": 7},
                "evidence": {"webhook": 17},
            }
        }
    )

    operation_key: OperationKey
    state: Literal["succeeded", "failed", "pending", "absent", "unknown"]
    project: Name | None = None
    """By default that of the token, which then is for one project alone."""
    evidence: Object = {}
    """The provider's own words."""
    result: Object | None = None
    """With `succeeded`."""
    error: ProviderError | None = None
    """With `failed`."""
    reason: Short | None = None
    """With `unknown`."""
    send_deadline: Moment | None = None
    """With `absent`: the provider itself refuses the key after this time."""
    asked_at: Moment | None = None
    """With `absent`: when the provider looked. Without it the answer proves nothing."""

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        for name, state in _GOES_WITH.items():
            if getattr(self, name) is not None and self.state != state:
                raise ValueError(f"{name} goes with the state {state} alone")
        if self.state == "succeeded" and self.result is None:
            raise ValueError("result must be given with the state succeeded")
        return self

    def provider_state(self) -> ProviderState[Object]:
        return ProviderState(
            ProviderAnswer(self.state),
            result=self.result,
            error=JobError.of(self.error.code, self.error.message) if self.error else None,
            reason=self.reason,
            send_deadline=self.send_deadline,
        )


class JobFilter(BaseModel):
    """Which jobs to list, in the order of their creation."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    project: Name | None = None
    status: list[ControlStatus] | None = None
    state: list[JobStatus] | None = None
    queue: StoredQueue | None = None
    type: TypeName | None = None
    escalated: bool | None = None
    """Whether it stands before an operator, in whatever state."""
    after: UUID | None = None
    """The previous page's `next_cursor`."""
    limit: int = Field(default=50, ge=1, le=100)


class Position(BaseModel):
    """Where a page of a trail begins, and how long it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    after: Cursor | None = None
    """The previous page's `next_cursor`."""
    limit: int = Field(default=200, ge=1, le=1000)
