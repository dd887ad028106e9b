"""The verbs against the reference model of `tests.model`, by Hypothesis; `make proof` runs many more examples."""

import asyncio
from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from durable_jobs import Database, DurableJobService
from tests.model_machine import Machine

EXAMPLES, STEPS = 30, 50


def hold_against_the_model(database_url: str, *, examples: int, steps: int) -> None:
    """Raises what Hypothesis does for an example, shrunk, in which the service and the model differ."""
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    with asyncio.Runner() as runner:
        database = Database(database_url, pool_size=2)
        try:
            run_state_machine_as_test(partial(Machine, runner, DurableJobService(database)), settings=chosen)
        finally:
            runner.run(database.close())


def test_the_verbs_are_the_models(database_url: str) -> None:
    hold_against_the_model(database_url, examples=EXAMPLES, steps=STEPS)
