"""A worker process as the settings describe it: which handlers, which queues, until it is told to stop."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from durable_jobs.handler import JobHandler
from durable_jobs.settings import PREFIX, InvalidSettings, Settings
from durable_jobs.temporal._plugin import DurableJobsPlugin

WORKER_APP = f"{PREFIX}WORKER_APP"


@dataclass(frozen=True)
class Hosted:
    """What a worker hosts: handlers of jobs, and a product's own workflows and activities."""

    handlers: Sequence[JobHandler[Any, Any]]
    workflows: Sequence[type] = ()
    activities: Sequence[Callable[..., Any]] = ()


App = Callable[[], AbstractAsyncContextManager[Hosted]]
"""Opens what a worker hosts, for as long as the worker runs."""


def load_app(reference: str) -> App:
    """What `module:attribute` names: handlers as for `load_handlers`, or a callable without arguments that returns an
    async context manager of a `Hosted`, for a product with workflows of its own or with something to close.

    Raises `InvalidSettings`; what the module itself raises passes through.
    """
    found = _find(reference)
    made = _called(found)
    if hasattr(made, "__aenter__"):
        app: App = found
        return app
    handlers = _checked(reference, made)

    @asynccontextmanager
    async def plain() -> AsyncIterator[Hosted]:
        yield Hosted(handlers)

    return plain


def load_handlers(reference: str) -> list[JobHandler[Any, Any]]:
    """The handlers that `module:attribute` names: a sequence of them, or a callable without arguments that returns one.

    Looks in the working directory as well. Raises `InvalidSettings`; what the module itself raises passes through.
    """
    return _checked(reference, _called(_find(reference)))


def _called(found: Any) -> Any:
    return found() if callable(found) and not isinstance(found, Sequence) else found


def _checked(reference: str, found: Any) -> list[JobHandler[Any, Any]]:
    if not isinstance(found, Sequence) or not found or not all(isinstance(each, JobHandler) for each in found):
        raise InvalidSettings.at(WORKER_APP, f"{reference!r} must be a sequence of JobHandler instances, not empty")
    return list(found)


def _find(reference: str) -> Any:
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise InvalidSettings.at(WORKER_APP, f"must be module:attribute, is {reference!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not f"{module_name}.".startswith(f"{missing.name}."):
            raise  # the module is there, and misses one that it imports
        raise InvalidSettings.at(WORKER_APP, f"there is no module {missing.name!r}") from None
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise InvalidSettings.at(WORKER_APP, f"module {module_name!r} has no {attribute!r}")
        found = getattr(found, name)
    return found


async def run_worker(settings: Settings, stop: asyncio.Event, app: App | None = None) -> None:
    """Host what `app` opens, by default what the settings name, on the settings' queues until `stop` is set.

    Then the attempts in hand get their grace period to end.

    Raises `InvalidSettings` for an app that can't be found; `StoreUnavailable`, `SchemaMissing`, or Temporal's errors
    where one of the two can't be reached at the start; what the app itself raises.
    """
    async with (app or load_app(settings.worker_app or ""))() as hosted:
        plugin = DurableJobsPlugin(
            settings.database_url,
            hosted.handlers,
            organizations=settings.worker_organizations,
            grace_seconds=settings.worker_grace_seconds,
            reconcile_every=timedelta(seconds=settings.reconcile_seconds),
            on_escalation=settings.escalation_url,
            schema=settings.database_schema,
            pool_size=settings.pool_size,
        )
        client = await Client.connect(**settings.temporal)

        async def host(queue: str) -> None:
            async with Worker(
                client,
                task_queue=queue,
                workflows=hosted.workflows,
                activities=hosted.activities,
                plugins=[plugin],
                max_concurrent_activities=settings.worker_slots,
            ):
                await stop.wait()

        try:
            async with asyncio.TaskGroup() as hosting:
                for queue in settings.queues:
                    hosting.create_task(host(queue))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
