"""The soak: many jobs, several worker processes, and faults all the while. `python -m tests.soak`, or `make soak`."""
