"""`make proof`: the three parts, a JSON line for each result, and a JSON object at the end; 1 on any violation.

    python -m tests.proof --parts model network         make proof ARGS="--parts histories --histories 2 --seconds 20"

model       the verbs against the reference model, by Hypothesis (`tests/test_model.py`): 500 examples of 50 steps
histories   recorded histories of 50 clients under the faults of `make soak`, judged by a checker: 20 of a minute
network     all tests of network, process and clock faults, those that take long as well, and kills in the application

It runs from the folder that it is started in, with the source that lies there: also a copy, such as a mutated one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.model_machine import Machine
from tests.proof.histories import run_histories
from tests.servers import scratch_servers
from tests.soak.__main__ import say
from tests.test_model import hold_against_the_model

NETWORK = [
    "tests/test_network_faults.py",
    "tests/test_black_hole.py",
    "tests/test_clock_skew.py",
    "tests/test_stale_process.py",
    "tests/test_worker_killed.py",
    "tests/test_outcome_writing.py",
    "tests/app/test_redelivery.py",
]
Line = dict[str, Any]


def model(chosen: argparse.Namespace) -> Line:
    violation: Exception | None = None
    with scratch_servers(persistent=False) as stack:
        try:
            hold_against_the_model(stack.database_url, examples=chosen.examples, steps=chosen.steps)
        except Exception as error:
            violation = error
            say("violation: " + "".join(traceback.format_exception(error)))
    answers = dict(sorted(Machine.counts.items()))
    line: Line = {
        "part": "model",
        "examples": chosen.examples,
        "steps": chosen.steps,
        "compared": sum(answers.values()),
    }
    return line | {"kinds_of_answers": len(answers), "violations": int(violation is not None)}


def histories(chosen: argparse.Namespace) -> Line:
    lines = []
    for line in run_histories(chosen.histories, chosen.seconds, chosen.seed):
        say(json.dumps(line))
        lines.append(line)
    told: Line = {"part": "histories", "histories": len(lines), "seconds_each": chosen.seconds}
    told["operations"] = sum(line["history"]["operations"] for line in lines)
    told["unknown"] = sum(line["history"]["unknown"] for line in lines)
    told["jobs"] = sum(line["jobs"] for line in lines)
    told["faults"] = sum(sum(line["faults"].values()) for line in lines)
    return told | {"violations": sum(line["violations"] for line in lines)}


def network(chosen: argparse.Namespace) -> Line:
    """In a process of its own, as pytest runs them; every marker."""
    with tempfile.TemporaryDirectory(prefix="durable-jobs-proof-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "proof or not proof", f"--junitxml={report}", *NETWORK]
        code = subprocess.run(command, check=False).returncode
        suite = next(iter(ET.parse(report).getroot())).attrib if report.exists() else {}
    broken = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    line: Line = {"part": "network", "tests": int(suite.get("tests", 0)), "skipped": int(suite.get("skipped", 0))}
    return line | {"violations": broken or int(code != 0)}


PARTS: dict[str, Callable[[argparse.Namespace], Line]] = {
    "model": model,
    "histories": histories,
    "network": network,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--examples", type=int, default=500, help="of the model-based test")
    parser.add_argument("--steps", type=int, default=50, help="at most in each example")
    parser.add_argument("--histories", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60, help="the length of each history, under faults")
    parser.add_argument("--seed", type=int, default=1, help="of the first history; each next one has the next")
    chosen = parser.parse_args()
    lines = []
    for name in chosen.parts:
        began = time.monotonic()
        line = PARTS[name](chosen)
        lines.append(line | {"took_seconds": round(time.monotonic() - began, 1)})
        say(json.dumps(lines[-1]))
    violations = sum(line["violations"] for line in lines)
    say(json.dumps({"parts": {line["part"]: line for line in lines}, "violations": violations}))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
