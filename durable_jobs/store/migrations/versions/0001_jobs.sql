-- {s} stands for the schema.

CREATE TABLE {s}.jobs (
    id                    uuid PRIMARY KEY,
    organization_id       text NOT NULL,
    project_id            text NOT NULL,
    queue                 text NOT NULL,
    job_type              text NOT NULL,
    payload               jsonb NOT NULL,
    idempotency_key       text NOT NULL,
    request_digest        text NOT NULL,
    status                text NOT NULL,
    priority              integer NOT NULL,
    intent_number         integer NOT NULL,
    attempt_count         integer NOT NULL,
    max_attempts          integer NOT NULL,
    backoff_base_seconds  double precision NOT NULL,
    lease_seconds         double precision NOT NULL,
    timeout_seconds       double precision NOT NULL,
    lease_id              text,
    claimed_by            text,
    claim_token           uuid,
    lease_generation      bigint NOT NULL,
    lease_expires_at      timestamptz,
    heartbeat_at          timestamptz,
    scheduled_at          timestamptz NOT NULL,
    created_at            timestamptz NOT NULL,
    started_at            timestamptz,
    finished_at           timestamptz,
    updated_at            timestamptz NOT NULL,
    cancel_requested_at   timestamptz,
    cancel_reason         text,
    cancel_actor          text,
    dispatched_at         timestamptz,
    dispatched_generation bigint,
    operation_key         text,
    result                jsonb,
    error                 jsonb,
    dead_lettered_at      timestamptz,
    dead_letter_reason    text,
    escalated_at          timestamptz,
    escalation_reason     text,
    reconciled_at         timestamptz,
    reconciliation        jsonb,
    reconcile_after       timestamptz,
    lookup_tries          integer NOT NULL,
    follow_ups_due        boolean NOT NULL,
    release_count         integer NOT NULL,
    launch_check_at       timestamptz,
    CONSTRAINT jobs_idempotency_key UNIQUE (organization_id, project_id, idempotency_key),
    CONSTRAINT jobs_payload_object CHECK (jsonb_typeof(payload) = 'object'),
    CONSTRAINT jobs_lease_while_active CHECK ((status IN ('claimed', 'running')) = (lease_expires_at IS NOT NULL)),
    CONSTRAINT jobs_marker_whole
        CHECK ((dispatched_at IS NULL) = (operation_key IS NULL) AND (dispatched_at IS NULL) = (dispatched_generation IS NULL))
) WITH (fillfactor = 80);

-- The claim order itself, measured flat from 1k to 1M rows. No index, not even a partial one, may name a column that
-- a heartbeat writes: it ended HOT updates.
CREATE INDEX jobs_claim ON {s}.jobs (queue, priority DESC, scheduled_at, created_at, id) WHERE status = 'queued';
CREATE INDEX jobs_active ON {s}.jobs (queue, priority DESC, scheduled_at, created_at, id)
    WHERE status IN ('claimed', 'running');
-- A claim of "the next job" that is repeated after a lost reply finds its own.
CREATE INDEX jobs_claim_token ON {s}.jobs (claim_token) WHERE claim_token IS NOT NULL;
CREATE INDEX jobs_listing ON {s}.jobs (organization_id, project_id, id);

CREATE TABLE {s}.job_events (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id          uuid NOT NULL,
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    name            text NOT NULL,
    status          text NOT NULL,
    generation      bigint NOT NULL,
    intent_number   integer NOT NULL,
    attempt_count   integer NOT NULL,
    actor           text NOT NULL,
    occurred_at     timestamptz NOT NULL,
    data            jsonb NOT NULL
);
CREATE INDEX job_events_job ON {s}.job_events (job_id, id);

CREATE TABLE {s}.job_attempts (
    job_id          uuid NOT NULL,
    generation      bigint NOT NULL,
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    intent_number   integer NOT NULL,
    worker_id       text NOT NULL,
    claimed_at      timestamptz NOT NULL,
    dispatched_at   timestamptz,
    operation_key   text,
    ended_at        timestamptz,
    outcome         text,
    error           jsonb,
    late_result     jsonb,
    superseded      jsonb,
    PRIMARY KEY (job_id, generation)
);
-- Tenant first: a violation of a key chosen by a caller must not tell of another tenant's.
CREATE UNIQUE INDEX job_attempts_operation_key ON {s}.job_attempts (organization_id, project_id, operation_key)
    WHERE operation_key IS NOT NULL;

CREATE TABLE {s}.control_events (
    id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    job_id          uuid,
    organization_id text,
    project_id      text,
    action          text NOT NULL,
    actor           text NOT NULL,
    reason          text,
    occurred_at     timestamptz NOT NULL,
    data            jsonb NOT NULL
);
CREATE INDEX control_events_job ON {s}.control_events (job_id, id);

CREATE FUNCTION {s}.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $refuse$
BEGIN
    RAISE EXCEPTION '%.% is append-only', TG_TABLE_SCHEMA, TG_TABLE_NAME USING ERRCODE = 'DJ002';
END $refuse$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {s}.job_events
    FOR EACH ROW EXECUTE FUNCTION {s}.refuse_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON {s}.job_events
    FOR EACH STATEMENT EXECUTE FUNCTION {s}.refuse_change();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON {s}.control_events
    FOR EACH ROW EXECUTE FUNCTION {s}.refuse_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON {s}.control_events
    FOR EACH STATEMENT EXECUTE FUNCTION {s}.refuse_change();
-- ALWAYS: session_replication_role = replica bypassed ordinary triggers.
ALTER TABLE {s}.job_events ENABLE ALWAYS TRIGGER append_only;
ALTER TABLE {s}.job_events ENABLE ALWAYS TRIGGER append_only_truncate;
ALTER TABLE {s}.control_events ENABLE ALWAYS TRIGGER append_only;
ALTER TABLE {s}.control_events ENABLE ALWAYS TRIGGER append_only_truncate;
