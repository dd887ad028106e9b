"""The state machine as the database enforces it: every from×to pair, on a migrated database, against the table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from durable_jobs.contract.render import targets
from durable_jobs.contract.states import (
    ACTIVE,
    INITIAL,
    SETTLED,
    TERMINAL,
    TRANSITIONS,
    EventName,
    JobStatus,
    Via,
)

Connection = psycopg.Connection[Any]

OFFERS: dict[str, str] = {
    "nothing": "",
    "a greater generation": "lease_generation = lease_generation + 1",
    "a sweep's record": 'reconciled_at = clock_timestamp(), reconciliation = \'{"by": "sweep"}\'',
    "an operator's record": 'reconciled_at = clock_timestamp(), reconciliation = \'{"by": "operator"}\'',
    "a record by nobody": "reconciled_at = clock_timestamp(), reconciliation = '{\"note\": 1}'",
    "an operator's record of before": 'reconciliation = \'{"by": "operator"}\'',
    "the next intent": "intent_number = intent_number + 1",
    "the intent after next": "intent_number = intent_number + 2",
    "the intent before": "intent_number = intent_number - 1",
}
"""What an UPDATE sets beside the status."""

ASKED: dict[Via, set[str]] = {
    Via.WORKER: set(OFFERS),
    Via.CLAIM: {"a greater generation"},
    Via.RECONCILED: {"a sweep's record", "an operator's record"},
    Via.RESOLVED: {"an operator's record"},
    Via.RETRIED: {"the next intent"},
}
"""Which of these satisfies a transition."""

ROUTES: dict[JobStatus, tuple[JobStatus, ...]] = {
    JobStatus.QUEUED: (),
    JobStatus.CLAIMED: (JobStatus.CLAIMED,),
    **{status: (JobStatus.CLAIMED, JobStatus.RUNNING, status) for status in TERMINAL},
    JobStatus.RUNNING: (JobStatus.CLAIMED, JobStatus.RUNNING),
}

NEW_ROW = """
INSERT INTO durable_jobs.jobs (id, organization_id, project_id, queue, job_type, payload, idempotency_key,
    request_digest, status, priority, intent_number, attempt_count, max_attempts, backoff_base_seconds, lease_seconds,
    timeout_seconds, lease_generation, lease_expires_at, scheduled_at, created_at, finished_at, updated_at,
    lookup_tries, follow_ups_due, release_count)
VALUES (%(id)s, 'acme', 'alpha', 'default', 'probe', '{"n": 1}', %(id)s::text, 'digest', %(status)s, 0,
    %(intent_number)s, %(attempt_count)s, 3, 30, 60, 3600, %(lease_generation)s,
    CASE WHEN %(status)s = ANY(%(active)s) THEN clock_timestamp() END, clock_timestamp(), clock_timestamp(),
    CASE WHEN %(status)s = ANY(%(terminal)s) THEN clock_timestamp() END, clock_timestamp(), 0, false, 0)
"""


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(params=["origin", "replica"])
def role(request: pytest.FixtureRequest, connection: Connection) -> Iterator[str]:
    """The session's replication role; under `replica` ordinary triggers don't fire."""
    try:
        connection.execute(f"SET session_replication_role = {request.param}")
    except psycopg.errors.InsufficientPrivilege:
        pytest.skip("only a superuser may change its replication role")
    return request.param


def insert(connection: Connection, status: str = INITIAL, **columns: int) -> Any:
    """Insert a row by plain SQL, consistent in all but what is asked for."""
    values = {"lease_generation": 0, "attempt_count": 0, "intent_number": 0} | columns
    values |= {"id": uuid4(), "status": status, "active": list(ACTIVE), "terminal": list(TERMINAL)}
    connection.execute(NEW_ROW, values)
    return values["id"]


def moving(job_id: Any, target: JobStatus, *offers: str) -> str:
    """The UPDATE to `target`; lease and finish time follow the status, so that no CHECK gets in the guard's way."""
    lease = "clock_timestamp()" if target in ACTIVE else "NULL"
    finished = "clock_timestamp()" if target in TERMINAL else "NULL"
    sets = [f"status = '{target}'", f"lease_expires_at = {lease}", f"finished_at = {finished}", *filter(None, offers)]
    return f"UPDATE durable_jobs.jobs SET {', '.join(sets)} WHERE id = '{job_id}'"


def row_in(connection: Connection, status: JobStatus) -> Any:
    """A new row, brought to `status` by legal moves."""
    job_id = insert(connection)
    for step in ROUTES[status]:
        connection.execute(moving(job_id, step, OFFERS["a greater generation"] if step is JobStatus.CLAIMED else ""))
    # A later record must be told from one that was there before.
    connection.execute(
        "UPDATE durable_jobs.jobs SET reconciled_at = '2020-01-01Z', intent_number = 5 WHERE id = %s", [job_id]
    )
    return job_id


@contextmanager
def undone(connection: Connection) -> Iterator[None]:
    with connection.transaction(force_rollback=True):
        yield


def refusal_of(connection: Connection, change: str | Callable[[], Any]) -> str | None:
    """The SQLSTATE with which the database refuses the change, which is undone; None when it takes it."""
    try:
        with undone(connection):
            if isinstance(change, str):
                connection.execute(change)
            else:
                change()
    except psycopg.Error as error:
        return error.sqlstate
    return None


def legal(source: JobStatus, target: JobStatus, offer: str) -> bool:
    if source is target:
        # No change of status: a renewal, or bookkeeping. A new generation is a claim, and only claimed may be claimed.
        return offer != "a greater generation" or (source, target) in TRANSITIONS
    via = TRANSITIONS.get((source, target))
    return via is not None and offer in ASKED[via]


def test_the_table_is_the_design() -> None:
    unsuccessful = {"failed", "cancelled", "dead_letter", "indeterminate", "halt_unsafe", "timed_out"}
    resolved = {"completed", "failed", "dead_letter"}
    designed = {
        "queued": {"claimed", "cancelled"},
        "claimed": {"running", "queued", "claimed"} | unsuccessful,
        "running": {"completed", "queued", "claimed"} | unsuccessful,
        "completed": set(),
        "failed": {"queued"},
        "cancelled": set(),
        "dead_letter": set(),
        "indeterminate": resolved,
        "halt_unsafe": set(),
        "timed_out": resolved,
    }
    assert {str(status) for status in JobStatus} == set(designed)
    assert {s: {str(b) for a, b in TRANSITIONS if a == s} for s in JobStatus} == designed
    assert {str(status) for status in TERMINAL} == unsuccessful | {"completed"}
    assert {"indeterminate", "timed_out"} == TERMINAL - SETTLED
    assert " ".join(EventName) == (
        "claimed dispatched heartbeat completed failed cancelled indeterminate halt_unsafe dead_lettered timed_out "
        "retried admission_checked escalated reconciled execution_control_shadow"
    )


def test_every_pair_of_statuses(connection: Connection, role: str) -> None:
    """Every from×to pair, with and without what its path asks for, is taken or refused as `TRANSITIONS` says."""
    assert set(ASKED) == set(Via)
    wrong = []
    with undone(connection):
        for source in JobStatus:
            job_id = row_in(connection, source)
            for target in JobStatus:
                for name, offer in OFFERS.items():
                    expected = None if legal(source, target, name) else "DJ001"
                    if (found := refusal_of(connection, moving(job_id, target, offer))) != expected:
                        wrong.append(f"{source} -> {target} with {name}: {found}, not {expected}")
    assert wrong == []


def test_rows_begin_queued(connection: Connection, role: str) -> None:
    """INSERT, in every status, and with every counter that must begin at 0."""
    taken = []
    for status in JobStatus:
        for columns in ({}, {"lease_generation": 1}, {"attempt_count": 1}, {"intent_number": 1}):
            if (found := refusal_of(connection, partial(insert, connection, status, **columns))) is None:
                taken.append((status, columns))
            else:
                assert found == "DJ001"
    assert taken == [(INITIAL, {})]


def test_the_generation_never_shrinks(connection: Connection, role: str) -> None:
    shrunk = "lease_generation = lease_generation - 1"
    others = [OFFERS["an operator's record"], OFFERS["the next intent"]]
    with undone(connection):
        for status in set(JobStatus) - {JobStatus.QUEUED}:
            job_id = row_in(connection, status)
            assert refusal_of(connection, f"UPDATE durable_jobs.jobs SET {shrunk} WHERE id = '{job_id}'") == "DJ001"
            for target in JobStatus:
                assert refusal_of(connection, moving(job_id, target, shrunk, *others)) == "DJ001", (status, target)


CHECKS = {
    "an unknown status": ("queued", "status = 'paused'", {"jobs_status_known", "DJ001"}),
    "queued with a cancellation flag": ("queued", "cancel_requested_at = now()", {"jobs_queued_unflagged"}),
    "queued with a finish time": ("queued", "finished_at = now()", {"jobs_terminal_finished"}),
    "queued with a lease": ("queued", "lease_expires_at = now()", {"jobs_lease_while_active"}),
    "claimed without a lease": ("claimed", "lease_expires_at = NULL", {"jobs_lease_while_active"}),
    "running without a lease": ("running", "lease_expires_at = NULL", {"jobs_lease_while_active"}),
    "running with a finish time": ("running", "finished_at = now()", {"jobs_terminal_finished"}),
    **{
        f"{status} without a finish time": (status, "finished_at = NULL", {"jobs_terminal_finished"})
        for status in TERMINAL
    },
    **{
        f"{status} with a lease": (status, "lease_expires_at = now()", {"jobs_lease_while_active"})
        for status in TERMINAL
    },
    "a marker without a key": (
        "running",
        "dispatched_at = now(), dispatched_generation = 1",
        {"jobs_marker_whole"},
    ),
    "a marker without a generation": ("running", "dispatched_at = now(), operation_key = 'k'", {"jobs_marker_whole"}),
    "a key without a marker": ("running", "operation_key = 'k'", {"jobs_marker_whole"}),
    "a payload that is no object": ("queued", "payload = '[1]'", {"jobs_payload_object"}),
}


def test_checks_refuse_what_contradicts_itself(connection: Connection) -> None:
    for case, (status, sets, refusals) in CHECKS.items():
        job_id = row_in(connection, JobStatus(status))
        with pytest.raises(psycopg.Error) as refused:
            connection.execute(f"UPDATE durable_jobs.jobs SET {sets} WHERE id = %s", [job_id])
        assert {refused.value.diag.constraint_name, refused.value.sqlstate} & refusals, case


def test_going_back_to_queued_with_a_flag_is_refused(connection: Connection) -> None:
    job_id = row_in(connection, JobStatus.CLAIMED)
    connection.execute("UPDATE durable_jobs.jobs SET cancel_requested_at = now() WHERE id = %s", [job_id])
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        connection.execute(moving(job_id, JobStatus.QUEUED))
    assert refused.value.diag.constraint_name == "jobs_queued_unflagged"


def test_rendered_files_have_not_drifted() -> None:
    rendered = targets(Path(__file__).parents[1])
    assert {path.name for path in rendered} >= {"guard.sql", "states.md", "README.md"}
    assert [path.name for path, text in rendered.items() if path.read_text() != text] == []
