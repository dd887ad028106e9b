"""Data sets and policies, read from files beside this module, each known by a version and by a digest of its content.

A data set is a folder: `dataset.json` (id, version, title, and the digest that the version stands for) and
`cases.jsonl`, one case a line. A policy is one file in `policies/`. The digest is that of the RFC 8785 form, so the
order of keys and white space don't matter. A case that changes under an unchanged version is refused.
"""

from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from activities.runtime.models import MAX_EVIDENCE, AgentRef, Evidence, JsonObject, Name, RuntimeRequest
from durable_jobs.contract.digest import request_digest
from durable_jobs.contract.errors import FieldProblem, InvalidInput
from durable_jobs.contract.strict_json import read_json

ROOT = Path(__file__).parent
POLICIES = "policies"
CASES = "cases.jsonl"

M = TypeVar("M", bound=BaseModel)


class UnknownDataset(InvalidInput):
    """No data set has this id."""

    code = "UNKNOWN_DATASET"


class UnknownPolicy(InvalidInput):
    """No policy has this id."""

    code = "UNKNOWN_POLICY"


class UnknownCase(InvalidInput):
    """The data set holds no such case."""

    code = "UNKNOWN_CASE"


class DatasetInvalid(InvalidInput):
    """A file of a data set or a policy breaks a rule; `problems` name file, line and field."""

    code = "DATASET_INVALID"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Policy(_Record):
    """What an agent decides by."""

    policy_id: Name
    version: Name
    title: str
    rules: JsonObject

    @property
    def digest(self) -> str:
        """SHA-256, in hex, over the id and the rules."""
        return policy_digest(self.policy_id, self.rules)


class Case(_Record):
    """One ticket with its evidence, and what an expert decides on it by the production policy."""

    case_id: Name
    category: Name
    question: JsonObject
    """`request`, what is asked for, and `ticket`, in the customer's words."""
    evidence: Annotated[tuple[Evidence, ...], Field(min_length=1, max_length=MAX_EVIDENCE)]
    expected_decision: Name

    def request(self, policy: Policy, agent: AgentRef, *, seed: int = 0) -> RuntimeRequest:
        """A run of the agent on this case: all but the expected decision."""
        return RuntimeRequest(
            agent=agent,
            case_id=self.case_id,
            question=self.question,
            policy=policy.rules,
            evidence=self.evidence,
            seed=seed,
        )


class Manifest(_Record):
    """`dataset.json`."""

    dataset_id: Name
    version: Name
    title: str
    digest: Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]


class Dataset(_Record):
    """All cases of one version, in the order of the file."""

    dataset_id: Name
    version: Name
    title: str
    digest: str
    """SHA-256, in hex, over the id and the cases."""
    cases: tuple[Case, ...]

    def case(self, case_id: str) -> Case:
        """Raises `UnknownCase`."""
        for case in self.cases:
            if case.case_id == case_id:
                return case
        raise UnknownCase.at("case_id", f"{self.dataset_id} {self.version} holds no {case_id!r}")


def load_dataset(dataset_id: str, *, root: Path = ROOT) -> Dataset:
    """Raises `UnknownDataset`, `DatasetInvalid`."""
    # An id is compared with what is there, never made into a path: it comes from a payload.
    known = sorted(path.parent.name for path in root.glob("*/dataset.json"))
    if dataset_id not in known:
        raise UnknownDataset.at("dataset_id", f"{dataset_id!r} is none of {', '.join(known)}")
    folder = root / dataset_id
    manifest = _read(Manifest, (folder / "dataset.json").read_bytes(), "dataset.json")
    _same(manifest.dataset_id, dataset_id, "dataset.json.dataset_id")
    cases = _cases((folder / CASES).read_bytes())
    digest = dataset_digest(dataset_id, cases)
    _same(manifest.digest, digest, f"dataset.json.digest (of {CASES}, version {manifest.version})")
    return Dataset(**dict(manifest), cases=cases)


def load_policy(policy_id: str, *, root: Path = ROOT) -> Policy:
    """Raises `UnknownPolicy`, `DatasetInvalid`."""
    known = {path.stem: path for path in sorted((root / POLICIES).glob("*.json"))}
    if policy_id not in known:
        raise UnknownPolicy.at("policy_id", f"{policy_id!r} is none of {', '.join(known)}")
    policy = _read(Policy, known[policy_id].read_bytes(), known[policy_id].name)
    _same(policy.policy_id, policy_id, f"{policy_id}.json.policy_id")
    return policy


def policy_digest(policy_id: str, rules: dict[str, Any]) -> str:
    """What makes two policies the same."""
    return request_digest({"policy_id": policy_id, "rules": rules})


def dataset_digest(dataset_id: str, cases: tuple[Case, ...]) -> str:
    """What a version of a data set stands for."""
    return request_digest({"dataset_id": dataset_id, "cases": [case.model_dump(mode="json") for case in cases]})


def _cases(text: bytes) -> tuple[Case, ...]:
    cases: list[Case] = []
    line_of: dict[str, int] = {}
    evidence_of: dict[str, int] = {}
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n"), 1):
        where = f"{CASES}:{number}"
        case = _read(Case, line, where)
        _once(line_of, case.case_id, number, f"{where}.case_id")
        for index, piece in enumerate(case.evidence):
            _once(evidence_of, piece.evidence_id, number, f"{where}.evidence[{index}].evidence_id")
        cases.append(case)
    return tuple(cases)


def _once(seen: dict[str, int], value: str, line: int, where: str) -> None:
    if value in seen:
        raise DatasetInvalid.at(where, f"{value} stands on line {seen[value]} already")
    seen[value] = line


def _read(model: type[M], text: bytes, where: str) -> M:
    try:
        return model.model_validate(read_json(text))
    except ValidationError as error:
        _invalid(InvalidInput.from_pydantic(error), where)
    except InvalidInput as error:
        _invalid(error, where)


def _invalid(error: InvalidInput, where: str) -> NoReturn:
    raise DatasetInvalid(FieldProblem(f"{where}.{each.field}", each.problem) for each in error.problems) from None


def _same(said: Any, found: Any, where: str) -> None:
    if said != found:
        raise DatasetInvalid.at(where, f"is {said}, must be {found}")
