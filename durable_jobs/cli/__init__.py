"""The command `durable-jobs`. Needs the extra `cli`."""

import os
import sys


def main() -> None:
    """The entry point: run the command line, or say what to install."""
    try:
        from durable_jobs.cli.app import app  # noqa: PLC0415 - it may be missing what it imports
    except ModuleNotFoundError as missing:
        if missing.name not in {"rich", "typer"}:
            raise
        sys.exit("the command line is an extra; install it with: pip install 'durable-jobs[cli]'")
    try:
        app()
    except SystemExit as end:
        # The SDK's threads can abort an interpreter that takes itself down around them: the exit code would be lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
