"""Renders the state machine as SQL, as a diagram and as a table, from `contract.states` alone.

`python -m durable_jobs.contract.render --write` writes the rendered files, `--check` fails when one has drifted.
Touches nothing but the files listed in `targets`.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from durable_jobs.contract.states import INITIAL, SETTLED, TERMINAL, TRANSITIONS, EventName, JobStatus, Via

_CONDITIONS = {
    Via.WORKER: None,
    Via.CLAIM: "NEW.lease_generation > OLD.lease_generation",
    Via.RECONCILED: "NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' IS NOT NULL",
    Via.RESOLVED: "NEW.reconciled_at IS DISTINCT FROM OLD.reconciled_at AND NEW.reconciliation ->> 'by' = 'operator'",
    Via.RETRIED: "NEW.intent_number = OLD.intent_number + 1",
}
_WORDS = {
    Via.WORKER: "",
    Via.CLAIM: "a greater generation",
    Via.RECONCILED: "reconciliation, or an operator's resolution",
    Via.RESOLVED: "an operator's resolution only",
    Via.RETRIED: "`retry_job`",
}
_EDGES = {
    Via.WORKER: "",
    Via.CLAIM: ": claim",
    Via.RECONCILED: ": evidence or operator",
    Via.RESOLVED: ": operator",
    Via.RETRIED: ": retry_job",
}


def guard_sql() -> str:
    """The CHECK constraints and triggers that hold the job table to the state machine. `{s}` stands for the schema."""
    allowed = "\n".join(
        f"        WHEN OLD.status = '{source}' AND NEW.status = '{target}' THEN {_CONDITIONS[via] or 'true'}"
        for (source, target), via in TRANSITIONS.items()
        if source != target
    )
    return f"""-- Rendered by durable_jobs.contract.render from the transition table. Do not edit.

ALTER TABLE {{s}}.jobs DROP CONSTRAINT IF EXISTS jobs_status_known;
ALTER TABLE {{s}}.jobs ADD CONSTRAINT jobs_status_known CHECK (status IN ({_quoted(JobStatus)}));
ALTER TABLE {{s}}.jobs DROP CONSTRAINT IF EXISTS jobs_queued_unflagged;
ALTER TABLE {{s}}.jobs ADD CONSTRAINT jobs_queued_unflagged
    CHECK (status <> 'queued' OR cancel_requested_at IS NULL);
ALTER TABLE {{s}}.jobs DROP CONSTRAINT IF EXISTS jobs_terminal_finished;
ALTER TABLE {{s}}.jobs ADD CONSTRAINT jobs_terminal_finished
    CHECK ((status IN ({_quoted(s for s in JobStatus if s in TERMINAL)})) = (finished_at IS NOT NULL));
ALTER TABLE {{s}}.job_events DROP CONSTRAINT IF EXISTS job_events_name_known;
ALTER TABLE {{s}}.job_events ADD CONSTRAINT job_events_name_known CHECK (name IN ({_quoted(EventName)}));

CREATE OR REPLACE FUNCTION {{s}}.guard_job_insert() RETURNS trigger LANGUAGE plpgsql AS $guard$
BEGIN
    IF NEW.status <> '{INITIAL}' OR NEW.lease_generation <> 0 OR NEW.attempt_count <> 0 OR NEW.intent_number <> 0 THEN
        RAISE EXCEPTION 'a job begins {INITIAL}, at generation, attempt and intent 0' USING ERRCODE = 'DJ001';
    END IF;
    RETURN NEW;
END $guard$;

CREATE OR REPLACE FUNCTION {{s}}.guard_job_update() RETURNS trigger LANGUAGE plpgsql AS $guard$
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
{allowed}
        ELSE false
    END;
    IF allowed IS NOT TRUE THEN
        RAISE EXCEPTION 'job %: illegal transition from % to %', OLD.id, OLD.status, NEW.status USING ERRCODE = 'DJ001';
    END IF;
    RETURN NEW;
END $guard$;

CREATE OR REPLACE TRIGGER guard_insert BEFORE INSERT ON {{s}}.jobs
    FOR EACH ROW EXECUTE FUNCTION {{s}}.guard_job_insert();
CREATE OR REPLACE TRIGGER guard_update BEFORE UPDATE ON {{s}}.jobs
    FOR EACH ROW WHEN (OLD.status IS DISTINCT FROM NEW.status OR OLD.lease_generation <> NEW.lease_generation)
    EXECUTE FUNCTION {{s}}.guard_job_update();
ALTER TABLE {{s}}.jobs ENABLE ALWAYS TRIGGER guard_insert;
ALTER TABLE {{s}}.jobs ENABLE ALWAYS TRIGGER guard_update;
"""


def diagram() -> str:
    """The state diagram, in Mermaid."""
    lines = ["stateDiagram-v2", f"    [*] --> {INITIAL}"]
    lines += [f"    {source} --> {target}{_EDGES[via]}" for (source, target), via in TRANSITIONS.items()]
    lines += [f"    {status} --> [*]" for status in JobStatus if status in SETTLED and status is not JobStatus.FAILED]
    return "\n".join(lines) + "\n"


def table() -> str:
    """Every status, whether it is terminal, and where it may go, in Markdown."""
    rows = ["| from | terminal | to |", "|---|---|---|"]
    for source in JobStatus:
        moves = [
            f"{target} ({_WORDS[via]})" if _WORDS[via] else f"{target}"
            for (start, target), via in TRANSITIONS.items()
            if start is source
        ]
        rows.append(f"| {source} | {'yes' if source in TERMINAL else 'no'} | {', '.join(moves) or 'nothing'} |")
    return "\n".join(rows) + "\n"


def _states_page() -> str:
    return (
        "# Statuses and transitions\n\n"
        "Rendered from `durable_jobs/contract/states.py` by `make generate`; do not edit.\n\n"
        f"```mermaid\n{diagram()}```\n\n{table()}\n"
        f"The event trail knows {len(EventName)} names: {', '.join(f'`{name}`' for name in EventName)}.\n"
    )


def _quoted(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


_BEGIN, _END = "<!-- states: rendered by make generate -->\n", "<!-- /states -->\n"


def _spliced(text: str) -> str:
    """The README with its diagram replaced."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}```mermaid\n{diagram()}```\n{_END}{after}"


def targets(root: Path) -> dict[Path, str]:
    """Each rendered file below the repository's `root`, and the text that it should hold."""
    readme = root / "README.md"
    return {
        root / "durable_jobs/store/migrations/guard.sql": guard_sql(),
        root / "docs/states.md": _states_page(),
        readme: _spliced(readme.read_text()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    write = parser.parse_args().write
    drifted = {
        path: text
        for path, text in targets(Path(__file__).parents[2]).items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in drifted.items():
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        print(f"{'wrote' if write else 'drifted; run make generate'}: {path.name}")
    return 1 if drifted and not write else 0


if __name__ == "__main__":
    sys.exit(main())
