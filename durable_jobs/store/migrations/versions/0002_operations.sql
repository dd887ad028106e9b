-- {s} stands for the schema.

-- A row stands for a pause; job_type '' is the whole queue. Who paused and resumed is in control_events.
CREATE TABLE {s}.queue_controls (
    queue     text NOT NULL,
    job_type  text NOT NULL,
    paused_at timestamptz NOT NULL,
    actor     text NOT NULL,
    reason    text NOT NULL,
    PRIMARY KEY (queue, job_type)
);

CREATE TABLE {s}.workers (
    id            text PRIMARY KEY,
    host          text NOT NULL,
    pid           integer NOT NULL,
    version       text NOT NULL,
    queue         text NOT NULL,
    job_types     text[] NOT NULL,
    organizations text[],
    running       integer NOT NULL,
    started_at    timestamptz NOT NULL,
    heartbeat_at  timestamptz NOT NULL,
    stopped_at    timestamptz
) WITH (fillfactor = 80);

CREATE INDEX workers_queue ON {s}.workers (queue);
CREATE INDEX jobs_unresolved ON {s}.jobs (organization_id, project_id, created_at, id)
    WHERE status IN ('indeterminate', 'timed_out');
CREATE INDEX jobs_launch_check ON {s}.jobs (queue, launch_check_at) WHERE launch_check_at IS NOT NULL;
CREATE INDEX jobs_follow_ups_due ON {s}.jobs (queue, id) WHERE follow_ups_due;
CREATE INDEX jobs_escalated ON {s}.jobs (escalated_at, id) WHERE escalated_at IS NOT NULL;
