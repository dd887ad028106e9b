"""Tokens of the HTTP API, and the door for SQL."""

from durable_jobs.store.migrations.scripts import run_script

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    run_script("versions/0004_doors.sql")
