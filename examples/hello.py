"""The smallest application: `durable-jobs worker --app examples.hello:handlers --queue greetings`."""

from typing import Any

from durable_jobs import JobContext, JobHandler


class Greet(JobHandler[dict[str, Any], dict[str, Any]]):
    job_type = "greet"
    consequential = False  # nothing in the world changes by it

    async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        async with job.dispatch(f"greet:{job.id}") as operation_key:
            return {"text": f"Hello, {request['name']}", "key": operation_key}


handlers = [Greet()]
