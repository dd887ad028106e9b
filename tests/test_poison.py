"""One row that can't be handled, whatever the reason, stops no sweep and starves no other row.

Case 36 of the catalogue, of the kind "data": one row whose handling raises."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio

from durable_jobs import Database, DurableJobService, FollowUp, Job, JobSpec, JobStatus, ProviderState
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.service.reconciliation import Candidate, Handled
from tests.conftest import Specs
from tests.support import sql
from tests.sweeping import (
    LANDED,
    RESULT,
    Asked,
    Parent,
    Report,
    abandoned,
    many_uncertain,
    poison_writes,
    summary,
    swept,
    timed_out,
    uncertain,
    untouched_for,
)

MANY = 1000


@pytest_asyncio.fixture
async def crowded(database_url: str) -> AsyncIterator[DurableJobService]:
    """The verbs, without the check of every trail at the end: a thousand of them would take the longest."""
    database = Database(database_url, pool_size=20)
    yield DurableJobService(database)
    await database.close()


async def raises(key: str, job: Job) -> Any:
    raise ConnectionError("no such host")


async def hangs(key: str, job: Job) -> Any:
    await asyncio.Event().wait()


async def returns_rubbish(key: str, job: Job) -> Any:
    return ["succeeded"]


@pytest.mark.parametrize("poison", [raises, hangs, returns_rubbish])
async def test_one_among_a_thousand(
    crowded: DurableJobService, spec: Specs, queue: str, poison: Callable[[str, Job], Awaitable[Any]]
) -> None:
    """The other 999 are handled in that very sweep, those before it and those after it."""
    rows = await many_uncertain(crowded, [spec(idempotency_key=f"k-{n:04}") for n in range(MANY)])
    middle = rows[MANY // 2]

    async def answer(key: str, job: Job) -> Any:
        return await poison(key, job) if job.id == middle.id else LANDED

    handler = Asked(answer)
    async with asyncio.timeout(60):
        sweep = await swept(crowded, queue, handler, policy=ReconciliationPolicy(lookup_timeout=1))
    expected = summary(MANY, resolved={"completed": MANY - 1}, skipped={"lookup_failed": 1})
    assert sweep.summary == expected
    assert sorted(handler.keys) == sorted(f"key:{job.id}" for job in rows)
    page = await crowded.list_jobs(limit=1000)
    assert Counter(job.status for job in page.items) == {JobStatus.COMPLETED: MANY - 1, JobStatus.INDETERMINATE: 1}
    (left,) = [job for job in page.items if job.status is JobStatus.INDETERMINATE]
    assert (left.id, left.lookup_tries) == (middle.id, 1)
    for job in (*rows[:5], middle, *rows[-5:]):
        assert await crowded.check_trail(job.id) == []


async def test_those_that_hang_are_passed(service: DurableJobService, spec: Specs, queue: str) -> None:
    """More of them than lookups run side by side, and all of them older than the rest."""
    hanging = [await uncertain(service, spec()) for _ in range(3)]
    willing = [await uncertain(service, spec()) for _ in range(3)]
    willing += [await uncertain(service, spec(project="beta")), await uncertain(service, spec(organization="zeta"))]

    async def answer(key: str, job: Job) -> Any:
        return await hangs(key, job) if job.id in {each.id for each in hanging} else LANDED

    policy = ReconciliationPolicy(lookup_timeout=0.2, lookup_concurrency=2)
    async with asyncio.timeout(20):
        sweep = await swept(service, queue, Asked(answer), policy=policy)
    assert sweep.summary == summary(8, resolved={"completed": 5}, skipped={"lookup_failed": 3})
    assert set(sweep.words) == {job.id for job in willing}


MakeRow = Callable[[DurableJobService, JobSpec], Awaitable[Job]]


@pytest.mark.parametrize(
    ("make", "answer", "counts"),
    [
        (uncertain, LANDED, {"resolved": {"completed": 2}}),
        (uncertain, ProviderState.unknown("lost"), {"escalated": 2}),
        (uncertain, ConnectionError("down"), {"skipped": {"lookup_failed": 2}}),
        (abandoned, LANDED, {"resolved": {"completed": 2}}),
        (timed_out, LANDED, {"escalated": 2}),
    ],
    ids=["to complete", "to escalate", "to put off", "to fence", "timed out"],
)
async def test_a_row_that_can_not_be_written_stops_no_other(
    service: DurableJobService, spec: Specs, queue: str, make: MakeRow, answer: Any, counts: dict[str, Any]
) -> None:
    before, poison, after = [await make(service, spec()) for _ in range(3)]
    await poison_writes(service, poison.id)
    policy = ReconciliationPolicy(lookup_concurrency=1)
    sweep = await swept(service, queue, Asked(answer), policy=policy)
    skipped = counts.pop("skipped", {}) | {"error": 1}
    assert sweep.summary == summary(3, skipped=skipped, **counts)
    assert await service.get_job(poison.id) == poison
    assert await service.get_job(before.id) != before
    assert await service.get_job(after.id) != after


@pytest.mark.parametrize("make", [uncertain, abandoned])
async def test_a_row_that_nobody_hosts_and_that_can_not_be_written_stops_no_other(
    service: DurableJobService, spec: Specs, make: MakeRow
) -> None:
    rows = [await make(service, spec()) for _ in range(3)]
    for job in rows:
        await untouched_for(service, job.id, hours=1)
    await poison_writes(service, rows[1].id)
    sweep = await swept(service, "another-queue", Asked(LANDED))
    assert sweep.words == {rows[0].id: "escalated", rows[2].id: "escalated"}
    assert sweep.summary.skipped["error"] == 1


async def test_a_row_that_can_not_be_written_stops_no_launch(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    created = [(await service.create_job(spec())).job for _ in range(3)]
    await sql(service, "UPDATE durable_jobs.jobs SET launch_check_at = clock_timestamp() - interval '1 second'")
    await poison_writes(service, created[1].id)
    taken = await service.take_due_for_launch(queue)
    assert {created[0].id, created[2].id} <= {job.id for job, _ in taken}


async def test_due_follow_ups_that_can_not_be_written_stop_no_other(
    service: DurableJobService, spec: Specs, queue: str
) -> None:
    rows = []
    for _ in range(3):
        job = await uncertain(service, spec())
        rows.append(await service.resolve_job(job.id, JobStatus.COMPLETED, {"seen": "it"}, "ann", result=RESULT))
    await poison_writes(service, rows[1].id)
    sweep = await swept(service, queue, Parent(LANDED, "mail"))
    assert (sweep.summary.follow_ups, set(sweep.words)) == (2, {rows[0].id, rows[2].id})
    found = await service.list_jobs(statuses=[JobStatus.QUEUED])
    assert sorted(job.idempotency_key for job in found.items) == [f"{rows[0].id}:mail", f"{rows[2].id}:mail"]


async def test_one_that_can_not_be_told_stops_no_other(service: DurableJobService, spec: Specs, queue: str) -> None:
    rows = [await uncertain(service, spec()) for _ in range(3)]
    told = []

    async def tell(handled: Handled) -> None:
        assert handled.job is not None
        if handled.job.id == rows[1].id:
            raise RuntimeError("no such address")
        told.append(handled.job.id)

    policy = ReconciliationPolicy(lookup_concurrency=1)
    await service.sweep_reconciliation_candidates(queue, {"probe": Asked(LANDED)}, policy=policy, tell=tell)
    assert told == [rows[0].id, rows[2].id]
    assert {(await service.get_job(job.id)).status for job in rows} == {JobStatus.COMPLETED}


class Careless(Asked):
    """Its follow-ups are none."""

    def __init__(self, wanted: Any) -> None:
        super().__init__(LANDED)
        self.wanted = wanted

    def follow_ups(self, job: Job, result: Report) -> Sequence[FollowUp]:
        if isinstance(self.wanted, Exception):
            raise self.wanted
        answer: Sequence[FollowUp] = self.wanted
        return answer


NO_FOLLOW_UPS = [
    pytest.param(ValueError("\x00"), id="raises"),
    pytest.param(None, id="None"),
    *(
        pytest.param(
            wanted,
            id=name,
            marks=(),
        )
        for name, wanted in {"objects": [{"name": "mail"}], "a text": "mail"}.items()
    ),
]


@pytest.mark.parametrize("by", ["the sweep", "an operator"])
@pytest.mark.parametrize("wanted", NO_FOLLOW_UPS)
async def test_follow_ups_that_are_none_undo_no_completion(
    service: DurableJobService, spec: Specs, queue: str, wanted: Any, by: str
) -> None:
    """It is recorded, and the parent escalated; the sweep goes on to the others."""
    job, other = await uncertain(service, spec()), await uncertain(service, spec())
    if by == "an operator":
        await service.resolve_job(job.id, JobStatus.COMPLETED, {"seen": "it"}, "ann", result=RESULT)
    try:
        await swept(service, queue, Careless(wanted))
    except AttributeError as error:
        raise AssertionError("the sweep has ended with it") from error
    for each in (job, other):
        after = await service.get_job(each.id)
        assert (after.status, after.result, after.follow_ups_due) == (JobStatus.COMPLETED, RESULT, False)
        assert after.escalation_reason is not None
        assert after.escalation_reason.startswith("FOLLOW_UPS_FAILED: ")


async def test_a_page_that_can_not_be_read_ends_the_sweep_as_it_says(
    service: DurableJobService, spec: Specs, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the database away there is nothing to go on with; `StoreUnavailable`, as documented."""
    await uncertain(service, spec())
    await uncertain(service, spec(project="beta"))
    real = service.find_reconciliation_candidates

    async def read(organization: str, project: str, **options: Any) -> list[Candidate]:
        if project == "beta":
            raise StoreUnavailable("gone")
        return await real(organization, project, **options)

    monkeypatch.setattr(service, "find_reconciliation_candidates", read)
    with pytest.raises(StoreUnavailable):
        await swept(service, queue, Asked(LANDED))
