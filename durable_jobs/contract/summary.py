"""What one sweep did. A plain dataclass: it crosses Temporal as the result of the sweep's workflow."""

from dataclasses import dataclass, field

_RESOLVED = frozenset({"completed", "failed", "dead_letter"})


@dataclass
class SweepSummary:
    """What one sweep did: the result of its workflow, for an operator to read in the Temporal UI."""

    looked_at: int = 0
    resolved: dict[str, int] = field(default_factory=dict)
    """By the status that the job was resolved to."""
    escalated: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """By reason: what was left as it was, `escalated` counting all that stood before an operator."""
    follow_ups: int = 0
    """Follow-ups created for jobs that an operator or a webhook completed."""
    launches: int = 0
    """Jobs whose workflow was looked for, and started where it was missing."""

    def counted(self) -> dict[tuple[str, str], int]:
        """As counters by (name, result), the launches apart: another activity counts those."""
        results = {**self.resolved, "escalated": self.escalated, "follow_ups": self.follow_ups}
        results |= {f"skipped_{reason}": number for reason, number in self.skipped.items()}
        return {("sweeps", ""): 1} | {("sweep_results", word): number for word, number in results.items() if number}

    def count(self, word: str) -> None:
        """Take in what became of one candidate."""
        if word == "escalated":
            self.escalated += 1
            return
        tally = self.resolved if word in _RESOLVED else self.skipped
        tally[word] = tally.get(word, 0) + 1
