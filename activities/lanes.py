"""How the lanes of a research question stand, by their idempotency keys: what its workflow asks while it waits."""

from temporalio import activity

from activities.messages import LANE_STATES, LaneState
from durable_jobs import Database, DurableJobService, JobStatus

UNCERTAIN = frozenset({JobStatus.INDETERMINATE, JobStatus.TIMED_OUT})


class LaneActivities:
    """Reads the job table through the service."""

    def __init__(self, database: Database) -> None:
        self._service = DurableJobService(database)

    @activity.defn(name=LANE_STATES)
    async def lane_states(self, organization: str, project: str, keys: list[str]) -> list[LaneState]:
        """In the order of `keys`; a lane whose job is not there yet has no id."""
        found = []
        for key in keys:
            job = await self._service.find_by_idempotency_key(organization, project, key)
            found.append(LaneState(key, str(job.id) if job else None, job is not None and job.status in UNCERTAIN))
        return found
