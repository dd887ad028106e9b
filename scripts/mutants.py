"""Runs a command against a copy of this source tree in which one rule is broken, to learn whether the command sees it.

    python scripts/mutants.py none -- make crash            the copy as it is: the command has to pass
    python scripts/mutants.py fence -- make crash ARGS="--shape plain"

    fence    `complete_job` asks for the job's status alone, not for its holder and generation
    marker   the reclaim of an expired lease takes a job past its boundary as any other: its handler runs again
    event    the event `completed` is written after the completion has committed, in a transaction of its own

The copy, of what git knows and does not ignore, is made in a temporary folder and removed; the tree itself is never
touched. It borrows the tree's `.venv`, and PYTHONPATH puts its own modules before the installed ones, which is checked.
A mutant is an exact text, to be found exactly once: where the source has moved, the script fails and says which one.

Prints what the command prints, then one JSON object. Exit code 0: the command failed on the mutant, or passed on
`none`. 1: the mutant was not seen, or the command fails on `none`. 2: the mutant could not be made. Whether it failed
for the mutant's sake only its own lines tell: run it on `none` first.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Edit:
    """`old`, which stands exactly once in `path`, becomes `new`."""

    path: str
    old: str
    new: str


FENCE = [
    Edit(
        "durable_jobs/store/statements.py",
        "    FROM judged g WHERE j.id = g.id AND {holder} AND g.status = 'running'\n",
        "    FROM judged g WHERE j.id = g.id AND g.status = 'running'\n",
    )
]

MARKER = [
    Edit(
        "durable_jobs/store/claim.py",
        "        WHEN j.dispatched_at IS NOT NULL THEN 'indeterminate'\n",
        "",
    )
]

_EVENT = """    INSERT INTO {s}.job_events {event_columns}
    SELECT id, organization_id, project_id, 'completed', status, lease_generation, intent_number, attempt_count,
        claimed_by, finished_at, %(data)s::jsonb
    FROM """

EVENT = [
    Edit("durable_jobs/store/statements.py", "), event AS (\n" + _EVENT + "changed\n)\n", ")\n"),
    Edit(
        "durable_jobs/store/statements.py",
        'RENEW_ONE = {"skip_locked"',
        f'COMPLETED = """\n{_EVENT}{{s}}.jobs WHERE id = %(job_id)s\n"""\n\nRENEW_ONE = {{"skip_locked"',
    ),
    Edit(
        "durable_jobs/service/outcomes.py",
        """        answer = await self.database.run(work)
        if isinstance(answer, Refused):
            raise answer
""",
        """        answer = await self.database.run(work)
        if isinstance(answer, Refused):
            raise answer

        async def tell(connection: AsyncConnection) -> None:
            from durable_jobs.store import statements

            sql = statements.statement(statements.COMPLETED, self.database.schema)
            await connection.exec_driver_sql(sql, {"job_id": claim.job_id, "data": encode_json(data)})

        await self.database.run(tell)
""",
    ),
]

MUTANTS: dict[str, list[Edit]] = {"none": [], "fence": FENCE, "marker": MARKER, "event": EVENT}


class Moved(Exception):
    """The source is not what the mutant was written for."""


def apply(edits: list[Edit], tree: Path) -> None:
    """Raises `Moved` where a text is not there exactly once."""
    for edit in edits:
        path = tree / edit.path
        source = path.read_text("utf-8")
        if (count := source.count(edit.old)) != 1:
            raise Moved(f"{edit.path} holds this text {count} times, not once:\n{edit.old}")
        path.write_text(source.replace(edit.old, edit.new), "utf-8")


def copy(tree: Path) -> None:
    """All that git knows and does not ignore, with its times: `make` finds the environment up to date."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if not (ROOT / name).is_file():
            continue  # deleted, and not committed yet
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")


def imports_from(tree: Path, environment: dict[str, str]) -> bool:
    """Whether a process that is started there imports the copy."""
    told = subprocess.run(
        [str(tree / ".venv/bin/python"), "-c", "import durable_jobs; print(durable_jobs.__file__)"],
        cwd=tree,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return Path(told.stdout.strip()).is_relative_to(tree)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants.py", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("mutant", choices=MUTANTS)
    parser.add_argument("command", nargs="+", help="what to run in the copy's root")
    asked = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="durable-jobs-mutant-") as folder:
        tree = Path(folder).resolve()
        tree.chmod(0o711)  # Postgres, which doesn't run as root, is started from there
        copy(tree)
        environment = os.environ | {"PYTHONPATH": str(tree)}
        try:
            apply(MUTANTS[asked.mutant], tree)
        except Moved as error:
            sys.stderr.write(f"mutant {asked.mutant}: {error}\n")
            return 2
        if not imports_from(tree, environment):
            sys.stderr.write("the copy is not what would be imported\n")
            return 2
        code = subprocess.run(asked.command, cwd=tree, env=environment, check=False).returncode
    passed = code == 0
    seen = None if asked.mutant == "none" else not passed
    line = {"mutant": asked.mutant, "command": asked.command, "exit": code, "seen": seen}
    print(json.dumps(line | {"seconds": round(time.monotonic() - started, 1)}), flush=True)
    return 0 if passed == (asked.mutant == "none") else 1


if __name__ == "__main__":
    sys.exit(main())
