"""Whether the process lives, whether it can serve, and what monitoring reads. No tenant's data in the first two."""

import asyncio
import logging
import os
import socket
from datetime import timedelta
from enum import StrEnum

from fastapi import APIRouter, Depends, Request, Response
from temporalio.service import RPCError

from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.contract.workers import WorkerState
from durable_jobs.http.access import require_scraper
from durable_jobs.http.metrics import Scrape
from durable_jobs.http.problems import documented
from durable_jobs.http.state import Api, TheApi
from durable_jobs.http.views import View

logger = logging.getLogger(__name__)

CHECK_SECONDS = 3.0

router = APIRouter()


class Alive(View):
    status: str = "ok"


class Part(StrEnum):
    OK = "ok"
    AWAY = "away"
    """Not reachable, too slow, or not as it must be: the log says which."""


class Readiness(View):
    """Each part that the API needs; `worker` where one runs beside it."""

    postgres: Part
    temporal: Part
    worker: Part | None


@router.get("/healthz")
async def healthz() -> Alive:
    """The process answers."""
    return Alive()


@router.get("/readyz", responses={503: {"model": Readiness, "description": "A part is away."}})
async def readyz(response: Response, api: TheApi) -> Readiness:
    """Postgres with the newest schema and Temporal answer, and the worker beside the API polls."""
    checks = [_postgres(api), _temporal(api), *([_worker(api)] if api.settings.run_worker else [])]
    parts = await asyncio.gather(*checks)
    if Part.AWAY in parts:
        response.status_code = 503
    postgres, temporal, *worker = parts
    return Readiness(postgres=postgres, temporal=temporal, worker=worker[0] if worker else None)


async def _postgres(api: Api) -> Part:
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            await api.service.database.check()
    except (DurableJobsError, TimeoutError) as error:
        logger.warning("Not ready, Postgres: %r", error)
        return Part.AWAY
    return Part.OK


async def _temporal(api: Api) -> Part:
    try:
        healthy = await api.temporal.service_client.check_health(timeout=timedelta(seconds=CHECK_SECONDS))
    except (RPCError, RuntimeError) as error:
        logger.warning("Not ready, Temporal: %r", error)
        return Part.AWAY
    return Part.OK if healthy else Part.AWAY


async def _worker(api: Api) -> Part:
    """The registry knows: its heartbeats come from the polling worker itself."""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            workers = await api.service.list_workers()
    except (DurableJobsError, TimeoutError):
        return Part.AWAY
    here = (socket.gethostname(), os.getpid())
    polled = {
        worker.queue
        for worker in workers
        if (worker.host, worker.pid) == here and worker.state(api.settings.worker_stale_seconds) is WorkerState.HEALTHY
    }
    return Part.OK if polled >= set(api.settings.queues) else Part.AWAY


@router.get(
    "/metrics",
    response_class=Response,
    dependencies=[Depends(require_scraper)],
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **documented(401, 403, 503)},
)
async def metrics(request: Request, api: TheApi) -> Response:
    """Prometheus metrics of the whole, every organization's: to loopback, or to DURABLE_JOBS_METRICS_TOKEN."""
    scrape: Scrape = request.app.state.scrape
    return await scrape.response(api, request.headers.get("accept", ""))
