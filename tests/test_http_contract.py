"""The running API against its own OpenAPI document: no failure of the server, no answer that is not documented."""

import asyncio
from collections import Counter
from typing import Any
from uuid import UUID

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from durable_jobs import DurableJobService
from durable_jobs.dev import DevStack
from tests.conftest import Specs
from tests.http_api import serving, settings_for, token
from tests.support import ERROR, claimed, running
from tests.sweeping import escalated, timed_out

EXAMPLES = 12
"""For each operation, of requests that fit the document and of such that don't."""


# A schema can't say all of the data rules (no U+0000 anywhere, times within two centuries, 1.0 is no priority): what
# fits it may still be refused, so one check is left out. All others hold, of refusals and of answers alike.


def explore(url: str, secrets: dict[str, str], job_ids: list[UUID]) -> Counter[int]:
    """Ask each operation what Schemathesis makes of it; returns how often each status was answered."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    answered: Counter[int] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        secret = secrets["queues and workers" if "queues and workers" in operation.tags else "jobs"]
        for mode in GenerationMode:
            # What takes nothing can't be given what doesn't fit.
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
                continue
            ask(operation, mode, secret, job_ids, answered)
    return answered


def ask(operation: Any, mode: GenerationMode, secret: str, job_ids: list[UUID], answered: Counter[int]) -> None:
    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.sampled_from([None, *job_ids]))
    def examine(case: Any, known: UUID | None) -> None:
        if known is not None and mode is GenerationMode.POSITIVE and "job_id" in (case.path_parameters or {}):
            case.path_parameters["job_id"] = str(known)
        if isinstance(case.query, dict) and "wait" in case.query and mode is GenerationMode.POSITIVE:
            case.query["wait"] = 0  # none of these jobs moves by itself
        response = case.call_and_validate(
            headers={"Authorization": f"Bearer {secret}"}, excluded_checks=[positive_data_acceptance]
        )
        answered[response.status_code] += 1

    examine()


async def test_schemathesis(
    database_url: str, durable_jobs_stack: DevStack, service: DurableJobService, spec: Specs
) -> None:
    jobs = [(await service.create_job(spec())).job.id]
    jobs += [(await running(service, spec())).job_id]
    jobs += [(await escalated(service, spec())).id, (await timed_out(service, spec())).id]
    done, failed = await claimed(service, spec()), await claimed(service, spec())
    await service.complete_job(done, {"n": 1})
    await service.fail_job(failed, ERROR, retryable=False)
    jobs += [done.job_id, failed.job_id]
    secrets = {"jobs": await token(service, projects=["alpha"]), "queues and workers": await token(service)}
    async with serving(settings_for(database_url, durable_jobs_stack, http_tokens="required")) as url:
        answered = await asyncio.to_thread(explore, url, secrets, jobs)
    # It got beyond the refusals.
    assert {200, 201, 404, 409, 422} <= answered.keys()
    assert answered[200] > 50
