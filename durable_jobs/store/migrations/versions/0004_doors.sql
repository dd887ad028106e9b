-- {s} stands for the schema.

CREATE TABLE {s}.api_tokens (
    id              uuid PRIMARY KEY,
    name            text NOT NULL,
    token_sha256    bytea NOT NULL,
    role            text NOT NULL,
    organization_id text NOT NULL,
    projects        text[],
    tenant          text NOT NULL,
    actor           text NOT NULL,
    created_at      timestamptz NOT NULL,
    expires_at      timestamptz,
    revoked_at      timestamptz,
    CONSTRAINT api_tokens_role_known CHECK (role IN ('reader', 'submitter', 'operator'))
);
CREATE UNIQUE INDEX api_tokens_digest ON {s}.api_tokens (token_sha256);

-- Retention has its own role, by name and not by membership, so that not even a superuser deletes by mistake.
CREATE OR REPLACE FUNCTION {s}.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $refuse$
BEGIN
    IF TG_OP = 'DELETE' AND current_user = TG_TABLE_SCHEMA || '_retention' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '%.% is append-only', TG_TABLE_SCHEMA, TG_TABLE_NAME USING ERRCODE = 'DJ002';
END $refuse$;

-- UUIDv7 (RFC 9562): PostgreSQL has uuidv7() from 18 on only.
CREATE FUNCTION {s}.new_job_id() RETURNS uuid LANGUAGE sql VOLATILE AS $id$
    SELECT encode(
        set_bit(set_bit(
            overlay(uuid_send(gen_random_uuid())
                PLACING substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6),
            52, 1), 53, 1),
        'hex')::uuid
$id$;

-- The seal of one envelope field, as durable_jobs.contract.envelope makes it: the values hold no control characters, so
-- that to_json writes each as RFC 8785 does.
CREATE FUNCTION {s}.envelope_seal(job uuid, field text, value jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $seal$
    SELECT left(encode(sha256(convert_to(
        '{"field":' || to_json(field)::text || ',"job":' || to_json(job::text)::text || ',"value":' || value::text || '}',
        'UTF8')), 'hex'), 16)
$seal$;

-- What is wrong with an idempotency key or a name in the identity, as durable_jobs.contract.rules has it.
CREATE FUNCTION {s}.key_problem(value text) RETURNS text LANGUAGE sql IMMUTABLE AS $problem$
    SELECT CASE
        WHEN value IS NULL OR length(value) NOT BETWEEN 1 AND 255 THEN 'must have 1 to 255 characters'
        WHEN value ~ '^ *$' OR value ~ U&'[\0001-\001F\007F-\00A0\00AD\0600-\0605\061C\06DD\070F\0890\0891\08E2\1680\180E\2000-\200F\2028-\202F\205F-\206F\3000\E000-\F8FF\FDD0-\FDEF\FEFF\FFF0-\FFFB\FFFE\FFFF\+0110BD\+0110CD\+013430-\+01343F\+01BCA0-\+01BCA3\+01D173-\+01D17A\+01FFFE\+01FFFF\+0E0000-\+10FFFF]'
            THEN 'must be printable characters, not all blank'
        END
$problem$;

CREATE FUNCTION {s}.refuse_input(field text, problem text) RETURNS void LANGUAGE plpgsql AS $refuse$
BEGIN
    RAISE EXCEPTION '%: %', field, problem USING ERRCODE = 'DJ004', COLUMN = field;
END $refuse$;

-- The first thing that keeps a jsonb value from being stored, as durable_jobs.contract.rules has it; null when nothing is.
-- jsonb itself has refused U+0000, lone surrogates, NaN and infinities, and has folded duplicate keys.
CREATE FUNCTION {s}.json_problem(value jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $problem$
    WITH RECURSIVE nodes AS (
        SELECT value AS node, 1 AS depth, 0 AS blanks
        UNION ALL
        SELECT child.value, n.depth + 1, child.blanks
        FROM nodes n
        CROSS JOIN LATERAL (
            SELECT e.value, 2 FROM jsonb_each(CASE jsonb_typeof(n.node) WHEN 'object' THEN n.node ELSE '{}' END) e
            UNION ALL
            SELECT e.value, 1
            FROM jsonb_array_elements(CASE jsonb_typeof(n.node) WHEN 'array' THEN n.node ELSE '[]' END) e
        ) child (value, blanks)
        WHERE n.depth <= 64
    ), size AS (
        -- Of compact JSON: jsonb's text has a blank after each colon and comma, of which a container has no last one.
        SELECT octet_length(value::text) - CASE WHEN octet_length(value::text) <= 8388608 THEN 0 ELSE (
            SELECT sum(blanks) - count(*) FILTER (WHERE jsonb_typeof(node) IN ('object', 'array') AND node NOT IN ('{}', '[]'))
            FROM nodes) END AS bytes
    )
    SELECT CASE
        WHEN jsonb_typeof(value) <> 'object' THEN 'must be a JSON object, not ' || jsonb_typeof(value)
        WHEN value = '{}' THEN 'must not be empty'
        WHEN value ?| ARRAY['execution', 'governance'] THEN 'execution and governance are reserved: only typed inputs write them'
        WHEN EXISTS (SELECT FROM nodes WHERE depth > 64 AND jsonb_typeof(node) IN ('object', 'array'))
            THEN 'must be nested at most 64 deep'
        WHEN (SELECT bytes FROM size) > 8388608 THEN 'must be at most 8388608 bytes, is ' || (SELECT bytes FROM size)
        WHEN EXISTS (SELECT FROM nodes WHERE CASE jsonb_typeof(node) WHEN 'number'
            THEN abs(node::numeric) >= 1e400::numeric ELSE false END)
            THEN 'must have at most 400 digits'
        END
$problem$;

-- The digest of a row that enqueue made, over the text that jsonb gives: only the database can take it again.
CREATE FUNCTION {s}.row_digest(queue text, job_type text, payload jsonb) RETURNS text LANGUAGE sql IMMUTABLE AS $digest$
    SELECT 'sql:' || encode(sha256(convert_to(jsonb_build_array(queue, job_type, payload)::text, 'UTF8')), 'hex')
$digest$;

-- A job from any language, inside the caller's transaction. Returns its id, a new one's or that which the key has.
-- The same rules and refusals as the Python door; the digest of what it made is taken when it is first compared.
CREATE FUNCTION {s}.enqueue(
    organization text, project text, job_type text, idempotency_key text, payload jsonb,
    queue text DEFAULT 'default', priority integer DEFAULT 0, scheduled_at timestamptz DEFAULT NULL,
    max_attempts integer DEFAULT 3, backoff_base_seconds double precision DEFAULT 30,
    lease_seconds double precision DEFAULT 60, timeout_seconds double precision DEFAULT 3600,
    tenant text DEFAULT NULL, actor text DEFAULT NULL, trace text DEFAULT NULL,
    isolated boolean DEFAULT false
) RETURNS uuid LANGUAGE plpgsql AS $enqueue$
#variable_conflict use_variable
DECLARE
    existing {s}.jobs;
    new_id uuid := {s}.new_job_id();
    born timestamptz := clock_timestamp();
    kind text := lower(job_type);
    target text := queue;
    stored jsonb := payload;
    lineage jsonb;
    problem text;
    name text;
    value text;
BEGIN
    FOR name, value IN VALUES ('organization', organization), ('project', project), ('job_type', job_type), ('queue', queue)
    LOOP
        IF value IS NULL OR value !~ '^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$' OR value ~ '[\n\r]' THEN
            PERFORM {s}.refuse_input(name, 'must match [A-Za-z0-9][A-Za-z0-9._:/-]{0,127}');
        END IF;
    END LOOP;
    IF queue LIKE '%.reconciliation' THEN
        PERFORM {s}.refuse_input('queue', 'the suffix .reconciliation is reserved');
    ELSIF isolated AND organization LIKE '%.reconciliation' THEN
        PERFORM {s}.refuse_input('organization', 'its isolated queue would end in .reconciliation, which is reserved');
    END IF;
    FOR name, value IN VALUES ('idempotency_key', idempotency_key), ('tenant', tenant), ('actor', actor), ('trace', trace)
    LOOP
        CONTINUE WHEN value IS NULL AND name <> 'idempotency_key';
        problem := {s}.key_problem(value);
        IF problem IS NOT NULL THEN PERFORM {s}.refuse_input(name, problem); END IF;
    END LOOP;
    problem := CASE WHEN payload IS NULL THEN 'must be a JSON object' ELSE {s}.json_problem(payload) END;
    IF problem IS NOT NULL THEN PERFORM {s}.refuse_input('payload', problem); END IF;
    IF priority IS NULL OR priority NOT BETWEEN -2 AND 2 THEN
        PERFORM {s}.refuse_input('priority', 'must be -2 to 2');
    ELSIF max_attempts IS NULL OR max_attempts NOT BETWEEN 1 AND 10000 THEN
        PERFORM {s}.refuse_input('max_attempts', 'must be 1 to 10000');
    ELSIF (backoff_base_seconds > 0 AND backoff_base_seconds <= 3600) IS NOT TRUE THEN
        PERFORM {s}.refuse_input('backoff_base_seconds', 'must be above 0 and at most 3600');
    ELSIF (lease_seconds >= 1 AND lease_seconds <= 86400) IS NOT TRUE THEN
        PERFORM {s}.refuse_input('lease_seconds', 'must be 1 to 86400');
    ELSIF (timeout_seconds > 0 AND timeout_seconds <= 2592000) IS NOT TRUE THEN
        PERFORM {s}.refuse_input('timeout_seconds', 'must be above 0 and at most 2592000');
    ELSIF scheduled_at IS NOT NULL
        AND (scheduled_at < '2000-01-01Z' OR scheduled_at >= '2201-01-01Z') THEN
        PERFORM {s}.refuse_input('scheduled_at', 'must lie within the years 2000 to 2200');
    END IF;
    IF num_nonnulls(tenant, actor, trace) NOT IN (0, 3) THEN
        PERFORM {s}.refuse_input('execution', 'tenant, actor and trace go together');
    END IF;
    IF isolated THEN target := queue || '@' || organization; END IF;
    IF tenant IS NOT NULL THEN
        lineage := jsonb_build_object('version', 1, 'tenant', tenant, 'actor', actor, 'trace', trace, 'task', NULL, 'run', NULL,
            'attempt', NULL, 'action_intent', NULL, 'admission_decision', NULL, 'approval', NULL, 'governance', NULL, 'parent_job', NULL,
            'parent_run', NULL, 'organization', organization, 'project', project, 'job', new_id::text);
        stored := payload || jsonb_build_object('execution', lineage || jsonb_build_object('seals', (
            SELECT jsonb_object_agg(f.key, {s}.envelope_seal(new_id, f.key, f.value)) FROM jsonb_each(lineage) f)));
    END IF;
    INSERT INTO {s}.jobs (
        id, organization_id, project_id, queue, job_type, payload, idempotency_key, request_digest, status, priority,
        intent_number, attempt_count, max_attempts, backoff_base_seconds, lease_seconds, timeout_seconds,
        lease_generation, scheduled_at, created_at, updated_at, lookup_tries, follow_ups_due, release_count,
        launch_check_at)
    VALUES (
        new_id, organization, project, target, kind, stored, idempotency_key, {s}.row_digest(target, kind, stored),
        'queued', priority,
        0, 0, max_attempts, backoff_base_seconds, lease_seconds, timeout_seconds,
        0, COALESCE(scheduled_at, born), born, born, 0, false, 0, born)
    ON CONFLICT ON CONSTRAINT jobs_idempotency_key DO NOTHING;
    IF FOUND THEN
        -- LISTEN asks for no right, so that the queue's name is told in a form that only who knows it can read.
        PERFORM pg_notify('{s}_enqueued', md5(target));
        RETURN new_id;
    END IF;
    SELECT j.* INTO existing FROM {s}.jobs j
    WHERE j.organization_id = organization AND j.project_id = project AND j.idempotency_key = idempotency_key;
    IF existing.id IS NULL THEN
        RAISE EXCEPTION 'the idempotency key is taken by a job that this transaction can''t see' USING ERRCODE = '40001';
    END IF;
    IF existing.queue <> target OR existing.job_type <> kind OR existing.payload - 'execution' - 'governance' <> payload
        OR existing.payload ? 'governance'
        OR existing.payload #>> '{execution,tenant}' IS DISTINCT FROM tenant
        OR existing.payload #>> '{execution,actor}' IS DISTINCT FROM actor
        OR existing.payload #>> '{execution,action_intent}' IS NOT NULL
    THEN
        RAISE EXCEPTION 'idempotency key % belongs to job %, which was another request', idempotency_key, existing.id
            USING ERRCODE = 'DJ005';
    END IF;
    RETURN existing.id;
END $enqueue$;
