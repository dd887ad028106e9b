"""Alembic's environment; `activities.store.migrate` hands it a connection and the schema."""

from alembic import context

config = context.config
context.configure(
    connection=config.attributes["connection"],
    version_table="schema_version",
    version_table_schema=config.attributes["schema"],
    transactional_ddl=True,
)
context.run_migrations()
