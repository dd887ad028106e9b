"""What an escalation does beyond its column, which reaches nobody: a hook, the log by default, and a metric."""

import asyncio
import inspect
import json
import logging
import urllib.request
from collections.abc import Awaitable, Callable

from temporalio import activity

from durable_jobs.contract.errors import InvalidInput
from durable_jobs.contract.models import Job

logger = logging.getLogger(__name__)

EscalationHook = Callable[[Job], Awaitable[None] | None]
HOOK_TIMEOUT_SECONDS = 10.0


def log_escalation(job: Job) -> None:
    """The default hook."""
    logger.error(
        "Job %s of %s/%s needs an operator: %s", job.id, job.organization_id, job.project_id, job.escalation_reason
    )


def hook_of(setting: EscalationHook | str | None) -> EscalationHook:
    """None: the log. A callable: itself. An http(s) URL: a POST of the job's facts there. Raises `InvalidInput`."""
    if setting is None:
        return log_escalation
    if callable(setting):
        return setting
    if not setting.startswith(("http://", "https://")):
        raise InvalidInput.at("on_escalation", "must be a callable or an http(s) URL")

    async def post(job: Job) -> None:
        log_escalation(job)
        facts = job.model_dump(
            mode="json",
            include={"id", "organization_id", "project_id", "queue", "job_type", "status", "operation_key"}
            | {"escalated_at", "escalation_reason"},
        )
        request = urllib.request.Request(
            setting, data=json.dumps(facts).encode(), headers={"Content-Type": "application/json"}, method="POST"
        )
        await asyncio.to_thread(_send, request)

    return post


def _send(request: urllib.request.Request) -> None:
    with urllib.request.urlopen(request, timeout=HOOK_TIMEOUT_SECONDS):
        pass


class Escalations:
    """Calls the hook after the escalation was committed. A hook that fails is logged: the row stays the truth."""

    def __init__(self, hook: EscalationHook | str | None) -> None:
        self._hook = hook_of(hook)

    async def __call__(self, job: Job) -> None:
        if activity.in_activity():
            labels = {"queue": job.queue, "job_type": job.job_type}
            meter = activity.metric_meter().with_additional_attributes(labels)
            meter.create_counter("durable_jobs_escalated", "Jobs put before an operator").add(1)
        try:
            answer = self._hook(job)
            if inspect.isawaitable(answer):
                await asyncio.wait_for(answer, HOOK_TIMEOUT_SECONDS)
        except Exception:
            logger.exception("Job %s: the escalation hook failed", job.id)
