"""The shipped application from end to end: `python -m examples.audit`."""
