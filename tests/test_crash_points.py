"""The most telling of the crash points (`make crash` has them all): a worker dies there, or stands still."""

import asyncio
from pathlib import Path

import pytest_asyncio
from temporalio.client import Client

from durable_jobs.dev import DevStack
from tests.crash.points import STORY, SWEEP, Target
from tests.crash.shapes import BY_NAME
from tests.crash.stage import Stage
from tests.crash.story import Run, play

pytest_plugins = ["tests.processes.fixtures"]

AT_A_TIME = 4


@pytest_asyncio.fixture
async def stage(
    durable_jobs_stack: DevStack,
    durable_jobs_template: str,
    temporal_client: Client,
    provider_url: str,
    tmp_path: Path,
) -> Stage:
    stage = Stage(durable_jobs_stack.database_url, durable_jobs_template, temporal_client, provider_url, tmp_path)
    await stage.set_provider()
    return stage


async def played(stage: Stage, *wanted: tuple[str, Target | None]) -> list[Run]:
    """All of them without a problem, and each crash came about."""
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(story: str, target: Target | None) -> Run:
        async with slots:
            return await play(stage, BY_NAME[story], target)

    runs = await asyncio.gather(*(one(*each) for each in wanted))
    assert {f"{run.story} {run.target}": run.problems for run in runs if run.problems} == {}
    assert [run.reached for run in runs] == [target is not None for _, target in wanted]
    return runs


def numbers(run: Run, role: str, what: str) -> list[int]:
    """The numbers of the points of that name, in a run without a crash."""
    return [number for number, (_, passed) in enumerate(run.points[role], start=1) if passed.startswith(what)]


async def test_a_worker_that_dies_or_stands_still_at_a_telling_point_leaves_one_whole_story(stage: Stage) -> None:
    # One test, as most of its time are waits for leases, which can be had side by side.
    clean = await played(stage, ("dispatching", None), ("plain", None), ("swept-uncertain", None))
    commits, (call,) = numbers(clean[0], STORY, "COMMIT"), numbers(clean[0], STORY, "provider")
    claim = commits[0]
    boundary = max(number for number in commits if number < call)
    outcome = min(number for number in commits if number > call)
    outcome_begins = numbers(clean[1], STORY, "BEGIN")[-1]
    lookup = numbers(clean[2], SWEEP, "provider")[0]
    resolution = min(number for number in numbers(clean[2], SWEEP, "COMMIT") if number > lookup)
    fates = {
        ("dispatching", Target(STORY, claim, "after")): ("completed", 1),
        ("dispatching", Target(STORY, boundary, "before")): ("completed", 1),
        # The operator's word, as the provider knows of no call.
        ("dispatching", Target(STORY, boundary, "after")): ("failed", 0),
        ("dispatching", Target(STORY, call, "after")): ("completed", 1),
        ("dispatching", Target(STORY, outcome, "before")): ("completed", 1),
        ("dispatching", Target(STORY, outcome, "after")): ("completed", 1),
        # Continued while another one holds the job.
        ("plain", Target(STORY, outcome_begins, "stop")): ("completed", 0),
        # The earlier holder's call, and that of a follow-up.
        ("swept-uncertain", Target(SWEEP, lookup, "after")): ("completed", 2),
        ("swept-uncertain", Target(SWEEP, resolution, "after")): ("completed", 2),
    }
    runs = await played(stage, *fates)
    assert {(run.story, run.target): (run.ended, run.sends) for run in runs} == fates
