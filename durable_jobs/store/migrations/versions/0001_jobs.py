"""The job table, its trail, its attempts, and the audit of control verbs."""

from durable_jobs.store.migrations.scripts import run_script

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_script("versions/0001_jobs.sql")
    run_script("guard.sql")
