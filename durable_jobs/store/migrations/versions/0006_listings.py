"""Lists of one organization's jobs, of any project, do not slow down with the rows that have ended."""

from durable_jobs.store.migrations.scripts import run_script

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    run_script("versions/0006_listings.sql")
