-- Rendered by durable_jobs.contract.render from the transition table. Do not edit.

ALTER TABLE {s}.jobs DROP CONSTRAINT IF EXISTS jobs_status_known;
ALTER TABLE {s}.jobs ADD CONSTRAINT jobs_status_known CHECK (status IN ('queued', 'claimed', 'running', 'completed', 'failed', 'cancelled', 'dead_letter', 'indeterminate', 'halt_unsafe', 'timed_out'));
ALTER TABLE {s}.jobs DROP CONSTRAINT IF EXISTS jobs_queued_unflagged;
ALTER TABLE {s}.jobs ADD CONSTRAINT jobs_queued_unflagged
    CHECK (status <> 'queued' OR cancel_requested_at IS NULL);
ALTER TABLE {s}.jobs DROP CONSTRAINT IF EXISTS jobs_terminal_finished;
ALTER TABLE {s}.jobs ADD CONSTRAINT jobs_terminal_finished
    CHECK ((status IN ('completed', 'failed', 'cancelled', 'dead_letter', 'indeterminate', 'halt_unsafe', 'timed_out')) = (finished_at IS NOT NULL));
ALTER TABLE {s}.job_events DROP CONSTRAINT IF EXISTS job_events_name_known;
ALTER TABLE {s}.job_events ADD CONSTRAINT job_events_name_known CHECK (name IN ('claimed', 'dispatched', 'heartbeat', 'completed', 'failed', 'cancelled', 'indeterminate', 'halt_unsafe', 'dead_lettered', 'timed_out', 'retried', 'admission_checked', 'escalated', 'reconciled', 'execution_control_shadow'));

CREATE OR REPLACE FUNCTION {s}.guard_job_insert() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF NEW.status <> 'queued' OR NEW.lease_generation <> 0 OR NEW.attempt_count <> 0 OR NEW.intent_number <> 0 THEN
        RAISE EXCEPTION 'a job begins queued, at generation, attempt and intent 0' USING ERRCODE = 'DJ001';
    END IF;
    RETURN NEW;
END $guard$;

CREATE OR REPLACE FUNCTION {s}.guard_job_update() RETURNS trigger LANGUAGE plpgsql AS $guard$
DECLARE allowed boolean;
BEGIN
    IF NEW.lease_generation < OLD.lease_generation THEN
        RAISE EXCEPTION 'job %: the lease generation only grows', OLD.id USING ERRCODE = 'DJ001';
    END IF;
    IF NEW.status = OLD.status THEN
        IF NEW.lease_generation > OLD.lease_generation AND NEW.status <> 'claimed' THEN
            RAISE EXCEPTION 'job %: a new generation of % is no claim', OLD.id, OLD.status USING ERRCODE = 'DJ001';
        END IF;
        RETURN NEW;
    END IF;
    allowed := CASE
        WHEN OLD.status = 'queued' AND NEW.status = 'claimed' THEN NEW.lease_generation > OLD.lease_generation
        WHEN OLD.status = 'queued' AND NEW.status = 'cancelled' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'running' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'queued' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'failed' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'cancelled' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'dead_letter' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'indeterminate' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'halt_unsafe' THEN true
        WHEN OLD.status = 'claimed' AND NEW.status = 'timed_out' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'completed' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'queued' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'failed' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'cancelled' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'dead_letter' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'indeterminate' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'halt_unsafe' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'timed_out' THEN true
        WHEN OLD.status = 'running' AND NEW.status = 'claimed' THEN NEW.lease_generation > OLD.lease_generation
        WHEN OLD.status = 'indeterminate' AND NEW.status = 'completed' THEN NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' IS NOT NULL
        WHEN OLD.status = 'indeterminate' AND NEW.status = 'failed' THEN NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' IS NOT NULL
        WHEN OLD.status = 'indeterminate' AND NEW.status = 'dead_letter' THEN NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' IS NOT NULL
        WHEN OLD.status = 'timed_out' AND NEW.status = 'completed' THEN NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' = 'operator'
        WHEN OLD.status = 'timed_out' AND NEW.status = 'failed' THEN NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' = 'operator'
        WHEN OLD.status = 'timed_out' AND NEW.status = 'dead_letter' THEN NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' = 'operator'
        WHEN OLD.status = 'failed' AND NEW.status = 'queued' THEN NEW.intent_number = OLD.intent_number + 1
        ELSE false
    END;
    IF allowed IS NOT TRUE THEN
        RAISE EXCEPTION 'job %: illegal transition from % to %', OLD.id, OLD.status, NEW.status USING ERRCODE = 'DJ001';
    END IF;
    RETURN NEW;
END $guard$;

CREATE OR REPLACE TRIGGER guard_insert BEFORE INSERT ON {s}.jobs
    FOR EACH ROW EXECUTE FUNCTION {s}.guard_job_insert();
CREATE OR REPLACE TRIGGER guard_update BEFORE UPDATE ON {s}.jobs
    FOR EACH ROW WHEN (OLD.status IS DISTINCT FROM NEW.status OR OLD.lease_generation <> NEW.lease_generation)
    EXECUTE FUNCTION {s}.guard_job_update();
ALTER TABLE {s}.jobs ENABLE ALWAYS TRIGGER guard_insert;
ALTER TABLE {s}.jobs ENABLE ALWAYS TRIGGER guard_update;
