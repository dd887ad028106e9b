"""Results as text and as a plot. `python -m benchmarks.report --write` puts the figures into docs/performance.md."""

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.budgets import Judged, judge
from benchmarks.figures import TITLES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
DOCUMENT = ROOT / "docs" / "performance.md"
PLOT = ROOT / "docs" / "performance.png"
MARKS = ("<!-- figures: rendered by python -m benchmarks.report --write -->", "<!-- /figures -->")

ROWS = (
    ("jobs per second", "jobs_per_second"),
    ("latency of one job, ms (p50)", "latency_ms"),
    ("latency of one job, ms (p99)", "latency_ms p99"),
    ("CPU per job, ms: client", "cpu_ms_client"),
    ("CPU per job, ms: worker", "cpu_ms_worker"),
    ("CPU per job, ms: Postgres", "cpu_ms_postgres"),
    ("CPU per job, ms: Temporal", "cpu_ms_temporal"),
    ("history events per job", "history_events"),
    ("Temporal actions per job", "actions"),
    ("Postgres commits that write, per job", "pg_transactions"),
    ("Postgres commits, per job", "pg_commits"),
    ("Postgres statements, per job", "pg_statements"),
    ("WAL bytes per job", "pg_wal_bytes"),
    ("bytes of tables and indexes per job", "stored_bytes"),
)


def shown(value: float | None) -> str:
    """A figure for a table: three digits that count."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _figure(shape: Mapping[str, Any], key: str) -> str:
    name, _, what = key.partition(" ")
    figure = shape.get(name)
    if not isinstance(figure, dict):
        return shown(figure)
    if what or name == "latency_ms":
        return shown(figure[what or "median"])
    return f"{shown(figure['median'])} ({shown(figure['min'])}…{shown(figure['max'])})"


def budget_table(judged: list[Judged]) -> str:
    """Each budget with its figure and whether it is met."""
    words = {True: "met", False: "missed", None: "not measured"}
    rows = [[each.name, each.limit, shown(each.figure), words[each.met]] for each in judged]
    return table(["budget", "limit", "figure", ""], rows)


def render(results: Mapping[str, Any]) -> str:
    """All figures of a run, in Markdown."""
    machine = results["machine"]
    load = " → ".join(shown(each) for each in machine["load"])
    parts = [
        f"{machine['date']}, {machine['cores']} cores ({machine['cpu']}), {machine['size']} run of"
        f" {machine['seconds']:.0f} s, load {load}. PostgreSQL {machine['postgres']}, Temporal server"
        f" {machine['temporal']}, SDK {machine['temporalio']}, Python {machine['python']}.",
    ]
    if machine["load"][0] > machine["cores"] / 2:
        parts.append(
            "Other work had the machine: times, rates and their ratios say little here; counts and CPU per job hold."
        )
    parts.append(budget_table(judge(results)))
    if "jobs" in results:
        shapes = results["jobs"]["shapes"]
        rows = [[label, *(_figure(shapes[shape], key) for shape in shapes)] for label, key in ROWS]
        for label, key in (("jobs per second", "jobs_per_second"), ("CPU of all processes", "cpu_ms_all")):
            ratios = (results["jobs"]["ratios"][f"{shape}_{key}"]["median"] for shape in list(shapes)[1:])
            rows.append([f"{label}, of bare", "1", *map(shown, ratios)])
        parts += [
            "Whole jobs, medians of the rounds with the least and the most:",
            table(["", *(TITLES.get(shape, shape) for shape in shapes)], rows),
        ]
    if "rows" in results:
        found = results["rows"]
        rows = [
            [name, shown(each["median"]), shown(each["p99"]), shown(found["claim_ratios"][name])]
            for name, each in found["claim_ms"].items()
        ]
        parts += ["The claim of the next job, ms:", table(["rows", "p50", "p99", "ratio"], rows)]
        rows = [
            [name, shown(each["few"]["median"]), shown(each["many"]["median"]), shown(each["ratio"])]
            for name, each in found["reads_ms"].items()
        ]
        many = f"beside {found['terminal_rows']:,} completed"
        parts += ["Reads, ms:", table(["verb", "1,000 rows", many, "ratio"], rows)]
    if "running" in results:
        found = results["running"]
        renewals = found["renewals"]
        rows = [
            [shape, *(shown(found[f"memory_{shape}"][key]) for key in ("empty_mb", "full_mb", "kb_per_job"))]
            for shape in ("bare", "ours")
        ]
        parts += [
            f"A worker with {found['jobs']:,} running jobs:",
            table(["", "empty, MB", "full, MB", "KB per job"], rows),
            f"Renewing their leases: {renewals['statements']} statements in {renewals['ticks']} ticks, "
            f"{shown(renewals['tick_ms']['median'])} ms a tick, {shown(renewals['server_ms'])} ms of it in the server.",
        ]
    rows = []
    for key, each in results.get("sweep", {}).items():
        if key.startswith("lookups"):
            rows.append([f"candidates resolved, lookups of {key.split('_')[1]} ms", shown(each["per_second"])])
    if "launch" in results:
        rates = results["launch"]["per_second"]
        rows.append(["missing workflows launched", shown(rates["ours"]["median"])])
        rows.append(["bare Temporal's own starts", shown(rates["bare"]["median"])])
    rows += [[name, shown(each["median"])] for name, each in results.get("doors", {}).get("per_second", {}).items()]
    if rows:
        parts += ["Rates, per second:", table(["", "per second"], rows)]
    if "scaling" in results:
        rows = [
            [
                count,
                shown(each["jobs_per_second"]),
                shown(each["ceiling"]),
                *(shown(each["cores_used"][name]) for name in ("workers", "postgres", "temporal")),
            ]
            for count, each in results["scaling"]["workers"].items()
        ]
        head = ["workers", "jobs per second", "slots allow", "cores: workers", "Postgres", "Temporal"]
        parts += ["Jobs of 200 ms on workers of four slots each:", table(head, rows)]
    return "\n\n".join(parts)


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Throughput of the shapes, and claim time against rows."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who plots needs it

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    shapes = results["jobs"]["shapes"]
    medians = [shapes[shape]["jobs_per_second"]["median"] for shape in shapes]
    spreads = [shapes[shape]["jobs_per_second"] for shape in shapes]
    errors = [[each["median"] - each["min"] for each in spreads], [each["max"] - each["median"] for each in spreads]]
    colours = ["#5f6673", "#2f6fde", "#b08d1a", "#8a93a3"]
    bars = left.bar([TITLES.get(shape, shape) for shape in shapes], medians, yerr=errors, capsize=4, color=colours)
    left.bar_label(bars, fmt="%.1f", label_type="center", color="white")
    left.set_title("Jobs per second, 50 submitters, 100 slots")
    left.set_ylim(bottom=0)
    claims = {name: each for name, each in results["rows"]["claim_ms"].items() if "beside" not in name}
    rows = [int(name.split()[0]) for name in claims]
    right.plot(rows, [each["median"] for each in claims.values()], "o-", color="#2f6fde", label="p50")
    right.plot(rows, [each["p99"] for each in claims.values()], "o:", color="#8a8f98", label="p99")
    beside = next(each for name, each in results["rows"]["claim_ms"].items() if "beside" in name)
    label = f"1,000 rows beside {results['rows']['terminal_rows']:,} completed, p50"
    right.plot([1000], [beside["median"]], "x", color="#c9a227", markersize=9, label=label)
    right.set_xscale("log")
    right.set_ylim(bottom=0)
    right.set_xlabel("queued rows")
    right.set_title("Claim of the next job, ms")
    right.legend(loc="best", frameon=False)
    figure.savefig(path, dpi=110)


def rendered_document(text: str, results: Mapping[str, Any]) -> str:
    """The document with its figures put in between the marks."""
    before, after = MARKS
    pattern = re.compile(re.escape(before) + ".*?" + re.escape(after), re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no {before} in the document")
    return pattern.sub(lambda _: f"{before}\n{render(results)}\n{after}", text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the figures into docs/performance.md")
    parser.add_argument("--check", action="store_true", help="fail where docs/performance.md shows other figures")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    if arguments.write or arguments.check:
        text = DOCUMENT.read_text()
        wanted = rendered_document(text, results)
        if arguments.check and text != wanted:
            print(f"{DOCUMENT.name} does not show the figures of {RESULTS.name}: python -m benchmarks.report --write")
            return 1
        DOCUMENT.write_text(wanted)
    else:
        print(render(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
