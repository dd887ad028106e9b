"""What the running API holds: its settings, and the client of the job service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request
from temporalio.client import Client

from durable_jobs.client import DurableJobs
from durable_jobs.service import Database, DurableJobService
from durable_jobs.settings import Settings
from durable_jobs.temporal.launch import Launcher


@dataclass(frozen=True)
class Api:
    """One running API."""

    settings: Settings
    jobs: DurableJobs

    @property
    def temporal(self) -> Client:
        return self.jobs.temporal

    @property
    def service(self) -> DurableJobService:
        return self.jobs.service


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Api]:
    """Over both servers, either of which may be away: `/readyz` says so, and requests are answered once it is back."""
    temporal = await Client.connect(**settings.temporal, lazy=True)
    database = Database(settings.database_url, schema=settings.database_schema, pool_size=settings.pool_size)
    async with DurableJobs(DurableJobService(database), Launcher(temporal)) as jobs:
        yield Api(settings, jobs)


def api_of(request: Request) -> Api:
    """The API that serves the request."""
    api: Api = request.app.state.api
    return api


async def _the_api(request: Request) -> Api:
    return api_of(request)


TheApi = Annotated[Api, Depends(_the_api)]
