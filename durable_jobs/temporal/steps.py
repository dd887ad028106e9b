"""What the job's workflow does next, decided on what it knows of the row. Pure, and run inside workflow code."""

from dataclasses import dataclass
from enum import Enum, auto

from durable_jobs.temporal.messages import NOT_HOSTED, PAUSED, JobView

LONGEST_WAIT = 3600.0
"""Seconds. A 10-minute cap would fill a history in two months."""
EXPIRY_MARGIN = 0.1
"""Seconds past the lease's end, so that the database's clock has passed it too."""


_HELD_UP = {NOT_HOSTED: (300.0, "a worker with its handler"), PAUSED: (300.0, "its queue to be resumed")}
"""Why an attempt moved nothing though the job is due: the longest wait, in seconds, and what for."""


class Act(Enum):
    CLOSE = auto()
    ATTEMPT = auto()
    WAIT = auto()


@dataclass(frozen=True)
class Step:
    act: Act
    seconds: float = 0.0
    why: str = ""


def widening(tries: int, first: float = 1.0, longest: float = LONGEST_WAIT) -> float:
    """`first`, doubled for each try after the first, at most `longest`; seconds."""
    return min(first * 2.0 ** min(max(tries, 1) - 1, 64), longest)


def next_step(view: JobView, idle: int, waited: bool) -> Step:
    """`idle` counts the rounds in which the row has not moved; `waited` says that the last round was a wait.

    A settled job closes the workflow. An unresolved one waits for reconciliation or an operator, ever less often. A
    claimed or running one has a holder until its lease runs out. A queued one is attempted when due; when an attempt
    moved nothing (the database away, no handler here), only after a widening wait.
    """
    if view.settled:
        return Step(Act.CLOSE)
    if view.terminal:
        return Step(Act.WAIT, widening(idle + 1, first=30.0), "resolution")
    if view.due_in > 0:
        active = view.status != "queued"
        seconds = min(view.due_in + (EXPIRY_MARGIN if active else 0.0), LONGEST_WAIT)
        return Step(Act.WAIT, seconds, "its holder's lease" if active else "its schedule")
    if waited or (idle == 0 and view.code not in _HELD_UP):
        return Step(Act.ATTEMPT)
    longest, why = _HELD_UP.get(view.code or "", (60.0, "another try"))
    return Step(Act.WAIT, widening(idle, longest=longest), why)
