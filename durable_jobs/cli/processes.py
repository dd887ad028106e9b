"""`durable-jobs serve` and `durable-jobs worker`: the processes of a deployment, until SIGTERM or Ctrl-C."""

import asyncio
import logging
import signal
from typing import Annotated, Any

import typer

from durable_jobs.cli.connection import UNAVAILABLE_EXIT
from durable_jobs.cli.output import JsonOption, fail, say
from durable_jobs.contract.errors import DurableJobsError
from durable_jobs.settings import InvalidSettings, Settings


def serve(
    host: Annotated[str | None, typer.Option(help="By default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="By default 8080; 0 takes a free one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the HTTP API, by the DURABLE_JOBS_* settings. Exits with 0 when stopped, 2 for a wrong setting."""
    try:
        from durable_jobs.http import serve as run  # noqa: PLC0415 - an extra of its own
    except ModuleNotFoundError as missing:
        if missing.name not in {"fastapi", "uvicorn", "prometheus_client"}:
            raise
        fail(as_json, "HTTP_MISSING", "the API is an extra; install it with: pip install 'durable-jobs[http]'")
    try:
        run(_settings(as_json, http_host=host, http_port=port))
    except InvalidSettings as error:
        fail(as_json, error.code, error.message, exit_code=2)


def worker(
    app: Annotated[str | None, typer.Option(help="The handlers: module:attribute.")] = None,
    queue: Annotated[list[str] | None, typer.Option(help="A queue to host; may be given more than once.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a worker, by the DURABLE_JOBS_* settings.

    On SIGTERM or Ctrl-C handlers run on through the grace period. Exits with 0 once every outcome is written, 2 for a
    wrong setting, 6 when a server is away at the start.
    """
    settings = _settings(as_json, worker_app=app, worker_queues=queue or None)
    if not settings.worker_app:
        fail(as_json, "INVALID_SETTINGS", "--app or DURABLE_JOBS_WORKER_APP must name the handlers", exit_code=2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    say(as_json, f"hosting {', '.join(settings.queues)}", queues=list(settings.queues))
    try:
        asyncio.run(_until_told(settings))
    except InvalidSettings as error:
        fail(as_json, error.code, error.message, exit_code=2)
    except DurableJobsError as error:
        fail(as_json, error.code, error.message, exit_code=UNAVAILABLE_EXIT)
    except RuntimeError as error:  # how the SDK says that it can't connect
        fail(as_json, "TEMPORAL_UNAVAILABLE", str(error), exit_code=UNAVAILABLE_EXIT)


async def _until_told(settings: Settings) -> None:
    from durable_jobs.hosting import run_worker  # noqa: PLC0415 - help needn't wait for the SDK's worker

    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    await run_worker(settings, stop)


def _settings(as_json: bool, **overrides: Any) -> Settings:
    try:
        return Settings.from_environment(**overrides)
    except InvalidSettings as error:
        fail(as_json, error.code, error.message, exit_code=2)
