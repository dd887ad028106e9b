"""Evaluation, experiment, replay and its evaluation: each job type run to its end and read back from the tables."""

from decimal import Decimal
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from activities.datasets import load_dataset, load_policy
from activities.runtime import RuntimeOutcome, RuntimeRequest
from activities.runtime.subprocess_adapter import SubprocessAdapter
from durable_jobs import DurableJobs, JobStatus
from durable_jobs.contract.errors import JobFailedError
from tests.app.conftest import AppWorker, Submit
from tests.probes import eventually

DATASET, PRODUCTION, CANDIDATE = "support-agent", "production-ai-policy", "candidate-ai-policy"


def rows(database_url: str, statement: str, **parameters: Any) -> list[dict[str, Any]]:
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        return connection.execute(statement, parameters).fetchall()


def counts(database_url: str) -> dict[str, int]:
    """How many rows each table of the product's results has."""
    tables = ("executions", "replays", "evaluations", "comparisons", "drift", "audits", "influences")
    return {name: rows(database_url, f"SELECT count(*) AS n FROM governance.{name}")[0]["n"] for name in tables}


async def test_an_evaluation_runs_every_case_once(product_url: str, app_worker: AppWorker, submit: Submit) -> None:
    cases = load_dataset(DATASET).cases
    async with app_worker():
        handle = await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)
        result = await handle.result(timeout=120)
    assert (result["cases"], result["dataset_digest"]) == (len(cases), load_dataset(DATASET).digest)
    recorded = rows(product_url, "SELECT * FROM governance.executions")
    assert {each["case_id"] for each in recorded} == {case.case_id for case in cases}
    assert len(recorded) == len(cases)
    expected = {case.case_id: case.expected_decision for case in cases}
    assert result["correct"] == sum(each["decision"] == expected[each["case_id"]] for each in recorded)
    mean = sum((each["score"] for each in recorded), Decimal(0)) / len(cases)
    assert abs(Decimal(result["mean_score"]) - mean) < Decimal("0.000000001")
    (evaluation,) = rows(product_url, "SELECT * FROM governance.evaluations")
    assert str(evaluation["id"]) == result["evaluation_id"]


async def test_an_experiment_compares_policies(product_url: str, app_worker: AppWorker, submit: Submit) -> None:
    async with app_worker():
        handle = await submit("experiment", dataset_id=DATASET, policy_ids=[PRODUCTION, CANDIDATE])
        result = await handle.result(timeout=240)
    (candidate,), (comparison,) = result["candidates"], result["comparisons"]
    assert comparison["policy_id"] == CANDIDATE
    assert comparison["correct_delta"] == candidate["correct"] - result["baseline"]["correct"]
    agreed = """
        SELECT count(*) AS n FROM governance.executions a JOIN governance.executions b USING (case_id)
        WHERE a.policy_digest = %(a)s AND b.policy_digest = %(b)s AND a.decision = b.decision
    """
    policies = {"a": result["baseline"]["policy_digest"], "b": candidate["policy_digest"]}
    assert comparison["agreements"] == rows(product_url, agreed, **policies)[0]["n"]
    assert comparison["agreements"] < result["baseline"]["cases"]
    found = counts(product_url)
    assert (found["evaluations"], found["comparisons"]) == (2, 1)


async def test_a_replay_queues_its_evaluation(
    jobs: DurableJobs, product_url: str, app_worker: AppWorker, submit: Submit
) -> None:
    async with app_worker():
        evaluated = await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)
        await evaluated.result(timeout=120)
        (execution, *_) = rows(product_url, "SELECT * FROM governance.executions ORDER BY case_id")
        same = await submit("replay_execution", execution_id=str(execution["id"]))
        other = await submit("replay_execution", execution_id=str(execution["id"]), policy_id=CANDIDATE)
        for handle in (same, other):
            result = await handle.result(timeout=60)
            assert result["execution_id"] == str(execution["id"])

            async def evaluation(parent: Any = handle) -> Any:
                return await jobs.service.find_by_idempotency_key("acme", "alpha", f"{parent.id}:evaluation")

            follow_up = await eventually(evaluation, "the evaluation of the replay")
            drift = await jobs.handle(follow_up.id).result(timeout=60)
            assert drift["replay_id"] == str(handle.id)
            if handle is same:
                assert (drift["drift"], drift["score_delta"]) == ("none", "0")
            else:
                (delta,) = rows(
                    product_url,
                    "SELECT p.score - o.score AS delta FROM governance.executions p, governance.executions o"
                    " WHERE p.id = %(p)s AND o.id = %(o)s",
                    p=result["produced_execution_id"],
                    o=execution["id"],
                )
                assert Decimal(drift["score_delta"]) == delta["delta"]
    found = counts(product_url)
    assert (found["replays"], found["drift"], found["comparisons"]) == (2, 2, 2)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("evaluation", {"dataset_id": "no-such", "policy_id": PRODUCTION}, "UNKNOWN_DATASET"),
    ("evaluation", {"dataset_id": "../policies", "policy_id": PRODUCTION}, "UNKNOWN_DATASET"),
    ("evaluation", {"dataset_id": DATASET, "policy_id": "no-such"}, "UNKNOWN_POLICY"),
    ("evaluation", {"dataset_id": DATASET}, "PAYLOAD_INVALID"),
    ("experiment", {"dataset_id": DATASET, "policy_ids": [PRODUCTION, PRODUCTION]}, "PAYLOAD_INVALID"),
    ("replay_execution", {"execution_id": "01a22e2d-f983-769c-a38b-81d08142fd1f"}, "EXECUTION_UNKNOWN"),
    ("replay_evaluation", {"replay_id": "01a22e2d-f983-769c-a38b-81d08142fd1f"}, "REPLAY_UNKNOWN"),
    ("causal_audit", {"execution_id": "01a22e2d-f983-769c-a38b-81d08142fd1f"}, "EXECUTION_UNKNOWN"),
    ("causal_audit", {"phase": "resume", "audit_id": "01a22e2d-f983-769c-a38b-81d08142fd1f"}, "AUDIT_UNKNOWN"),
    ("causal_audit", {"phase": "finalize", "audit_id": "01a22e2d-f983-769c-a38b-81d08142fd1f"}, "NOT_THE_FINAL_JOB"),
]


async def test_what_cannot_be_run_fails_with_its_reason_and_leaves_nothing(
    product_url: str, app_worker: AppWorker, submit: Submit
) -> None:
    async with app_worker():
        for job_type, payload, code in REFUSED:
            handle = await submit(job_type, **payload)
            with pytest.raises(JobFailedError) as failed:
                await handle.result(timeout=30)
            assert (failed.value.status, failed.value.error_code) == (JobStatus.FAILED, code)
    assert set(counts(product_url).values()) == {0}


async def test_another_tenants_execution_is_not_there(
    jobs: DurableJobs, product_url: str, app_worker: AppWorker, submit: Submit
) -> None:
    async with app_worker():
        evaluated = await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)
        await evaluated.result(timeout=120)
        (execution, *_) = rows(product_url, "SELECT * FROM governance.executions")
        job = await evaluated.job()
        for job_type in ("replay_execution", "causal_audit"):
            spec = {
                "organization": "globex",
                "project": "alpha",
                "queue": job.queue,
                "job_type": job_type,
                "idempotency_key": job_type,
                "payload": {"execution_id": str(execution["id"])},
            }
            (handle,) = await jobs.create_jobs([spec])
            with pytest.raises(JobFailedError) as failed:
                await handle.result(timeout=30)
            assert failed.value.error_code == "EXECUTION_UNKNOWN"
    assert counts(product_url)["replays"] == 0


async def test_an_evaluation_never_mixes_two_versions_of_its_dataset(
    product_url: str, app_worker: AppWorker, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker dies half way, and the next one has other files."""
    first = load_dataset(DATASET)
    other = first.model_copy(update={"digest": "0" * 64, "cases": first.cases[:30]})
    calls = 0

    async def stops_half_way(adapter: SubprocessAdapter, request: RuntimeRequest, *, key: str) -> RuntimeOutcome:
        nonlocal calls
        calls += 1
        if calls == 6:
            monkeypatch.setattr("activities.product.load_dataset", lambda _: other)
            raise ConnectionError("the machine went away")
        return await run(adapter, request, key=key)

    run = SubprocessAdapter.run
    monkeypatch.setattr(SubprocessAdapter, "run", stops_half_way)
    async with app_worker():
        handle = await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)
        with pytest.raises(JobFailedError) as failed:
            await handle.result(timeout=60)
    assert failed.value.error_code == "INPUTS_CHANGED"
    assert (counts(product_url)["executions"], counts(product_url)["evaluations"]) == (5, 0)


async def test_a_replay_keeps_the_policy_that_it_began_with(
    product_url: str, app_worker: AppWorker, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first delivery ends without an outcome, and by the next one the catalogue has another version."""
    began_with = load_policy(CANDIDATE)
    later = began_with.model_copy(update={"rules": began_with.rules | {"base": "0.1"}})
    async with app_worker():
        await (await submit("evaluation", dataset_id=DATASET, policy_id=PRODUCTION)).result(timeout=120)
        (execution,) = rows(product_url, "SELECT id::text FROM governance.executions WHERE case_id = 'sa-001'")

        async def breaks_once(adapter: SubprocessAdapter, request: RuntimeRequest, *, key: str) -> RuntimeOutcome:
            monkeypatch.setattr(SubprocessAdapter, "run", run)
            monkeypatch.setattr("activities.product.load_policy", lambda _: later)
            raise ConnectionError("the machine went away")

        run = SubprocessAdapter.run
        monkeypatch.setattr(SubprocessAdapter, "run", breaks_once)
        handle = await submit("replay_execution", execution_id=execution["id"], policy_id=CANDIDATE)
        result = await handle.result(timeout=60)
    (produced,) = rows(product_url, "SELECT * FROM governance.executions WHERE job_id = %(id)s", id=handle.id)
    assert str(produced["id"]) == result["produced_execution_id"]
    assert produced["policy_digest"] == began_with.digest != later.digest
