"""A worker process as the settings describe it: which handlers, which queues, until it is told to stop."""

import asyncio
import importlib
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from durable_jobs.handler import JobHandler
from durable_jobs.settings import PREFIX, InvalidSettings, Settings
from durable_jobs.temporal._plugin import DurableJobsPlugin

WORKER_APP = f"{PREFIX}WORKER_APP"


def load_handlers(reference: str) -> list[JobHandler[Any, Any]]:
    """The handlers that `module:attribute` names: a sequence of them, or a callable without arguments that returns one.

    Looks in the working directory as well. Raises `InvalidSettings`; what the module itself raises passes through.
    """
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
    if callable(found) and not isinstance(found, Sequence):
        found = found()
    if not isinstance(found, Sequence) or not found or not all(isinstance(each, JobHandler) for each in found):
        raise InvalidSettings.at(WORKER_APP, f"{reference!r} must be a sequence of JobHandler instances, not empty")
    return list(found)


async def run_worker(
    settings: Settings,
    stop: asyncio.Event,
    handlers: Sequence[JobHandler[Any, Any]] | None = None,
    *,
    workflows: Sequence[type] = (),
    activities: Sequence[Callable[..., Any]] = (),
) -> None:
    """Host `handlers`, by default those that the settings name, on the settings' queues until `stop` is set.

    Then the attempts in hand get their grace period to end. `workflows` and `activities` are a product's own, hosted
    on the same queues.

    Raises `InvalidSettings` for handlers that can't be found; `StoreUnavailable`, `SchemaMissing`, or Temporal's errors
    where one of the two can't be reached at the start.
    """
    plugin = DurableJobsPlugin(
        settings.database_url,
        load_handlers(settings.worker_app or "") if handlers is None else handlers,
        organizations=settings.worker_organizations,
        grace_seconds=settings.worker_grace_seconds,
        reconcile_every=timedelta(seconds=settings.reconcile_seconds),
        on_escalation=settings.escalation_url,
        schema=settings.database_schema,
        pool_size=settings.pool_size,
    )
    client = await Client.connect(**settings.temporal)

    async def host(queue: str) -> None:
        slots = settings.worker_slots
        async with Worker(
            client,
            task_queue=queue,
            workflows=workflows,
            activities=activities,
            plugins=[plugin],
            max_concurrent_activities=slots,
        ):
            await stop.wait()

    try:
        async with asyncio.TaskGroup() as hosting:
            for queue in settings.queues:
                hosting.create_task(host(queue))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
