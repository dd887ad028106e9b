"""A replay on a model: a call to a provider, behind the boundary, found again when its answer is lost."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from durable_jobs import DurableJobs, JobStatus
from durable_jobs.contract.errors import JobFailedError
from tests.app.conftest import AppWorker, Submit
from tests.app.providers import Model
from tests.app.test_replays import DATASET, PRODUCTION, counts, rows
from tests.http_api import served
from tests.probes import eventually

OUTCOME = {"decision": "refund", "score": 0.25, "evidence_used": [], "trace": []}


@pytest.fixture
def model() -> Model:
    return Model(json.dumps(OUTCOME))


@pytest_asyncio.fixture
async def provider_url(model: Model) -> AsyncIterator[str]:
    async with served(model.app) as url:
        yield f"{url}/v1"


@pytest.mark.parametrize("lost", [False, True])
async def test_a_replay_asks_the_model_once(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    model: Model,
    provider_url: str,
    lost: bool,
) -> None:
    model.loses = lambda _: lost
    async with app_worker(provider_url=provider_url):
        await (await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)).result(120)
        (execution,) = rows(product_url, "SELECT id::text FROM governance.executions WHERE case_id = 'sa-007'")
        handle = await submit("replay_execution", execution_id=execution["id"], runtime="model")
        result = await handle.result(timeout=60)
        assert (result["decision"], result["score"]) == ("refund", "0.25")

        async def evaluation() -> Any:
            return await jobs.service.find_by_idempotency_key("acme", "alpha", f"{handle.id}:evaluation")

        drift = await jobs.handle((await eventually(evaluation, "the evaluation")).id).result(timeout=60)
        assert drift["drift"] == "score"
    assert model.sent == [f"replay:{handle.id}"]
    assert ((await handle.job()).reconciliation is not None) is lost
    (produced,) = rows(product_url, "SELECT * FROM governance.executions WHERE runtime = 'model'")
    assert (str(produced["id"]), produced["operation_key"]) == (result["produced_execution_id"], model.sent[0])
    assert counts(product_url)["replays"] == 1


async def test_an_answer_that_is_no_outcome_fails_the_replay(
    product_url: str, app_worker: AppWorker, submit: Submit, model: Model, provider_url: str
) -> None:
    model.answer = json.dumps(OUTCOME | {"score": 7})
    async with app_worker(provider_url=provider_url):
        await (await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)).result(120)
        (execution,) = rows(product_url, "SELECT id::text FROM governance.executions WHERE case_id = 'sa-007'")
        handle = await submit("replay_execution", execution_id=execution["id"], runtime="model")
        with pytest.raises(JobFailedError) as failed:
            await handle.result(timeout=60)
    assert (failed.value.status, failed.value.error_code) == (JobStatus.FAILED, "OUTCOME_INVALID")
    assert len(model.sent) == 1
    assert counts(product_url)["replays"] == 0


async def test_without_a_provider_there_is_no_model(product_url: str, app_worker: AppWorker, submit: Submit) -> None:
    async with app_worker():
        await (await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)).result(120)
        (execution,) = rows(product_url, "SELECT id::text FROM governance.executions WHERE case_id = 'sa-007'")
        handle = await submit("replay_execution", execution_id=execution["id"], runtime="model")
        with pytest.raises(JobFailedError) as failed:
            await handle.result(timeout=60)
    assert failed.value.error_code == "RUNTIME_NOT_HOSTED"
