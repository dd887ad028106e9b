"""How the lanes of a research question stand, by their idempotency keys: what its workflow asks while it waits."""

from temporalio import activity

from activities.messages import LANE_STATES, LaneState
from durable_jobs import DurableJobService, JobStatus

UNCERTAIN = frozenset({JobStatus.INDETERMINATE, JobStatus.TIMED_OUT})


class LaneActivities:
    """Reads the job table through the service."""

    def __init__(self, jobs: DurableJobService) -> None:
        self._jobs = jobs

    @activity.defn(name=LANE_STATES)
    async def lane_states(self, organization: str, project: str, keys: list[str]) -> list[LaneState]:
        """In the order of `keys`; a lane whose job is not there yet has no id."""
        jobs = await self._jobs.find_by_idempotency_keys(organization, project, keys)
        found = []
        for key in keys:
            job = jobs.get(key)
            found.append(LaneState(key, str(job.id) if job else None, job is not None and job.status in UNCERTAIN))
        return found
