"""Histories under faults: `make proof ARGS="--parts histories --histories 2 --seconds 20"`.

Each is a run of the soak, its servers, workers, provider and faults, with the clients of `tests.proof.clients`, whose
every call is recorded; then `tests.proof.checker` judges the history, and the soak its own invariants.
"""

import argparse
import asyncio
import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.proof.checker import summary, violations
from tests.proof.clients import RecordedClients
from tests.proof.history import History
from tests.servers import scratch_folder
from tests.soak.__main__ import say, soak

JOBS_PER_SECOND, BY_HAND_PER_SECOND = 3.0, 2.0
"""What two cores settle while they are broken every few seconds."""


async def one_history(seed: int, seconds: float, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The line of one history, and its violations. Its file is `history.jsonl` in the folder."""
    arguments = argparse.Namespace(
        jobs=int(seconds * JOBS_PER_SECOND), workers=3, seconds=seconds, limit=300.0, seed=seed, keep=False
    )
    with History(folder / "history.jsonl") as history:
        clients = partial(RecordedClients, history=history, seconds=seconds, by_hand=int(seconds * BY_HAND_PER_SECOND))
        async with soak(arguments, folder, clients) as run:
            line, problems = await run.run()
            problems += violations(history.operations, run.found)
    kept = ("seed", "jobs", "statuses", "faults", "sends", "late_results", "reconciled", "seconds")
    told = {"part": "histories", **{name: line[name] for name in kept}}
    return told | {"history": summary(history.operations, seconds), "violations": len(problems)}, problems


def run_histories(count: int, seconds: float, seed: int) -> Iterator[dict[str, Any]]:
    """The line of each, as it ends. The servers' logs and the history of one that has violations are kept."""
    for number in range(count):
        folder = scratch_folder("durable-jobs-history-")
        handler = logging.FileHandler(folder / "clients.log")
        logging.getLogger().addHandler(handler)
        try:
            line, problems = asyncio.run(one_history(seed + number, seconds, folder))
            for problem in problems:
                say(f"violation: {problem}")
            if problems:
                say(f"the history and the logs are in {folder}")
            else:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()
        yield line
