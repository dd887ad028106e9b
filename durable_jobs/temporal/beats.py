"""Heartbeats to Temporal, which only tell that the process lives; the lease is the keeper's."""

import asyncio

from temporalio import activity


async def beat(every: float) -> None:
    """Heartbeat every so many seconds, until cancelled; the start of the activity counts as the first."""
    while True:
        await asyncio.sleep(every)
        activity.heartbeat()
