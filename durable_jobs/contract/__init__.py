"""The contract: statuses, events, models, errors and decisions. Pure: no I/O, no Temporal, no SQLAlchemy."""
