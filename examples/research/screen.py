"""What the demo shows: live progress on a terminal, plain lines elsewhere, and the tables at the end."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from durable_jobs.contract.models import Job, JobEvent

PLAIN_LINE_SECONDS = 2.0
STYLES = {
    "completed": "green",
    "dead_letter": "magenta",
    "escalated": "magenta",
    "failed": "red",
    "indeterminate": "yellow",
    "queued": "dim",
}
UNTOLD = {"claim_token", "result", "traceback"}
"""Parts of an event that say nothing to a reader."""


@dataclass(frozen=True)
class Snapshot:
    """Where things stand: jobs by status, and the calls that the provider is working on."""

    statuses: Mapping[str, int]
    pending_calls: int

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {status}" for status, count in sorted(self.statuses.items()))
        return f"{counts}; {self.pending_calls} calls at the provider"


class Screen:
    """Progress while the context is open, `say` and the tables at any time."""

    def __init__(self, total: int) -> None:
        console = Console(highlight=False)
        self.console = console if console.is_terminal else Console(highlight=False, width=120)
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("questions settled"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("", total=total)
        self._live = Live(self._progress, console=self.console, transient=True)
        self._last: tuple[float, str] = (0.0, "")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(f"[cyan]{self.seconds:6.1f} s[/]  {text}")

    def update(self, snapshot: Snapshot, done: int) -> None:
        """Moves the bar; without a terminal, prints a line now and then when something has changed."""
        counts = "  ".join(_coloured(status, f"{n} {status}") for status, n in sorted(snapshot.statuses.items()))
        state = Text.from_markup(f"{counts}  [dim]{snapshot.pending_calls} calls at the provider[/]")
        self._progress.update(self._task, completed=done)
        self._live.update(Group(self._progress, state))
        when, text = self._last
        if not self.console.is_terminal and str(snapshot) != text and self.seconds - when >= PLAIN_LINE_SECONDS:
            self._last = (self.seconds, str(snapshot))
            self.say(str(snapshot))

    def results(self, statuses: Mapping[str, int], sends: Iterable[int]) -> None:
        """Jobs by status, and how many operation keys were sent how often."""
        table = Table("jobs", "status", title="Jobs by status")
        for status, count in sorted(statuses.items()):
            table.add_row(str(count), _coloured(status, status))
        self.console.print(table)
        table = Table("operation keys", "calls that the provider accepted", title="Sends per operation key")
        for times, count in sorted(Counter(sends).items()):
            table.add_row(str(count), f"[{'green' if times <= 1 else 'bold red'}]{times}[/]")
        self.console.print(table)

    def trail(self, job: Job, events: Sequence[JobEvent]) -> None:
        """One job's events: when, since its creation, what, and to which status."""
        question = escape(str(job.payload["question"]))
        table = Table(
            "seconds", "event", "gen.", Column("facts", overflow="fold"), title=f"Trail of job {job.id}\n{question}"
        )
        for event in events:
            after = f"{(event.occurred_at - job.created_at).total_seconds():.2f}"
            name = f"{event.name}\n[dim]→[/] {_coloured(event.status, event.status)}"
            facts = escape("\n".join([f"actor: {event.actor}", *_facts(event.data)]))
            table.add_row(after, name, str(event.generation), facts)
        self.console.print(table)


def _coloured(status: str, text: str) -> str:
    return f"[{STYLES.get(status, 'blue')}]{text}[/]"


def _facts(data: Mapping[str, object]) -> Iterator[str]:
    """What an event carries, a line for each fact."""
    for name, value in data.items():
        if value is None or name in UNTOLD:
            continue
        if isinstance(value, Mapping):
            yield from _facts(value)
        else:
            yield f"{name}: {value}"
