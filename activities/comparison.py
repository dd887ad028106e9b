"""Two runs of the same cases beside each other. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from activities.influence import exact


@dataclass(frozen=True)
class CaseOutcome:
    """What an agent made of one case."""

    case_id: str
    expected: str
    decision: str
    score: Decimal

    @property
    def correct(self) -> bool:
        return self.decision == self.expected


@dataclass(frozen=True)
class Compared:
    cases: int
    agreements: int
    correct_delta: int
    score_delta: Decimal
    """The candidate's mean score less the baseline's."""


def mean_score(outcomes: Sequence[CaseOutcome]) -> Decimal:
    return exact(sum((Fraction(each.score) for each in outcomes), Fraction(0)) / len(outcomes))


def compared(baseline: Sequence[CaseOutcome], candidate: Sequence[CaseOutcome]) -> Compared:
    """Raises `ValueError` unless both ran the same cases."""
    pairs = list(zip(baseline, candidate, strict=True))
    if any(one.case_id != other.case_id for one, other in pairs):
        raise ValueError("both must have run the same cases, in one order")
    delta = sum((Fraction(other.score) - Fraction(one.score) for one, other in pairs), Fraction(0))
    return Compared(
        cases=len(pairs),
        agreements=sum(one.decision == other.decision for one, other in pairs),
        correct_delta=sum(other.correct - one.correct for one, other in pairs),
        score_delta=exact(delta / len(pairs)),
    )


def drift_of(both: Compared) -> Literal["none", "score", "decision"]:
    """Of one replayed execution: whether its decision changed, or its score alone."""
    if both.agreements < both.cases:
        return "decision"
    return "score" if both.score_delta else "none"
