"""Paused queues, the registry of workers, and the indexes of the sweeps."""

from durable_jobs.store.migrations.scripts import run_script

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_script("versions/0002_operations.sql")
