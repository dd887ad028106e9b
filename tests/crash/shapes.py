"""The stories that are crashed: what the job is like, what is done to it, and whose points are taken.

Each is the soak's kind of job (`tests.soak.shapes.Shape`), but keeps to a time, so that its points come in one order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.crash.points import HOST, KEEPER, LAUNCH, STORY, SWEEP
from tests.soak.shapes import Shape

LEASE_SECONDS = 1.5
GRACE_SECONDS = 0.4
RECONCILE_SECONDS = 1.0
LATER_LINGERS = 0.2
"""How long the handlers of later generations take before the boundary: whoever was stopped wakes up beside them."""

Before = Literal["", "expired", "marked", "uncertain", "resolved", "committed", "enqueued"]
"""How far the job has come before the worker at whose points the run aims: nowhere; an earlier claim of it ran out,
or ran out past the boundary; it is uncertain; an operator completed it; it is committed and not launched, by
`create_job` or by SQL's `enqueue`. An earlier holder that crossed the boundary did send."""


Cue = Literal["", "claimed", "dispatched"]
"""As soon as the row says so."""


@dataclass(frozen=True)
class Story:
    """One kind of run. The provider's rule and the job's fields are those of `shape`."""

    name: str
    shape: Shape
    roles: tuple[str, ...] = (STORY,)
    """Whose points are taken."""
    lingers: float = 0.0
    """Seconds that the handler takes before the boundary in the first generation, or with `always` in each."""
    always: bool = False
    before: Before = ""
    cancel: Cue = ""
    """When a client cancels."""
    terminate: Cue = ""
    """When the worker gets SIGTERM."""
    stops: bool = False
    """Whether to stop the worker at each point as well, until another one holds the job."""
    most: int | None = None
    """No more points than that: those beyond repeat them."""
    reached: frozenset[str] = frozenset({"completed"})
    """How the job may end, beside what the checks of the soak say of a call that never left."""


SOON = {"seconds": 0.05}
SLOW = {"seconds": 1.3}


def _call(name: str, rule: Mapping[str, Any] = SOON, **spec: Any) -> Shape:
    return Shape(name, 0, rule={**SOON, **rule}, spec=spec)


def _plain(name: str, **spec: Any) -> Shape:
    return Shape(name, 0, job_type="soak-plain", spec=spec)


_CALL, _PARENT, _PLAIN = _call("call"), _call("parent"), _plain("plain")
_FORGOTTEN = _call("forgotten", {"outcome": "forget"})
_CANCELLED, _LOST = _call("cancelled-before"), frozenset({"dead_letter"})

STORIES = (
    Story("plain", _PLAIN, stops=True),
    Story("dispatching", _CALL, stops=True),
    Story("follow-ups", _PARENT),
    Story("cancelled-before", _CANCELLED, lingers=3, always=True, cancel="claimed", reached=frozenset({"cancelled"})),
    Story("cancelled-past", _call("cancelled-past", SLOW), cancel="dispatched"),
    Story("failing-before", _call("stumbling")),
    Story("failing-always", _call("hopeless", max_attempts=2), reached=_LOST),
    Story("refused", _call("refused", {"outcome": "fail"}), reached=frozenset({"failed"})),
    Story("failing-past", _call("dropped", {"reply": "drop"})),
    Story("retried", _call("retried", {"outcome": "fail"})),
    Story("timing-out-before", _call("overtime", timeout_seconds=1.0), lingers=2.5, most=28),
    Story("timing-out-past", _call("overdue", {"seconds": 2.5}, timeout_seconds=1.0), most=28),
    Story("released-before", _call("released"), lingers=4, terminate="claimed"),
    Story("released-past", _call("released-past", {"seconds": 2.5}), terminate="dispatched"),
    Story("reclaimed-before", _CALL, before="expired"),
    Story("reclaimed-past", _CALL, before="marked"),
    Story("renewed", _call("renewed", SLOW), roles=(KEEPER,), most=6),
    Story("enqueued", _PLAIN, before="enqueued", roles=(HOST,), most=20),
    Story("launched", _PLAIN, before="committed", roles=(LAUNCH,), most=12),
    Story("swept-expired", _CALL, before="marked", roles=(SWEEP,), most=24),
    Story("swept-uncertain", _PARENT, before="uncertain", roles=(SWEEP,), most=28),
    Story("swept-forgotten", _FORGOTTEN, before="uncertain", roles=(SWEEP,), most=24, reached=_LOST),
    Story("swept-due", _PARENT, before="resolved", roles=(SWEEP,), most=28),
)
BY_NAME = {story.name: story for story in STORIES}
BY_SHAPE = {story.shape.name: story for story in reversed(STORIES)}
"""By the payload's `shape`, all that a handler knows; stories that share one linger alike."""
