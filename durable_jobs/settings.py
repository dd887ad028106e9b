"""What the processes read from the environment: `DURABLE_JOBS_*` ours, and Temporal's own by `temporalio.envconfig`.

Each field is read from `DURABLE_JOBS_` and its name in capitals. An empty variable counts as not set.
"""

import os
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from temporalio.envconfig import ClientConfig

from durable_jobs.contract.errors import FieldProblem, InvalidInput
from durable_jobs.contract.rules import checked, hosted_queue_problem
from durable_jobs.contract.specs import Identifier, Queue
from durable_jobs.service.base import DEFAULT_GRACE_SECONDS
from durable_jobs.service.registry import HEARTBEAT_SECONDS, STALE_SECONDS
from durable_jobs.store.tables import SCHEMA

PREFIX = "DURABLE_JOBS_"


class InvalidSettings(InvalidInput):
    """A setting is missing or wrong; `problems` name the environment variables."""

    code = "INVALID_SETTINGS"


def _listed(value: object) -> object:
    """`a, b` as a list."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _mapped(value: object) -> object:
    """`a=1, b=2` as a mapping."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError("must be pairs such as evaluation=evaluations, with commas between them")
    return {key.strip().lower(): queue.strip() for key, _, queue in pairs}


HostedQueue = Annotated[str, checked(hosted_queue_problem)]
"""A queue, or an organization's isolated one: `<queue>@<organization>`."""


class Settings(BaseModel):
    """The settings of the API, of a worker, and of what the command line does beside them; checked when made."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    database_url: str = Field(repr=False)
    """postgresql://…, of a migrated database."""
    database_schema: str = Field(default=SCHEMA, alias="schema")
    """The Postgres schema that holds the tables: DURABLE_JOBS_SCHEMA."""
    pool_size: int = Field(default=10, ge=1, le=500)
    """Connections to Postgres for a process's work; its control verbs have two of their own."""

    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8080, ge=0, le=65_535)
    http_tokens: Literal["required", "off"] = "required"
    """`off`: no token is asked for, and loopback alone is served."""
    metrics_token: SecretStr | None = Field(default=None, min_length=16)
    """The bearer token that /metrics asks for, from 16 characters on; without it loopback alone may read them."""
    local_organization: Identifier = "local"
    """With HTTP_TOKENS=off: the organization that the one local operator acts for."""
    local_project: Identifier = "local"
    """With HTTP_TOKENS=off: the project of a submission that names none."""
    default_queue: Queue = "default"
    """The queue of a job submitted over HTTP whose type has none of its own."""
    type_queues: Annotated[dict[Identifier, Queue], BeforeValidator(_mapped)] = {}
    """The default queues of job types: `evaluation=evaluations,replay=replays`."""

    run_worker: bool = False
    """Run a worker beside the API, in its process."""
    worker_app: str | None = None
    """What a worker hosts, as `module:attribute`: see `durable_jobs.hosting.load_app`."""
    worker_queues: Annotated[tuple[HostedQueue, ...], BeforeValidator(_listed)] = ()
    """The task queues that a worker hosts; by default the default queue and those of TYPE_QUEUES."""
    worker_organizations: Annotated[tuple[Identifier, ...] | None, BeforeValidator(_listed)] = None
    """Host these organizations alone."""
    worker_slots: int = Field(default=100, ge=1, le=10_000)
    """How many jobs a worker runs at once, for each of its queues."""
    worker_grace_seconds: float = Field(default=DEFAULT_GRACE_SECONDS, ge=0, le=86_400)
    """How long handlers may run on when the worker shuts down."""
    worker_stale_seconds: float = Field(default=STALE_SECONDS, gt=HEARTBEAT_SECONDS)
    """A worker silent for longer is shown as stale; above the interval of its heartbeats, which is 10 s."""
    reconcile_seconds: float = Field(default=60, ge=1, le=86_400)
    """How often a worker's queues are swept for uncertain jobs."""
    escalation_url: str | None = Field(default=None, pattern=r"^https?://")
    """A webhook, called with each job that needs an operator; by default the log says so."""

    temporal_ui_url: str | None = Field(default=None, pattern=r"^https?://")
    """Where operators' browsers find Temporal's UI: the console links into it."""

    temporal: dict[str, Any] = Field(default={"target_host": "localhost:7233"}, repr=False)
    """The arguments of `Client.connect`. No variable of ours: see `temporalio.envconfig`."""

    @classmethod
    def variables(cls) -> dict[str, str]:
        """The environment variables that are read, each with the name of its field."""
        fields = {name: field.alias or name for name, field in cls.model_fields.items() if name != "temporal"}
        return {f"{PREFIX}{alias.upper()}": name for name, alias in fields.items()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, **overrides: Any) -> Self:
        """Read the environment; `overrides`, by field name, come before it where not None. Raises `InvalidSettings`."""
        variables = cls.variables()
        given: dict[str, Any] = {
            name: environment[variable] for variable, name in variables.items() if environment.get(variable)
        }
        given |= {name: value for name, value in overrides.items() if value is not None}
        try:
            temporal = ClientConfig.load_client_connect_config(override_env_vars=dict(environment))
        except (RuntimeError, ValueError) as error:
            raise InvalidSettings.at("TEMPORAL_*", str(error)) from error
        try:
            return cls.model_validate({"temporal": {**cls.model_fields["temporal"].default, **temporal}} | given)
        except ValidationError as error:
            named = {name: variable for variable, name in variables.items()}
            raise InvalidSettings(
                FieldProblem(_variable(problem["loc"], named), problem["msg"])
                for problem in error.errors(include_url=False, include_input=False)
            ) from None

    @property
    def queues(self) -> tuple[str, ...]:
        """The task queues that a worker with these settings hosts."""
        return self.worker_queues or tuple(dict.fromkeys([self.default_queue, *self.type_queues.values()]))

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.http_tokens == "off" and not is_loopback(self.http_host):
            raise ValueError(f"{PREFIX}HTTP_HOST must be a loopback address where {PREFIX}HTTP_TOKENS is off")
        if self.run_worker and not self.worker_app:
            raise ValueError(f"{PREFIX}WORKER_APP must name the handlers where {PREFIX}RUN_WORKER is true")
        return self


def _variable(location: tuple[int | str, ...], named: Mapping[str, str]) -> str:
    """The variable that a problem at this location of the model comes from."""
    field = str(location[0]) if location else "*"
    return named.get(field, f"{PREFIX}{field.upper()}")


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or `localhost`, is this machine's own."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
