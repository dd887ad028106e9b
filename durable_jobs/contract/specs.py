"""What a product submits: `JobSpec` and `FollowUp`. Checked when made, and again by the service before it writes."""

from typing import Annotated, Any, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)

from durable_jobs.contract import rules
from durable_jobs.contract.admission import trusted_identity
from durable_jobs.contract.envelope import ExecutionInput, GovernanceInput, Text, Time, job_digest, seal_payload
from durable_jobs.contract.errors import FieldProblem, InvalidJob, ReservedPayloadKey
from durable_jobs.contract.models import Job


def _queue_problem(value: str) -> str | None:
    if value.endswith(rules.RESERVED_QUEUE_SUFFIX):
        return f"the suffix {rules.RESERVED_QUEUE_SUFFIX} is reserved"
    return rules.identifier_problem(value)


def _json_ready(payload: object) -> object:
    if not isinstance(payload, BaseModel):
        return payload
    if problem := rules.finite_problem(payload.model_dump(), "payload"):
        raise InvalidJob([problem])
    return payload.model_dump(mode="json")


Identifier = Annotated[str, rules.checked(rules.identifier_problem)]
Queue = Annotated[str, rules.checked(_queue_problem)]
JobType = Annotated[str, rules.checked(rules.identifier_problem), AfterValidator(str.lower)]
Payload = Annotated[dict[str, Any], BeforeValidator(_json_ready)]


class _Submission(BaseModel):
    """The fields that a job and a follow-up share."""

    model_config = ConfigDict(frozen=True, extra="forbid", revalidate_instances="always", strict=True)

    job_type: JobType
    """Which handler runs it; folded to lower case."""
    payload: Payload
    """A JSON object, not empty, or a pydantic model that dumps to one."""
    priority: int = Field(default=0, ge=-2, le=2)
    """-2 to 2, higher first."""
    max_attempts: int = Field(default=3, ge=1, le=10_000)
    backoff_base_seconds: float = Field(default=30, gt=0, le=3600)
    """Seconds before the second attempt; doubled for each one after, up to an hour."""
    lease_seconds: float = Field(default=60, ge=1, le=86_400)
    """Seconds that a worker may go silent before another may take the job over."""
    timeout_seconds: float = Field(default=3600, gt=0, le=30 * 86_400)
    """Seconds that one attempt's handler may run."""
    scheduled_at: Time | None = None
    """Not claimed before this time; None is now, on the database clock."""

    @model_validator(mode="wrap")
    @classmethod
    def _typed_error(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            submission = handler(data)
        except ValidationError as error:
            raise InvalidJob.from_pydantic(error) from error
        _refuse_bad_payload(submission.payload)
        if problems := submission._problems():
            raise InvalidJob(problems)
        return submission

    def _problems(self) -> list[FieldProblem]:
        """What is wrong between the fields."""
        return []


class JobSpec(_Submission):
    """A job to create.

    Raises `InvalidJob` (naming the fields) or `ReservedPayloadKey` when made from bad input. Defaults are the
    design's, section 4.
    """

    organization: Identifier
    project: Identifier
    idempotency_key: Text
    """One job per (organization, project, idempotency key), for as long as the row is kept."""
    queue: Queue = "default"
    """Also the Temporal task queue."""

    execution: ExecutionInput | None = None
    """Whose work it is; a consequential handler dispatches nothing without it."""
    governance: GovernanceInput | None = None
    """What was allowed; goes with `execution`."""
    isolated: bool = False
    """Run it on the organization's own task queue, `<queue>@<organization>`."""

    @property
    def stored_queue(self) -> str:
        """The row's queue, and the Temporal task queue. Nobody can name an isolated one: `@` is no letter of theirs."""
        return isolated_queue(self.queue, self.organization) if self.isolated else self.queue

    def stored_payload(self, job_id: UUID) -> dict[str, Any]:
        """The payload with its envelopes, bound to the row."""
        return seal_payload(
            self.payload,
            self.execution,
            self.governance,
            organization=self.organization,
            project=self.project,
            job_id=job_id,
        )

    def digest(self) -> str:
        """The request digest: see `job_digest`."""
        return job_digest(self.job_type, self.stored_queue, self.payload, self.execution, self.governance)

    def _problems(self) -> list[FieldProblem]:
        problems = []
        if self.isolated and self.organization.endswith(rules.RESERVED_QUEUE_SUFFIX):
            problem = f"its isolated queue would end in {rules.RESERVED_QUEUE_SUFFIX}, which is reserved"
            problems.append(FieldProblem("organization", problem))
        if self.governance is None:
            return problems
        if self.execution is None:
            return [*problems, FieldProblem("governance", "governance goes with execution: whose work is it?")]
        for name in ("action_intent", "approval"):
            typed, governed = getattr(self.execution, name), getattr(self.governance, name)
            if typed is not None and typed != governed:
                problems.append(
                    FieldProblem(
                        f"execution.{name}", f"execution.{name} {typed!r} is not governance.{name} {governed!r}"
                    )
                )
        if self.governance.expires_at <= self.governance.issued_at:
            problems.append(
                FieldProblem("governance.expires_at", "governance.expires_at must be after governance.issued_at")
            )
        return problems


def isolated_queue(queue: str, organization: str) -> str:
    """The task queue of one organization's isolated jobs; a worker that serves it hosts that organization alone."""
    return f"{queue}@{organization}"


class FollowUp(_Submission):
    """A job to create in the same transaction that completes its parent, in the parent's organization and project.

    Its idempotency key is `<parent id>:<name>`, so that every path to completed creates it once.
    """

    name: Annotated[str, rules.checked(rules.identifier_problem)] = Field(max_length=128)
    queue: Queue | None = None
    """None: the parent's queue."""

    task: Text | None = None
    """The task in the lineage; tenant, actor and trace are the parent's, so that a child can't claim another's."""
    governance: GovernanceInput | None = None

    def spec(self, parent: Job) -> JobSpec:
        """The job that this follow-up of `parent` stands for. Raises `InvalidJob`, or `MalformedEnvelope`."""
        identity = trusted_identity(parent)
        inherited = None
        if identity is not None:
            inherited = ExecutionInput(
                tenant=identity.tenant,
                actor=identity.actor,
                trace=identity.trace,
                task=self.task or identity.task,
                run=identity.run,
                parent_job=str(parent.id),
                parent_run=identity.run,
            )
        queue, _, isolation = parent.queue.partition("@")
        return JobSpec(
            **{name: getattr(self, name) for name in _Submission.model_fields},
            organization=parent.organization_id,
            project=parent.project_id,
            queue=self.queue or queue,
            isolated=bool(isolation),
            idempotency_key=f"{parent.id}:{self.name}",
            execution=inherited,
            governance=self.governance,
        )


def _refuse_bad_payload(payload: dict[str, Any]) -> None:
    if not payload:
        raise InvalidJob([FieldProblem("payload", "must not be empty")])
    if reserved := sorted(rules.RESERVED_PAYLOAD_KEYS & payload.keys()):
        raise ReservedPayloadKey(
            FieldProblem(f"payload.{key}", "is reserved: only typed inputs write it") for key in reserved
        )
    if problem := rules.json_problem(payload, "payload"):
        raise InvalidJob([problem])
