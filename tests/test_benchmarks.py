"""What a run of the benchmarks concludes: each budget at, inside and beyond its limit, and the document's figures."""

import copy
import json
from typing import Any

import pytest

from benchmarks import report
from benchmarks.budgets import BUDGETS, judge
from benchmarks.figures import spread

MET: dict[str, Any] = {
    "jobs": {
        "ratios": {"ours_jobs_per_second": {"median": 0.9}, "ours_latency_p50": {"median": 1.15}},
        "shapes": {
            "bare": {"history_events": 11},
            "ours": {"history_events": 11, "pg_transactions": {"median": 4.02}},
        },
    },
    "running": {"renewals": {"statements_per_tick": 1.0}},
    "sweep": {"concurrency": 32, "lookups_0_ms": {"per_second": 500.0}, "lookups_50_ms": {"most_at_once": 32}},
    "launch": {"ratio": {"median": 0.9}},
    "rows": {
        "claim_ratios": {"1000 queued": 1.0, "1000000 queued": 1.3, "1000 queued beside 1000000 completed": 1.3},
        "reads_ms": {"list_jobs": {"ratio": 1.3}, "get_job": {"ratio": 0.9}},
    },
}

MISSED = {
    "jobs per second, of bare": (("jobs", "ratios", "ours_jobs_per_second", "median"), 0.89),
    "latency of one job (p50), of bare": (("jobs", "ratios", "ours_latency_p50", "median"), 1.16),
    "history events more than bare": (("jobs", "shapes", "ours", "history_events"), 12),
    "Postgres commits that write, per job": (("jobs", "shapes", "ours", "pg_transactions", "median"), 5.0),
    "renewal statements per tick": (("running", "renewals", "statements_per_tick"), 2.0),
    "candidates resolved per second, instant lookups": (("sweep", "lookups_0_ms", "per_second"), 499.0),
    "lookups at once, of the bound": (("sweep", "lookups_50_ms", "most_at_once"), 33),
    "launch rate, of bare starts": (("launch", "ratio", "median"), 0.89),
    "claim at the most queued rows, of 1,000": (("rows", "claim_ratios", "1000000 queued"), 1.31),
    "claim beside completed rows, of none": (("rows", "claim_ratios", "1000 queued beside 1000000 completed"), 1.31),
    "slowest read beside completed rows, of few": (("rows", "reads_ms", "list_jobs", "ratio"), 1.31),
}


def test_at_its_limit_each_budget_is_met() -> None:
    assert {each.name: each.met for each in judge(MET)} == {budget.name: True for budget in BUDGETS}


@pytest.mark.parametrize("name", MISSED)
def test_beyond_its_limit_a_budget_is_missed_and_no_other(name: str) -> None:
    path, value = MISSED[name]
    results = copy.deepcopy(MET)
    place = results
    for key in path[:-1]:
        place = place[key]
    assert path[-1] in place
    place[path[-1]] = value
    assert [each.name for each in judge(results) if not each.met] == [name]


def test_every_budget_has_a_case_beyond_its_limit() -> None:
    assert list(MISSED) == [budget.name for budget in BUDGETS]


def test_lookups_one_after_the_other_are_no_concurrency() -> None:
    results = copy.deepcopy(MET)
    results["sweep"]["lookups_50_ms"]["most_at_once"] = 1
    assert [each.name for each in judge(results) if not each.met] == ["lookups at once, of the bound"]


def test_what_a_run_left_out_is_neither_met_nor_missed() -> None:
    (judged,) = [each for each in judge({}) if each.name == "launch rate, of bare starts"]
    assert (judged.figure, judged.met) == (None, None)
    assert "not measured" in report.budget_table([judged])


def test_the_spread_of_samples() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0, "p99": 3.0, "n": 3}
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_the_document_shows_the_figures_of_the_last_full_run() -> None:
    text = report.DOCUMENT.read_text()
    assert text == report.rendered_document(text, json.loads(report.RESULTS.read_text()))
