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


async def played(stage: Stage, story: str, *targets: Target | None) -> list[Run]:
    """All of them without a problem, and each crash came about."""
    slots = asyncio.Semaphore(AT_A_TIME)

    async def one(target: Target | None) -> Run:
        async with slots:
            return await play(stage, BY_NAME[story], target)

    runs = await asyncio.gather(*map(one, targets))
    assert {str(run.target): run.problems for run in runs if run.problems} == {}
    assert [run.reached for run in runs] == [target is not None for target in targets]
    return runs


def numbers(run: Run, role: str, what: str) -> list[int]:
    """The numbers of the points of that name, in a run without a crash."""
    return [number for number, (_, passed) in enumerate(run.points[role], start=1) if passed.startswith(what)]


async def test_killed_round_the_claim_the_boundary_the_call_and_the_outcome(stage: Stage) -> None:
    (clean,) = await played(stage, "dispatching", None)
    commits, (call,) = numbers(clean, STORY, "COMMIT"), numbers(clean, STORY, "provider")
    claim = commits[0]
    boundary = max(number for number in commits if number < call)
    outcome = min(number for number in commits if number > call)
    fates = {
        Target(STORY, claim, "after"): ("completed", 1),
        Target(STORY, boundary, "before"): ("completed", 1),
        Target(STORY, boundary, "after"): ("failed", 0),  # the operator's word, as the provider knows of no call
        Target(STORY, call, "after"): ("completed", 1),
        Target(STORY, outcome, "before"): ("completed", 1),
        Target(STORY, outcome, "after"): ("completed", 1),
    }
    runs = await played(stage, "dispatching", *fates)
    assert {run.target: (run.ended, run.sends) for run in runs} == fates


async def test_stopped_before_its_outcome_and_continued_beside_the_next_holder(stage: Stage) -> None:
    (clean,) = await played(stage, "plain", None)
    outcome = numbers(clean, STORY, "BEGIN")[-1]
    (run,) = await played(stage, "plain", Target(STORY, outcome, "stop"))
    assert run.ended == "completed"


async def test_killed_in_mid_sweep(stage: Stage) -> None:
    (clean,) = await played(stage, "swept-uncertain", None)
    lookup = numbers(clean, SWEEP, "provider")[0]
    resolution = min(number for number in numbers(clean, SWEEP, "COMMIT") if number > lookup)
    targets = [Target(SWEEP, lookup, "after"), Target(SWEEP, resolution, "after")]
    runs = await played(stage, "swept-uncertain", *targets)
    # The call of the earlier holder, and that of a follow-up.
    assert [(run.ended, run.sends) for run in runs] == [("completed", 2)] * 2
