"""The commands, and what they have in common."""

import typer

from durable_jobs.cli import jobs, operations, processes, queues, tokens
from durable_jobs.cli.dev import dev
from durable_jobs.cli.doctor import doctor
from durable_jobs.cli.migrate import migrate

app = typer.Typer(
    name="durable-jobs",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
for command in (
    dev,
    migrate,
    processes.worker,
    processes.serve,
    doctor,
    operations.workers,
    operations.sweep,
    operations.prune,
    operations.quarantine,
):
    app.command()(command)
app.add_typer(jobs.app, name="jobs")
app.add_typer(queues.app, name="queues")
app.add_typer(tokens.app, name="tokens")


@app.callback()
def root() -> None:
    """Durable jobs on Temporal, with Postgres as the authority on what happened.

    Reads DURABLE_JOBS_DATABASE_URL, and Temporal's own settings such as TEMPORAL_ADDRESS.

    Exits with 0 on success, 1 on failure, 2 on wrong usage, 4 when there is no such thing, 5 when the job's row
    refuses, 6 when a server is away; a command's help names any other.
    """
