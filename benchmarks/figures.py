"""What many samples come to."""

import statistics
from collections.abc import Sequence

TITLES = {"open": "bare, no sandbox"}
"""What a shape is called in a report, where it isn't by its name."""

Figure = dict[str, float]
"""`median`, `min`, `max`, `p99` and `n` of some samples."""


def spread(samples: Sequence[float]) -> Figure:
    """The samples in short. Raises `ValueError` without any."""
    if not samples:
        raise ValueError("there are no samples")
    ordered = sorted(samples)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "p99": last,
        "n": len(ordered),
    }
