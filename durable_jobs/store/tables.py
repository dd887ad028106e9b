"""The tables, for reads and for comparing with the migrated database. The migrations are the authority on the DDL."""

from sqlalchemy import BigInteger, Boolean, Column, Float, Identity, Integer, LargeBinary, MetaData, Table, Text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB, TIMESTAMP, UUID

SCHEMA = "durable_jobs"
"""The default schema; `Database(schema=…)` translates to another."""

metadata = MetaData(schema=SCHEMA)


def _time(name: str, *, nullable: bool = True) -> Column[object]:
    return Column(name, TIMESTAMP(timezone=True), nullable=nullable)


jobs = Table(
    "jobs",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column("organization_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("job_type", Text, nullable=False),
    Column("payload", JSONB, nullable=False),
    Column("idempotency_key", Text, nullable=False),
    Column("request_digest", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("intent_number", Integer, nullable=False),
    Column("attempt_count", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("backoff_base_seconds", Float(53), nullable=False),
    Column("lease_seconds", Float(53), nullable=False),
    Column("timeout_seconds", Float(53), nullable=False),
    Column("lease_id", Text),
    Column("claimed_by", Text),
    Column("claim_token", UUID(as_uuid=True)),
    Column("lease_generation", BigInteger, nullable=False),
    _time("lease_expires_at"),
    _time("heartbeat_at"),
    _time("scheduled_at", nullable=False),
    _time("created_at", nullable=False),
    _time("started_at"),
    _time("finished_at"),
    _time("updated_at", nullable=False),
    _time("cancel_requested_at"),
    Column("cancel_reason", Text),
    Column("cancel_actor", Text),
    _time("dispatched_at"),
    Column("dispatched_generation", BigInteger),
    Column("operation_key", Text),
    Column("result", JSONB),
    Column("error", JSONB),
    _time("dead_lettered_at"),
    Column("dead_letter_reason", Text),
    _time("escalated_at"),
    Column("escalation_reason", Text),
    _time("reconciled_at"),
    Column("reconciliation", JSONB),
    _time("reconcile_after"),
    Column("lookup_tries", Integer, nullable=False),
    Column("follow_ups_due", Boolean, nullable=False),
    Column("release_count", Integer, nullable=False),
    _time("launch_check_at"),
)

job_events = Table(
    "job_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("job_id", UUID(as_uuid=True), nullable=False),
    Column("organization_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("intent_number", Integer, nullable=False),
    Column("attempt_count", Integer, nullable=False),
    Column("actor", Text, nullable=False),
    _time("occurred_at", nullable=False),
    Column("data", JSONB, nullable=False),
)

job_attempts = Table(
    "job_attempts",
    metadata,
    Column("job_id", UUID(as_uuid=True), primary_key=True),
    Column("generation", BigInteger, primary_key=True),
    Column("organization_id", Text, nullable=False),
    Column("project_id", Text, nullable=False),
    Column("intent_number", Integer, nullable=False),
    Column("worker_id", Text, nullable=False),
    _time("claimed_at", nullable=False),
    _time("dispatched_at"),
    Column("operation_key", Text),
    _time("ended_at"),
    Column("outcome", Text),
    Column("error", JSONB),
    Column("late_result", JSONB),
    Column("superseded", JSONB),
)

control_events = Table(
    "control_events",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("job_id", UUID(as_uuid=True)),
    Column("organization_id", Text),
    Column("project_id", Text),
    Column("action", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text),
    _time("occurred_at", nullable=False),
    Column("data", JSONB, nullable=False),
)

queue_controls = Table(
    "queue_controls",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("job_type", Text, primary_key=True),
    Column("organization_id", Text, primary_key=True),
    _time("paused_at", nullable=False),
    Column("actor", Text, nullable=False),
    Column("reason", Text, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("version", Text, nullable=False),
    Column("queue", Text, nullable=False),
    Column("job_types", ARRAY(Text), nullable=False),
    Column("organizations", ARRAY(Text)),
    Column("running", Integer, nullable=False),
    _time("started_at", nullable=False),
    _time("heartbeat_at", nullable=False),
    _time("stopped_at"),
    Column("slots", Integer),
    Column("keeper_lag_seconds", Float(53), nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("queue", Text, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("result", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

approvals = Table(
    "approvals",
    metadata,
    Column("organization_id", Text, primary_key=True),
    Column("project_id", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Column("action_intent", Text, nullable=False),
    _time("granted_at", nullable=False),
    Column("granted_by", Text, nullable=False),
    _time("expires_at"),
    _time("revoked_at"),
    Column("revoked_by", Text),
    Column("revoke_reason", Text),
    _time("consumed_at"),
    Column("consumed_by", UUID(as_uuid=True)),
)

api_tokens = Table(
    "api_tokens",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column("name", Text, nullable=False),
    Column("token_sha256", LargeBinary, nullable=False),
    Column("role", Text, nullable=False),
    Column("organization_id", Text, nullable=False),
    Column("projects", ARRAY(Text)),
    Column("tenant", Text, nullable=False),
    Column("actor", Text, nullable=False),
    _time("created_at", nullable=False),
    _time("expires_at"),
    _time("revoked_at"),
)
