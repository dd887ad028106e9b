"""A job's trail as server-sent events: sent as it grows, until the job is settled."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator

from fastapi import Response
from fastapi.responses import StreamingResponse

from durable_jobs.contract.errors import DurableJobsError, InvalidInput
from durable_jobs.contract.models import Job
from durable_jobs.http.state import Api
from durable_jobs.http.views import EventView, JobSummary

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
LONGEST_SECONDS = 600
"""A client that has seen no end by then connects again, and shows its token again."""
_POLL_SECONDS = 0.5
_LONGEST_POLL_SECONDS = 3.0
_SILENCE_SECONDS = 15.0


async def stream_events(api: Api, job: Job, after: str | None) -> Response:
    """The trail after event `after`. Raises `InvalidInput`.

    A settled job whose trail was read to its end is answered with 204: it keeps an `EventSource` from coming back.
    """
    if after is not None and not re.fullmatch("[0-9]{1,18}", after):
        raise InvalidInput.at("Last-Event-ID", "must be the id of an event")
    if after is not None and job.status.is_settled:
        page = await api.service.list_job_events(job.id, after=after, limit=1)
        if not page.items:
            return Response(status_code=204)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_told(api, job, after), media_type=MEDIA_TYPE, headers=headers)


async def _told(api: Api, job: Job, after: str | None) -> AsyncIterator[str]:
    """Events, a comment in each long silence, and `settled` with the job at the end."""
    clock = asyncio.get_running_loop().time
    end, spoke, pause = clock() + LONGEST_SECONDS, clock(), _POLL_SECONDS
    yield "retry: 2000\n\n"
    try:
        while clock() < end:
            # The row before its trail: all that led to what the row says is then on the trail.
            job = await api.service.get_job(job.id)
            while True:
                page = await api.service.list_job_events(job.id, after=after, limit=200)
                for event in page.items:
                    after = str(event.id)
                    yield _message(event.name, EventView.of(event).model_dump_json(), after)
                if page.items:
                    spoke, pause = clock(), _POLL_SECONDS
                if page.next_cursor is None:
                    break
            if job.status.is_settled:
                yield _message("settled", JobSummary.of(job).model_dump_json())
                return
            if clock() - spoke > _SILENCE_SECONDS:
                yield ": nothing new\n\n"
                spoke = clock()
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)
    except DurableJobsError as error:
        # The answer has begun: the client comes back for the rest.
        logger.info("The stream of job %s was broken off: %s", job.id, error)


def _message(event: str, data: str, event_id: str | None = None) -> str:
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {event}\ndata: {data}\n\n"
