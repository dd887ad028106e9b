"""The network breaks between a worker and its servers: at a COMMIT, without a word, in one direction, and for long."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from temporalio.client import Client
from temporalio.service import KeepAliveConfig
from temporalio.worker import Worker

from durable_jobs import Database, DurableJobs, DurableJobService, DurableJobsPlugin, EventName, JobContext, JobStatus
from durable_jobs.contract.errors import AlreadyDispatched, IllegalTransition, StoreUnavailable
from durable_jobs.contract.models import Claim, ClaimRefusal
from durable_jobs.dev import DevStack
from durable_jobs.store import database as store_database
from durable_jobs.temporal import keeper
from tests.conftest import Specs
from tests.netfaults import Direction, How, Proxy, Strike, proxied
from tests.probes import OTHER_WORKER, Gate, Probe, Provider, eventually, trail, until
from tests.support import A, claimed, dispatched, names

CLAIMED, DISPATCHED, COMPLETED = EventName.CLAIMED, EventName.DISPATCHED, EventName.COMPLETED
STATEMENTS = {"claim": b"'claim' AS decision", "mark": b"'dispatched', c.status", "complete": b"'completed', status"}
"""Text of the statements of these verbs alone, after which their COMMIT is looked for."""
RENEWAL = b"'cancel_requested'"

both_outcomes = pytest.mark.parametrize("arrives", [False, True], ids=["COMMIT is lost", "its answer is lost"])
both_ways = pytest.mark.parametrize("how", ["reset", "close"])
every_verb = pytest.mark.parametrize("verb", list(STATEMENTS))


@pytest.fixture
async def proxy(database_url: str) -> AsyncIterator[Proxy]:
    """Between whoever uses its address, and this test's database."""
    async with proxied(database_url) as proxy:
        yield proxy


@pytest.fixture
async def behind(proxy: Proxy) -> AsyncIterator[DurableJobService]:
    """The verbs, through the proxy."""
    database = Database(proxy.address)
    try:
        yield DurableJobService(database, grace_seconds=5)
    finally:
        await database.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing is given up after a second, not after half a minute."""
    monkeypatch.setattr(store_database, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(keeper, "ANSWER_SECONDS", 1.0)
    monkeypatch.setitem(store_database.CONNECT_ARGS, "connect_timeout", 2)


def strike(proxy: Proxy, verb: str, *, arrives: bool, how: How) -> Strike:
    return proxy.strike(Strike(after=STATEMENTS[verb], at=b"COMMIT", arrives=arrives, how=how))


# Verbs


@both_outcomes
@both_ways
async def test_connection_lost_in_the_commit_of_a_claim(
    service: DurableJobService, behind: DurableJobService, proxy: Proxy, spec: Specs, how: How, arrives: bool
) -> None:
    """The same token gets the same claim, whether the first one took effect or not."""
    job_id, token = (await service.create_job(spec())).job.id, uuid4()
    lost = strike(proxy, "claim", arrives=arrives, how=how)
    with pytest.raises(StoreUnavailable):
        await behind.claim_job(A, token, job_id=job_id)
    assert lost.struck.is_set()
    await settled(service, job_id, JobStatus.CLAIMED if arrives else JobStatus.QUEUED)
    outcome = await behind.claim_job(A, token, job_id=job_id)
    assert outcome is not None
    assert outcome.claim == Claim(job_id=job_id, worker_id=A, generation=1)
    assert await names(service, job_id) == [CLAIMED]


@both_outcomes
@both_ways
async def test_connection_lost_in_the_commit_of_a_mark(
    service: DurableJobService, behind: DurableJobService, proxy: Proxy, spec: Specs, how: How, arrives: bool
) -> None:
    claim = await claimed(service, spec())
    lost = strike(proxy, "mark", arrives=arrives, how=how)
    with pytest.raises(StoreUnavailable):
        await behind.mark_provider_dispatched(claim, "key", consequential=False)
    assert lost.struck.is_set()
    await settled(service, claim.job_id, JobStatus.RUNNING if arrives else JobStatus.CLAIMED)
    if arrives:
        with pytest.raises(AlreadyDispatched):
            await behind.mark_provider_dispatched(claim, "key", consequential=False)
    else:
        await behind.mark_provider_dispatched(claim, "key", consequential=False)
    job = await service.get_job(claim.job_id)
    assert (job.operation_key, job.dispatched_generation) == ("key", 1)
    assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED]


@both_outcomes
@both_ways
async def test_connection_lost_in_the_commit_of_a_completion(
    service: DurableJobService, behind: DurableJobService, proxy: Proxy, spec: Specs, how: How, arrives: bool
) -> None:
    claim = await dispatched(service, spec())
    lost = strike(proxy, "complete", arrives=arrives, how=how)
    with pytest.raises(StoreUnavailable):
        await behind.complete_job(claim, {"ok": True})
    assert lost.struck.is_set()
    await settled(service, claim.job_id, JobStatus.COMPLETED if arrives else JobStatus.RUNNING)
    if arrives:
        with pytest.raises(IllegalTransition):
            await behind.complete_job(claim, {"ok": True})
    else:
        await behind.complete_job(claim, {"ok": True})
    assert await behind.attempt_outcome(claim.job_id, claim.generation) == "completed"
    assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED, COMPLETED]


async def settled(service: DurableJobService, job_id: UUID, status: JobStatus) -> None:
    """Returns once nobody holds the row's lock any more, and it stands so: a transaction whose COMMIT was lost is
    rolled back when its server notices."""

    async def look() -> bool:
        async with asyncio.timeout(20):
            job, _ = await service.database.run(lambda own: service._store.lock(own, job_id))
        return job.status is status

    await eventually(look, f"the row is {status}")


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.usefixtures("impatient")
async def test_nothing_is_forwarded_in_one_direction(
    service: DurableJobService, behind: DurableJobService, proxy: Proxy, spec: Specs, direction: Direction
) -> None:
    """TCP stays up all the while: nobody but the caller's own patience ends the call."""
    claim = await dispatched(service, spec())
    await behind.get_job(claim.job_id)  # a connection that has been good
    proxy.silence(direction)
    with pytest.raises(StoreUnavailable):
        await behind.complete_job(claim, {"ok": True})
    assert (await service.get_job(claim.job_id)).status is JobStatus.RUNNING
    proxy.heal()
    proxy.break_all("reset")  # and their servers notice
    await behind.complete_job(claim, {"ok": True})
    assert await names(service, claim.job_id) == [CLAIMED, DISPATCHED, COMPLETED]


# Workers


Behind = Callable[..., Any]


@pytest.fixture
def worker_behind(proxy: Proxy, temporal_client: Client, queue: str) -> Behind:
    """`async with worker_behind(handler):` a worker whose every connection to Postgres goes through the proxy."""

    @asynccontextmanager
    async def run(handler: Probe, temporal: Client | None = None) -> AsyncIterator[Worker]:
        plugin = DurableJobsPlugin(proxy.address, [handler], grace_seconds=2, reconcile_every=timedelta(days=365))
        async with Worker(temporal or temporal_client, task_queue=queue, plugins=[plugin]) as running:
            yield running

    return run


def calling(provider: Provider, gate: Gate | None = None) -> Probe:
    """Past the boundary one call, and then it waits at the gate."""

    async def script(job: JobContext, request: dict[str, Any]) -> Any:
        async with job.dispatch(f"probe:{job.id}") as key:
            answer = await provider.call(key)
        if gate:
            await gate.wait()
        return answer

    return Probe(script)


async def undisturbed(jobs: DurableJobs, job_id: UUID, provider: Provider) -> None:
    """The job was completed in its first attempt, by one call."""
    assert await jobs.handle(job_id).result(timeout=30) == {"sent": f"probe:{job_id}"}
    assert provider.keys == [f"probe:{job_id}"]
    assert await trail(jobs.service, job_id) == [CLAIMED, DISPATCHED, COMPLETED]
    assert (await jobs.service.get_job(job_id)).lease_generation == 1


@both_outcomes
@every_verb
async def test_a_worker_loses_its_connection_in_a_commit(
    jobs: DurableJobs, worker_behind: Behind, proxy: Proxy, spec: Specs, verb: str, arrives: bool
) -> None:
    provider = Provider()
    lost = strike(proxy, verb, arrives=arrives, how="reset")
    async with worker_behind(calling(provider)):
        handle = await jobs.create_job(spec())
        await undisturbed(jobs, handle.id, provider)
    assert lost.struck.is_set()


@both_outcomes
@every_verb
@pytest.mark.usefixtures("impatient")
async def test_a_worker_hears_nothing_after_a_commit(
    jobs: DurableJobs, worker_behind: Behind, proxy: Proxy, spec: Specs, verb: str, arrives: bool
) -> None:
    """The black hole, both ways, round each of its three writes."""
    provider = Provider()
    lost = strike(proxy, verb, arrives=arrives, how="silence")
    async with worker_behind(calling(provider)):
        handle = await jobs.create_job(spec())
        await asyncio.wait_for(lost.struck.wait(), 20)
        if not arrives:
            proxy.servers_notice()
        await undisturbed(jobs, handle.id, provider)


@pytest.mark.usefixtures("impatient")
async def test_the_keeper_hears_nothing(jobs: DurableJobs, worker_behind: Behind, proxy: Proxy, spec: Specs) -> None:
    """Its renewal vanishes: it takes a new connection, and the lease holds."""
    provider, gate = Provider(), Gate()
    async with worker_behind(calling(provider, gate)):
        handle = await jobs.create_job(spec(lease_seconds=6))
        await gate.handler_came()
        lost = proxy.strike(Strike(after=RENEWAL, at=b"COMMIT", arrives=True, how="silence"))
        await asyncio.wait_for(lost.struck.wait(), 20)
        silent_since = (await handle.job()).heartbeat_at
        assert silent_since is not None

        async def renewed_for_long() -> bool:
            beat = (await handle.job()).heartbeat_at
            return beat is not None and beat - silent_since > timedelta(seconds=6)

        await eventually(renewed_for_long, "renewals go on beyond the lease")
        outcome = await jobs.service.claim_job(OTHER_WORKER, uuid4(), job_id=handle.id)
        assert outcome is not None
        assert outcome.refusal is ClaimRefusal.HELD
        gate.go_on.set()
        await undisturbed(jobs, handle.id, provider)


@pytest.mark.usefixtures("impatient")
async def test_cut_off_past_the_lease(
    jobs: DurableJobs, worker_behind: Behind, proxy: Proxy, spec: Specs, service: DurableJobService
) -> None:
    """A worker that no packet reaches any more changes nothing when it is back; what it got is kept as evidence."""
    provider, gate = Provider(), Gate()
    async with worker_behind(calling(provider, gate)):
        handle = await jobs.create_job(spec(lease_seconds=2))
        await gate.handler_came()
        proxy.silence("up", "down")

        async def lease_is_gone() -> bool:
            outcome = await service.claim_job(OTHER_WORKER, uuid4(), job_id=handle.id)
            return outcome is not None and outcome.refusal is ClaimRefusal.LANDED

        await eventually(lease_is_gone, "the lease runs out")
        landed = await handle.job()
        proxy.heal()
        gate.go_on.set()

        async def late() -> bool:
            return bool((await service.list_job_attempts(handle.id)).items[0].late_result)

        await eventually(late, "the late result")
    job = await handle.job()
    assert (job.status, job.lease_generation, job.updated_at) == (JobStatus.INDETERMINATE, 2, landed.updated_at)
    assert provider.keys == [f"probe:{handle.id}"]


async def test_a_slow_network(jobs: DurableJobs, worker_behind: Behind, proxy: Proxy, spec: Specs) -> None:
    """Nothing is lost, least of all the lease."""
    provider, gate = Provider(), Gate()
    async with worker_behind(calling(provider, gate)):
        proxy.delay(0.08, "up", "down")
        handle = await jobs.create_job(spec(lease_seconds=2))
        await gate.handler_came()
        began = (await handle.job()).heartbeat_at
        assert began is not None

        async def renewed() -> bool:
            beat = (await handle.job()).heartbeat_at
            return beat is not None and beat - began > timedelta(seconds=2)

        await eventually(renewed, "renewals beyond the lease")
        gate.go_on.set()
        await undisturbed(jobs, handle.id, provider)


# Temporal


@pytest.mark.parametrize(
    "how", ["reset", "close", *(pytest.param(how, marks=pytest.mark.proof) for how in ("silence", "up", "down"))]
)
async def test_the_network_to_temporal_breaks(
    jobs: DurableJobs,
    worker_behind: Behind,
    spec: Specs,
    durable_jobs_stack: DevStack,
    temporal_client: Client,
    how: str,
) -> None:
    """Cut, or nothing forwarded in one direction or both: an attempt in hand goes on without Temporal and is not run
    again, and the next job runs once the network is back."""
    provider, gate = Provider(), Gate()
    quick = KeepAliveConfig(interval_millis=500, timeout_millis=500)
    async with proxied(durable_jobs_stack.temporal_address) as between:
        client = await Client.connect(between.address, namespace=temporal_client.namespace, keep_alive_config=quick)
        async with worker_behind(calling(provider, gate), client):
            handle = await jobs.create_job(spec(lease_seconds=6))
            await gate.handler_came()
            connections = between.accepted
            match how:
                case "reset" | "close":
                    between.break_all("reset" if how == "reset" else "close")
                case "up" | "down":
                    between.silence("up" if how == "up" else "down")
                case _:
                    between.silence("up", "down")

            async def again() -> bool:
                return between.accepted > connections

            await eventually(again, "a new connection to Temporal", timeout=30)
            gate.go_on.set()
            await until(jobs.service, handle.id, JobStatus.COMPLETED)
            between.heal()
            await undisturbed(jobs, handle.id, provider)
            after = await jobs.create_job(spec())
            assert await after.result(timeout=60) == {"sent": f"probe:{after.id}"}
            assert len(provider.keys) == 2
