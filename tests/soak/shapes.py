"""What the jobs of a soak are like, and what the provider does with the calls of each kind."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from durable_jobs import JobSpec

QUEUE = "soak"
PROJECTS = (("acme", "alpha"), ("acme", "beta"), ("zenith", "alpha"))
CHILD = "child"
BY_HAND = "by-hand"
"""Shape, type and queue of jobs that no worker process hosts: see `tests.proof.clients`."""

QUESTIONS = (
    "How do mountains form?",
    "What makes volcanoes erupt?",
    "Why do leaves change colour in autumn?",
    "How did people measure longitude at sea?",
    "What is the water cycle?",
)


@dataclass(frozen=True)
class Shape:
    """One kind of job. `rule` is the provider's, for the calls of this kind; `spec` overrides the job's fields."""

    name: str
    share: int
    """Of all jobs, in percent."""
    job_type: str = "soak-call"
    rule: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)


SHAPES = (
    Shape("plain", 14, job_type="soak-plain"),
    Shape("call", 20),
    # Lingers between boundary and send: killed there it never sends, stopped there it sends late.
    Shape("hesitant", 6),
    Shape("stumbling", 10),  # raises before the boundary in its first attempt
    Shape("slow", 7, rule={"seconds": 6}),  # longer than its lease
    Shape("parent", 8),  # has follow-ups
    Shape("cancelled", 9, rule={"seconds": 1.5}),  # by a client, at any moment
    Shape("dropped", 7, rule={"reply": "drop"}),  # accepted, then the connection breaks
    Shape("garbled", 3, rule={"reply": "error"}),  # accepted, then answered 502
    Shape("refused", 3, rule={"outcome": "fail"}),  # the provider's definite no
    Shape("retried", 3, rule={"outcome": "fail"}),  # the same, and an operator tries once more
    Shape("lost-no", 2, rule={"outcome": "fail", "reply": "drop"}),  # a no that only a lookup learns of
    Shape("forgotten", 2, rule={"outcome": "forget", "reply": "drop"}),  # nobody can account for it
    Shape("overdue", 2, rule={"seconds": 4}, spec={"timeout_seconds": 1.5}),
    Shape("hopeless", 2, spec={"max_attempts": 2}),  # raises before the boundary in every attempt
    Shape("halting", 2),  # raises `HaltUnsafe` before the boundary
)
BY_NAME = {shape.name: shape for shape in SHAPES}


def operation_key(shape: str, job_id: UUID) -> str:
    """What the one call of a job's first intent is sent under; a retry's has `:retry-<n>` appended."""
    return f"soak:{shape}:{job_id}"


def provider_rules(shapes: Sequence[Shape] = SHAPES) -> list[dict[str, Any]]:
    """What the provider is to do with the calls of each shape; a retried one succeeds."""
    shaped = [{"contains": f"soak:{shape.name}:"} | shape.rule for shape in shapes if shape.rule]
    return [{"contains": ":retry-"}, *shaped]


def draw_specs(chance: random.Random, count: int) -> list[JobSpec]:
    """The jobs to submit, the same for the same state of `chance`."""
    shapes: Sequence[Shape] = chance.choices(SHAPES, weights=[shape.share for shape in SHAPES], k=count)
    return [_spec(chance, shape, number) for number, shape in enumerate(shapes)]


def key_of(name: str, shape: str) -> str:
    """An idempotency key that tells the shape: a list of jobs holds no payloads."""
    return f"{name}~{shape}"


def _spec(chance: random.Random, shape: Shape, number: int) -> JobSpec:
    organization, project = chance.choice(PROJECTS)
    fields: dict[str, Any] = {
        "organization": organization,
        "project": project,
        "queue": QUEUE,
        "job_type": shape.job_type,
        "idempotency_key": key_of(f"soak-{number}", shape.name),
        "payload": {"shape": shape.name, "question": chance.choice(QUESTIONS)},
        "priority": chance.choice((-1, 0, 0, 0, 1)),
        "lease_seconds": chance.choice((3.0, 4.0, 5.0)),
        "timeout_seconds": 60.0,
        "backoff_base_seconds": 0.2,
        # Faults spend attempts as well, and are not to end jobs: only what the shape says is.
        "max_attempts": 50,
    }
    return JobSpec(**(fields | shape.spec))
