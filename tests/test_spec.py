"""The model in spec/ and the code say the same: the transition table, and the trails that the suite leaves."""

import json
import re
import shutil
from copy import deepcopy
from typing import Any

import pytest

from durable_jobs.contract.states import ACTIVE, SETTLED, TERMINAL_EVENT, TRANSITIONS, UNRESOLVED, JobStatus
from spec.check import HERE, INVARIANTS, LIVENESS, MUTANTS, RULES, STEPS, config
from tests.spec_trails import STORED, Trail, refused

MODEL = (HERE / "Job.tla").read_text()


def words(text: str) -> set[str]:
    return set(re.findall(r'"(\w+)"', text))


def definition(name: str) -> str:
    """The text of a definition of the model, up to the next blank line or definition."""
    found = re.search(rf"^{name} ==(.*?)(?=^\w+(?:\([^)]*\))? ==|^$)", MODEL, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def test_the_model_has_the_transition_table() -> None:
    moves = re.findall(r"(\w+) \|-> \{([^}]*)\}", definition("Moves"))
    assert {JobStatus(source): words(targets) for source, targets in moves} == {
        source: {str(target) for start, target in TRANSITIONS if start is source} for source in JobStatus
    }


def test_the_model_has_the_statuses_and_their_events() -> None:
    sets = {"Active": ACTIVE, "Settled": SETTLED, "Unresolved": UNRESOLVED}
    assert {name: words(definition(name)) for name in sets} == {
        name: {str(status) for status in statuses} for name, statuses in sets.items()
    }
    events = dict(re.findall(r'(\w+) \|-> "(\w+)"', definition("TerminalEvent")))
    assert events == {str(status): str(event) for status, event in TERMINAL_EVENT.items()}


def test_each_mutant_breaks_a_rule_of_the_model_and_a_property_that_holds_without_it() -> None:
    broken = set(re.findall(r'Mut\("(\w+)"\)', MODEL))
    assert {run.mutant for run in MUTANTS} == broken
    for run in MUTANTS:
        assert any(run.breaks in config(rules) and run.bounds == rules.bounds for rules in RULES), run.name


def test_the_documentation_names_every_action_property_and_mutant() -> None:
    text = (HERE.parent / "docs" / "spec.md").read_text()
    steps = definition(r"Attempt\(a\)") + definition("Environment") + definition("Sweep")
    actions = set(re.findall(r"\b([A-Z][a-z]\w+)\b", steps)) - {"Workers", "Intents", "Verdicts", "Sweep"}
    assert {"Claim", "Mark", "SweepFence", "Relaunch"} <= actions
    wanted = actions | {*INVARIANTS, *STEPS, LIVENESS} | {run.mutant for run in MUTANTS}
    assert sorted(name for name in wanted if f"`{name}`" not in text) == []


FORGED = {
    "the boundary is crossed twice": ("dispatched", 2),
    "it is completed twice": ("completed", 2),
    "it is completed without a claim": ("claimed", 0),
}


def forged(trail: Trail, name: str, times: int) -> Trail:
    """The trail with its event of this name as many times over."""
    copy: dict[str, Any] = deepcopy(trail)
    copy["events"] = [each for event in copy["events"] for each in [event] * (times if event["name"] == name else 1)]
    return copy


@pytest.mark.skipif(shutil.which("java") is None, reason="TLC needs Java, and there is none on the path")
def test_recorded_trails_are_behaviours_of_the_model_and_forged_ones_are_not() -> None:
    recorded: list[Trail] = json.loads(STORED.read_text())
    happy = next(
        trail
        for trail in recorded
        if [each["name"] for each in trail["events"]] == ["claimed", "dispatched", "completed"]
    )
    at_large = [forged(happy, name, times) for name, times in FORGED.values()]
    found = refused([*recorded, *at_large])
    assert [recorded[at] for at in found if at < len(recorded)] == []
    assert [why for at, why in enumerate(FORGED, start=len(recorded)) if at not in found] == []
