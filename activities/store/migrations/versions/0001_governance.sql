-- {s} stands for the schema. Everything carries its organization and project; nothing is read across them.

-- Frozen inputs, addressed by digest: what an execution ran on stays readable as it was.
CREATE TABLE {s}.datasets (
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    digest          text NOT NULL,
    dataset_id      text NOT NULL,
    cases           integer NOT NULL,
    frozen_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, project_id, digest)
);
CREATE TABLE {s}.policies (
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    digest          text NOT NULL,
    policy_id       text NOT NULL,
    version         text NOT NULL,
    body            jsonb NOT NULL,
    frozen_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (organization_id, project_id, digest)
);
CREATE TABLE {s}.cases (
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    dataset_digest  text NOT NULL,
    case_id         text NOT NULL,
    position        integer NOT NULL,
    digest          text NOT NULL,
    question        jsonb NOT NULL,
    expected        text NOT NULL,
    evidence        text[] NOT NULL,
    PRIMARY KEY (organization_id, project_id, dataset_digest, case_id),
    FOREIGN KEY (organization_id, project_id, dataset_digest) REFERENCES {s}.datasets
);
CREATE TABLE {s}.evidence (
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    dataset_digest  text NOT NULL,
    case_id         text NOT NULL,
    evidence_id     text NOT NULL,
    digest          text NOT NULL,
    body            jsonb NOT NULL,
    PRIMARY KEY (organization_id, project_id, dataset_digest, case_id, evidence_id),
    FOREIGN KEY (organization_id, project_id, dataset_digest, case_id) REFERENCES {s}.cases
);

-- One run of an agent on one case. A job has one execution for each case and policy, however often it is delivered.
CREATE TABLE {s}.executions (
    id              uuid PRIMARY KEY,
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    job_id          uuid NOT NULL,
    kind            text NOT NULL CHECK (kind IN ('evaluation', 'replay', 'counterfactual')),
    dataset_digest  text NOT NULL,
    case_id         text NOT NULL,
    policy_digest   text NOT NULL,
    evidence_digest text NOT NULL,
    without         text,
    seed            bigint NOT NULL,
    runtime         text NOT NULL,
    agent           text NOT NULL,
    agent_version   text NOT NULL,
    build           text NOT NULL,
    operation_key   text,
    outcome         jsonb NOT NULL,
    decision        text NOT NULL,
    score           numeric NOT NULL CHECK (score BETWEEN 0 AND 1),
    created_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT executions_one_per_job UNIQUE (job_id, policy_digest, case_id),
    FOREIGN KEY (organization_id, project_id, dataset_digest, case_id) REFERENCES {s}.cases,
    FOREIGN KEY (organization_id, project_id, policy_digest) REFERENCES {s}.policies
);

CREATE TABLE {s}.audits (
    id              uuid PRIMARY KEY,
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    execution_id    uuid NOT NULL REFERENCES {s}.executions,
    samples         integer NOT NULL,
    status          text NOT NULL CHECK (status IN ('FROZEN', 'COMPLETED', 'FAILED')),
    classification  text,
    reasons         jsonb NOT NULL DEFAULT '[]',
    frozen_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at     timestamptz,
    finished_by     uuid,
    UNIQUE (id, status),
    CHECK ((status = 'COMPLETED') = (classification IS NOT NULL)),
    CHECK ((status = 'FAILED') = (reasons <> '[]')),
    CHECK ((status = 'FROZEN') = (finished_at IS NULL))
);
-- An execution of an audit's own, made when it is frozen: '' is the control, with all the evidence.
CREATE TABLE {s}.audit_samples (
    audit_id     uuid NOT NULL REFERENCES {s}.audits,
    intervention text NOT NULL,
    sample       integer NOT NULL,
    seed         bigint NOT NULL,
    execution_id uuid UNIQUE REFERENCES {s}.executions,
    PRIMARY KEY (audit_id, intervention, sample)
);
-- A figure exists for a completed audit alone: the foreign key holds it, not a handler's good will.
CREATE TABLE {s}.influences (
    audit_id    uuid NOT NULL,
    status      text NOT NULL DEFAULT 'COMPLETED' CHECK (status = 'COMPLETED'),
    evidence_id text NOT NULL,
    influence   numeric NOT NULL,
    flips       integer NOT NULL,
    role        text NOT NULL,
    PRIMARY KEY (audit_id, evidence_id),
    FOREIGN KEY (audit_id, status) REFERENCES {s}.audits (id, status)
);

-- The policy that a replay was asked to run under, fixed before it runs: a later delivery runs under the same.
CREATE TABLE {s}.replay_policies (
    job_id          uuid PRIMARY KEY,
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    policy_digest   text NOT NULL,
    FOREIGN KEY (organization_id, project_id, policy_digest) REFERENCES {s}.policies
);

-- A replay is named by its job, and has the one execution that the job produced.
CREATE TABLE {s}.replays (
    id                    uuid PRIMARY KEY,
    organization_id       text NOT NULL,
    project_id            text NOT NULL,
    execution_id          uuid NOT NULL REFERENCES {s}.executions,
    produced_execution_id uuid NOT NULL UNIQUE REFERENCES {s}.executions,
    audit_id              uuid REFERENCES {s}.audits,
    created_at            timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE {s}.evaluations (
    id              uuid PRIMARY KEY,
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    job_id          uuid NOT NULL,
    dataset_digest  text NOT NULL,
    policy_digest   text NOT NULL,
    replay_id       uuid UNIQUE REFERENCES {s}.replays,
    cases           integer NOT NULL,
    correct         integer NOT NULL,
    mean_score      numeric NOT NULL,
    finished_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT evaluations_one_per_job UNIQUE (job_id, policy_digest)
);
-- Baseline and candidate are evaluations of an experiment, or executions of a replay.
CREATE TABLE {s}.comparisons (
    id              uuid PRIMARY KEY,
    organization_id text NOT NULL,
    project_id      text NOT NULL,
    job_id          uuid NOT NULL,
    subject         text NOT NULL CHECK (subject IN ('evaluation', 'execution')),
    baseline        uuid NOT NULL,
    candidate       uuid NOT NULL,
    cases           integer NOT NULL,
    agreements      integer NOT NULL,
    correct_delta   integer NOT NULL,
    score_delta     numeric NOT NULL,
    CONSTRAINT comparisons_once UNIQUE (baseline, candidate)
);
CREATE TABLE {s}.drift (
    replay_id     uuid PRIMARY KEY REFERENCES {s}.replays,
    evaluation_id uuid NOT NULL REFERENCES {s}.evaluations,
    comparison_id uuid NOT NULL REFERENCES {s}.comparisons,
    drift         text NOT NULL CHECK (drift IN ('none', 'score', 'decision')),
    score_delta   numeric NOT NULL
);
