"""A product's own workflows, run in Temporal's sandbox, that call jobs from workflow code."""

from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

with workflow.unsafe.imports_passed_through():
    from durable_jobs.contract.specs import JobSpec
    from durable_jobs.workflow import run_job


@workflow.defn
class RunsAJob:
    """Runs the job of the request, and tells how it went."""

    @workflow.run
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"result": await run_job(JobSpec(**request))}


@workflow.defn
class Counts:
    """Ends as the request says, or runs until it is ended from outside."""

    @workflow.run
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        if error := request.get("fail"):
            raise ApplicationError("it failed", type=error, non_retryable=True)
        if request.get("again"):
            workflow.continue_as_new(request | {"again": False})
        await workflow.wait_condition(lambda: not request.get("hang"))
        return {"total": request["total"]}


@workflow.defn
class Forgives:
    """Catches what the documentation says that `run_job` raises."""

    @workflow.run
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": await run_job(JobSpec(**request))}
        except ApplicationError as error:
            return {"type": error.type, "message": error.message}
        except ActivityError as error:
            return {"activity": str(error.cause)}


@workflow.defn
class Smuggles:
    """A specification that no check has seen."""

    @workflow.run
    async def run(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": await run_job(JobSpec.model_construct(**request))}
        except ApplicationError as error:
            return {"type": error.type, "message": error.message}
        except ActivityError as error:
            return {"activity": str(error.cause)}
