"""Datasets, policies and evidence as they were; executions, replays, evaluations, audits."""

from pathlib import Path

from alembic import context, op

revision = "0001"
down_revision = None


def upgrade() -> None:
    script = Path(__file__).with_suffix(".sql").read_text().replace("{s}", context.config.attributes["schema"])
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})
