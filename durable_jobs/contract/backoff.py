"""The one shape of the waits that the row records: before another attempt, and before another lookup. Pure."""


def doubled(first: float, tries: int, longest: float) -> float:
    """`first`, doubled for each try after the first, at most `longest`; the exponent is clamped before anything
    overflows. Any unit of time."""
    return min(first * 2.0 ** min(max(tries, 1) - 1, 64), longest)
