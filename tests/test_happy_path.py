"""A job that runs through: its history is that of a bare one-activity workflow, and Postgres sees four commits."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from durable_jobs import DurableJobs, JobContext, JobHandler
from durable_jobs.contract.states import EventName, JobStatus
from durable_jobs.temporal.messages import workflow_id
from tests.conftest import Specs, Workers


class Sends(JobHandler[dict[str, Any], dict[str, Any]]):
    job_type = "probe"
    consequential = False

    async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        async with job.dispatch(f"probe:{job.id}") as operation_key:
            return {"sent": operation_key, "n": request["n"]}


@activity.defn
async def bare_activity() -> str:
    return "done"


@workflow.defn
class BareWorkflow:
    @workflow.run
    async def run(self) -> str:
        return await workflow.execute_activity(bare_activity, start_to_close_timeout=timedelta(seconds=30))


async def test_runs_to_completed(jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client) -> None:
    async with worker(Sends()):
        handle = await jobs.create_job(spec())
        assert await handle.result(timeout=30) == {"sent": f"probe:{handle.id}", "n": 1}
    assert [event.name for event in await handle.events()] == [
        EventName.CLAIMED,
        EventName.DISPATCHED,
        EventName.COMPLETED,
    ]
    job = await handle.job()
    assert (job.status, job.attempt_count, job.lease_generation) == (JobStatus.COMPLETED, 1, 1)
    described = await temporal_client.get_workflow_handle(workflow_id(handle.id)).describe()
    assert described.status is WorkflowExecutionStatus.COMPLETED


async def test_history_is_as_long_as_a_bare_workflow(
    jobs: DurableJobs, worker: Workers, spec: Specs, temporal_client: Client
) -> None:
    async with worker(Sends()):
        handle = await jobs.create_job(spec())
        await handle.result(timeout=30)
        ours = await temporal_client.get_workflow_handle(workflow_id(handle.id)).fetch_history()
    bare_queue = f"bare-{uuid4().hex}"
    async with Worker(
        temporal_client,
        task_queue=bare_queue,
        workflows=[BareWorkflow],
        activities=[bare_activity],
        workflow_runner=UnsandboxedWorkflowRunner(),
    ):
        bare = await temporal_client.start_workflow(BareWorkflow.run, id=bare_queue, task_queue=bare_queue)
        await bare.result()
        theirs = await bare.fetch_history()
    assert [event.event_type for event in ours.events] == [event.event_type for event in theirs.events]


async def test_four_commits(jobs: DurableJobs, worker: Workers, spec: Specs, database_url: str) -> None:
    """Create, claim, dispatch, complete: the transactions that were given an id, which is those that wrote."""
    spent = []
    async with worker(Sends()):
        with psycopg.connect(database_url, autocommit=True) as connection:
            for _ in range(4):
                before = _transaction_id(connection)
                handle = await jobs.create_job(spec())
                await handle.result(timeout=30)
                spent.append(_transaction_id(connection) - before)
    # The server's own housekeeping may spend an id as well, now and then.
    assert min(spent) == 4


def _transaction_id(connection: psycopg.Connection[Any]) -> int:
    """The next transaction id of the whole server."""
    row = connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    return int(row[0])
