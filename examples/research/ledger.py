"""The provider's own record: every call that it accepted is a row, in its own SQLite file."""

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS call (
    id INTEGER PRIMARY KEY,
    operation_key TEXT NOT NULL,
    question TEXT NOT NULL,
    mode TEXT NOT NULL,
    outcome TEXT NOT NULL,
    seconds REAL NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('pending', 'succeeded', 'failed', 'unknown')),
    body TEXT,
    accepted_at TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%fZ')),
    finished_at TEXT
);
CREATE INDEX IF NOT EXISTS call_by_key ON call (operation_key);
CREATE INDEX IF NOT EXISTS call_pending ON call (id) WHERE state = 'pending';
"""

# What a key's calls together amount to: one that succeeded decides, then one that nobody can account for.
WEIGHT = ("succeeded", "unknown", "pending", "failed")


@dataclass(frozen=True)
class Accepted:
    """One accepted call: what was asked, what will come of it, and how long it takes."""

    id: int
    question: str
    mode: str
    outcome: str
    seconds: float


class Ledger:
    """Accepts, finishes and counts calls. A key seen before is accepted again: this provider does not deduplicate."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        # An accepted call outlives a power cut.
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.executescript(SCHEMA)

    def close(self) -> None:
        self._db.close()

    def accept(self, operation_key: str, question: str, mode: str, outcome: str, seconds: float) -> Accepted:
        """Records a call durably. One that is to be forgotten is `unknown` from the start."""
        state = "unknown" if outcome == "forget" else "pending"
        number = self._db.execute(
            "INSERT INTO call (operation_key, question, mode, outcome, seconds, state) VALUES (?, ?, ?, ?, ?, ?)",
            (operation_key, question, mode, outcome, seconds, state),
        ).lastrowid
        assert number is not None
        return Accepted(number, question, mode, outcome, seconds)

    def finish(self, number: int, state: str, body: dict[str, Any]) -> None:
        """Records the result or error of a pending call."""
        self._db.execute(
            "UPDATE call SET state = ?, body = ?, finished_at = strftime('%Y-%m-%dT%H:%M:%fZ')"
            " WHERE id = ? AND state = 'pending'",
            (state, json.dumps(body), number),
        )

    def pending(self) -> list[Accepted]:
        """Calls accepted by an earlier process that it did not get to finish."""
        rows = self._db.execute("SELECT id, question, mode, outcome, seconds FROM call WHERE state = 'pending'")
        return [Accepted(*row) for row in rows]

    def operation(self, operation_key: str) -> dict[str, Any]:
        """What became of an operation key: its state, with `result` or `error`, and how often it was sent."""
        rows = self._db.execute(
            "SELECT state, body FROM call WHERE operation_key = ? ORDER BY id", (operation_key,)
        ).fetchall()
        answer: dict[str, Any] = {"operation_key": operation_key, "state": "absent", "sends": len(rows)}
        if rows:
            state, body = min(rows, key=lambda row: WEIGHT.index(row[0]))
            answer["state"] = state
            if body is not None:
                answer["result" if state == "succeeded" else "error"] = json.loads(body)
        return answer

    def stats(self) -> dict[str, Any]:
        """All accepted calls, by state and by operation key."""
        states = dict(self._db.execute("SELECT state, count(*) FROM call GROUP BY state"))
        sends = dict(self._db.execute("SELECT operation_key, count(*) FROM call GROUP BY operation_key"))
        return {"accepted": sum(states.values()), "pending": states.get("pending", 0), "states": states, "sends": sends}
