"""Queues and workers, as the token's organization sees them."""

from datetime import datetime
from typing import Annotated

from fastapi import Path

from durable_jobs.contract.models import TokenRole
from durable_jobs.contract.workers import QueueOverview, WorkerRecord, WorkerState
from durable_jobs.http.access import Principal, Who
from durable_jobs.http.bodies import QueueSwitch, StoredQueue
from durable_jobs.http.doors import door
from durable_jobs.http.problems import documented
from durable_jobs.http.state import Api, TheApi
from durable_jobs.http.views import View

reading = door(TokenRole.READER)
operating = door(TokenRole.OPERATOR)


class QueueView(View):
    """How the organization's unsettled jobs of one queue and type stand."""

    queue: str
    type: str
    queued: int
    due: int
    """Queued and due now."""
    active: int
    unresolved: int
    escalated: int
    oldest_due_seconds: float | None
    paused: bool
    live_workers: int

    @classmethod
    def of(cls, overview: QueueOverview) -> "QueueView":
        return cls(type=overview.job_type, **overview.model_dump(exclude={"job_type"}))


class Queues(View):
    items: list[QueueView]


class Switched(View):
    queue: str
    type: str | None
    paused: bool
    changed: bool
    """False: it stood so before."""
    woken: int
    """Due jobs that were told of a resume."""


class WorkerView(View):
    """One incarnation of one worker process."""

    worker_id: str
    state: WorkerState
    host: str
    pid: int
    version: str
    queue: str
    types: list[str]
    running: int
    """Attempts in hand at the last heartbeat."""
    slots: int | None
    """How many it runs at once; null where its own tuner decides."""
    started_at: datetime
    heartbeat_at: datetime
    stopped_at: datetime | None

    @classmethod
    def of(cls, worker: WorkerRecord, stale_seconds: float) -> "WorkerView":
        kept = {name: value for name, value in worker if name in cls.model_fields}
        return cls(**kept, worker_id=worker.id, state=worker.state(stale_seconds), types=worker.job_types)


class NeverStarted(View):
    """A queue and type with jobs that no worker ever hosted."""

    queue: str
    type: str
    queued: int


class Workers(View):
    items: list[WorkerView]
    never_started: list[NeverStarted]


@reading.get("/queues")
async def list_queues(who: Who, api: TheApi) -> Queues:
    """Every queue and type with unsettled jobs: depth, age, pause, live workers."""
    return Queues(items=[QueueView.of(each) for each in await _overview(api, who)])


@operating.post("/queues/{queue:path}/pause", responses=documented(404, 413, 415))
async def pause_queue(queue: Annotated[StoredQueue, Path()], body: QueueSwitch, who: Who, api: TheApi) -> Switched:
    """Stop the claims of the organization's jobs on a queue, or there of one type. Attempts in hand go on."""
    who.require_whole_organization()
    changed = await api.service.pause_queue(
        queue, body.type, actor=who.actor, reason=body.reason, organization=who.organization
    )
    return Switched(queue=queue, type=body.type, paused=True, changed=changed, woken=0)


@operating.post("/queues/{queue:path}/resume", responses=documented(404, 413, 415))
async def resume_queue(queue: Annotated[StoredQueue, Path()], body: QueueSwitch, who: Who, api: TheApi) -> Switched:
    """Lift the organization's own pause, and wake its due jobs in their order. A deployer's pause stands."""
    who.require_whole_organization()
    changed = await api.service.resume_queue(
        queue, body.type, actor=who.actor, reason=body.reason, organization=who.organization
    )
    woken = await api.jobs.wake_due(queue, body.type, organization=who.organization)
    return Switched(queue=queue, type=body.type, paused=False, changed=changed, woken=woken)


@reading.get("/workers")
async def list_workers(who: Who, api: TheApi) -> Workers:
    """The workers that serve the organization; and what it has queued where none ever served."""
    workers = await serving(api, who)
    hosted = {(worker.queue, job_type) for worker in workers for job_type in worker.job_types}
    return Workers(
        items=[WorkerView.of(worker, api.settings.worker_stale_seconds) for worker in workers],
        never_started=[
            NeverStarted(queue=each.queue, type=each.job_type, queued=each.queued)
            for each in await _overview(api, who)
            if (each.queue, each.job_type) not in hosted
        ],
    )


async def serving(api: Api, who: Principal) -> list[WorkerRecord]:
    """The workers that serve the principal's organization."""
    workers = await api.service.list_workers()
    return [each for each in workers if each.organizations is None or who.organization in each.organizations]


async def _overview(api: Api, who: Principal) -> list[QueueOverview]:
    who.require_whole_organization()
    return await api.service.list_queues(organization=who.organization, stale_seconds=api.settings.worker_stale_seconds)
