-- {s} stands for the schema.

ALTER TABLE {s}.workers
    ADD COLUMN slots integer,
    ADD COLUMN keeper_lag_seconds double precision NOT NULL DEFAULT 0;

-- Counts that only grow. Workers add to them with their heartbeats and after each sweep; monitoring reads them.
CREATE TABLE {s}.counters (
    queue  text NOT NULL,
    name   text NOT NULL,
    result text NOT NULL DEFAULT '',
    value  bigint NOT NULL,
    PRIMARY KEY (queue, name, result)
) WITH (fillfactor = 80);
