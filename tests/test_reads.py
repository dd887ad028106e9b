"""Reading jobs, trails and attempts: paged by key, narrowed by tenant, and refused by name."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from durable_jobs import DurableJobService, JobStatus
from durable_jobs.contract.errors import InvalidInput, JobNotFound
from durable_jobs.contract.models import Page
from tests.conftest import Specs
from tests.support import claimed, end_in, reclaimed, running, sql


async def all_pages(read: Any, limit: int) -> list[Page[Any]]:
    """Every page of a listing, from the first to the last."""
    pages = [await read(limit=limit)]
    while pages[-1].next_cursor is not None:
        pages.append(await read(limit=limit, after=pages[-1].next_cursor))
    return pages


async def test_jobs_are_listed_in_pages(service: DurableJobService, spec: Specs) -> None:
    created = [(await service.create_job(spec(priority=n % 3))).job.id for n in range(7)]
    for limit, sizes in ((3, [3, 3, 1]), (7, [7]), (6, [6, 1]), (1, [1] * 7), (1000, [7])):
        pages = await all_pages(service.list_jobs, limit)
        assert [len(page.items) for page in pages] == sizes
        assert [job.id for page in pages for job in page.items] == created
    assert await service.list_jobs(after=str(created[-1])) == Page(items=[])


async def test_a_listing_holds_no_payloads_and_results(service: DurableJobService, spec: Specs) -> None:
    """A page of a thousand jobs of the largest size would be eight gigabytes."""
    job = await end_in(service, await claimed(service, spec()), JobStatus.COMPLETED)
    assert job.payload
    assert job.result
    (listed,) = (await service.list_jobs()).items
    assert listed.model_dump() == job.model_dump(exclude={"payload", "result"})


async def test_a_page_is_not_moved_by_what_happens_meanwhile(service: DurableJobService, spec: Specs) -> None:
    created = [(await service.create_job(spec())).job.id for _ in range(4)]
    first = await service.list_jobs(limit=2)
    await sql(service, "DELETE FROM durable_jobs.jobs WHERE id = %(id)s", id=created[0])
    late = (await service.create_job(spec())).job.id
    rest = await service.list_jobs(limit=10, after=first.next_cursor)
    assert [job.id for job in rest.items] == [*created[2:], late]


async def test_a_listing_is_narrowed(service: DurableJobService, spec: Specs) -> None:
    claim = await running(service, spec(queue="one"))
    others = [
        (await service.create_job(spec(**overrides))).job.id
        for overrides in ({"organization": "globex"}, {"project": "beta"}, {"job_type": "other"}, {"queue": "two"})
    ]
    ended = (await end_in(service, await claimed(service, spec(queue="one")), JobStatus.COMPLETED)).id

    async def found(**narrow: Any) -> set[Any]:
        return {job.id for job in (await service.list_jobs(**narrow)).items}

    everything = {claim.job_id, ended, *others}
    assert await found() == everything
    assert await found(organization="acme") == everything - {others[0]}
    assert await found(organization="globex") == {others[0]}
    assert await found(organization="globex", project="beta") == set()
    assert await found(project="beta") == {others[1]}
    assert await found(job_type="other") == {others[2]}
    assert await found(queue="one") == {claim.job_id, ended}
    assert await found(queue="one", statuses=[JobStatus.COMPLETED, JobStatus.FAILED]) == {ended}
    assert await found(statuses=[JobStatus.RUNNING]) == {claim.job_id}
    assert await found(statuses=[]) == set()


async def test_another_tenants_job_is_not_found(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec(organization="acme"))).job
    assert await service.get_job(job.id, organization="acme") == job
    with pytest.raises(JobNotFound):
        await service.get_job(job.id, organization="globex")
    with pytest.raises(JobNotFound):
        await service.get_job(uuid4())
    with pytest.raises(JobNotFound):
        await service.get_job_and_clock(uuid4())


async def test_events_and_attempts_are_listed_in_pages(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    for _ in range(5):
        await service.release_job(await reclaimed(service, job.id), "deploy")

    async def events(**page: Any) -> Page[Any]:
        return await service.list_job_events(job.id, **page)

    async def attempts(**page: Any) -> Page[Any]:
        return await service.list_job_attempts(job.id, **page)

    assert [len(page.items) for page in await all_pages(events, 4)] == [4, 4, 2]
    listed = [event.name for page in await all_pages(events, 3) for event in page.items]
    assert listed == ["claimed", "retried"] * 5
    assert [len(page.items) for page in await all_pages(attempts, 2)] == [2, 2, 1]
    assert [attempt.generation for page in await all_pages(attempts, 2) for attempt in page.items] == [1, 2, 3, 4, 5]


async def test_the_trail_of_an_unknown_job_is_not_found(service: DurableJobService) -> None:
    """An empty trail is that of a job which nobody has claimed yet."""
    with pytest.raises(JobNotFound):
        await service.list_job_events(uuid4())
    with pytest.raises(JobNotFound):
        await service.list_job_attempts(uuid4())


async def test_limits_and_cursors_are_checked(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job

    async def events(**page: Any) -> Page[Any]:
        return await service.list_job_events(job.id, **page)

    async def attempts(**page: Any) -> Page[Any]:
        return await service.list_job_attempts(job.id, **page)

    for read in (service.list_jobs, events, attempts):
        for limit in (0, -1, 1001):
            with pytest.raises(InvalidInput, match="limit"):
                await read(limit=limit)
        for cursor in ("", "x", "1.5", "' OR 1=1", "\x00", "\ud800"):
            with pytest.raises(InvalidInput, match="after"):
                await read(after=cursor)


async def test_a_cursor_beyond_a_bigint_is_none(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    for read in (service.list_job_events, service.list_job_attempts):
        with pytest.raises(InvalidInput, match="after"):
            await read(job.id, after="9" * 30)


async def test_text_that_no_row_can_hold_is_found_nowhere(service: DurableJobService, spec: Specs) -> None:
    """U+0000 and lone surrogates in a question: a typed refusal or nothing found, never a driver's own error."""
    await service.create_job(spec())
    asks: list[Callable[[str], Awaitable[Any]]] = [
        lambda text: service.find_by_idempotency_key("acme", "alpha", text),
        lambda text: service.list_jobs(organization=text),
        lambda text: service.list_jobs(queue=text),
        lambda text: service.claim_job("worker", uuid4(), queues=[text]),
        lambda text: service.claim_job("worker", uuid4(), organizations=["globex", text]),
    ]
    for ask in asks:
        for text in ("\x00", "\ud800"):
            try:
                answer = await ask(text)
            except InvalidInput:
                continue
            assert answer is None or answer.items == []


async def test_the_clock_is_the_databases(service: DurableJobService, spec: Specs) -> None:
    job = (await service.create_job(spec())).job
    read, now = await service.get_job_and_clock(job.id)
    assert read == job
    assert timedelta(0) < now - job.created_at < timedelta(seconds=30)
    (clock,) = await sql(service, "SELECT clock_timestamp() AS now")
    assert now < clock["now"]
