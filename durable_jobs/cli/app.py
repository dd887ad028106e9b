"""The commands, and what they have in common."""

import typer

from durable_jobs.cli.dev import dev
from durable_jobs.cli.migrate import migrate

app = typer.Typer(
    name="durable-jobs",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command()(dev)
app.command()(migrate)


@app.callback()
def root() -> None:
    """Durable jobs on Temporal, with Postgres as the authority on what happened.

    Every command exits with 0 on success, 1 on failure and 2 on wrong usage; its help names any other exit code.
    """
