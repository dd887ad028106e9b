"""What is asked, what the provider does wrong on purpose, and how each job is to end because of it."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from durable_jobs import JobSpec
from examples.research.handler import QUEUE, ResearchRequest
from examples.research.provider import Rule

QUESTIONS = Path(__file__).parent / "questions.jsonl"
ORGANIZATION = "acme"

# Of several rules the first that hits decides.
RULES = [
    # Accepted, and nobody can account for it: only an operator can end such a job.
    Rule(contains="bridges of Königsberg", outcome="forget", reply="drop"),
    # A definite no, which the worker is told, and one that only the sweep gets to know of.
    Rule(contains="Monty Hall", outcome="fail", seconds=0.1),
    Rule(contains="Fermat's Last Theorem", outcome="fail", seconds=0.1),
    Rule(contains="hyperinflation", outcome="fail", reply="drop"),
    # Accepted and done, but the worker only sees a broken connection or a 502.
    Rule(every=9, reply="drop"),
    Rule(every=25, reply="error"),
]


class Ending(StrEnum):
    """How a job is to end."""

    COMPLETED = "completed"
    FAILED = "failed"
    ESCALATED = "escalated"


_ENDINGS = {"succeed": Ending.COMPLETED, "fail": Ending.FAILED, "forget": Ending.ESCALATED}


@dataclass(frozen=True)
class Question:
    id: str
    request: ResearchRequest

    @property
    def ending(self) -> Ending:
        """What the provider's rules lead to."""
        return next(
            (_ENDINGS[rule.outcome] for rule in RULES if rule.contains and rule.contains in self.request.question),
            Ending.COMPLETED,
        )

    def spec(self, project: str) -> JobSpec:
        """The job that answers it. A short lease, so that what a killed worker held is soon taken over."""
        return JobSpec(
            organization=ORGANIZATION,
            project=project,
            queue=QUEUE,
            job_type="research",
            idempotency_key=self.id,
            payload=self.request.model_dump(),
            lease_seconds=5,
            timeout_seconds=60,
        )


def read_questions(path: Path = QUESTIONS) -> list[Question]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [Question(row.pop("id"), ResearchRequest.model_validate(row)) for row in rows]
