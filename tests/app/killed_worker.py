"""The application's worker process that kills itself at the hand-offs: `python -m tests.app.killed_worker PLAN`.

PLAN is a file with one point to a line; reaching one takes its line out of the file and ends the process with SIGKILL,
so that the next process goes on to the points that are left. A point is `before` or `after`, and what is committed:
the name of the transaction's function, or `start:<workflow>`, `create_job:<type>`, `complete_job:<type>`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from activities.hosting import application
from activities.product import Product
from activities.settings import AppSettings
from durable_jobs import DurableJobService, DurableJobsPlugin
from examples.research.worker import connect_temporal
from tests.isolation import STRONGEST
from workflows import PRODUCT


class Plan:
    def __init__(self, file: Path) -> None:
        self.file = file

    def reach(self, point: str) -> None:
        points = self.file.read_text().splitlines()
        if point in points:
            points.remove(point)
            self.file.write_text("\n".join(points))
            os.kill(os.getpid(), signal.SIGKILL)


def around(plan: Plan, owner: type, name: str, named: Callable[..., str]) -> None:
    """Put a point before and one after every call of `owner.name`."""
    real: Callable[..., Awaitable[Any]] = getattr(owner, name)

    async def called(*arguments: Any, **options: Any) -> Any:
        what = named(*arguments, **options)
        plan.reach(f"before {what}")
        answer = await real(*arguments, **options)
        plan.reach(f"after {what}")
        return answer

    setattr(owner, name, called)


def transaction(_: Product, work: Any) -> str:
    """`ReplayExecution._commit` of the function within it, `record_execution` of a partial."""
    return str(getattr(work, "func", work).__qualname__.removesuffix(">").split(".<locals>")[0])


async def completion(service: DurableJobService, claim: Any) -> str:
    return f"complete_job:{(await service.get_job(claim.job_id)).job_type}"


async def main() -> None:
    plan = Plan(Path(sys.argv[1]))
    around(plan, Product, "write", transaction)
    around(plan, Client, "start_workflow", lambda _, workflow, *__, **___: f"start:{workflow}")
    complete = DurableJobService.complete_job

    async def completing(service: DurableJobService, claim: Any, *arguments: Any, **options: Any) -> Any:
        what = await completion(service, claim)
        plan.reach(f"before {what}")
        answer = await complete(service, claim, *arguments, **options)
        plan.reach(f"after {what}")
        return answer

    around(plan, DurableJobService, "create_job", lambda _, spec, *__: f"create_job:{spec.job_type}")
    DurableJobService.complete_job = completing  # type: ignore[method-assign]
    url = os.environ["DURABLE_JOBS_DATABASE_URL"]
    async with application(AppSettings(isolation=STRONGEST), url) as hosted:
        plugin = DurableJobsPlugin(url, hosted.handlers, grace_seconds=1, reconcile_every=timedelta(seconds=1))
        async with Worker(
            await connect_temporal(),
            task_queue=os.environ["APP_QUEUE"],
            workflows=PRODUCT,
            activities=hosted.activities,
            plugins=[plugin],
            max_cached_workflows=0,  # else Temporal waits 10 s for a killed worker's cached workflows
        ):
            print("is polling", flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
