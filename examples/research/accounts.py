"""What a run of the demo came to: counted in the table and at the provider, and held against what was promised."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

from durable_jobs.contract.models import JobHead
from durable_jobs.contract.states import JobStatus
from examples.research.plan import Ending, Question


def was_reconciled(job: JobHead) -> bool:
    """Whether the sweep settled the job, by the provider's word."""
    return job.reconciliation is not None and job.reconciliation["by"] == "provider"


@dataclass
class Accounts:
    """The end of one run."""

    submitted: Mapping[UUID, Question]
    jobs: Mapping[UUID, JobHead]
    """As the table has them at the end."""
    calls: Mapping[str, int]
    """How often the provider accepted each operation key."""
    caught: Collection[UUID]
    """The jobs whose call was in flight when their worker was killed."""
    escalated: Sequence[UUID]
    """The jobs that were put before the operator."""
    open_workflows: Collection[UUID]
    """The jobs whose workflow did not close."""
    seconds: float

    @cached_property
    def statuses(self) -> Counter[str]:
        return Counter(job.status for job in self.jobs.values())

    @cached_property
    def sends(self) -> list[int]:
        """Calls for each key that the table has or the provider saw; 0 for one that never arrived."""
        marked = {job.operation_key: 0 for job in self.jobs.values() if job.operation_key}
        return list((marked | dict(self.calls)).values())

    @property
    def survivor(self) -> JobHead | None:
        """A job that was in flight at the kill, and that the sweep found completed."""
        return next(
            (
                job
                for job in self.jobs.values()
                if job.id in self.caught and was_reconciled(job) and job.status is JobStatus.COMPLETED
            ),
            None,
        )

    @property
    def counts(self) -> dict[str, int | float]:
        """The last line."""
        return {
            "submitted": 2 * len(self.submitted),
            "jobs": len(self.jobs),
            "completed": self.statuses[JobStatus.COMPLETED],
            "failed": self.statuses[JobStatus.FAILED],
            "reconciled": sum(map(was_reconciled, self.jobs.values())),
            "escalated": len(self.escalated),
            "indeterminate": self.statuses[JobStatus.INDETERMINATE],
            "lost": self._lost,
            "max_sends_per_key": max(self.sends, default=0),
            "seconds": round(self.seconds, 1),
        }

    @property
    def problems(self) -> list[str]:
        """What did not go as promised."""
        surprises = [f"{job.id} {self._ending(job)}" for job in self.jobs.values() if not self._as_planned(job)]
        failures = Counter(was_reconciled(job) for job in self.jobs.values() if job.status is JobStatus.FAILED)
        checks = {
            f"{self._lost} jobs are lost": self._lost == 0,
            f"{len(self.jobs)} jobs stand for {len(self.submitted)} questions": len(self.jobs) == len(self.submitted),
            "an operation key was sent more than once": max(self.sends, default=0) <= 1,
            "no call was in flight when the worker was killed": bool(self.caught),
            "no call in flight at the kill was found completed by the sweep": self.survivor is not None,
            "no job failed by what its worker was told": failures[False] > 0,
            "no job failed by what the sweep found": failures[True] > 0,
            f"jobs ended otherwise than planned: {', '.join(surprises)}": not surprises,
            f"{len(self.open_workflows)} workflows did not close": not self.open_workflows,
        }
        return [problem for problem, fine in checks.items() if not fine]

    @property
    def _lost(self) -> int:
        """Accepted jobs that are neither settled nor known as uncertain."""
        found = [job.id for job in self.jobs.values() if job.status.is_settled or job.status is JobStatus.INDETERMINATE]
        return len(self.submitted.keys() - set(found))

    def _ending(self, job: JobHead) -> str:
        return Ending.ESCALATED if job.id in self.escalated else job.status

    def _as_planned(self, job: JobHead) -> bool:
        if not job.status.is_settled:
            return False
        if job.id in self.escalated and not self.calls.get(job.operation_key or ""):
            # The kill fell between the boundary and the call: it never arrived, which only an operator may conclude.
            return job.id in self.caught
        return job.id in self.submitted and self._ending(job) == self.submitted[job.id].ending
