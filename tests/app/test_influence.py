"""The judgement of a causal audit, on numbers that can be checked by hand."""

from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from activities.contracts import CONTROL, Influence
from activities.influence import Frozen, Lineage, Sample, classify, exact, judge

LINEAGE = Lineage(
    dataset_digest="d1",
    case_id="case-1",
    policy_digest="p1",
    agent="agent",
    agent_version="1",
    build="sha256:1",
    runtime="isolated",
)
FROZEN = Frozen(
    lineage=LINEAGE,
    evidence={CONTROL: "all", "e1": "without e1", "e2": "without e2"},
    samples=2,
    decision="refund",
    score=Decimal("0.800000"),
    seeds=[7, 8],
)
SCORES = {
    CONTROL: [("refund", "0.800000"), ("refund", "0.800001")],
    "e1": [("deny", "0.300000"), ("deny", "0.300000")],
    "e2": [("refund", "0.900000"), ("refund", "0.900003")],
}


def sampled(scores: dict[str, list[tuple[str, str]]] = SCORES) -> list[Sample]:
    return [
        Sample(
            intervention=intervention,
            sample=number,
            lineage=LINEAGE,
            evidence_digest=FROZEN.evidence[intervention],
            without=intervention or None,
            seed=FROZEN.seeds[number],
            decision=decision,
            score=Decimal(score),
        )
        for intervention, row in scores.items()
        for number, (decision, score) in enumerate(row)
    ]


def test_influence_is_the_mean_of_matched_differences() -> None:
    verdict = judge(FROZEN, sampled(), {})
    assert verdict.reasons == ()
    # (0.8 − 0.3 + 0.800001 − 0.3) / 2, and (0.8 − 0.9 + 0.800001 − 0.900003) / 2
    assert verdict.influences == (
        Influence(evidence_id="e1", influence=Decimal("0.5000005"), flips=2, role="decisive"),
        Influence(evidence_id="e2", influence=Decimal("-0.100001"), flips=0, role="opposing"),
    )
    assert verdict.classification == "single_cause"


def test_the_order_of_the_samples_does_not_matter() -> None:
    assert judge(FROZEN, sampled()[::-1], {}) == judge(FROZEN, sampled(), {})


def test_a_missing_sample_fails_the_audit_with_the_code_of_its_job() -> None:
    verdict = judge(FROZEN, sampled()[:-1], {("e2", 1): "RUNTIME_CRASHED"})
    assert (verdict.classification, verdict.influences) == (None, ())
    assert verdict.reasons == ("sample 1 without e2: RUNTIME_CRASHED",)
    assert judge(FROZEN, sampled()[:-1], {}).reasons == ("sample 1 without e2: MISSING",)
    # A fenced worker may have committed an execution for a job that was then failed.
    assert judge(FROZEN, sampled(), {("e2", 1): "OPERATOR"}).reasons == ("sample 1 without e2: OPERATOR",)


MISMATCHES: dict[str, Callable[[Sample], Sample]] = {
    "policy": lambda each: replace(each, lineage=replace(each.lineage, policy_digest="p2")),
    "dataset": lambda each: replace(each, lineage=replace(each.lineage, dataset_digest="d2")),
    "case": lambda each: replace(each, lineage=replace(each.lineage, case_id="case-2")),
    "agent": lambda each: replace(each, lineage=replace(each.lineage, agent_version="2")),
    "build": lambda each: replace(each, lineage=replace(each.lineage, build="sha256:2")),
    "runtime": lambda each: replace(each, lineage=replace(each.lineage, runtime="model")),
    "evidence": lambda each: replace(each, evidence_digest="all"),
    "intervention": lambda each: replace(each, without="e1"),
    "seed": lambda each: replace(each, seed=9),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_one_mismatch_of_lineage_fails_the_audit(name: str) -> None:
    *others, last = sampled()
    verdict = judge(FROZEN, [*others, MISMATCHES[name](last)], {})
    assert (verdict.classification, verdict.influences) == (None, ())
    assert verdict.reasons == (f"sample 1 without e2: its {name} lineage does not match",)


@pytest.mark.parametrize("first", [("deny", "0.800000"), ("refund", "0.800001")])
def test_a_control_that_does_not_reproduce_the_execution_fails_the_audit(first: tuple[str, str]) -> None:
    verdict = judge(FROZEN, sampled(SCORES | {CONTROL: [first, SCORES[CONTROL][1]]}), {})
    assert (verdict.classification, verdict.influences) == (None, ())
    assert "does not reproduce" in verdict.reasons[0]


def test_reasons_are_bounded() -> None:
    many = replace(FROZEN, evidence={CONTROL: "all"} | {f"e{n}": "x" for n in range(100)})
    verdict = judge(many, [], {})
    assert len(verdict.reasons) == 51
    assert verdict.reasons[-1] == "and 152 more"


def of(*roles: str, influence: str = "0.1") -> list[Influence]:
    made: list[Any] = [
        Influence(
            evidence_id=f"e{n}",
            influence=Decimal(0 if role == "none" else influence),
            flips=3 if role == "decisive" else 0,
            role=role,
        )
        for n, role in enumerate(roles)
    ]
    return made


def test_classification() -> None:
    assert classify(of("decisive", "none")) == "single_cause"
    assert classify(of("decisive", "decisive", "supporting")) == "joint_causes"
    assert classify(of("supporting", "opposing")) == "overdetermined"
    assert classify(of("none", "none")) == "insensitive"


def test_a_mean_is_exact_to_nine_digits() -> None:
    assert exact(Fraction(1, 3)) == Decimal("0.333333333")
    assert str(exact(Fraction(1, 2))) == "0.5"
    assert str(exact(Fraction(0))) == "0"
    assert str(exact(Fraction(-1, 1000))) == "-0.001"
    assert str(exact(Fraction(100))) == "100"
