"""Research lanes and deep research: one send each, whatever becomes of its answer; a question over several lanes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError

from activities.messages import RESEARCH_TYPE, Lane, ResearchAnswer, ResearchQuestion
from activities.research import INSTRUCTIONS, Report, Research, ResearchRequest, report_of
from durable_jobs import DurableJobs, EventName, JobContext, JobStatus
from durable_jobs.contract.errors import JobFailedError
from durable_jobs.providers.openai_chat import OpenAIChat
from tests.app.conftest import TENANT, AppWorker, Submit
from tests.app.providers import Model
from tests.conftest import Specs, Workers
from tests.http_api import served
from tests.probes import Gate, eventually, take_over, until
from tests.sweeping import NEVER


@pytest.fixture
def model() -> Model:
    return Model()


@pytest_asyncio.fixture
async def provider_url(model: Model) -> AsyncIterator[str]:
    async with served(model.app) as url:
        yield f"{url}/v1"


async def test_a_lane_sends_once_under_its_key(
    app_worker: AppWorker, submit: Submit, model: Model, provider_url: str
) -> None:
    async with app_worker(provider_url=provider_url):
        handle = await submit("research", question="Why is the sky blue?", mode="sceptical")
        report = await handle.result(timeout=30)
    assert report == {"text": "It depends.", "model": "any", "reference": model.completions[0]["id"]}
    assert model.sent == [f"research:{handle.id}:sceptical"]
    names = [event.name for event in await handle.events() if event.name is not EventName.ADMISSION_CHECKED]
    assert names == [EventName.CLAIMED, EventName.HEARTBEAT, EventName.DISPATCHED, EventName.COMPLETED]


async def test_an_accepted_send_whose_answer_was_lost_is_found_and_not_repeated(
    app_worker: AppWorker, submit: Submit, model: Model, provider_url: str, jobs: DurableJobs
) -> None:
    model.loses = lambda _: True
    async with app_worker(provider_url=provider_url):
        handle = await submit("research", question="Why is the sky blue?")
        report = await handle.result(timeout=60)
    assert report["text"] == "It depends."
    assert model.sent == [f"research:{handle.id}:quick"]
    assert (await handle.job()).reconciliation is not None


async def test_a_refusal_is_a_definite_no(
    app_worker: AppWorker, submit: Submit, model: Model, provider_url: str
) -> None:
    model.refuses = lambda _: True
    async with app_worker(provider_url=provider_url):
        handle = await submit("research", question="Why is the sky blue?")
        with pytest.raises(JobFailedError) as failed:
            await handle.result(timeout=30)
    assert failed.value.error_code == "PROVIDER_REFUSED"
    assert len(model.sent) == 1


async def test_deep_research_outlives_its_worker(
    app_worker: AppWorker, submit: Submit, model: Model, provider_url: str, jobs: DurableJobs
) -> None:
    """The batch is pending for longer than its worker lives; the next worker's sweep finds its end."""
    async with app_worker(provider_url=provider_url):
        handle = await submit("deep_research", question="What did the sea level do?", run_id="run-7")

        async def waits() -> bool:
            return any("waiting_for" in event.data for event in await handle.events())

        await eventually(waits, "a heartbeat that names the batch")
    assert (await handle.job()).status is JobStatus.INDETERMINATE
    (batch,) = model.batches
    assert batch["metadata"]["operation_key"] == f"deep-research:{handle.id}:run-7"
    async with app_worker(provider_url=provider_url):
        await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
        body = model.store(None, "It rose.")
        line = {"custom_id": "request-1", "response": {"status_code": 200, "body": body}, "error": None}
        batch |= {"status": "completed", "output_file_id": model.show_file(line), "error_file_id": None}
        batch["request_counts"] = {"total": 1, "completed": 1, "failed": 0}
        assert (await handle.result(timeout=60))["text"] == "It rose."
    assert len([path for method, path in model.requests if (method, path) == ("POST", "/v1/batches")]) == 1


def question(queue: str, **overrides: Any) -> ResearchQuestion:
    fields: dict[str, Any] = {
        "question": "Why is the sky blue?",
        "organization": "acme",
        "project": "alpha",
        "queue": queue,
        "tenant": "acme-eu",
        "actor": "ann",
        "trace": "00-trace",
        "modes": ["quick", "thorough", "sceptical"],
    }
    return ResearchQuestion(**(fields | overrides))


async def asked(client: Client, what: ResearchQuestion, workflow_id: str) -> ResearchAnswer:
    answer: ResearchAnswer = await client.execute_workflow(
        RESEARCH_TYPE, what, id=workflow_id, task_queue=what.queue, result_type=ResearchAnswer
    )
    return answer


async def test_a_question_joins_its_lanes(
    app_worker: AppWorker, model: Model, provider_url: str, temporal_client: Client, queue: str
) -> None:
    async with app_worker(provider_url=provider_url):
        answer = await asked(temporal_client, question(queue), f"research-{queue}")
    assert answer.reports == dict.fromkeys(("quick", "thorough", "sceptical"), "It depends.")
    assert [lane.outcome for lane in answer.lanes] == ["completed"] * 3
    assert len(set(model.sent)) == 3


async def test_a_question_tolerates_lanes_that_failed_or_are_uncertain(
    app_worker: AppWorker, model: Model, provider_url: str, temporal_client: Client, queue: str, jobs: DurableJobs
) -> None:
    model.refuses = lambda said: INSTRUCTIONS["thorough"] in said
    model.hides = lambda said: INSTRUCTIONS["sceptical"] in said
    async with app_worker(provider_url=provider_url):
        answer = await asked(temporal_client, question(queue, lane_seconds=6), f"research-{queue}")
        uncertain = await jobs.service.find_by_idempotency_key("acme", "alpha", f"research-{queue}:sceptical")
    assert uncertain is not None
    assert answer.reports == {"quick": "It depends."}
    assert answer.lanes[1:] == [
        Lane("thorough", "failed", code="PROVIDER_REFUSED"),
        Lane("sceptical", "uncertain", job_id=str(uncertain.id)),
    ]
    assert uncertain.status is JobStatus.INDETERMINATE
    assert len(model.sent) == 3


async def test_a_question_without_any_report_says_so(
    app_worker: AppWorker, model: Model, provider_url: str, temporal_client: Client, queue: str
) -> None:
    model.refuses = lambda _: True
    async with app_worker(provider_url=provider_url):
        with pytest.raises(WorkflowFailureError) as failed:
            await asked(temporal_client, question(queue), f"research-{queue}")
    assert isinstance(failed.value.cause, ApplicationError)
    assert failed.value.cause.type == "NO_REPORT"
    assert "thorough PROVIDER_REFUSED" in failed.value.cause.message


async def test_a_question_that_makes_no_valid_job_fails_at_once(
    app_worker: AppWorker, model: Model, provider_url: str, temporal_client: Client, queue: str
) -> None:
    async with app_worker(provider_url=provider_url):
        with pytest.raises(WorkflowFailureError) as failed:
            await asked(temporal_client, question(queue, project="not a project"), f"research-{queue}")
    assert "project" in str(failed.value.cause)
    assert model.sent == []


async def test_a_question_whose_lanes_are_all_uncertain_does_not_wait_for_its_limit(
    app_worker: AppWorker, model: Model, provider_url: str, temporal_client: Client, queue: str
) -> None:
    model.hides = lambda said: INSTRUCTIONS["quick"] not in said
    async with app_worker(provider_url=provider_url):
        async with asyncio.timeout(60):
            answer = await asked(temporal_client, question(queue, lane_seconds=100_000), f"research-{queue}")
    assert [lane.outcome for lane in answer.lanes] == ["completed", "uncertain", "uncertain"]


class Held(Research):
    """Comes to its dispatch only when the test lets it."""

    gate: Gate

    async def run(self, job: JobContext, request: ResearchRequest) -> Report:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            # As a handler may that is not to be stopped: the checks before its dispatch are then all there is.
            await self.gate.wait()
        return await super().run(job, request)


@pytest.mark.parametrize("why", ["cancelled", "lost"])
async def test_nothing_is_sent_by_a_lane_that_is_cancelled_or_was_taken_over(
    jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str, model: Model, provider_url: str, why: str
) -> None:
    client = AsyncOpenAI(base_url=provider_url, api_key="none", max_retries=0)
    handler = Held(OpenAIChat(client, read=report_of), "any")
    handler.gate = Gate()
    async with client, worker(handler, reconcile_every=NEVER):
        job = spec(job_type="research", payload={"question": "Why?"}, execution=TENANT, lease_seconds=60)
        handle = await jobs.create_job(job)
        await handler.gate.handler_came()
        if why == "lost":
            assert await take_over(jobs.service, database_url, handle.id)
        else:
            assert await jobs.service.cancel_job(handle.id, "not wanted", "ann") == "requested"
        handler.gate.go_on.set()
        if why == "cancelled":
            await until(jobs.service, handle.id, JobStatus.CANCELLED)
    assert model.sent == []
    assert EventName.DISPATCHED not in [event.name for event in await handle.events()]
