"""Crash points: a worker dies at each step that leaves it, one run for each. `python -m tests.crash`, `make crash`."""
