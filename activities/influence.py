"""What a causal audit's samples say: pure arithmetic, exact, and no figure unless everything is there.

`judge` is the whole decision. Influence is the mean over samples of the matched difference: sample n of an intervention
has the seed of sample n of the control, so that only the piece of evidence differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from activities.contracts import CONTROL, Influence, RuntimeName

MAX_REASONS = 50
DIGITS = Decimal("0.000000001")
"""A mean is rounded to nine digits, half to even; scores themselves have six."""

Role = Literal["decisive", "supporting", "opposing", "none"]
Classification = Literal["single_cause", "joint_causes", "overdetermined", "insensitive"]


@dataclass(frozen=True)
class Lineage:
    """What a sample's execution must have run on."""

    dataset_digest: str
    case_id: str
    policy_digest: str
    agent: str
    agent_version: str
    build: str
    runtime: RuntimeName


@dataclass(frozen=True)
class Frozen:
    """The audit's inputs, as they were frozen."""

    lineage: Lineage
    evidence: Mapping[str, str]
    """The digest of the evidence that is left, by the piece that is left out; `CONTROL`: of all of it."""
    samples: int
    decision: str
    score: Decimal
    """Of the audited execution: the control with its own seed must reproduce both."""
    seeds: Sequence[int]
    """By sample; the first is the audited execution's own."""


@dataclass(frozen=True)
class Sample:
    """One controlled replay that ended with an execution."""

    intervention: str
    sample: int
    lineage: Lineage
    evidence_digest: str
    without: str | None
    seed: int
    decision: str
    score: Decimal


@dataclass(frozen=True)
class Verdict:
    """COMPLETED with a classification and influences, or FAILED with reasons and no figure."""

    classification: Classification | None
    influences: tuple[Influence, ...]
    reasons: tuple[str, ...]


def judge(frozen: Frozen, samples: Sequence[Sample], failures: Mapping[tuple[str, int], str]) -> Verdict:
    """`failures`: the codes of the replays whose jobs did not complete, by (intervention, sample); an execution that
    such a job left behind counts for nothing."""
    found = {(each.intervention, each.sample): each for each in samples}
    reasons: list[str] = []
    for intervention in (CONTROL, *sorted(set(frozen.evidence) - {CONTROL})):
        for number in range(frozen.samples):
            sample, code = found.get((intervention, number)), failures.get((intervention, number))
            if sample is None or code is not None:
                reasons.append(f"{_named(intervention, number)}: {code or 'MISSING'}")
            else:
                reasons += [f"{_named(intervention, number)}: {problem}" for problem in _mismatches(frozen, sample)]
    control = found.get((CONTROL, 0))
    if not reasons and control is not None and (control.decision, control.score) != (frozen.decision, frozen.score):
        reasons.append(
            f"{_named(CONTROL, 0)}: {control.decision} {control.score} does not reproduce the audited execution's"
            f" {frozen.decision} {frozen.score}"
        )
    if reasons:
        more = len(reasons) - MAX_REASONS
        return Verdict(None, (), (*reasons[:MAX_REASONS], *([f"and {more} more"] if more > 0 else [])))
    influences = tuple(_influence(frozen, found, each) for each in sorted(set(frozen.evidence) - {CONTROL}))
    return Verdict(classify(influences), influences, ())


def classify(influences: Sequence[Influence]) -> Classification:
    """By the pieces without which the decision changes in every sample, and by whether anything matters at all."""
    decisive = sum(each.role == "decisive" for each in influences)
    if decisive:
        return "single_cause" if decisive == 1 else "joint_causes"
    return "overdetermined" if any(each.influence or each.flips for each in influences) else "insensitive"


def _influence(frozen: Frozen, found: Mapping[tuple[str, int], Sample], evidence_id: str) -> Influence:
    pairs = [(found[CONTROL, number], found[evidence_id, number]) for number in range(frozen.samples)]
    total = sum((Fraction(control.score) - Fraction(without.score) for control, without in pairs), Fraction(0))
    mean = exact(total / len(pairs))
    flips = sum(control.decision != without.decision for control, without in pairs)
    return Influence(evidence_id=evidence_id, influence=mean, flips=flips, role=_role(mean, flips, len(pairs)))


def _role(mean: Decimal, flips: int, samples: int) -> Role:
    if flips == samples:
        return "decisive"
    if mean == 0:
        return "none"
    return "supporting" if mean > 0 else "opposing"


def exact(value: Fraction) -> Decimal:
    """The fraction as a decimal of at most nine digits after the point, without trailing zeros."""
    quotient = (Decimal(value.numerator) / Decimal(value.denominator)).quantize(DIGITS)
    return Decimal(f"{quotient.normalize():f}") if quotient else Decimal(0)


def _mismatches(frozen: Frozen, sample: Sample) -> list[str]:
    """Where the sample's execution did not run on what the audit froze."""
    expected = {
        "policy": (frozen.lineage.policy_digest, sample.lineage.policy_digest),
        "dataset": (frozen.lineage.dataset_digest, sample.lineage.dataset_digest),
        "case": (frozen.lineage.case_id, sample.lineage.case_id),
        "agent": (
            (frozen.lineage.agent, frozen.lineage.agent_version),
            (sample.lineage.agent, sample.lineage.agent_version),
        ),
        "build": (frozen.lineage.build, sample.lineage.build),
        "runtime": (frozen.lineage.runtime, sample.lineage.runtime),
        "evidence": (frozen.evidence[sample.intervention], sample.evidence_digest),
        "intervention": (sample.intervention or None, sample.without),
        "seed": (frozen.seeds[sample.sample], sample.seed),
    }
    return [f"its {name} lineage does not match" for name, (wanted, got) in expected.items() if wanted != got]


def _named(intervention: str, number: int) -> str:
    return f"sample {number} {f'without {intervention}' if intervention else 'of the control'}"
