-- Least rights, and row-level security as a second wall. {s} stands for the schema, {role} for the prefix of the roles.
-- Run by `durable-jobs migrate --roles`, after the migrations; may be run again.

DO $roles$
DECLARE name text;
BEGIN
    FOREACH name IN ARRAY ARRAY['{role}_owner', '{role}_service', '{role}_tenant', '{role}_retention'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) THEN
            EXECUTE format('CREATE ROLE %I NOLOGIN', name);
        END IF;
        -- From PostgreSQL 16 on, who makes a role may neither act as it nor give it ownership without this.
        IF current_setting('server_version_num')::int >= 160000
            AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN
            EXECUTE format('GRANT %I TO CURRENT_USER WITH SET TRUE, INHERIT TRUE', name);
        END IF;
    END LOOP;
    -- The owner owns, so that neither of the others does: row-level security passes over an owner unless forced.
    EXECUTE format('ALTER SCHEMA {s} OWNER TO %I', '{role}_owner');
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = '{s}' LOOP
        EXECUTE format('ALTER TABLE {s}.%I OWNER TO %I', name, '{role}_owner');
    END LOOP;
    FOR name IN
        SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = '{s}'::regnamespace
    LOOP
        EXECUTE format('ALTER FUNCTION %s OWNER TO %I', name, '{role}_owner');
    END LOOP;
END $roles$;

GRANT USAGE ON SCHEMA {s} TO {role}_service, {role}_tenant, {role}_retention;
GRANT SELECT, INSERT, UPDATE ON {s}.job_attempts, {s}.workers, {s}.approvals, {s}.api_tokens, {s}.counters
    TO {role}_service;
-- Whose a job is and what it was to do is written at its creation alone.
GRANT SELECT, INSERT ON {s}.jobs TO {role}_service;
GRANT UPDATE (status, priority, intent_number, attempt_count, lease_id, claimed_by, claim_token, lease_generation,
    lease_expires_at, heartbeat_at, scheduled_at, started_at, finished_at, updated_at, cancel_requested_at, cancel_reason,
    cancel_actor, dispatched_at, dispatched_generation, operation_key, result, error, dead_lettered_at,
    dead_letter_reason, escalated_at, escalation_reason, reconciled_at, reconciliation, reconcile_after, lookup_tries,
    follow_ups_due, release_count, launch_check_at) ON {s}.jobs TO {role}_service;
GRANT SELECT, INSERT ON {s}.job_events, {s}.control_events TO {role}_service;
GRANT SELECT, INSERT, DELETE ON {s}.queue_controls TO {role}_service;
GRANT SELECT ON {s}.schema_version TO {role}_service;
GRANT SELECT ON {s}.jobs, {s}.job_events, {s}.job_attempts TO {role}_tenant;
-- UPDATE on the jobs, as a row must be locked to be deleted only where it still is what was looked at.
GRANT SELECT, DELETE ON {s}.jobs, {s}.job_events, {s}.job_attempts TO {role}_retention;
GRANT UPDATE (updated_at) ON {s}.jobs TO {role}_retention;

ALTER TABLE {s}.jobs ENABLE ROW LEVEL SECURITY;
ALTER TABLE {s}.jobs FORCE ROW LEVEL SECURITY;
ALTER TABLE {s}.job_events ENABLE ROW LEVEL SECURITY;
ALTER TABLE {s}.job_events FORCE ROW LEVEL SECURITY;
ALTER TABLE {s}.job_attempts ENABLE ROW LEVEL SECURITY;
ALTER TABLE {s}.job_attempts FORCE ROW LEVEL SECURITY;

DROP POLICY IF EXISTS service ON {s}.jobs;
DROP POLICY IF EXISTS service ON {s}.job_events;
DROP POLICY IF EXISTS service ON {s}.job_attempts;
DROP POLICY IF EXISTS retention ON {s}.jobs;
CREATE POLICY retention ON {s}.jobs TO {role}_retention
    USING (status IN ('completed', 'failed', 'cancelled', 'dead_letter', 'halt_unsafe'));
CREATE POLICY service ON {s}.jobs TO {role}_service USING (true) WITH CHECK (true);
DROP POLICY IF EXISTS retention ON {s}.job_events;
CREATE POLICY retention ON {s}.job_events TO {role}_retention USING (true);
CREATE POLICY service ON {s}.job_events TO {role}_service USING (true) WITH CHECK (true);
DROP POLICY IF EXISTS retention ON {s}.job_attempts;
CREATE POLICY retention ON {s}.job_attempts TO {role}_retention USING (true);
CREATE POLICY service ON {s}.job_attempts TO {role}_service USING (true) WITH CHECK (true);

-- Transaction-local: SELECT set_config('durable_jobs.organization', 'acme', true). Unset, or after the transaction, the
-- setting is null or empty, and no row is seen.
DROP POLICY IF EXISTS tenant ON {s}.jobs;
DROP POLICY IF EXISTS tenant ON {s}.job_events;
DROP POLICY IF EXISTS tenant ON {s}.job_attempts;
CREATE POLICY tenant ON {s}.jobs FOR SELECT TO {role}_tenant
    USING (organization_id = current_setting('durable_jobs.organization', true));
CREATE POLICY tenant ON {s}.job_events FOR SELECT TO {role}_tenant
    USING (organization_id = current_setting('durable_jobs.organization', true));
CREATE POLICY tenant ON {s}.job_attempts FOR SELECT TO {role}_tenant
    USING (organization_id = current_setting('durable_jobs.organization', true));
