"""What a worker counts between two of its heartbeats, which add it to the table of counters."""

import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum


class Counted(StrEnum):
    CLAIMS = "claims"
    RECLAIMS = "reclaims"
    """Claims, and landings, of a job whose lease had run out."""
    STALE_REFUSALS = "stale_refusals"
    """Attempts that were refused, since their claim had been fenced."""


class Tally:
    """Added to on the event loop, taken by the lease keeper's thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: Counted) -> None:
        """Count one."""
        with self._lock:
            self._counts[name] += 1

    def take(self) -> dict[str, int]:
        """All that was counted since the last time."""
        with self._lock:
            taken, self._counts = dict(self._counts), Counter()
        return taken

    def give_back(self, counts: Mapping[str, int]) -> None:
        """`counts` could not be written; they are taken again."""
        with self._lock:
            self._counts.update(counts)
