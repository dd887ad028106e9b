"""`DurableJobsPlugin`: makes any Temporal worker a host of durable jobs."""

import asyncio
import builtins
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import Any

from temporalio.client import Client
from temporalio.common import VersioningBehavior
from temporalio.plugin import SimplePlugin
from temporalio.worker import ReplayerConfig, Worker, WorkerConfig

from durable_jobs.contract.errors import DurableJobsError, InvalidInput
from durable_jobs.contract.reconciliation import ReconciliationPolicy
from durable_jobs.contract.rules import RESERVED_QUEUE_SUFFIX, identifier_problem
from durable_jobs.handler import JobHandler, ShadowPolicy
from durable_jobs.service import ApprovalStore, Database, DurableJobService
from durable_jobs.service.base import DEFAULT_GRACE_SECONDS
from durable_jobs.store.tables import SCHEMA
from durable_jobs.temporal.activities import JobActivities
from durable_jobs.temporal.escalation import EscalationHook, Escalations
from durable_jobs.temporal.job_workflow import JobWorkflow
from durable_jobs.temporal.keeper import LeaseKeeper
from durable_jobs.temporal.launch import Launcher
from durable_jobs.temporal.listener import EnqueueListener
from durable_jobs.temporal.reconciliation_workflow import ReconciliationWorkflow
from durable_jobs.temporal.schedule import DEFAULT_INTERVAL, ensure_schedule, reconciliation_queue
from durable_jobs.temporal.sweeps import SweepActivities
from durable_jobs.temporal.tally import Tally
from durable_jobs.temporal.versioned import VersionedJobWorkflow

logger = logging.getLogger(__name__)

SWEEP_SLOTS = 4
LONGEST_PAUSE_SECONDS = 30.0
SCHEDULE_TIMEOUT_SECONDS = 10.0
SCHEDULE_EVERY_SECONDS = 600.0
SWEEP_POOL_SIZE = 8
SHUTDOWN_ALLOWANCE = timedelta(seconds=15)
"""What Temporal's own shutdown timeout leaves beyond the grace period, to write the outcomes."""


class DurableJobsPlugin(SimplePlugin):
    """A worker plugin: adds the job workflow, its activities and the lease keeper.

    `handlers`: one for each job type that the worker hosts, on the worker's own task queue. `organizations`: host
    these tenants alone. `grace_seconds`: how long handlers may run on when the worker shuts down; the worker's
    graceful shutdown timeout is raised to it, as Temporal's default is none. `database_url`: postgresql://, migrated.
    `reconciliation`, `reconcile_every`: how and how often uncertain jobs of the queue are swept. `on_escalation`: what
    to call with a job that needs an operator, a callable or the URL of a webhook; by default the log. `approvals`:
    where approvals are checked, by default the table beside the jobs. `shadow_policy`: its decisions are only recorded.

    Given on the client it reaches every worker of that client; given twice it registers once. When the database
    can't be reached at the worker's start, the worker shuts down and the error is raised from its `run`.

    Raises `InvalidInput` for handlers without a job type, or with the same one.
    """

    def __init__(
        self,
        database_url: str,
        handlers: Sequence[JobHandler[Any, Any]],
        *,
        organizations: Sequence[str] | None = None,
        grace_seconds: float = DEFAULT_GRACE_SECONDS,
        reconciliation: ReconciliationPolicy | None = None,
        reconcile_every: timedelta = DEFAULT_INTERVAL,
        on_escalation: EscalationHook | str | None = None,
        approvals: ApprovalStore | None = None,
        shadow_policy: ShadowPolicy | None = None,
        schema: str = SCHEMA,
        pool_size: int = 10,
    ) -> None:
        super().__init__("durable-jobs")
        self.approvals = approvals
        self.shadow_policy = shadow_policy
        self.policy = reconciliation or ReconciliationPolicy()
        self.reconcile_every = reconcile_every
        self.escalations = Escalations(on_escalation)
        self.database_url = database_url
        self.handlers = _by_type(handlers)
        self.organizations = list(organizations) if organizations is not None else None
        self.grace_seconds = grace_seconds
        self.schema = schema
        self.pool_size = pool_size

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """See the base class."""
        mine = config["task_queue"].endswith(RESERVED_QUEUE_SUFFIX)
        if mine or any(_host_of(each) for each in config.get("activities") or ()):
            return config
        _require_tenant(config["task_queue"], self.organizations)
        host = _Host(self, config["client"], config["task_queue"], _slots(config))
        config["activities"] = [*(config.get("activities") or ()), *host.all()]
        config["workflows"] = [
            *(config.get("workflows") or ()),
            VersionedJobWorkflow if _is_versioned(config) else JobWorkflow,
        ]
        least = timedelta(seconds=self.grace_seconds) + SHUTDOWN_ALLOWANCE
        config["graceful_shutdown_timeout"] = max(config.get("graceful_shutdown_timeout") or least, least)
        return config

    def configure_replayer(self, config: ReplayerConfig) -> ReplayerConfig:
        """See the base class."""
        workflows = list(config.get("workflows") or ())
        config["workflows"] = workflows + [
            each for each in (JobWorkflow, ReconciliationWorkflow) if each not in workflows
        ]
        return config

    async def run_worker(self, worker: Worker, next: Callable[[Worker], Awaitable[None]]) -> None:
        """See the base class."""
        activities = worker.config(active_config=True).get("activities") or ()
        host = builtins.next(filter(None, map(_host_of, activities)), None)
        if host is None or host.plugin is not self or host.running:
            await next(worker)
            return
        try:
            await host.start()
        except BaseException:
            # A worker that was never run would leave `async with` waiting for it.
            stopping = asyncio.create_task(worker.shutdown())
            await next(worker)
            await stopping
            await host.stop()
            raise
        try:
            await next(worker)
        finally:
            await host.stop()


class _Host(JobActivities):
    """What one worker needs to host jobs. Opened when the worker runs, closed after its last attempt has ended."""

    def __init__(self, plugin: DurableJobsPlugin, client: Client, queue: str, slots: int | None) -> None:
        self.plugin = plugin
        self._slots = slots
        self.running = False
        self._client = client
        self._queue = queue
        # One incarnation of one process: a pod's name alone would let a new process renew the old one's leases.
        worker_id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._database = Database(plugin.database_url, schema=plugin.schema, pool_size=plugin.pool_size)
        # The sweep's connections are its own, as its slots are: jobs in full swing must not starve it.
        self._sweep_database = Database(plugin.database_url, schema=plugin.schema, pool_size=SWEEP_POOL_SIZE)
        self._sweeper: Worker | None = None
        self._sweeping: asyncio.Task[None] | None = None
        self._keeping_schedule: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        launcher = Launcher(client)
        tally = Tally()
        super().__init__(
            worker_id,
            DurableJobService(self._database, grace_seconds=plugin.grace_seconds, approvals=plugin.approvals),
            LeaseKeeper(self._database.url, plugin.schema, worker_id, queue, plugin.grace_seconds, tally),
            launcher,
            plugin.handlers,
            plugin.organizations,
            plugin.escalations,
            tally,
            plugin.shadow_policy,
        )
        self._sweeps = SweepActivities(
            DurableJobService(self._sweep_database),
            launcher,
            plugin.handlers,
            plugin.organizations,
            plugin.policy,
            plugin.escalations,
        )

        self._listener = EnqueueListener(
            self._database.url, plugin.schema, queue, partial(self._sweeps.launch_due, queue)
        )

    async def start(self) -> None:
        """Raises `StoreUnavailable`, or `SchemaMissing` on a database that was not migrated."""
        self.running = True
        await self._database.check()
        await self._service.register_worker(
            self.worker_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=version("durable-jobs"),
            queue=self._queue,
            job_types=sorted(self.plugin.handlers),
            organizations=self.plugin.organizations,
            slots=self._slots,
        )
        made = await self._schedule()
        self._keeping_schedule = asyncio.create_task(self._keep_schedule(SCHEDULE_EVERY_SECONDS if made else 1.0))
        self._keeper.start()
        self._sweeping = asyncio.create_task(self._keep_sweeping())
        self._listener.start()

    async def _schedule(self) -> bool:
        """Make or update the queue's schedule; False when Temporal would not now: jobs run all the same."""
        try:
            async with asyncio.timeout(SCHEDULE_TIMEOUT_SECONDS):
                await ensure_schedule(self._client, self._queue, self.plugin.reconcile_every)
        except Exception as error:
            logger.warning("The schedule of queue %s could not be made now, and is tried again: %r", self._queue, error)
            return False
        return True

    async def _keep_schedule(self, pause: float) -> None:
        """Look after the schedule: one that could not be made, or was deleted, is made later."""
        while True:
            await asyncio.sleep(pause)
            made = await self._schedule()
            pause = SCHEDULE_EVERY_SECONDS if made else min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _keep_sweeping(self) -> None:
        """Run the worker of the sweeps, again and again while the jobs' own runs."""
        pause = 1.0
        while not self._stopped.is_set():
            try:
                self._sweeper = Worker(
                    self._client,
                    task_queue=reconciliation_queue(self._queue),
                    workflows=[ReconciliationWorkflow],
                    activities=self._sweeps.all(),
                    max_concurrent_activities=SWEEP_SLOTS,
                )
                await self._sweeper.run()
            except Exception:
                logger.exception("The sweeps of queue %s stopped, and start again in %g s", self._queue, pause)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopped.wait(), pause)
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def stop(self) -> None:
        self._stopped.set()
        if self._keeping_schedule is not None:
            self._keeping_schedule.cancel()
        await self._listener.stop()
        if self._sweeping is not None:
            # Waited for by its task: `shutdown()` would never return where that was cancelled, as by the end of a loop.
            ending = asyncio.create_task(self._sweeper.shutdown()) if self._sweeper is not None else None
            await asyncio.wait({self._sweeping})
            if ending is not None:
                ending.cancel()
        await self._keeper.stop()
        with contextlib.suppress(DurableJobsError):  # a record left behind goes stale by itself
            await self._service.stop_worker(self.worker_id)
        await self._database.close()
        await self._sweep_database.close()


def _host_of(activity: object) -> _Host | None:
    owner = getattr(activity, "__self__", None)
    return owner if isinstance(owner, _Host) else None


def _by_type(handlers: Sequence[JobHandler[Any, Any]]) -> dict[str, JobHandler[Any, Any]]:
    by_type: dict[str, JobHandler[Any, Any]] = {}
    for handler in handlers:
        job_type = getattr(handler, "job_type", None)
        if not isinstance(job_type, str) or identifier_problem(job_type):
            raise InvalidInput.at(f"handlers.{type(handler).__name__}.job_type", "must name the job type")
        if job_type.lower() in by_type:
            raise InvalidInput.at(f"handlers.{type(handler).__name__}.job_type", f"{job_type!r} has a handler already")
        by_type[job_type.lower()] = handler
    return by_type


def _require_tenant(queue: str, organizations: Sequence[str] | None) -> None:
    """An isolated queue, `<queue>@<organization>`, is served by a worker that hosts that organization alone."""
    _, _, tenant = queue.partition("@")
    if tenant and list(organizations or ()) != [tenant]:
        raise InvalidInput.at("organizations", f"must be [{tenant!r}] on the isolated task queue {queue!r}")


def _slots(config: WorkerConfig) -> int | None:
    """How many activities the worker runs at once: the SDK's default is 100, and a tuner decides by itself."""
    return None if config.get("tuner") is not None else config.get("max_concurrent_activities") or 100


def _is_versioned(config: WorkerConfig) -> bool:
    """Whether the worker needs workflows that declare their versioning behaviour."""
    deployment = config.get("deployment_config")
    if deployment is None or not deployment.use_worker_versioning:
        return False
    return deployment.default_versioning_behavior is VersioningBehavior.UNSPECIFIED
