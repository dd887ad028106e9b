"""What the application reads from the environment, beside the library's `DURABLE_JOBS_*`."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, SecretStr, ValidationError

from durable_jobs.contract.errors import FieldProblem
from durable_jobs.settings import InvalidSettings

PREFIX = "GOVERNANCE_"


class AppSettings(BaseModel):
    """Each field is read from `GOVERNANCE_` and its name in capitals. An empty variable counts as not set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    isolation: Literal["full", "filter"] = "full"
    """How the agent's program is shut in; `filter` for containers that forbid namespaces."""
    agent_seconds: Annotated[float, Field(gt=0, le=3600)] = 30
    """How long one run of the agent's program may take."""
    agent_memory_mib: Annotated[int, Field(ge=64, le=65_536)] = 512

    provider_url: HttpUrl | None = None
    """The OpenAI-compatible API of the research lanes and of the model runtime; without it, neither is hosted."""
    provider_key: SecretStr = SecretStr("none")
    research_model: str = Field(default="gpt-4o-mini", min_length=1)
    deep_research_model: str = Field(default="o4-mini-deep-research", min_length=1)
    agent_model: str = Field(default="gpt-4o-mini", min_length=1)
    """The model that plays the agent where a replay asks for the runtime `model`."""

    @classmethod
    def variables(cls) -> dict[str, str]:
        """The environment variables that are read, each with the name of its field."""
        return {f"{PREFIX}{name.upper()}": name for name in cls.model_fields}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Raises `InvalidSettings`, which names the variables."""
        given: dict[str, Any] = {
            name: environment[variable] for variable, name in cls.variables().items() if environment.get(variable)
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            raise InvalidSettings(
                FieldProblem(f"{PREFIX}{str(problem['loc'][0]).upper()}", problem["msg"])
                for problem in error.errors(include_url=False, include_input=False)
            ) from None
