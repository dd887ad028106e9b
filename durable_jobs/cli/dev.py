"""`durable-jobs dev`: the embedded servers in the foreground."""

import signal
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Annotated

import typer

from durable_jobs.cli.output import JsonOption, fail, say

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stop(BaseException):
    """A signal asked us to stop."""


def _on_signal(signum: int, frame: FrameType | None) -> None:
    _ignore_signals()
    raise _Stop


def _ignore_signals() -> None:
    # Stopping takes a second or two, and is not to be cut short by an impatient second Ctrl-C.
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def dev(
    folder: Annotated[Path, typer.Option(help="Where the servers keep their data.")] = Path(".durable-jobs"),
    as_json: JsonOption = False,
) -> None:
    """Run Postgres and a Temporal server, with its UI and the schema in place, until Ctrl-C.

    Where DURABLE_JOBS_DATABASE_URL or TEMPORAL_ADDRESS is set, that server is used instead of an embedded one.

    Exits with 0 when stopped by Ctrl-C or SIGTERM, 1 when a server fails, 3 when the folder's servers run already.
    """
    try:
        from durable_jobs.dev import DevStack, DevStackError, DevStackInUseError  # noqa: PLC0415 - an extra of its own
    except ModuleNotFoundError as missing:
        if missing.name != "psutil":
            raise
        message = "the servers are an extra; install it with: pip install 'durable-jobs[dev-stack]'"
        fail(as_json, "DEV_STACK_MISSING", message)

    stack = DevStack(folder)
    for signum in _SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup asked to ignore that one
            signal.signal(signum, _on_signal)
    try:
        stack.start()
        say(as_json, _greeting(stack.addresses), **stack.addresses)
        while signal.getsignal(signal.SIGTERM) is _on_signal:
            sleep(1)
            stack.check()
    except _Stop:
        pass
    except DevStackInUseError as error:
        fail(as_json, "DEV_STACK_IN_USE", str(error), exit_code=3, addresses=error.addresses)
    except DevStackError as error:
        fail(as_json, "DEV_STACK_FAILED", str(error))
    finally:
        _ignore_signals()
        stack.stop()


def _greeting(addresses: dict[str, str]) -> str:
    lines = [
        f"Postgres      {addresses['database_url']}",
        f"Temporal      {addresses['temporal_address']} (namespace {addresses['namespace']})",
        *([f"Temporal UI   {addresses['ui_url']}"] if "ui_url" in addresses else []),
        "",
        "For your programs:",
        f"  export DURABLE_JOBS_DATABASE_URL='{addresses['database_url']}'",
        f"  export TEMPORAL_ADDRESS='{addresses['temporal_address']}'",
        "",
        "Ctrl-C stops both; their data stays.",
    ]
    return "\n".join(lines)
