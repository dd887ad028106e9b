"""What workers count, for monitoring."""

from durable_jobs.store.migrations.scripts import run_script

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    run_script("versions/0005_metrics.sql")
