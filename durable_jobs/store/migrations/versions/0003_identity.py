"""Approvals, pauses of one organization, and the guard of the reserved envelopes."""

from durable_jobs.store.migrations.scripts import run_script

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run_script("versions/0003_identity.sql")
