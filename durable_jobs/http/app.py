"""The application: `create_app` makes it, `serve` runs it."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI

from durable_jobs.hosting import App, load_app, run_worker
from durable_jobs.http import console, control, health, jobs, queues
from durable_jobs.http.metrics import Scrape
from durable_jobs.http.problems import Problem, answer_problems
from durable_jobs.http.state import opened
from durable_jobs.settings import Settings

logger = logging.getLogger(__name__)

DESCRIPTION = """Durable jobs: one job per idempotency key, one send per intent, and no guessing about the rest.

`status` is the control plane's word: QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED, or UNCERTAIN, which is neither;
`state` is one of the ten that the job service knows. Errors are problem details (RFC 9457) with a stable `code`.
"""
_WORKER_PAUSE_SECONDS = 5.0
_DRAIN_SECONDS = 10


def create_app(settings: Settings | None = None) -> FastAPI:
    """The API with these settings, by default those of the environment. Raises `InvalidSettings`."""
    settings = settings or Settings.from_environment()
    # What can't be found is said at once, not by a worker that never polls.
    worker = load_app(settings.worker_app or "") if settings.run_worker else None

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with opened(settings) as api, _worker_beside(settings, worker):
            app.state.api = api
            app.state.scrape = Scrape()
            yield

    app = FastAPI(
        title="Durable jobs",
        version=version("durable-jobs"),
        description=DESCRIPTION,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        lifespan=lifespan,
    )
    answer_problems(app)
    for router in (jobs.submitting, jobs.reading, control.submitting, control.operating):
        app.include_router(router, tags=["jobs"])
    for router in (queues.reading, queues.operating):
        app.include_router(router, tags=["queues and workers"])
    app.include_router(health.router, tags=["health"])
    app.include_router(console.router)
    app.add_exception_handler(console.SignIn, console.show_sign_in)
    _describe_problems(app)
    return app


def serve(settings: Settings | None = None) -> None:
    """Serve the API until SIGTERM or Ctrl-C; requests in hand get ten seconds, a worker beside it its grace period."""
    settings = settings or Settings.from_environment()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # uvicorn raises the signal that stopped it once more: to have been told to stop is no failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    uvicorn.run(
        create_app(settings),
        host=settings.http_host,
        port=settings.http_port,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )


@contextlib.asynccontextmanager
async def _worker_beside(settings: Settings, worker: App | None) -> AsyncIterator[None]:
    """Run the worker, where there is to be one, again and again until the API stops."""
    if worker is None:
        yield
        return
    stop = asyncio.Event()

    async def keep_running() -> None:
        while not stop.is_set():
            try:
                await run_worker(settings, stop, worker)
            except Exception:
                logger.exception("The worker beside the API ended; it starts again in %g s", _WORKER_PAUSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), _WORKER_PAUSE_SECONDS)

    running = asyncio.create_task(keep_running())
    try:
        yield
    finally:
        stop.set()
        await running


def _describe_problems(app: FastAPI) -> None:
    """Let the OpenAPI document hold the schema that every refusal refers to."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas |= problem.pop("$defs") | {Problem.__name__: problem}
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]
