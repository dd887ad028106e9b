"""The support agent's decisions rest on its evidence: what each piece contributes is worked out here by hand."""

import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from activities.agents import SUPPORT_AGENT
from activities.agents.support_agent import ASK, DENY, ESCALATE, READINGS, REQUESTS, decide
from activities.datasets import (
    ROOT,
    Case,
    DatasetInvalid,
    Policy,
    UnknownCase,
    UnknownDataset,
    UnknownPolicy,
    dataset_digest,
    load_dataset,
    load_policy,
)
from activities.runtime import RuntimeRefused, RuntimeRequest
from activities.runtime.subprocess_adapter import SubprocessAdapter, SubprocessSettings
from tests.isolation import STRONGEST

ADAPTER = SubprocessAdapter([SUPPORT_AGENT], SubprocessSettings(isolation=STRONGEST))
DATASET = load_dataset("support-agent")
PRODUCTION = load_policy("production-ai-policy")
CANDIDATE = load_policy("candidate-ai-policy")
SAMPLED = load_policy("sampled-ai-policy")

# For each case by the production policy: score and decision with all evidence; then for each piece its influence, which
# is that score less the score without the piece, and the decision without it where that is another one.
#
# Weights: eligibility .20, fault .25, delivery .30, identity .35, records .30, commitment .20, standing .10, risk .40,
# statement .04. Base .45; granted from .70, denied up to .30. A factor is its strongest support plus its strongest
# objection. Scores are rounded to 6 digits before they are compared.
BY_HAND: dict[str, tuple[str, str, dict[str, tuple[str, str | None]]]] = {
    # .45 + delivery .30·1 + standing .10·(1 - 4/24) + statement .04 = .8733333
    # Interplay: 14 days without a scan (lost after 10) and the carrier's word each suffice for delivery 1.
    "sa-001": (
        ".873333",
        "refund",
        {
            "order": ("0", ASK),
            "scan": ("0", None),
            "carrier": ("0", None),
            "history": (".083333", None),  # .873333 - .79
            "claim": (".04", None),
        },
    ),
    # .45 + eligibility .20·(1 - 1/60) + records .30·3/4 + statement .04 = .9116667
    # Decisive: without the incident .6866667 lies under .70. The terms speak of no fact that is read: no influence.
    "sa-007": (
        ".911667",
        "refund",
        {
            "order": (".196667", ASK),  # .911667 - .715
            "incident": (".225", ESCALATE),
            "terms": ("0", None),
            "claim": (".04", None),
        },
    ),
    # .45 + eligibility .20·(1 - 3/60) + fault .25·1 = .89; the photo's grade 0 adds nothing, nor does the stock.
    "sa-009": (
        ".89",
        "replace",
        {
            "order": (".19", ASK),
            "pick": (".25", ESCALATE),
            "photo": ("0", None),
            "stock": ("0", None),
        },
    ),
    # .45 + eligibility .20·(1 - 1/60) + fault .25·1 + standing .10·(1 - 4/17) = .97313725
    # Interplay: photo and carrier each show a fault of 1.
    "sa-011": (
        ".973137",
        "replace",
        {
            "order": (".196666", ASK),  # .973137 - .776471
            "photo": ("0", None),
            "carrier": ("0", None),
            "history": (".07647", None),  # .973137 - .896667
        },
    ),
    # .45 + eligibility .20·(1 - 62/200) + standing .10 + statement .04 = .728
    # The terms set the window to 100 days. Without them it is 30, and 62 days are more than twice that: eligibility -1,
    # .45 - .20 + .10 + .04 = .39. So close to .70 each of the others is decisive too.
    "sa-013": (
        ".728",
        "refund",
        {
            "order": (".138", ASK),
            "terms": (".338", ESCALATE),
            "history": (".1", ESCALATE),  # .628
            "claim": (".04", ESCALATE),  # .688
        },
    ),
    # .45 + eligibility .20·(1 - 8/48 - 1) - fault .25 - statement .04 = .1266667
    # Without the warranty .45 - .20 - .25 - .04 is under 0, held at 0. Without the test .3766667, without the terms
    # .45 + .20·5/6 - .29 = .3266667: both above .30.
    "sa-017": (
        ".126667",
        DENY,
        {
            "cover": (".126667", ASK),
            "test": ("-.25", ESCALATE),
            "terms": ("-.2", ESCALATE),
            "order": ("0", None),
            "claim": ("-.04", None),
        },
    ),
    # .45 - eligibility .20·2/12 + fault .25 - records .30·1/2 + standing .10 = .6166667
    # Decisive: without the note on the recall .7666667, and it would be repaired.
    "sa-019": (
        ".616667",
        ESCALATE,
        {
            "cover": ("-.033333", ASK),  # .616667 - .65
            "test": (".25", None),  # .616667 - .366667
            "incident": ("-.15", "repair"),
            "history": (".1", None),
        },
    ),
    # .45 + eligibility .20·(1 - 14/48 - 1) + fault .25 + commitment .20 + standing .10·(1 - 4/15) = .915
    # Without the order, 45 days past a window of 30, eligibility is .20·17/24: 1.115, held at 1.
    "sa-020": (
        ".915",
        "replace",
        {
            "order": ("-.085", ASK),
            "cover": (".141667", None),  # .915 - .773333
            "test": (".25", ESCALATE),  # .665
            "note": (".2", None),  # .715
            "history": (".073333", None),  # .915 - .841667
        },
    ),
    # .45 + eligibility .20·(1 - 11/60) - delivery .30·1 - standing .10·1 (three of four: 1 - 3, held at -1) = .2133333
    # Interplay: signature and GPS track each suffice against a loss. Weights that agree say nothing.
    "sa-026": (
        ".213333",
        DENY,
        {
            "order": (".163333", ASK),  # .213333 - .05
            "scan": ("0", None),
            "carrier": ("0", None),
            "weight": ("0", None),
            "history": ("-.1", ESCALATE),  # .313333
        },
    ),
    # .45 + identity .35·1/2 + records .30·3/4 - risk .40·.05 = .83
    # Interplay: three of four factors and the known device each give 1/2, but the check is also required.
    "sa-034": (
        ".83",
        "restore_access",
        {
            "check": ("0", ASK),
            "incident": (".225", ESCALATE),  # .605
            "login": ("0", None),
            "signal": ("-.02", None),
        },
    ),
    # .45 + identity .35·1 = .80. The note leaves the score alone and yet decides: a hold.
    "sa-037": (
        ".8",
        ESCALATE,
        {
            "check": (".175", ASK),  # the known device alone gives 1/2
            "login": ("0", None),
            "note": ("0", "restore_access"),
        },
    ),
    # .45 + eligibility .20·(1 - 20/60) - risk .40·.64 + standing .10 = .4273333
    "sa-041": (
        ".427333",
        ESCALATE,
        {
            "order": (".133333", DENY),  # .427333 - .294
            "ledger": ("0", None),
            "signal": ("-.256", None),  # .427333 - .683333
            "history": (".1", None),  # .327333
        },
    ),
}

# Pairs of which either alone has no influence, and both together this much.
TOGETHER = {
    ("sa-001", "scan", "carrier"): ".3",  # .873333 - .573333
    ("sa-011", "photo", "carrier"): ".25",  # .973137 - .723137
    ("sa-026", "scan", "carrier"): "-.3",  # .213333 - .513333
}


def asked(case: Case, policy: Policy = PRODUCTION, *without: str, seed: int = 0) -> RuntimeRequest:
    request = case.request(policy, SUPPORT_AGENT.agent, seed=seed)
    for piece in without:
        request = request.without(f"{case.case_id}:{piece}")
    return request


def answer(case: Case, policy: Policy = PRODUCTION, *without: str, seed: int = 0) -> tuple[Decimal, str]:
    """The score, exactly as the program prints it, and the decision."""
    decided = json.loads(json.dumps(decide(asked(case, policy, *without, seed=seed).model_dump(mode="json"))))
    return Decimal(str(decided["score"])), decided["decision"]


def pieces(case: Case) -> list[str]:
    return [piece.evidence_id.removeprefix(f"{case.case_id}:") for piece in case.evidence]


# --- influence ---


@pytest.mark.parametrize("case_id", BY_HAND)
def test_influence_is_what_was_worked_out_by_hand(case_id: str) -> None:
    score, decision, influences = BY_HAND[case_id]
    case = DATASET.case(case_id)
    assert answer(case) == (Decimal(score), decision)
    found = {}
    for piece in pieces(case):
        without, other = answer(case, PRODUCTION, piece)
        found[piece] = (Decimal(score) - without, other if other != decision else None)
    assert found == {piece: (Decimal(influence), other) for piece, (influence, other) in influences.items()}


@pytest.mark.parametrize(("pair", "influence"), TOGETHER.items())
def test_two_pieces_that_each_suffice_count_only_together(pair: tuple[str, str, str], influence: str) -> None:
    case_id, *both = pair
    case = DATASET.case(case_id)
    everything, _ = answer(case)
    assert [everything - answer(case, PRODUCTION, piece)[0] for piece in both] == [0, 0]
    assert everything - answer(case, PRODUCTION, *both)[0] == Decimal(influence)


@pytest.mark.parametrize("case_id", ["sa-001", "sa-019", "sa-037"])
async def test_the_isolated_program_says_the_same_to_the_last_digit(case_id: str) -> None:
    case = DATASET.case(case_id)
    outcome = await ADAPTER.run(asked(case), key=f"replay:{case_id}")
    assert (Decimal(str(outcome.score)), outcome.decision) == answer(case)
    assert outcome.agent == SUPPORT_AGENT.agent
    last = pieces(case)[-1]
    outcome = await ADAPTER.run(asked(case, PRODUCTION, last), key=f"replay:{case_id}:without")
    assert (Decimal(str(outcome.score)), outcome.decision) == answer(case, PRODUCTION, last)


async def test_the_outcome_names_what_it_used_and_how() -> None:
    outcome = await ADAPTER.run(asked(DATASET.case("sa-009")), key="k")
    assert outcome.evidence_used == ("sa-009:order", "sa-009:pick", "sa-009:photo")
    steps = [(step.evidence_id, step.note, step.value) for step in outcome.trace]
    assert steps[:3] == [
        ("sa-009:order", "eligibility", 0.95),
        ("sa-009:pick", "fault", 1),
        ("sa-009:photo", "fault", 0),
    ]
    assert steps[3][1] == "score is at least 0.7"


async def test_a_request_that_it_does_not_know_is_refused() -> None:
    request = asked(DATASET.case("sa-009")).model_copy(update={"question": {"request": "dance"}})
    with pytest.raises(RuntimeRefused, match=r"the agent refused: question\.request: 'dance' is none of"):
        await ADAPTER.run(request, key="k")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"base": None}, "policy: ValueError"),
        ({"approve": "1/0"}, "policy: ZeroDivisionError"),
        ({"weights": []}, "policy: AttributeError"),
        ({"deny": "0.7"}, "policy: deny must be less than approve"),
        ({"return_window_days": 0}, "policy: return_window_days and lost_after_days must be at least 1"),
    ],
)
async def test_a_policy_that_makes_no_sense_is_refused(changed: dict[str, Any], problem: str) -> None:
    request = asked(DATASET.case("sa-009"))
    request = request.model_copy(update={"policy": request.policy | changed})
    with pytest.raises(RuntimeRefused, match=problem):
        await ADAPTER.run(request, key="k")


# --- policies and seeds ---


def test_the_seed_moves_the_score_only_where_the_policy_has_a_jitter() -> None:
    case = DATASET.case("sa-044")
    assert {answer(case, seed=seed) for seed in range(8)} == {(Decimal("0.743333"), "credit")}
    drawn = [answer(case, SAMPLED, seed=seed) for seed in range(8)]
    assert drawn == [answer(case, SAMPLED, seed=seed) for seed in range(8)]
    assert len(set(drawn)) == 8
    assert all(abs(score - Decimal("0.743333")) <= Decimal("0.03") for score, _ in drawn)


def test_each_policy_decides_as_counted() -> None:
    """How often a policy agrees with the expert: neither always, or an evaluation would have nothing to find."""
    agreed: Counter[str] = Counter()
    for policy in (PRODUCTION, CANDIDATE):
        agreed[policy.policy_id] = sum(answer(case, policy)[1] == case.expected_decision for case in DATASET.cases)
    assert len(DATASET.cases) == 51
    assert agreed == {"production-ai-policy": 49, "candidate-ai-policy": 37}


def test_where_the_production_policy_and_the_expert_differ() -> None:
    """A return without a reason has no fault to show; a repair costs less than the price that the limit looks at."""
    differ = {case.case_id: answer(case)[1] for case in DATASET.cases if answer(case)[1] != case.expected_decision}
    assert differ == {"sa-002": ESCALATE, "sa-016": ESCALATE}


# --- the data ---


def test_the_cases_cover_what_a_support_desk_sees() -> None:
    categories = Counter(case.category for case in DATASET.cases)
    assert min(categories.values()) >= 4
    assert set(categories) == {
        *("refund", "return", "warranty", "shipping", "account_access", "fraud", "billing", "privacy"),
    }
    assert {case.expected_decision for case in DATASET.cases} == {*REQUESTS, DENY, ESCALATE, ASK}
    assert {len(case.evidence) for case in DATASET.cases} == {3, 4, 5, 6}


def test_no_ticket_and_no_evidence_stands_twice() -> None:
    tickets = Counter(case.question["ticket"] for case in DATASET.cases)
    texts = Counter(piece.text for case in DATASET.cases for piece in case.evidence)
    assert [text for text, times in (tickets + texts).items() if times > 1] == []


def test_every_reading_of_the_agent_is_used_by_a_case() -> None:
    steps = {
        (piece.kind, step["note"])
        for case in DATASET.cases
        for step in decide(asked(case).model_dump(mode="json"))["trace"]
        for piece in case.evidence
        if step.get("evidence_id") == piece.evidence_id
    }
    assert steps == {(kind, factor) for kind, _, factor, _ in READINGS}


def test_a_version_stands_for_its_digest() -> None:
    assert (DATASET.version, DATASET.digest) == (
        "1.0.0",
        "560bea6e9ed04ba54a713f42e220af2fc90f21d638015c03b510c96293354187",
    )
    assert dataset_digest("support-agent", DATASET.cases[:-1]) != DATASET.digest
    digests = [policy.digest for policy in (PRODUCTION, CANDIDATE, SAMPLED)]
    assert len(set(digests)) == 3


def test_a_run_is_not_told_what_is_expected() -> None:
    sent = asked(DATASET.case("sa-003")).encoded(key="k")
    assert b"expected" not in sent


# --- loading ---


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the data set, to be spoiled."""
    folder = tmp_path / "support-agent"
    folder.mkdir()
    for name in ("dataset.json", "cases.jsonl"):
        (folder / name).write_bytes((ROOT / "support-agent" / name).read_bytes())
    (tmp_path / "policies").mkdir()
    return tmp_path


def spoil(root: Path, line: int, change: dict[str, Any]) -> None:
    path = root / "support-agent" / "cases.jsonl"
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps(json.loads(lines[line - 1]) | change)
    path.write_text("\n".join(lines) + "\n")


def refusal(root: Path) -> str:
    with pytest.raises(DatasetInvalid) as caught:
        load_dataset("support-agent", root=root)
    return caught.value.message


@pytest.mark.parametrize("unknown", ["other", "", "../support-agent", "policies", "support-agent/", "."])
def test_an_unknown_id_is_refused_by_name(unknown: str) -> None:
    with pytest.raises(UnknownDataset, match=r"dataset_id: .* is none of support-agent"):
        load_dataset(unknown)
    with pytest.raises(UnknownPolicy, match=r"policy_id: .* is none of candidate-ai-policy, production-ai-policy"):
        load_policy(unknown)
    with pytest.raises(UnknownCase, match=r"case_id: support-agent 1\.0\.0 holds no "):
        DATASET.case(unknown)


def test_key_order_and_white_space_do_not_matter(root: Path) -> None:
    path = root / "support-agent" / "cases.jsonl"
    lines = [
        json.dumps(dict(reversed(json.loads(line).items())), indent=None) for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines))
    assert load_dataset("support-agent", root=root) == DATASET


def test_a_changed_case_under_the_same_version_is_refused(root: Path) -> None:
    spoil(root, 3, {"expected_decision": "refund"})
    assert refusal(root).startswith("dataset.json.digest (of cases.jsonl, version 1.0.0): is ")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"case_id": "sa-001"}, "cases.jsonl:7.case_id: sa-001 stands on line 1 already"),
        ({"case_id": ""}, "cases.jsonl:7.case_id: Value error, must match"),
        ({"evidence": []}, "cases.jsonl:7.evidence: Tuple should have at least 1 item"),
        ({"evidence": [{"evidence_id": "e", "kind": "k"}]}, "cases.jsonl:7.evidence[0].text: Field required"),
        (
            {"evidence": [{"evidence_id": "sa-002:order", "kind": "k", "text": "t"}]},
            "cases.jsonl:7.evidence[0].evidence_id: sa-002:order stands on line 2 already",
        ),
        ({"question": {"request": float("nan")}}, "cases.jsonl:7.question: Value error, value.request: must be finite"),
        ({"more": 1}, "cases.jsonl:7.more: Extra inputs are not permitted"),
    ],
)
def test_a_bad_case_is_refused_by_line_and_field(root: Path, change: dict[str, Any], problem: str) -> None:
    spoil(root, 7, change)
    assert refusal(root).startswith(problem)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "cases.jsonl:2.(whole): is not JSON"),
        ("{", "cases.jsonl:2.(whole): is not JSON"),
        ("[]", "cases.jsonl:2.(whole): must be a JSON object"),
        ('{"case_id": "a", "case_id": "b"}', "cases.jsonl:2.case_id: stands twice in its object"),
    ],
)
def test_a_malformed_line_is_refused_by_number(root: Path, line: str, problem: str) -> None:
    path = root / "support-agent" / "cases.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    assert refusal(root).startswith(problem)


def test_a_policy_under_another_name_is_refused(root: Path) -> None:
    text = (ROOT / "policies" / "production-ai-policy.json").read_text()
    (root / "policies" / "renamed.json").write_text(text)
    with pytest.raises(DatasetInvalid, match=r"renamed\.json\.policy_id: is production-ai-policy, must be renamed"):
        load_policy("renamed", root=root)
