"""A causal audit from its first job to its verdict: figures known by construction, and none where anything is amiss."""

from collections.abc import Awaitable, Callable
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError

from activities.contracts import CONTROL
from activities.runtime import RuntimeOutcome, RuntimeRefused, RuntimeRequest
from activities.runtime.subprocess_adapter import SubprocessAdapter
from durable_jobs import DurableJobs, JobHandle, JobStatus
from durable_jobs.contract.errors import JobFailedError
from tests.app.conftest import AppWorker, Submit
from tests.app.test_replays import DATASET, PRODUCTION, counts, rows
from tests.probes import Gate, eventually
from tests.test_support_agent import BY_HAND

Run = Callable[[SubprocessAdapter, RuntimeRequest, str], Awaitable[RuntimeOutcome]]

AUDITED = "sa-007"
"""A decisive incident, a supporting claim, and terms that say nothing which is read."""


@pytest.fixture
def intervene(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Puts something before or behind each run of the agent's program."""
    run = SubprocessAdapter.run

    def put(around: Run) -> None:
        async def replaced(adapter: SubprocessAdapter, request: RuntimeRequest, *, key: str) -> RuntimeOutcome:
            return await around(adapter, request, key)

        monkeypatch.setattr(SubprocessAdapter, "run", replaced)

    put.real = run  # type: ignore[attr-defined]
    return put


@pytest.fixture
def execution(product_url: str, submit: Submit) -> Callable[[str], Awaitable[str]]:
    """The recorded execution of a case, by an evaluation that this fixture runs once."""

    async def of(case_id: str) -> str:
        await (await submit("evaluation", key="the-evaluation", dataset_id=DATASET, policy_id=PRODUCTION)).result(120)
        found = rows(
            product_url,
            "SELECT id FROM governance.executions WHERE kind = 'evaluation' AND case_id = %(case)s",
            case=case_id,
        )
        return str(found[0]["id"])

    return of


async def verdict(jobs: DurableJobs, audit_id: UUID, timeout: float = 60) -> dict[str, Any]:
    """The result of the audit's finalization job."""

    async def final() -> Any:
        return await jobs.service.find_by_idempotency_key("acme", "alpha", f"{audit_id}:final")

    job = await eventually(final, "the finalization job", timeout)
    return await jobs.handle(job.id).result(timeout)


async def audited(
    jobs: DurableJobs, submit: Submit, execution_id: str, samples: int = 1
) -> tuple[UUID, dict[str, Any]]:
    started = await submit("causal_audit", execution_id=execution_id, samples=samples)
    frozen = await started.result(timeout=60)
    assert (frozen["status"], frozen["audit_id"]) == ("FROZEN", str(started.id))
    return started.id, await verdict(jobs, started.id)


async def test_influence_equals_what_was_worked_out_by_hand(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Callable[[str], Awaitable[str]],
    temporal_client: Client,
) -> None:
    async with app_worker():
        for case_id, (score, decision, pieces) in list(BY_HAND.items())[:4]:
            audit_id, found = await audited(jobs, submit, await execution(case_id))
            assert found["status"] == "COMPLETED", found["reasons"]
            (control,) = rows(
                product_url,
                "SELECT e.* FROM governance.audit_samples s JOIN governance.executions e ON e.id = s.execution_id"
                " WHERE s.audit_id = %(id)s AND s.intervention = ''",
                id=audit_id,
            )
            assert (control["score"], control["decision"]) == (Decimal(score), decision)
            short = {each["evidence_id"].removeprefix(f"{case_id}:"): each for each in found["influences"]}
            assert short.keys() == pieces.keys()
            for name, (influence, other) in pieces.items():
                assert Decimal(short[name]["influence"]) == Decimal(influence), (case_id, name)
                assert short[name]["flips"] == (other is not None), (case_id, name)
                assert (short[name]["role"] == "decisive") == (other is not None)
            published = rows(
                product_url, "SELECT * FROM governance.influences WHERE audit_id = %(id)s ORDER BY 1", id=audit_id
            )
            assert len(published) == len(pieces)
            workflow = temporal_client.get_workflow_handle(f"causal-audit:{audit_id}")
            assert await workflow.result() == "COMPLETED"
    assert counts(product_url)["audits"] == 4


async def test_several_samples_are_matched_by_their_seeds(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Callable[[str], Awaitable[str]],
) -> None:
    """Under a policy with jitter every sample differs, and control and intervention of one sample share their seed."""
    async with app_worker():
        original = await execution(AUDITED)
        replay = await submit("replay_execution", execution_id=original, policy_id="sampled-ai-policy", seed=7)
        jittered = (await replay.result(timeout=60))["produced_execution_id"]
        audit_id, found = await audited(jobs, submit, jittered, samples=3)
    assert found["status"] == "COMPLETED", found["reasons"]
    sampled = rows(
        product_url,
        "SELECT s.intervention, s.sample, s.seed, e.score FROM governance.audit_samples s"
        " JOIN governance.executions e ON e.id = s.execution_id WHERE s.audit_id = %(id)s",
        id=audit_id,
    )
    scores = {(each["intervention"], each["sample"]): each["score"] for each in sampled}
    assert {each["seed"] for each in sampled} == {7, 8, 9}
    assert len({scores[CONTROL, number] for number in range(3)}) == 3
    for each in found["influences"]:
        mean = sum(scores[CONTROL, n] - scores[each["evidence_id"], n] for n in range(3)) / 3
        assert abs(Decimal(each["influence"]) - mean) < Decimal("0.000000001")


async def failed(jobs: DurableJobs, submit: Submit, execution_id: str, product_url: str) -> list[str]:
    """The reasons of an audit that must be FAILED, with no figure anywhere."""
    audit_id, found = await audited(jobs, submit, execution_id)
    assert (found["status"], found["classification"], found["influences"]) == ("FAILED", None, [])
    assert counts(product_url)["influences"] == 0
    (audit,) = rows(product_url, "SELECT * FROM governance.audits WHERE id = %(id)s", id=audit_id)
    assert (audit["status"], audit["reasons"]) == ("FAILED", found["reasons"])
    return found["reasons"]


def leaves_out(request: RuntimeRequest, piece: str) -> bool:
    return request.case_id == AUDITED and f"{AUDITED}:{piece}" not in {each.evidence_id for each in request.evidence}


async def test_one_failed_replay_fails_the_audit(
    jobs: DurableJobs, product_url: str, app_worker: AppWorker, submit: Submit, execution: Any, intervene: Any
) -> None:
    async def refuses(adapter: SubprocessAdapter, request: RuntimeRequest, key: str) -> RuntimeOutcome:
        if leaves_out(request, "terms"):
            raise RuntimeRefused("no scorer for this one")
        return await intervene.real(adapter, request, key=key)

    intervene(refuses)
    async with app_worker():
        reasons = await failed(jobs, submit, await execution(AUDITED), product_url)
    assert reasons == [f"sample 0 without {AUDITED}:terms: RUNTIME_REFUSED"]


async def test_one_mismatch_of_lineage_fails_the_audit(
    jobs: DurableJobs, product_url: str, app_worker: AppWorker, submit: Submit, execution: Any, intervene: Any
) -> None:
    """One sample ran another build of the agent: its score is of another scorer."""

    async def rebuilt(adapter: SubprocessAdapter, request: RuntimeRequest, key: str) -> RuntimeOutcome:
        outcome: RuntimeOutcome = await intervene.real(adapter, request, key=key)
        return outcome.model_copy(update={"build": "sha256:other"}) if leaves_out(request, "claim") else outcome

    intervene(rebuilt)
    async with app_worker():
        reasons = await failed(jobs, submit, await execution(AUDITED), product_url)
    assert reasons == [f"sample 0 without {AUDITED}:claim: its build lineage does not match"]


async def test_one_missing_piece_of_evidence_fails_the_audit(
    jobs: DurableJobs, product_url: str, app_worker: AppWorker, submit: Submit, execution: Any, intervene: Any
) -> None:
    """It is gone while the replays run: whatever those that had read it gave, there is no figure."""

    async def loses(adapter: SubprocessAdapter, request: RuntimeRequest, key: str) -> RuntimeOutcome:
        if len(request.evidence) == 4:
            rows(product_url, "DELETE FROM governance.evidence WHERE evidence_id = %(id)s RETURNING 1", id=piece)
        return await intervene.real(adapter, request, key=key)

    piece = f"{AUDITED}:terms"
    async with app_worker():
        execution_id = await execution(AUDITED)
        intervene(loses)
        reasons = await failed(jobs, submit, execution_id, product_url)
    assert reasons == [f"evidence {piece} of case {AUDITED} is gone"]


async def test_an_uncertain_replay_is_waited_for(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Any,
    intervene: Any,
    temporal_client: Client,
) -> None:
    """No verdict while nobody knows; an operator's word settles the sample, and then the audit."""
    gate, held = Gate(), f"{AUDITED}:claim"

    async def holds(adapter: SubprocessAdapter, request: RuntimeRequest, key: str) -> RuntimeOutcome:
        if leaves_out(request, "claim"):
            await gate.wait()
        return await intervene.real(adapter, request, key=key)

    async with app_worker():
        execution_id = await execution(AUDITED)
        intervene(holds)
        started = await submit("causal_audit", execution_id=execution_id, samples=1)
        await started.result(timeout=60)
        await gate.handler_came()

        async def others() -> bool:
            asked = "SELECT count(*) AS n FROM governance.audit_samples WHERE execution_id IS NULL"
            return bool(rows(product_url, asked)[0]["n"] == 1)

        await eventually(others, "the other replays", timeout=60)
        key = f"{started.id}:without:{held}:0"
        replay = await jobs.service.find_by_idempotency_key("acme", "alpha", key)
        assert replay is not None
        quarantined = await jobs.service.quarantine(replay.created_at, actor="ann", reason="a restore")
        assert quarantined == [replay.id]
        gate.go_on.set()
        workflow = temporal_client.get_workflow_handle(f"causal-audit:{started.id}")

        async def escalated() -> bool:
            return (await jobs.service.get_job(replay.id)).escalated_at is not None

        await eventually(escalated, "the escalation", timeout=60)
        assert (await workflow.describe()).status is WorkflowExecutionStatus.RUNNING
        assert await jobs.service.find_by_idempotency_key("acme", "alpha", f"{started.id}:final") is None
        evidence = {"seen": "the restore lost it"}
        await jobs.handle(replay.id).resolve(JobStatus.FAILED, evidence, "ann")
        found = await verdict(jobs, started.id)
    assert (found["status"], found["influences"]) == ("FAILED", [])
    assert found["reasons"][0].startswith(f"sample 0 without {held}: ")


async def held_audit(
    submit: Submit,
    execution_id: str,
    intervene: Any,
    jobs: DurableJobs,
    *,
    without: str | None = "claim",
    **options: Any,
) -> tuple[JobHandle, Gate]:
    """An audit whose replay `without` this piece waits at a gate; None: every replay."""
    gate = Gate()

    async def holds(adapter: SubprocessAdapter, request: RuntimeRequest, key: str) -> RuntimeOutcome:
        if without is None or leaves_out(request, without):
            await gate.wait()
        return await intervene.real(adapter, request, key=key)

    intervene(holds)
    started = await submit("causal_audit", execution_id=execution_id, samples=1, **options)
    await started.result(timeout=60)
    await gate.handler_came()
    return started, gate


def status_of(product_url: str, audit_id: UUID) -> tuple[str, list[str]]:
    (audit,) = rows(product_url, "SELECT status, reasons FROM governance.audits WHERE id = %(id)s", id=audit_id)
    return audit["status"], audit["reasons"]


async def test_a_terminated_workflow_is_resumed(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Any,
    intervene: Any,
    temporal_client: Client,
) -> None:
    async with app_worker():
        started, gate = await held_audit(submit, await execution(AUDITED), intervene, jobs)
        await temporal_client.get_workflow_handle(f"causal-audit:{started.id}").terminate()
        gate.go_on.set()
        resumed = await submit("causal_audit", phase="resume", audit_id=str(started.id))
        assert (await resumed.result(timeout=60))["status"] == "FROZEN"
        found = await verdict(jobs, started.id)
        assert found["status"] == "COMPLETED", found["reasons"]
        again = await submit("causal_audit", phase="resume", audit_id=str(started.id))
        assert (await again.result(timeout=60))["influences"] == found["influences"]
    assert counts(product_url)["influences"] == 4


async def test_a_cancelled_workflow_leaves_a_failed_audit(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Any,
    intervene: Any,
    temporal_client: Client,
) -> None:
    async with app_worker():
        started, gate = await held_audit(submit, await execution(AUDITED), intervene, jobs)
        workflow = temporal_client.get_workflow_handle(f"causal-audit:{started.id}")
        await workflow.cancel()
        with pytest.raises(WorkflowFailureError):
            await workflow.result()
        gate.go_on.set()
    assert status_of(product_url, started.id) == ("FAILED", ["its workflow was cancelled"])


async def test_an_audit_whose_last_job_ends_otherwise_is_failed(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Any,
    intervene: Any,
    temporal_client: Client,
) -> None:
    async with app_worker():
        started, gate = await held_audit(submit, await execution(AUDITED), intervene, jobs)
        final = await submit("replay_evaluation", key=f"{started.id}:final", replay_id=str(started.id))
        with pytest.raises(JobFailedError):
            await final.result(timeout=30)
        gate.go_on.set()
        assert await temporal_client.get_workflow_handle(f"causal-audit:{started.id}").result() == "FAILED"
    status, (reason,) = status_of(product_url, started.id)
    assert status == "FAILED"
    assert reason.startswith("its last job ended without a verdict")


async def test_only_the_audits_own_jobs_move_it(
    jobs: DurableJobs, product_url: str, app_worker: AppWorker, submit: Submit, execution: Any, intervene: Any
) -> None:
    async with app_worker():
        execution_id = await execution(AUDITED)
        started, gate = await held_audit(submit, execution_id, intervene, jobs)
        own = {"audit_id": str(started.id), "intervention": f"{AUDITED}:claim", "sample": 0}
        for job_type, payload, code in (
            ("causal_audit", {"phase": "finalize", "audit_id": str(started.id)}, "NOT_THE_FINAL_JOB"),
            ("replay_execution", {"execution_id": execution_id, "seed": 5, "audit": own}, "SAMPLE_UNKNOWN"),
            ("replay_execution", {"execution_id": execution_id, "audit": own | {"sample": 1}}, "SAMPLE_UNKNOWN"),
        ):
            handle = await submit(job_type, **payload)
            with pytest.raises(JobFailedError) as failed:
                await handle.result(timeout=30)
            assert failed.value.error_code == code
        spec = {
            "organization": "acme",
            "project": "beta",
            "queue": (await started.job()).queue,
            "job_type": "replay_execution",
            "idempotency_key": "from another project",
            "payload": {"execution_id": execution_id, "audit": own},
        }
        (stranger,) = await jobs.create_jobs([spec])
        with pytest.raises(JobFailedError) as failed:
            await stranger.result(timeout=30)
        assert failed.value.error_code == "EXECUTION_UNKNOWN"
        gate.go_on.set()
        found = await verdict(jobs, started.id)
    assert found["status"] == "COMPLETED", found["reasons"]


TAMPERED = {
    "evidence that is no evidence": "UPDATE governance.evidence SET body = '{}' WHERE evidence_id = 'sa-007:terms'",
    "evidence with other words": """UPDATE governance.evidence SET body = jsonb_set(body, '{text}', '"x"')
        WHERE evidence_id = 'sa-007:terms'""",
    "a case with less evidence": "UPDATE governance.cases SET evidence = evidence[1:2] WHERE case_id = 'sa-007'",
    "a policy with other rules": """UPDATE governance.policies SET body = jsonb_set(body, '{base}', '"0.5"')""",
}


@pytest.mark.parametrize("what", TAMPERED)
async def test_inputs_that_are_not_what_was_frozen_fail_the_audit(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Any,
    intervene: Any,
    what: str,
) -> None:
    # One replay at a time, so that those behind the one that waits have not read their inputs yet.
    async with app_worker(slots=1):
        started, gate = await held_audit(submit, await execution(AUDITED), intervene, jobs, without=None)
        rows(product_url, f"WITH changed AS ({TAMPERED[what]} RETURNING 1) SELECT count(*) FROM changed")
        gate.go_on.set()
        found = await verdict(jobs, started.id)
    assert (found["status"], found["influences"]) == ("FAILED", [])


async def test_an_isolated_audit_stays_on_its_tenants_queue(
    jobs: DurableJobs,
    product_url: str,
    app_worker: AppWorker,
    submit: Submit,
    execution: Any,
    temporal_client: Client,
    queue: str,
) -> None:
    async with app_worker():
        execution_id = await execution(AUDITED)
    async with app_worker(queue=f"{queue}@acme", organizations=["acme"]):
        started = await submit("causal_audit", isolated=True, execution_id=execution_id, samples=1)
        await started.result(timeout=60)
        found = await verdict(jobs, started.id)
    assert found["status"] == "COMPLETED", found["reasons"]
    assert {job.queue for job in (await jobs.service.list_jobs()).items} == {queue, f"{queue}@acme"}
