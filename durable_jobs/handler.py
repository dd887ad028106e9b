"""What a product writes: a `JobHandler` for each job type. What it is given: a `JobContext`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, cast, get_args, get_origin
from uuid import UUID

from pydantic import BaseModel, TypeAdapter
from pydantic_core import to_jsonable_python

from durable_jobs.contract.envelope import ExecutionIdentity
from durable_jobs.contract.errors import NotStorable
from durable_jobs.contract.models import Job, LeaseStatus
from durable_jobs.contract.provider import ProviderState
from durable_jobs.contract.rules import encode_json, finite_problem
from durable_jobs.contract.specs import FollowUp

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class ShadowDecision:
    """What a policy that runs in shadow would have decided of a dispatch."""

    policy: str
    allowed: bool
    reasons: Sequence[str] = ()


ShadowPolicy = Callable[[Job], ShadowDecision]
"""Asked at each dispatch, beside the admission that decides; its answer is left on the trail and has no effect."""


class JobContext(ABC):
    """One attempt at a job, as its handler sees it."""

    id: UUID
    organization: str
    project: str
    attempt: int
    """1 for the first attempt of an intent."""
    generation: int
    intent: int
    """0, and one more for each deliberate retry by an operator."""
    identity: ExecutionIdentity | None
    """Whose work it is; None without a valid envelope."""

    @property
    @abstractmethod
    def cancel_requested(self) -> bool:
        """Past the boundary a handler is told so, and not interrupted."""

    @property
    @abstractmethod
    def shutting_down(self) -> bool:
        """The worker stops; the handler has the grace period to finish."""

    @abstractmethod
    async def heartbeat(self, details: dict[str, Any] | None = None) -> LeaseStatus:
        """Renew the lease now and leave `details`, a JSON object, on the trail. Falsy: stop soon.

        The lease is renewed in the background anyway; this is for progress worth recording, which is given up while the
        database is away. Raises `InvalidInput`.
        """

    @abstractmethod
    def dispatch(self, key: str) -> AbstractAsyncContextManager[str]:
        """Cross the dispatch boundary: `async with job.dispatch(key) as operation_key:`, then call the provider.

        Records, in one fenced statement, that the call is about to be sent, and yields the operation key to send it
        under: `key`, with `:retry-<n>` appended for later intents. Derive `key` from the job alone. Once per attempt.

        Raises `AlreadyDispatched`, `CancellationRequested`, `LeaseLost`, `OperationKeyConflict`, `AdmissionRefused`:
        nothing may be sent. Let them pass through; they end the attempt as they should.
        """

    @abstractmethod
    def nothing_sent(self) -> None:
        """The handler's word that it had nothing to send: a consequential handler may then return undispatched."""

    @abstractmethod
    async def acknowledge_cancellation(self, provider_confirmed: dict[str, Any] | None = None) -> None:
        """Yield to a requested cancellation; past the boundary with the provider's own confirmation as evidence."""


class JobHandler(ABC, Generic[RequestT, ResultT]):
    """Runs the jobs of one type: `class Research(JobHandler[ResearchRequest, ResearchReport])`.

    The type parameters are pydantic models, or anything pydantic validates from and dumps to a JSON object.
    """

    job_type: ClassVar[str]
    consequential: ClassVar[bool] = True
    """Its calls have effects in the world: without a valid identity it never dispatches. False for harmless work."""

    has_follow_ups: ClassVar[bool] = False
    """Whether `follow_ups` is overridden; set by the class itself."""

    _request: ClassVar[TypeAdapter[Any]] = TypeAdapter(dict[str, Any])
    _result: ClassVar[TypeAdapter[Any]] = TypeAdapter(dict[str, Any])
    _result_is_json: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_follow_ups = cls.follow_ups is not JobHandler.follow_ups
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is JobHandler:
                request, result = get_args(base)
                if not isinstance(request, TypeVar):
                    cls._request = TypeAdapter(request)
                if not isinstance(result, TypeVar):
                    cls._result = TypeAdapter(result)
                    # A dict is stored as it is, unless its values are declared to be something else than JSON.
                    cls._result_is_json = get_origin(result) is not dict or result == dict[str, Any]

    @abstractmethod
    async def run(self, job: JobContext, request: RequestT) -> ResultT:
        """Do the work. Raise `JobFailed` or `HaltUnsafe` to say how it failed; any other exception is retryable
        before the boundary and uncertain after it."""

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[ResultT]:
        """Ask the provider what became of `operation_key`. Read only: a replay of the request is a dispatch."""
        return ProviderState.unknown(f"the handler of {self.job_type} has no lookup")

    def follow_ups(self, job: Job, result: ResultT) -> Sequence[FollowUp]:
        """The jobs to create with the completion. Pure: it may be asked again on another path to completed."""
        return ()

    def parse_request(self, payload: dict[str, Any]) -> RequestT:
        """The payload as the handler's model. Raises pydantic's `ValidationError`."""
        return cast("RequestT", self._request.validate_json(encode_json(payload)))

    def parse_result(self, result: dict[str, Any]) -> ResultT:
        """A stored result as the handler's model. Raises pydantic's `ValidationError`."""
        return cast("ResultT", self._result.validate_json(encode_json(result)))

    def dump_result(self, result: object) -> object:
        """What is stored of a handler's result: the JSON form of whatever pydantic dumps, an empty object for None.

        Raises `NotStorable` for a NaN or an infinity in a model, and what pydantic raises for what it can't dump.
        """
        if result is None:
            return {}
        if self._result_is_json and isinstance(result, dict):
            return result
        if isinstance(result, BaseModel) and (problem := finite_problem(result.model_dump(), "result")):
            raise NotStorable([problem])
        # Not the adapter's own dump: it writes NaN as null, and a figure would be gone in silence.
        return to_jsonable_python(result, inf_nan_mode="constants")
