-- {s} stands for the schema.

CREATE TABLE {s}.approvals (
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    id              text NOT NULL,
    action_intent   text NOT NULL,
    granted_at      timestamptz NOT NULL,
    granted_by      text NOT NULL,
    expires_at      timestamptz,
    revoked_at      timestamptz,
    revoked_by      text,
    revoke_reason   text,
    consumed_at     timestamptz,
    consumed_by     uuid,
    PRIMARY KEY (organization_id, project_id, id),
    CONSTRAINT approvals_end_once CHECK (revoked_at IS NULL OR consumed_at IS NULL)
);

-- A pause may be of one organization's jobs alone; '' is everybody's.
ALTER TABLE {s}.queue_controls ADD COLUMN organization_id text NOT NULL DEFAULT '';
ALTER TABLE {s}.queue_controls DROP CONSTRAINT queue_controls_pkey;
ALTER TABLE {s}.queue_controls ADD PRIMARY KEY (queue, job_type, organization_id);

-- The reserved keys at the last door: an envelope that a row is born with must be bound to that very row, as the
-- service binds it. A raw payload that carries one of them names no such binding.
CREATE FUNCTION {s}.guard_envelopes() RETURNS trigger LANGUAGE plpgsql AS $guard$
DECLARE execution jsonb := NEW.payload -> 'execution'; governance jsonb := NEW.payload -> 'governance';
BEGIN
    IF execution IS NOT NULL AND (
        execution ->> 'job' IS DISTINCT FROM NEW.id::text
        OR execution ->> 'organization' IS DISTINCT FROM NEW.organization_id
        OR execution ->> 'project' IS DISTINCT FROM NEW.project_id
        OR jsonb_typeof(execution -> 'seals') IS DISTINCT FROM 'object'
    ) THEN
        RAISE EXCEPTION 'payload.execution is reserved: only typed inputs write it' USING ERRCODE = 'DJ003';
    END IF;
    IF governance IS NOT NULL AND (
        execution IS NULL
        OR governance ->> 'job' IS DISTINCT FROM NEW.id::text
        OR governance ->> 'digest' IS NULL
        OR jsonb_typeof(governance -> 'seals') IS DISTINCT FROM 'object'
    ) THEN
        RAISE EXCEPTION 'payload.governance is reserved: only typed inputs write it' USING ERRCODE = 'DJ003';
    END IF;
    RETURN NEW;
END $guard$;

CREATE TRIGGER guard_envelopes BEFORE INSERT ON {s}.jobs
    FOR EACH ROW WHEN (NEW.payload ?| ARRAY['execution', 'governance'])
    EXECUTE FUNCTION {s}.guard_envelopes();
ALTER TABLE {s}.jobs ENABLE ALWAYS TRIGGER guard_envelopes;
-- Nor may a row get later what it was born without.
CREATE TRIGGER guard_new_envelopes BEFORE UPDATE OF payload ON {s}.jobs
    FOR EACH ROW WHEN (
        NEW.payload ? 'execution' AND NOT OLD.payload ? 'execution'
        OR NEW.payload ? 'governance' AND NOT OLD.payload ? 'governance')
    EXECUTE FUNCTION {s}.guard_envelopes();
ALTER TABLE {s}.jobs ENABLE ALWAYS TRIGGER guard_new_envelopes;
