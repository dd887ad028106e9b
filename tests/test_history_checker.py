"""The checker of recorded histories flags what is wrong: a good history, made on the real tables, and then spoiled."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from durable_jobs import DurableJobService
from durable_jobs.contract.errors import IdempotencyKeyConflict, LeaseLost, StoreUnavailable
from tests.conftest import Specs
from tests.proof.checker import violations
from tests.proof.clients import told
from tests.proof.history import History, Operation, read_history
from tests.soak.checks import Found, read_tables
from tests.support import A, B, expire


@dataclass
class Told:
    """A history and what it left. `sent` was completed by B after A had lost its lease; `dropped` was cancelled."""

    history: list[Operation]
    found: Found
    sent: UUID
    dropped: UUID

    def of(self, operation: str, which: int = 0) -> int:
        """Where the `which`th call of this operation stands."""
        return [at for at, each in enumerate(self.history) if each.operation == operation][which]

    def change(self, at: int, **fields: Any) -> None:
        self.history[at] = replace(self.history[at], **fields)

    def answer(self, at: int, **fields: Any) -> None:
        self.change(at, answer=(self.history[at].answer or {}) | fields, error=None)


@pytest.fixture
async def good(service: DurableJobService, spec: Specs, database_url: str, tmp_path: Path) -> Told:
    path = tmp_path / "history.jsonl"
    with History(path) as history:
        call = history.call
        one, two = spec(), spec()
        made = []
        for each in (one, one, two):
            key = (each.organization, each.project, each.idempotency_key)

            def create(each: Any = each) -> Any:
                return service.create_job(each)

            made += [
                await call(
                    "c1",
                    "create",
                    {"key": key, "variant": "first"},
                    create,
                    lambda it: told(it.job) | {"created": it.created},
                )
            ]
        sent, dropped = made[0].job.id, made[2].job.id
        key = (one.organization, one.project, one.idempotency_key)
        other = one.model_copy(update={"payload": {"n": 2}})
        arguments = {"key": key, "variant": "other"}
        with pytest.raises(IdempotencyKeyConflict):
            await call("c2", "create", arguments, lambda: service.create_job(other), told)
        await call(
            "c2", "find", {"key": key}, lambda: service.find_by_idempotency_key(*key), lambda it: told(it) if it else {}
        )
        claims = []
        for worker in (A, B):
            token = uuid4()

            def claim(worker: str = worker, token: UUID = token) -> Any:
                return service.claim_job(worker, token, job_id=sent)

            outcome = await call(
                worker,
                "claim",
                {"worker": worker, "token": str(token)},
                claim,
                lambda it: told(it.job) | {"granted": bool(it)},
            )
            claims.append(outcome.claim)
            await expire(service, sent)
        stale, held = claims
        await service.renew_lease(held)
        at = {"id": str(sent), "generation": held.generation}
        mark = {"operation_key": "key"}
        await call(
            B, "mark", at | mark, lambda: service.mark_provider_dispatched(held, "key", consequential=False), told
        )
        result = {"ok": True}
        late = at | {"generation": stale.generation, "result": {"late": True}}
        with pytest.raises(LeaseLost):
            await call(A, "complete", late, lambda: service.complete_job(stale, {"late": True}), told)
        await call(
            B, "complete", at | {"result": result}, lambda: service.complete_job(held, result), lambda it: told(it.job)
        )
        for job_id in (sent, dropped):

            def cancel(job_id: UUID = job_id) -> Any:
                return service.cancel_job(job_id, "not wanted", "c3")

            await call("c3", "cancel", {"id": str(job_id)}, cancel, lambda it: {"reply": it})
        await call("c1", "get", {"id": str(sent)}, lambda: service.get_job(sent), told)

        async def away() -> Any:
            raise StoreUnavailable

        with pytest.raises(StoreUnavailable):
            await call("c1", "get", {"id": str(sent)}, away, told)
    found = read_tables(database_url)
    found.sends = {"key": 1}
    assert [each.operation for each in read_history(path)] == [each.operation for each in history.operations]
    assert list(read_history(path))[-1].unknown
    return Told(history.operations, copy.deepcopy(found), sent, dropped)


def test_a_good_history(good: Told) -> None:
    assert list(violations(good.history, good.found)) == []


def _two_effects(it: Told) -> None:
    it.found.sends = {"key": 2}


def _lost_creation(it: Told) -> None:
    del it.found.jobs[it.dropped]


def _two_ids(it: Told) -> None:
    it.answer(it.of("create", 1), id=str(it.dropped))


def _created_twice(it: Told) -> None:
    it.answer(it.of("create", 1), created=True)


def _another_request_accepted(it: Told) -> None:
    it.answer(it.of("create", 3), **told_of(it, it.sent), created=False)


def _conflict_with_nobody(it: Told) -> None:
    it.change(it.of("create", 1), answer=None, error="IdempotencyKeyConflict")
    del it.history[it.of("create", 3)]


def _not_found_after_its_creation(it: Told) -> None:
    it.change(it.of("find"), answer={"id": None})


def _generation_shrinks_in_the_trail(it: Told) -> None:
    it.found.events[it.sent][-1]["generation"] = 1


def _generation_shrinks_to_a_reader(it: Told) -> None:
    it.answer(it.of("get"), generation=1)


def _settled_and_then_not(it: Told) -> None:
    it.answer(it.of("get"), status="running")


def _settled_row_rewritten(it: Told) -> None:
    it.found.jobs[it.sent]["status"] = "failed"


def _row_without_its_event(it: Told) -> None:
    del it.found.events[it.sent][-1]


def _event_without_its_row(it: Told) -> None:
    it.found.jobs[it.sent]["operation_key"] = None


def _generation_granted_twice(it: Told) -> None:
    it.answer(it.of("claim", 1), generation=1)


def _lost_claim(it: Told) -> None:
    del it.found.attempts[it.sent][1]


def _two_marks(it: Told) -> None:
    at = it.of("mark")
    earlier = it.history[at].arguments | {"generation": 1}
    it.history.append(replace(it.history[at], arguments=earlier))
    it.found.attempts[it.sent][0]["operation_key"] = "key"


def _stale_completion(it: Told) -> None:
    it.answer(it.of("complete"), **told_of(it, it.sent))


def _completion_refused_that_stands(it: Told) -> None:
    it.change(it.of("complete", 1), answer=None, error="LeaseLost")


def _cancel_and_completion_both_win(it: Told) -> None:
    it.answer(it.of("cancel"), reply="cancelled")


def _cancel_that_was_told_another_end(it: Told) -> None:
    it.answer(it.of("cancel"), reply="already_terminal:failed")


def _cancel_lost(it: Told) -> None:
    it.found.jobs[it.dropped]["status"] = "queued"
    it.found.events[it.dropped].clear()


def told_of(it: Told, job_id: UUID) -> dict[str, Any]:
    row = it.found.jobs[job_id]
    return {
        "id": str(job_id),
        "status": row["status"],
        "generation": row["lease_generation"],
        "intent": row["intent_number"],
    }


SPOILT: dict[Callable[[Told], None], str] = {
    _two_effects: "had its effect 2 times",
    _lost_creation: "is not there",
    _two_ids: "acknowledged as several jobs",
    _created_twice: "created more than once",
    _another_request_accepted: "for two different requests",
    _conflict_with_nobody: "told of a conflict",
    _not_found_after_its_creation: "did not find it after it was acknowledged",
    _generation_shrinks_in_the_trail: "generation 2 is followed by completed at 1",
    _generation_shrinks_to_a_reader: "saw generation 1 and intent 0 after 2 and 0",
    _settled_and_then_not: "saw running after completed",
    _settled_row_rewritten: "status: the row has",
    _row_without_its_event: "status: the row has",
    _event_without_its_row: "operation_key: the row has None",
    _generation_granted_twice: "was granted twice",
    _lost_claim: "the table has None",
    _two_marks: "two marks of intent 0 were granted",
    _stale_completion: "is not what the table has",
    _completion_refused_that_stands: "was refused, and yet it stands",
    _cancel_and_completion_both_win: "and a completion won",
    _cancel_that_was_told_another_end: "it never was that",
    _cancel_lost: "was told that it is cancelled",
}


def test_spoilt_histories(good: Told) -> None:
    """Each is flagged, and for what it is."""
    for spoil, problem in SPOILT.items():
        spoilt = Told(list(good.history), copy.deepcopy(good.found), good.sent, good.dropped)
        spoil(spoilt)
        lines = list(violations(spoilt.history, spoilt.found))
        assert any(problem in line for line in lines), f"{spoil.__name__}: {lines}"
