"""Runs a SQL file of this folder inside the migration's transaction."""

from pathlib import Path

from alembic import context, op

_HERE = Path(__file__).parent


def run_script(name: str) -> None:
    """Run `name`, a path below this folder, with `{s}` replaced by the schema that is being migrated."""
    schema = context.config.attributes["schema"]
    script = (_HERE / name).read_text().replace("{s}", schema)
    op.get_bind().exec_driver_sql(script, execution_options={"no_parameters": True})
