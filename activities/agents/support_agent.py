"""A support agent as a stand-alone program: a ticket with its evidence as JSON on stdin, a decision as JSON on stdout.

It reads facts out of each piece's text, turns each into a strength from -1 to 1 on one factor, and adds up

    score = base + sum over factors of weight * (strongest support + strongest objection) + jitter

in exact fractions, held within 0 and 1, rounded once to 6 digits (half to even). Thus two pieces that say the same
make one of them redundant, and what a piece contributes can be worked out by hand. Weights and thresholds are the
policy's. The seed matters only where the policy has a jitter. Standard library only.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

NAME, VERSION = "support-agent", "1.0.0"
DIGITS = 6
MAX_STEPS = 100
REQUESTS = frozenset(
    {"refund", "replace", "repair", "reship", "cancel", "credit", "redirect", "restore_access", "erase", "export"}
)
ESCALATE, DENY, ASK = "escalate", "deny", "ask_evidence"


class Refused(Exception):
    """The request is none that this agent decides."""


@dataclass(frozen=True)
class Rules:
    """A policy's rules. Amounts, weights and thresholds come as decimal text, so that nothing is rounded on the way."""

    base: Fraction
    approve: Fraction
    deny: Fraction
    weights: Mapping[str, Fraction]
    return_window_days: int
    lost_after_days: int
    auto_limit: Fraction
    hard_risk: Fraction
    requires: Mapping[str, list[str]]
    jitter: Fraction

    @classmethod
    def read(cls, policy: Mapping[str, Any]) -> "Rules":
        names = ("base", "approve", "deny", "jitter", "auto_limit", "hard_risk")
        try:
            rules = cls(
                **{name: Fraction(str(policy[name])) for name in names},
                weights={factor: Fraction(str(weight)) for factor, weight in policy["weights"].items()},
                return_window_days=int(policy["return_window_days"]),
                lost_after_days=int(policy["lost_after_days"]),
                requires={wanted: list(kinds) for wanted, kinds in policy["requires"].items()},
            )
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise Refused(f"policy: {type(error).__name__} {error}") from None
        if rules.deny >= rules.approve:
            raise Refused("policy: deny must be less than approve")
        if min(rules.return_window_days, rules.lost_after_days) < 1:
            raise Refused("policy: return_window_days and lost_after_days must be at least 1")
        return rules


@dataclass
class Facts:
    """What holds for the ticket as a whole."""

    window_days: int
    """Of the return policy that a piece quotes, or else the policy's own."""
    amount: Fraction = Fraction(0)
    held: bool = False
    kinds: set[str] = field(default_factory=set)


Strength = Callable[[re.Match[str], Facts, Rules], Fraction]


def always(numerator: int, denominator: int = 1) -> Strength:
    return lambda *_: Fraction(numerator, denominator)


def _since_delivery(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    """From 1 on the day of delivery to 1/2 on the window's last day; past it, minus the share of a window over."""
    days, window = int(found[1]), facts.window_days
    return 1 - Fraction(days, 2 * window) if days <= window else -min(Fraction(1), Fraction(days - window, window))


def _of_warranty(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    """From 1 to 1/2 over the term; past it, a twelfth for each month over."""
    month, term = int(found[1]), int(found[2])
    return 1 - Fraction(month, 2 * term) if month <= term else -min(Fraction(1), Fraction(month - term, 12))


def _without_scan(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    return min(Fraction(1), Fraction(int(found[1]), rules.lost_after_days))


def _reproduced(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    return Fraction(int(found[1]), int(found[2])) if int(found[1]) else Fraction(-1, 2)


def _packed(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    return Fraction(-1, 2) if found[1] == found[2] else Fraction(1)


def _missing_weight(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    weighed, expected = int(found[1]), int(found[2])
    return max(Fraction(0), Fraction(expected - weighed, expected))


def _standing(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    """1 without refunds, 0 at one in four orders, -1 at one in two."""
    orders, refunds = int(found[1]), int(found[2])
    return max(Fraction(-1), 1 - Fraction(4 * refunds, orders)) if orders else Fraction(0)


def _proven(found: re.Match[str], facts: Facts, rules: Rules) -> Fraction:
    """From -1 for no factor to 1 for all of them."""
    return Fraction(2 * int(found[1]), int(found[2])) - 1


# Kind of evidence, what is looked for in its text, the factor it bears on, and how strongly. Of the lines with the same
# kind and factor the first that matches counts.
READINGS: tuple[tuple[str, str, str, Strength], ...] = (
    ("order_record", r"\bfinal sale\b", "eligibility", always(-1)),
    ("order_record", r"\bnot yet shipped\b", "eligibility", always(1)),
    ("order_record", r"\bdelivered (\d+) days? ago\b", "eligibility", _since_delivery),
    ("policy_excerpt", r"\bnot covered\b", "eligibility", always(-1)),
    ("policy_excerpt", r"\bis covered\b", "eligibility", always(1, 2)),
    ("warranty_record", r"\bmonth (\d+) of ([1-9]\d*)\b", "eligibility", _of_warranty),
    ("retention_rule", r"\bmust be kept\b", "eligibility", always(-1, 2)),
    ("retention_rule", r"\bmay be erased\b", "eligibility", always(1)),
    ("consent_record", r"\bconsent withdrawn\b", "eligibility", always(1, 2)),
    ("photo_report", r"\bsigns of (?:a drop|liquid|misuse)\b", "fault", always(-3, 4)),
    ("photo_report", r"\bno damage visible\b", "fault", always(-1, 2)),
    ("photo_report", r"\bdamage grade ([0-5]) of 5\b", "fault", lambda found, *_: Fraction(int(found[1]), 5)),
    ("diagnostics", r"\bliquid indicator triggered\b", "fault", always(-1)),
    ("diagnostics", r"\breproduced in (\d+) of ([1-9]\d*) runs\b", "fault", _reproduced),
    ("pick_log", r"\bpacked (\S+), ordered (\S+?)[.;,]", "fault", _packed),
    ("pick_log", r"\bweighed (\d+) g against ([1-9]\d*) g\b", "fault", _missing_weight),
    ("carrier_statement", r"\bdamaged in transit\b", "fault", always(1)),
    ("carrier_statement", r"\bconfirms the loss\b", "delivery", always(1)),
    ("carrier_statement", r"\bconfirms delivery\b", "delivery", always(-1)),
    ("delivery_scan", r"\bsigned for by\b", "delivery", always(-1)),
    ("delivery_scan", r"\bleft (?:at|in|with)\b", "delivery", always(-1, 2)),
    ("delivery_scan", r"\b(?:returned to sender|at another address)\b", "delivery", always(1)),
    ("delivery_scan", r"\bno scan for (\d+) days\b", "delivery", _without_scan),
    ("identity_check", r"\b(\d) of ([1-9]) factors\b", "identity", _proven),
    ("login_history", r"\bnew country\b", "identity", always(-3, 4)),
    ("login_history", r"\bunknown device\b", "identity", always(-1, 2)),
    ("login_history", r"\bknown device\b", "identity", always(1, 2)),
    ("address_record", r"\bdoes not match\b", "identity", always(-1, 2)),
    ("address_record", r"\bmatches\b", "identity", always(1, 4)),
    ("customer_history", r"\b[1-9]\d* chargebacks?\b", "standing", always(-1)),
    ("customer_history", r"\b(\d+) orders?, (\d+) refunds?\b", "standing", _standing),
    ("risk_signal", r"\brisk (\d\.\d+)\b", "risk", lambda found, *_: -Fraction(found[1])),
    ("billing_log", r"\b(?:one charge|refund already issued)\b", "records", always(-1)),
    ("billing_log", r"\bcharged (?:twice|\d times|after the cancellation)\b", "records", always(1)),
    ("incident_note", r"\bdid not affect\b", "records", always(-1, 2)),
    ("incident_note", r"\baffected this (?:order|account)\b", "records", always(3, 4)),
    ("agent_note", r"\bpromised an? (?:refund|replacement|repair|credit)\b", "commitment", always(1)),
    ("customer_statement", r"\b(?:changed (?:my|her|his) mind|own mistake)\b", "statement", always(-1)),
    ("customer_statement", r"", "statement", always(1)),
)  # fmt: skip
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE), factor, how) for kind, pattern, factor, how in READINGS)
AMOUNT = re.compile(r"\bpaid (\d+\.\d\d) (?:USD|EUR|GBP)\b")
WINDOW = re.compile(r"\bwithin ([1-9]\d*) days of delivery\b")
HOLD = re.compile(r"\b(?:legal hold|police report filed|threat of self-harm)\b", re.IGNORECASE)


def facts_of(evidence: list[Mapping[str, Any]], rules: Rules) -> Facts:
    """What the pieces say about the ticket as a whole."""
    facts = Facts(rules.return_window_days)
    for piece in evidence:
        text = piece["text"]
        facts.kinds.add(piece["kind"])
        if piece["kind"] == "order_record" and (paid := AMOUNT.search(text)):
            facts.amount = max(facts.amount, Fraction(paid[1]))
        if piece["kind"] == "policy_excerpt" and (window := WINDOW.search(text)):
            facts.window_days = int(window[1])
        facts.held |= HOLD.search(text) is not None
    return facts


def strengths_of(piece: Mapping[str, Any], facts: Facts, rules: Rules) -> dict[str, Fraction]:
    """How strongly one piece speaks, for each factor that it bears on."""
    found: dict[str, Fraction] = {}
    for kind, pattern, factor, how in _COMPILED:
        if kind == piece["kind"] and factor not in found and (match := pattern.search(piece["text"])):
            found[factor] = how(match, facts, rules)
    return found


def decide(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    wanted = asked["question"].get("request")
    if wanted not in REQUESTS:
        raise Refused(f"question.request: {wanted!r} is none of {', '.join(sorted(REQUESTS))}")
    rules = Rules.read(asked["policy"])
    evidence = asked["evidence"]
    facts = facts_of(evidence, rules)
    strengths = {piece["evidence_id"]: strengths_of(piece, facts, rules) for piece in evidence}
    exact = rules.base + rules.jitter * _noise(asked)
    for factor, weight in rules.weights.items():
        values = [each.get(factor, Fraction(0)) for each in strengths.values()]
        exact += weight * (max([*values, Fraction(0)]) + min([*values, Fraction(0)]))
    score = round(min(Fraction(1), max(Fraction(0), exact)), DIGITS)
    worst = -min((each.get("risk", Fraction(0)) for each in strengths.values()), default=Fraction(0))
    decision, why = _decision(wanted, score, worst, facts, rules)
    margin = min(abs(score - rules.approve), abs(score - rules.deny))
    return {
        "agent": {"name": NAME, "version": VERSION},
        "decision": decision,
        "score": float(score),
        "confidence": float(round(min(Fraction(1), 2 * margin), DIGITS)),
        "evidence_used": [evidence_id for evidence_id, each in strengths.items() if each],
        "trace": [*_steps(strengths, rules)[:MAX_STEPS], {"note": why}],
    }


def _decision(wanted: str, score: Fraction, risk: Fraction, facts: Facts, rules: Rules) -> tuple[str, str]:
    if missing := sorted(set(rules.requires.get(wanted, ())) - facts.kinds):
        return ASK, f"{wanted} needs {', '.join(missing)}"
    if facts.held:
        return ESCALATE, "a hold lies on it"
    if risk >= rules.hard_risk:
        return ESCALATE, f"risk is at least {float(rules.hard_risk)}"
    if score >= rules.approve:
        if facts.amount > rules.auto_limit:
            return ESCALATE, f"more than {float(rules.auto_limit):.2f} is a person's to grant"
        return wanted, f"score is at least {float(rules.approve)}"
    if score <= rules.deny:
        return DENY, f"score is at most {float(rules.deny)}"
    return ESCALATE, f"score lies between {float(rules.deny)} and {float(rules.approve)}"


def _steps(strengths: Mapping[str, Mapping[str, Fraction]], rules: Rules) -> list[dict[str, Any]]:
    """One step for each piece and factor: the strength that was read, before any other piece is looked at."""
    return [
        {"evidence_id": evidence_id, "note": factor, "value": float(round(value, DIGITS))}
        for evidence_id, each in strengths.items()
        for factor, value in each.items()
        if factor in rules.weights
    ]


def _noise(asked: Mapping[str, Any]) -> Fraction:
    """From -1 to 1, fixed by the seed, the case and which evidence is there: another prompt, another draw."""
    drawn = json.dumps([asked["seed"], asked["case_id"], sorted(piece["evidence_id"] for piece in asked["evidence"])])
    return Fraction(int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:4]), 2**31) - 1


def main() -> int:
    asked = json.load(sys.stdin)
    try:
        answer = decide(asked)
    except Refused as error:
        answer = {"refused": str(error)}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
