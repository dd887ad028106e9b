"""The budgets of the design, measured side by side in one run: `make bench`, or `BENCH=quick make bench`."""
