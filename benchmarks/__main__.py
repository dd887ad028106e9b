"""Measure every budget in one run: `python -m benchmarks`.

A full run writes benchmarks/results.json, the figures of docs/performance.md and its plot; a quick or partial one
writes results and plot under build/benchmarks/. The exit code is 1 where a budget is missed.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg

from benchmarks import report
from benchmarks.budgets import judge
from benchmarks.doors import measure_doors
from benchmarks.jobs import measure_jobs, measure_scaling
from benchmarks.rows import measure_rows
from benchmarks.running import measure_running
from benchmarks.stack import SETTINGS, Stack
from benchmarks.sweeps import measure_launch, measure_sweep
from durable_jobs._servers import temporal_binary
from tests.servers import scratch_folder

Section = Callable[[Stack], Awaitable[dict[str, Any]]]

FULL: dict[str, Section] = {
    "jobs": lambda it: measure_jobs(it, jobs=300, rounds=4, samples=80),
    "scaling": lambda it: measure_scaling(it, jobs=60, workers=(1, 2, 4, 8)),
    "rows": lambda it: measure_rows(it, sizes=(1000, 100_000, 1_000_000), terminal=1_000_000, calls=200),
    "sweep": lambda it: measure_sweep(it, candidates=10_000, milliseconds=(0, 50)),
    "launch": lambda it: measure_launch(it, rows=10_000, rounds=5),
    "doors": lambda it: measure_doors(it, singles=200, bulk=2000, rounds=3),
    "running": lambda it: measure_running(it, jobs=1000, ticks=5),
}
QUICK: dict[str, Section] = {
    "jobs": lambda it: measure_jobs(it, jobs=100, rounds=3, samples=15),
    "rows": lambda it: measure_rows(it, sizes=(1000, 100_000), terminal=100_000, calls=60),
    "sweep": lambda it: measure_sweep(it, candidates=1000, milliseconds=(0, 50)),
    "launch": lambda it: measure_launch(it, rows=900, rounds=3),
    "doors": lambda it: measure_doors(it, singles=50, bulk=500, rounds=2),
    "running": lambda it: measure_running(it, jobs=150, ticks=2),
}


def facts(stack: Stack, size: str) -> dict[str, Any]:
    """What the figures hold for."""
    with psycopg.connect(stack.postgres.url) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    said = subprocess.run([str(temporal_binary()), "--version"], capture_output=True, text=True, check=True).stdout
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "size": size,
        "cores": os.cpu_count(),
        "cpu": models[0].split(": ")[1] if models else platform.machine(),
        "python": platform.python_version(),
        "postgres": row[0] if row else "",
        "postgres_settings": SETTINGS,
        "temporal": said.split("Server ")[-1].split(",")[0].rstrip(")\n"),
        **{name: version(name) for name in ("temporalio", "psycopg", "sqlalchemy")},
        "load": [os.getloadavg()[0]],
    }


async def measure(sections: dict[str, Section], size: str) -> dict[str, Any]:
    folder = scratch_folder("durable-jobs-bench-")
    began = time.perf_counter()
    try:
        with Stack(folder).running() as stack:
            results: dict[str, Any] = {"machine": facts(stack, size)}
            for name, section in sections.items():
                started = time.perf_counter()
                results[name] = await section(stack)
                results[name]["seconds"] = time.perf_counter() - started
                results["machine"]["load"].append(os.getloadavg()[0])
                print(f"{name}: {results[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results["machine"]["seconds"] = time.perf_counter() - began
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", default=os.environ.get("BENCH") == "quick")
    parser.add_argument("--only", nargs="+", choices=list(FULL), help="these sections alone")
    arguments = parser.parse_args()
    sections = QUICK if arguments.quick else FULL
    if arguments.only:
        sections = {name: section for name, section in (FULL | sections).items() if name in arguments.only}
    results = asyncio.run(measure(sections, "quick" if arguments.quick else "full"))
    if arguments.quick or arguments.only:
        place = report.ROOT / "build" / "benchmarks"
        place.mkdir(parents=True, exist_ok=True)
        results_file, plot_file = place / "results.json", place / "performance.png"
    else:
        results_file, plot_file = report.RESULTS, report.PLOT
    results_file.write_text(json.dumps(results, indent=1) + "\n")
    if "jobs" in results and "rows" in results:
        report.plot(results, plot_file)
    if results_file == report.RESULTS:
        report.DOCUMENT.write_text(report.rendered_document(report.DOCUMENT.read_text(), results))
    judged = judge(results)
    print(report.render(results))
    for each in judged:
        if each.met is not None:
            print(f"{'met' if each.met else 'missed'}: {each.name}: {report.shown(each.figure)} ({each.limit})")
    return 1 if any(each.met is False for each in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
