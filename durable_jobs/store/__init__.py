"""Postgres: tables, fenced statements, migrations. Functions here take a connection and never commit."""
