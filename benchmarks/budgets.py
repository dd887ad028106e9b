"""The budgets of the design, and whether a run's figures meet them. Pure."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Budget:
    """One budget: `figure` is read from the results; `met` judges it."""

    name: str
    limit: str
    figure: Callable[[Results], float]
    met: Callable[[float], bool]


@dataclass(frozen=True)
class Judged:
    """A budget with its figure; `met` is None where the run did not measure it."""

    name: str
    limit: str
    figure: float | None
    met: bool | None


def at_least(limit: float) -> Callable[[float], bool]:
    return lambda figure: figure >= limit


def at_most(limit: float) -> Callable[[float], bool]:
    return lambda figure: figure <= limit


def _more_events(results: Results) -> float:
    shapes = results["jobs"]["shapes"]
    return float(shapes["ours"]["history_events"] - shapes["bare"]["history_events"])


def _claim_at_most_rows(results: Results) -> float:
    ratios = results["rows"]["claim_ratios"]
    return float(ratios[max((name for name in ratios if "beside" not in name), key=lambda name: int(name.split()[0]))])


def _claim_beside_completed(results: Results) -> float:
    ratios = results["rows"]["claim_ratios"]
    return float(next(ratio for name, ratio in ratios.items() if "beside" in name))


NOISE = 1.3
"""What a verb's time may grow by and still count as the same: the design's own figure for the claim."""

BUDGETS = (
    Budget(
        "jobs per second, of bare",
        "≥ 0.90",
        lambda it: it["jobs"]["ratios"]["ours_jobs_per_second"]["median"],
        at_least(0.9),
    ),
    Budget(
        "latency of one job (p50), of bare",
        "≤ 1.15",
        lambda it: it["jobs"]["ratios"]["ours_latency_p50"]["median"],
        at_most(1.15),
    ),
    Budget("history events more than bare", "0", _more_events, at_most(0)),
    Budget(
        "Postgres commits that write, per job",
        "4, ≤ 4.1 with the workers' own beats",
        lambda it: it["jobs"]["shapes"]["ours"]["pg_transactions"]["median"],
        at_most(4.1),
    ),
    Budget(
        "renewal statements per tick", "≤ 1", lambda it: it["running"]["renewals"]["statements_per_tick"], at_most(1.0)
    ),
    Budget(
        "candidates resolved per second, instant lookups",
        "≥ 500",
        lambda it: it["sweep"]["lookups_0_ms"]["per_second"],
        at_least(500),
    ),
    Budget(
        "lookups at once, of the bound",
        "> 0.5, ≤ 1",
        lambda it: it["sweep"]["lookups_50_ms"]["most_at_once"] / it["sweep"]["concurrency"],
        lambda figure: 0.5 < figure <= 1,
    ),
    Budget("launch rate, of bare starts", "≥ 0.90", lambda it: it["launch"]["ratio"]["median"], at_least(0.9)),
    Budget("claim at the most queued rows, of 1,000", "≤ 1.3", _claim_at_most_rows, at_most(NOISE)),
    Budget("claim beside completed rows, of none", "≤ 1.3", _claim_beside_completed, at_most(NOISE)),
    Budget(
        "slowest read beside completed rows, of few",
        "≤ 1.3",
        lambda it: max(each["ratio"] for each in it["rows"]["reads_ms"].values()),
        at_most(NOISE),
    ),
)


def judge(results: Results) -> list[Judged]:
    """Every budget against the results."""
    judged = []
    for budget in BUDGETS:
        try:
            figure = budget.figure(results)
        except KeyError:
            judged.append(Judged(budget.name, budget.limit, None, None))
        else:
            judged.append(Judged(budget.name, budget.limit, figure, budget.met(figure)))
    return judged
