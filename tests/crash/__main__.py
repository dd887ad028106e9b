"""Every story, with a worker that dies at each of its points in turn, until it passes them all.

    python -m tests.crash --shape dispatching --only 7         make crash ARGS="--shape dispatching --only 7"

For each story (see `shapes.py`) and each role whose points it takes: one run without a crash, which shows the points;
then for N = 1, 2, 3 … a run in which the worker is killed just before point N, and one in which it is killed just
after it, on until a run passes its N-th point no more; for some stories also one in which it is stopped at point N
while another worker goes on, and continued. After a statement that hangs on a COMMIT nothing is left but what there is
before the next point, so that only those are run.

Each run is a JSON line; the last line is one JSON object. After a violation the exit code is 1, and the logs of its
processes are kept where its line says.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

from examples.research.processes import Children
from tests.crash.points import Target
from tests.crash.shapes import BY_NAME, STORIES, Story
from tests.crash.stage import Stage
from tests.crash.story import Run, play
from tests.servers import own_servers, scratch_folder, template_database


class Crashes:
    """All runs, so many at a time."""

    def __init__(self, stage: Stage, parallel: int, only: int | None) -> None:
        self._stage = stage
        self._slots = asyncio.Semaphore(parallel)
        self._only = only
        self.runs: list[Run] = []
        self.points: dict[str, int] = {}
        self.by_story: dict[str, Counter[str]] = {}

    async def of_story(self, story: Story) -> None:
        clean = await self._play(story, None)
        for role in story.roles:
            points = clean.points.get(role, [])[: story.most]
            self.points[f"{story.name}/{role}"] = len(points)
            say({"story": story.name, "role": role, "points": [what for _, what in points]})
            async with asyncio.TaskGroup() as group:
                for number, (pending, _) in enumerate(points, start=1):
                    if self._only not in (None, number):
                        continue
                    for act in ("before", *(() if pending else ("after",)), *(("stop",) if story.stops else ())):
                        group.create_task(self._play(story, Target(role, number, act)))
                if not story.most and not self._only:
                    group.create_task(self._beyond(story, role, len(points) + 1))

    async def _beyond(self, story: Story, role: str, number: int) -> None:
        """A run passes as many points as its waits have it: on until one is not reached."""
        while (await self._play(story, Target(role, number, "before"))).reached:
            number += 1

    async def _play(self, story: Story, target: Target | None) -> Run:
        async with self._slots:
            run = await play(self._stage, story, target)
        self.runs.append(run)
        counts = self.by_story.setdefault(story.name, Counter())
        counts["runs"] += 1
        counts["crashed"] += run.reached
        counts["violations"] += bool(run.problems)
        counts[run.ended] += 1
        line: dict[str, Any] = {"story": story.name, "at": str(target or "nowhere"), "reached": run.reached}
        if target and len(passed := run.points.get(target.role, [])) >= target.number:
            line["point"] = passed[target.number - 1][1]
        line |= {"ended": run.ended, "sends": run.sends, "seconds": run.seconds}
        say(line | ({"violations": run.problems, "logs": run.logs} if run.problems else {}))
        return run


def say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


@asynccontextmanager
async def stage_of_its_own(folder: Path) -> AsyncIterator[Stage]:
    """One Postgres, one Temporal server and one provider for all runs."""
    quiet = LoggingConfig(filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"))
    with own_servers(folder / "servers", persistent=False) as stack:
        runtime = Runtime(telemetry=TelemetryConfig(logging=quiet))
        temporal = await Client.connect(stack.temporal_address, namespace=stack.namespace, runtime=runtime)
        async with Children(folder, os.environ) as children:
            ledger = str(folder / "provider.sqlite3")
            provider = await children.start("provider", "examples.research.provider", "--database", ledger)
            url = await provider.prints(r"listening on (\S+)")
            template = await asyncio.to_thread(template_database, stack)
            stage = Stage(stack.database_url, template, temporal, url, folder)
            await stage.set_provider()
            yield stage


async def main(arguments: argparse.Namespace, folder: Path) -> int:
    started = time.monotonic()
    playing = asyncio.current_task()
    assert playing is not None
    for number in (signal.SIGINT, signal.SIGTERM):  # all processes are ended with us, also where a time limit ends us
        asyncio.get_running_loop().add_signal_handler(number, playing.cancel)
    async with stage_of_its_own(folder) as stage:
        crashes = Crashes(stage, arguments.parallel, arguments.only)
        stories = [BY_NAME[name] for name in arguments.shape] or STORIES
        await asyncio.gather(*map(crashes.of_story, stories))
    runs = crashes.runs
    broken = [run for run in runs if run.problems]
    say(
        {
            "points": crashes.points,
            "runs": len(runs),
            "crashed": sum(run.reached for run in runs),
            "stories": crashes.by_story,
            "seconds": round(time.monotonic() - started, 1),
            "violations": len(broken),
        }
    )
    return 1 if broken else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", action="append", default=[], choices=BY_NAME, help="one story, or several; all")
    parser.add_argument("--only", type=int, metavar="N", help="point N alone")
    parser.add_argument("--parallel", type=int, default=2 * (os.cpu_count() or 1), help="runs at a time")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = arguments()
    place = scratch_folder("durable-jobs-crash-")
    logging.basicConfig(filename=place / "crash.log", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    code = 2
    try:
        code = asyncio.run(main(chosen, place))
    finally:
        if code == 0:
            shutil.rmtree(place, ignore_errors=True)
    sys.exit(code)
