"""One tree of errors. Each carries a stable `code`, an HTTP status, and whether the same call may be repeated."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from uuid import UUID

    from pydantic import ValidationError

    from durable_jobs.contract.states import JobStatus


class DurableJobsError(Exception):
    """An error of the job service."""

    code: ClassVar[str] = "DURABLE_JOBS_ERROR"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or type(self).__doc__)

    @property
    def message(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class FieldProblem:
    """One thing wrong with an input: `field` is a dotted path such as `payload.items[3].price`."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class InvalidInput(DurableJobsError):
    """An input breaks a data rule; `problems` name the fields. Nothing was written."""

    code = "INVALID_INPUT"
    http_status = 422

    def __init__(self, problems: Iterable[FieldProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, field: str, problem: str) -> "InvalidInput":
        return cls([FieldProblem(field, problem)])

    @classmethod
    def from_pydantic(cls, error: "ValidationError") -> "InvalidInput":
        return cls(FieldProblem(field_path(e["loc"]), e["msg"]) for e in error.errors(include_url=False))


def field_path(location: Iterable[str | int]) -> str:
    """`("payload", "items", 3)` as `payload.items[3]`."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path or "(whole)"


class InvalidJob(InvalidInput):
    """The job's specification breaks a data rule; `problems` name the fields. Nothing was written."""

    code = "INVALID_JOB"


class ReservedPayloadKey(InvalidJob):
    """The payload carries a key that only typed inputs may write (`execution`, `governance`)."""

    code = "RESERVED_PAYLOAD_KEY"


class UnknownEvent(InvalidInput):
    """The event name is not one of the closed vocabulary."""

    code = "UNKNOWN_EVENT"


class NotStorable(InvalidInput):
    """A result breaks a data rule and can't be stored; `problems` name the fields."""

    code = "RESULT_NOT_STORABLE"


class InvalidBatch(InvalidInput):
    """Some jobs of a batch can't be created; `errors` maps the index of each to its error. Nothing was written."""

    code = "INVALID_BATCH"

    def __init__(self, errors: Mapping[int, DurableJobsError]) -> None:
        self.errors = dict(sorted(errors.items()))
        super().__init__(
            FieldProblem(f"[{index}].{problem.field}", problem.problem)
            for index, error in self.errors.items()
            for problem in _problems(error)
        )


def _problems(error: DurableJobsError) -> tuple[FieldProblem, ...]:
    if isinstance(error, InvalidInput):
        return error.problems
    return (FieldProblem("idempotency_key", error.message),)


class IdempotencyKeyConflict(DurableJobsError):
    """The idempotency key belongs to a job with another request."""

    code = "IDEMPOTENCY_KEY_CONFLICT"
    http_status = 422

    def __init__(self, idempotency_key: str, job_id: "UUID | None" = None) -> None:
        self.idempotency_key = idempotency_key
        self.job_id = job_id
        where = f"job {job_id}" if job_id else "another job of the same batch"
        super().__init__(f"idempotency key {idempotency_key!r} belongs to {where}, which was another request")


class JobNotFound(DurableJobsError):
    """No such job."""

    code = "JOB_NOT_FOUND"
    http_status = 404


class StoreUnavailable(DurableJobsError):
    """The database could not be reached, or gave up; whether the statement took effect is unknown."""

    code = "STORE_UNAVAILABLE"
    http_status = 503
    retryable = True


class SchemaMissing(DurableJobsError):
    """The database does not hold the newest schema: run `durable-jobs migrate`."""

    code = "SCHEMA_MISSING"
    http_status = 503


class RetryTransaction(DurableJobsError):
    """The caller's transaction lost a serialization conflict or a deadlock: roll it back and run it again."""

    code = "RETRY_TRANSACTION"
    http_status = 409
    retryable = True


class Refused(DurableJobsError):
    """The job's row does not allow the verb; nothing changed."""

    code = "REFUSED"
    http_status = 409


class LeaseLost(Refused):
    """The caller no longer holds the job: another generation, another owner, or an expired lease."""

    code = "LEASE_LOST"


class IllegalTransition(Refused):
    """The transition table does not allow this move."""

    code = "ILLEGAL_TRANSITION"


class CancellationRequested(Refused):
    """Cancellation of the job was requested: the boundary is closed."""

    code = "CANCELLATION_REQUESTED"


class AlreadyDispatched(Refused):
    """The boundary of this intent was crossed before: a second send could duplicate the first."""

    code = "ALREADY_DISPATCHED"


class OperationKeyConflict(Refused):
    """The operation key is in use by another attempt in the same organization and project."""

    code = "OPERATION_KEY_CONFLICT"


class AdmissionRefused(Refused):
    """Dispatch was not admitted; nothing was sent. `reasons` say why."""

    code = "ADMISSION_REFUSED"
    http_status = 403

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class DuplicateWorker(Refused):
    """A live worker has this id."""

    code = "DUPLICATE_WORKER"


class ApprovalNotFound(DurableJobsError):
    """No such approval."""

    code = "APPROVAL_NOT_FOUND"
    http_status = 404


class TokenNotFound(DurableJobsError):
    """No such token."""

    code = "TOKEN_NOT_FOUND"
    http_status = 404


class RetentionRoleMissing(DurableJobsError):
    """The role that may delete from the trail is missing, or not granted: run `durable-jobs migrate --roles`."""

    code = "RETENTION_ROLE_MISSING"


class ApprovalConflict(Refused):
    """The approval was granted otherwise, or consumed."""

    code = "APPROVAL_CONFLICT"


class NotRetryable(Refused):
    """Only a job that failed with certainty may be retried."""

    code = "NOT_RETRYABLE"


class NotRequeueable(Refused):
    """Only an interrupted job, whose lease ran out before its boundary, may be requeued."""

    code = "NOT_REQUEUEABLE"


class NotResolvable(Refused):
    """Only an uncertain job, indeterminate or timed out, can be resolved."""

    code = "NOT_RESOLVABLE"


class NotReleasable(Refused):
    """A job past its boundary can't be released: its send may have landed."""

    code = "NOT_RELEASABLE"


class JobOutcomeError(DurableJobsError):
    """The job ended, but not in `completed`; carries the row's error code and message."""

    code = "JOB_NOT_COMPLETED"
    http_status = 409

    def __init__(self, job_id: "UUID", status: "JobStatus", error_code: str | None, error_message: str | None) -> None:
        self.job_id = job_id
        self.status = status
        self.error_code = error_code
        self.error_message = error_message
        detail = ": ".join(part for part in (error_code, error_message) if part)
        super().__init__(f"job {job_id} ended {status}" + (f" ({detail})" if detail else ""))


class JobFailedError(JobOutcomeError):
    """The job ended `failed`."""

    code = "JOB_FAILED"


class JobCancelledError(JobOutcomeError):
    """The job ended `cancelled`."""

    code = "JOB_CANCELLED"


class JobDeadLetteredError(JobOutcomeError):
    """The job ended in `dead_letter`."""

    code = "JOB_DEAD_LETTERED"


class JobHaltedError(JobOutcomeError):
    """The job ended in `halt_unsafe`."""

    code = "JOB_HALTED_UNSAFE"


class ResultTimeout(DurableJobsError, TimeoutError):
    """The job was not settled within the time that the caller was ready to wait."""

    code = "RESULT_TIMEOUT"
    http_status = 504
    retryable = True


class JobFailed(Exception):
    """Raised by a handler: the work failed.

    `retryable=False` is a definite no (the provider refused, nothing took effect): the job ends `failed`, on either
    side of the boundary. `retryable=True` before the boundary goes back to the queue with backoff, and past the
    boundary is `indeterminate`, as the send may have landed.
    """

    def __init__(self, message: str, *, retryable: bool, code: str = "JOB_FAILED") -> None:
        super().__init__(message)
        self.retryable = retryable
        self.code = code


class HaltUnsafe(Exception):
    """Raised by a handler: moving the job on would be dangerous. It ends `halt_unsafe` and never moves again."""

    def __init__(self, message: str, *, code: str = "HALT_UNSAFE") -> None:
        super().__init__(message)
        self.code = code
