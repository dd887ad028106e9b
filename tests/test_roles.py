"""The roles of `migrate --roles`: least rights, and row-level security as a second wall, tried by plain SQL."""

import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from secrets import token_hex
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import UUID, uuid4

import psycopg
import pytest
import pytest_asyncio
from psycopg import sql
from psycopg.rows import dict_row
from temporalio.client import Client
from temporalio.worker import Worker

from durable_jobs import (
    Database,
    DurableJobs,
    DurableJobService,
    DurableJobsPlugin,
    FollowUp,
    Job,
    JobContext,
    JobError,
    JobSpec,
    JobStatus,
)
from durable_jobs.contract.models import Claim
from durable_jobs.dev import DevStack
from durable_jobs.store.migrate import migrate, newest_revision
from durable_jobs.temporal.schedule import schedule_id
from tests.conftest import Specs, unsound
from tests.governing import governed, granted, identity
from tests.probes import ConsequentialProbe
from tests.sweeping import LANDED, NEVER, Asked, swept

Json = dict[str, Any]
Rows = list[Json]

PASSWORD = "only for this test"
TENANTS = ("acme", "globex")


@dataclass
class Site:
    """A database of its own with a schema of its own, as a deployer's superuser has prepared it."""

    url: str
    schema: str

    def role(self, name: str) -> str:
        return f"{self.schema}_{name}"

    def as_login(self, login: str) -> str:
        """The database's URL for this login."""
        parts = urlsplit(self.url)
        user = f"{quote(login)}:{quote(PASSWORD)}"
        return parts._replace(netloc=f"{user}@{parts.hostname}:{parts.port}").geturl()

    def run(self, statement: str, *parameters: Any, login: str | None = None) -> Rows:
        """One statement, committed; `{s}` stands for the schema."""
        url = self.as_login(login) if login else self.url
        with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
            cursor = connection.execute(statement.replace("{s}", self.schema).encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    def member(self, role: str) -> str:
        """A login that may do what the role may, and no more."""
        login = f"{self.schema}_{role}_{token_hex(3)}"
        self.run(f"CREATE ROLE {login} LOGIN PASSWORD '{PASSWORD}' IN ROLE {self.role(role)}")
        return login


@contextmanager
def fresh_site(stack: DevStack) -> Iterator[Site]:
    """Roles are the whole server's: this one's begin with the name of a schema that nobody else has."""
    name = f"roles_{token_hex(5)}"
    with psycopg.connect(stack.database_url, autocommit=True) as server:
        server.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield Site(urlsplit(stack.database_url)._replace(path=f"/{name}").geturl(), name)
        finally:
            server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
            left = server.execute("SELECT rolname FROM pg_roles WHERE starts_with(rolname, %s)", [name]).fetchall()
            for (role,) in left:
                server.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(role)))


@pytest.fixture(scope="module")
def site(durable_jobs_stack: DevStack) -> Iterator[Site]:
    """Migrated with its roles, twice; the tests that share it make jobs of organizations of their own."""
    with fresh_site(durable_jobs_stack) as site:
        assert migrate(site.url, schema=site.schema, roles=True) == newest_revision()
        assert migrate(site.url, schema=site.schema, roles=True) == newest_revision()
        yield site


@pytest_asyncio.fixture
async def served(site: Site) -> AsyncIterator[DurableJobService]:
    """The service over a login that is a member of the service role and of nothing else."""
    database = Database(site.as_login(site.member("service")), schema=site.schema, pool_size=4)
    yield DurableJobService(database)
    await database.close()


# ---- the roles themselves


def acl(site: Site) -> Rows:
    """Who owns what, who may do what, and which rows are whose."""
    return [
        *site.run(
            "SELECT relname, relacl::text, relowner::regrole::text, relrowsecurity, relforcerowsecurity FROM pg_class"
            " WHERE relnamespace = '{s}'::regnamespace AND relkind IN ('r', 'S', 'v') ORDER BY 1"
        ),
        *site.run(
            "SELECT tablename, policyname, roles::text, cmd, qual, with_check, permissive FROM pg_policies"
            " WHERE schemaname = '{s}' ORDER BY 1, 2"
        ),
        *site.run(
            "SELECT oid::regprocedure::text, proacl::text, proowner::regrole::text, prosecdef FROM pg_proc"
            " WHERE pronamespace = '{s}'::regnamespace ORDER BY 1"
        ),
        *site.run("SELECT nspacl::text, nspowner::regrole::text FROM pg_namespace WHERE nspname = '{s}'"),
        *site.run(
            "SELECT tgrelid::regclass::text, tgname, tgenabled::text FROM pg_trigger t JOIN pg_class c"
            " ON c.oid = t.tgrelid WHERE c.relnamespace = '{s}'::regnamespace AND NOT tgisinternal ORDER BY 1, 2"
        ),
    ]


def test_making_the_roles_again_changes_nothing(durable_jobs_stack: DevStack) -> None:
    """Again, by several at once, and after a plain migration: the same roles with the same rights."""
    with fresh_site(durable_jobs_stack) as site:
        assert migrate(site.url, schema=site.schema) == newest_revision()
        assert site.run("SELECT rolname FROM pg_roles WHERE starts_with(rolname, '{s}')") == []
        failures: list[Exception] = []
        together = threading.Barrier(3)

        def one() -> None:
            together.wait(20)
            try:
                migrate(site.url, schema=site.schema, roles=True)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=one) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        first = acl(site)
        site.run(f"GRANT {site.role('tenant')} TO CURRENT_USER")
        assert migrate(site.url, schema=site.schema, roles=True) == newest_revision()
        assert migrate(site.url, schema=site.schema) == newest_revision()
        assert acl(site) == first


def test_the_roles_are_no_logins_and_have_no_powers(site: Site) -> None:
    found = site.run(
        "SELECT rolname, rolcanlogin, rolsuper, rolcreaterole, rolcreatedb, rolreplication, rolbypassrls FROM pg_roles"
        " WHERE rolname ~ '^{s}_[a-z]+$' ORDER BY 1"
    )
    powers = ("rolcanlogin", "rolsuper", "rolcreaterole", "rolcreatedb", "rolreplication", "rolbypassrls")
    names = ("owner", "retention", "service", "tenant")
    assert found == [{"rolname": site.role(name)} | dict.fromkeys(powers, False) for name in names]
    members = "SELECT roleid::regrole::text FROM pg_auth_members WHERE member::regrole::text ~ '^{s}_[a-z]+$'"
    assert site.run(members) == []


# Per table: what the service, the tenant and the retention role may do; the owner may do all.
R, RW, RA, RD = "r", "rwa", "ra", "rd"
RIGHTS: dict[str, tuple[str, str, str]] = {
    "jobs": (RA, R, RD),  # and columns: see below
    "job_attempts": (RW, R, RD),
    "job_events": (RA, R, RD),
    "control_events": (RA, "", ""),
    "queue_controls": ("rad", "", ""),
    "workers": (RW, "", ""),
    "counters": (RW, "", ""),
    "approvals": (RW, "", ""),
    "api_tokens": (RW, "", ""),
    "schema_version": (R, "", ""),
}
PRIVILEGES = {"r": "SELECT", "a": "INSERT", "w": "UPDATE", "d": "DELETE"}
BEYOND = ("TRUNCATE", "REFERENCES", "TRIGGER")
ROLES = ("owner", "service", "tenant", "retention")
BORN_WITH = {
    *("id", "organization_id", "project_id", "queue", "job_type", "payload", "idempotency_key"),
    *("request_digest", "created_at"),
}
"""What is written at a job's creation alone: whose it is, and what it was to do."""


def test_each_role_may_do_what_it_must_and_no_more(site: Site) -> None:
    """Each role, table and verb, as the server itself answers; and nothing for everybody."""
    tables = {row["tablename"] for row in site.run("SELECT tablename FROM pg_tables WHERE schemaname = '{s}'")}
    assert tables == RIGHTS.keys(), "a new table's rights are to be decided upon"
    verbs = (*PRIVILEGES.values(), *BEYOND)
    asked = ", ".join(f"has_table_privilege(%s, %s, '{verb}') AS \"{verb}\"" for verb in verbs)
    found, expected = {}, {}
    for table, rights in RIGHTS.items():
        for role, letters in zip(("service", "tenant", "retention"), rights, strict=True):
            (row,) = site.run(f"SELECT {asked}", *([site.role(role), f"{site.schema}.{table}"] * len(verbs)))
            found[role, table] = {verb for verb, granted in row.items() if granted}
            expected[role, table] = {PRIVILEGES[letter] for letter in letters}
    assert found == expected
    everybody = site.run(
        "SELECT relname, privilege_type FROM pg_class, aclexplode(relacl)"
        " WHERE relnamespace = '{s}'::regnamespace AND grantee = 0"
    )
    assert everybody == []
    columns = site.run(
        "SELECT attrelid::regclass::text AS table, attname, a.grantee::regrole::text AS role, a.privilege_type"
        " FROM pg_attribute, aclexplode(attacl) a JOIN pg_class c ON true"
        " WHERE c.oid = attrelid AND c.relnamespace = '{s}'::regnamespace"
    )
    assert {(each["table"], each["privilege_type"]) for each in columns} == {(f"{site.schema}.jobs", "UPDATE")}
    by_role = {role: {each["attname"] for each in columns if each["role"] == site.role(role)} for role in ROLES}
    born_with = BORN_WITH | {"max_attempts", "backoff_base_seconds", "lease_seconds", "timeout_seconds"}
    assert by_role == {
        "service": set(Job.model_fields) - born_with,
        "retention": {"updated_at"},
        "tenant": set(),
        "owner": set(),
    }


def test_the_schema_and_its_objects_are_the_owners(site: Site) -> None:
    for role, rights in {"service": "U", "tenant": "U", "retention": "U", "owner": "UC"}.items():
        (row,) = site.run(
            "SELECT has_schema_privilege(%s, '{s}', 'USAGE') AS u, has_schema_privilege(%s, '{s}', 'CREATE') AS c",
            site.role(role),
            site.role(role),
        )
        assert (row["u"], row["c"]) == ("U" in rights, "C" in rights), role
    owners = site.run(
        "SELECT DISTINCT relowner::regrole::text AS owner FROM pg_class WHERE relnamespace = '{s}'::regnamespace"
        " UNION SELECT proowner::regrole::text FROM pg_proc WHERE pronamespace = '{s}'::regnamespace"
        " UNION SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = '{s}'"
    )
    assert owners == [{"owner": site.role("owner")}]
    definers = site.run("SELECT proname FROM pg_proc WHERE pronamespace = '{s}'::regnamespace AND prosecdef")
    assert definers == [], "what runs with its owner's rights lends them to whoever calls it"


@pytest.mark.parametrize("role", ["service", "tenant", "retention"])
def test_no_role_is_a_step_to_another(site: Site, role: str) -> None:
    login = site.member(role)
    for other in {"owner", "service", "tenant", "retention"} - {role}:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            site.run(f"SET ROLE {site.role(other)}", login=login)
    for attempt in (
        "ALTER TABLE {s}.jobs NO FORCE ROW LEVEL SECURITY",
        "ALTER TABLE {s}.jobs DISABLE TRIGGER ALL",
        "DROP POLICY tenant ON {s}.jobs",
        "CREATE TABLE {s}.mine (n int)",
        "CREATE OR REPLACE FUNCTION {s}.refuse_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN OLD; END'",
        "SET session_replication_role = replica",
        "TRUNCATE {s}.jobs",
        "TRUNCATE {s}.job_events",
        "ALTER ROLE CURRENT_USER BYPASSRLS",
        "GRANT {s}_owner TO CURRENT_USER",
        "ALTER DEFAULT PRIVILEGES FOR ROLE {s}_owner GRANT ALL ON TABLES TO PUBLIC",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            site.run(attempt, login=login)


# ---- the service


async def test_the_service_does_all_its_verbs_as_the_service_role(served: DurableJobService, queue: str) -> None:
    """Every write of every verb, by a login that may do what the service role may and no more."""

    def asked(**fields: Any) -> JobSpec:
        fixed = {"organization": "acme", "project": "alpha", "queue": queue, "job_type": "probe", "payload": {"n": 1}}
        return JobSpec(**fixed | {"idempotency_key": uuid4().hex} | fields)

    async def claim(spec: JobSpec) -> Claim:
        job = (await served.create_job(spec)).job
        outcome = await served.claim_job("worker", uuid4(), job_id=job.id)
        assert outcome is not None
        assert outcome.claim is not None
        return outcome.claim

    async def mark(claim: Claim) -> Job:
        return await served.mark_provider_dispatched(claim, f"key:{claim.job_id}", consequential=True)

    error = JobError.of("BROKEN", "it broke")
    await served.database.check()
    await served.create_jobs([asked(), asked()])
    await served.pause_queue(queue, "other", actor="ann", reason="r", organization="acme")
    await served.resume_queue(queue, "other", actor="ann", reason="r", organization="acme")
    await granted(served)
    done = await claim(governed(asked()))
    assert await served.renew_lease(done)
    assert await served.heartbeat(done, {"at": 1})
    await mark(done)
    follow_up = FollowUp(name="next", job_type="probe", payload={"n": 1})
    assert len((await served.complete_job(done, {"ok": True}, [follow_up])).follow_ups) == 1
    failed = await claim(asked())
    await served.fail_job(failed, error, retryable=False)
    assert (await served.retry_job(failed.job_id, "ann", "r")).status is JobStatus.QUEUED
    assert await served.cancel_job(failed.job_id, "r", "ann") == "cancelled"
    again = await claim(asked())
    await served.fail_job(again, error, retryable=True)
    released = await claim(asked())
    await served.release_job(released, "shutdown")
    flagged = await claim(asked())
    assert await served.cancel_job(flagged.job_id, "r", "ann") == "requested"
    assert (await served.acknowledge_cancellation(flagged)).status is JobStatus.CANCELLED
    for verdict in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.DEAD_LETTER):
        unsure = await claim(asked(execution=identity()))
        await mark(unsure)
        await served.mark_indeterminate(unsure, error)
        await served.resolve_job(unsure.job_id, verdict, {"seen": 1}, "ann")
    looked_up = await claim(asked(execution=identity()))
    await mark(looked_up)
    await served.mark_indeterminate(looked_up, error)
    late = await claim(asked())
    await served.mark_timed_out(late, error)
    sweep = await swept(served, queue, Asked(LANDED))
    assert (sweep.summary.resolved, sweep.summary.escalated) == ({"completed": 1}, 1)
    await served.mark_halt_unsafe(await claim(asked()), error)
    await served.register_worker(
        "worker", host="h", pid=1, version="1", queue=queue, job_types=["probe"], organizations=["acme"]
    )
    await served.stop_worker("worker")
    await served.take_due_for_launch(queue)
    await served.append_job_event(done.job_id, "execution_control_shadow", "policy", {"allowed": True})
    await granted(served, "grant-2")
    await served.revoke_approval("acme", "alpha", "grant-2", actor="grace", reason="r")
    assert len((await served.list_jobs(organization="acme", queue=queue, limit=100)).items) == 14
    assert await unsound(served) == {}


async def test_a_job_runs_through_a_worker_of_the_service_role(
    site: Site, temporal_client: Client, queue: str, spec: Specs
) -> None:
    """Client and worker both, end to end, on a schema of another name."""
    url = site.as_login(site.member("service"))

    async def script(job: JobContext, request: Json) -> Json:
        await job.heartbeat({"at": 1})
        async with job.dispatch(f"send:{job.id}") as key:
            return {"sent": key}

    plugin = DurableJobsPlugin(
        url, [ConsequentialProbe(script)], schema=site.schema, grace_seconds=1, reconcile_every=NEVER
    )
    async with await DurableJobs.connect(url, temporal_client, schema=site.schema) as jobs:
        await granted(jobs.service, f"grant-{queue}")
        async with Worker(temporal_client, task_queue=queue, plugins=[plugin]):
            handle = await jobs.create_job(governed(spec(), approval=f"grant-{queue}"))
            assert await handle.result(timeout=30) == {"sent": f"send:{handle.id}"}
            await jobs.sweep(queue)
        await temporal_client.get_schedule_handle(schedule_id(queue)).delete()
        assert (await jobs.service.get_approval("acme", "alpha", f"grant-{queue}")).consumed_by == handle.id
        assert await unsound(jobs.service) == {}


def test_the_service_role_deletes_nothing_of_a_job(site: Site) -> None:
    """Neither a job nor its trail, nor what was audited; and it rewrites none of the two trails."""
    login = site.member("service")
    for table in ("jobs", "job_attempts", "job_events", "control_events", "workers", "approvals", "api_tokens"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            site.run(f"DELETE FROM {{s}}.{table}", login=login)
    for table, column in (("job_events", "actor"), ("control_events", "actor"), ("schema_version", "version_num")):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            site.run(f"UPDATE {{s}}.{table} SET {column} = 'eve'", login=login)


def test_the_service_role_rewrites_nothing_of_whose_work_a_job_is(site: Site) -> None:
    """What the roles keep others from, a hole in the service itself would have for the asking: what is written at
    creation alone needs no right to change."""
    granted_ = site.run(
        "SELECT attname FROM pg_attribute WHERE attrelid = '{s}.jobs'::regclass AND attnum > 0 AND NOT attisdropped"
        " AND has_column_privilege(%s, attrelid, attname, 'UPDATE')",
        site.role("service"),
    )
    assert {row["attname"] for row in granted_} & BORN_WITH == set()


async def test_the_role_of_retention_deletes_no_unsettled_job(
    site: Site, served: DurableJobService, two_tenants: dict[str, list[UUID]]
) -> None:
    """What `prune` never does, the second wall need not allow either."""
    waits = next(iter(two_tenants.values()))[1]
    deleted = site.run(f"DELETE FROM {{s}}.jobs WHERE id = '{waits}' RETURNING id", login=site.member("retention"))
    assert deleted == []


def test_a_user_that_may_make_roles_needs_not_be_a_superuser(durable_jobs_stack: DevStack) -> None:
    """As the administrator of a managed database is not."""
    with fresh_site(durable_jobs_stack) as site:
        admin = f"{site.schema}_admin"
        site.run(f"CREATE ROLE {admin} LOGIN CREATEROLE PASSWORD '{PASSWORD}'")
        site.run(f"GRANT CREATE ON DATABASE {site.schema} TO {admin}")
        assert migrate(site.as_login(admin), schema=site.schema, roles=True) == newest_revision()
        assert migrate(site.as_login(admin), schema=site.schema, roles=True) == newest_revision()


async def test_only_who_takes_the_role_of_retention_deletes_from_a_trail(
    site: Site, served: DurableJobService, two_tenants: dict[str, list[UUID]]
) -> None:
    """By name, not by membership: a login that may take the role has to say so, and a superuser can't by mistake."""
    done = next(iter(two_tenants.values()))[0]
    delete = f"DELETE FROM {{s}}.job_events WHERE job_id = '{done}'"
    login = site.member("retention")
    with pytest.raises(psycopg.DatabaseError) as refused:
        site.run(delete)
    assert refused.value.sqlstate == "DJ002"
    assert site.run(f"SELECT count(*) AS n FROM {{s}}.job_events WHERE job_id = '{done}'") == [{"n": 3}]
    with pytest.raises(psycopg.DatabaseError) as refused:
        site.run(delete, login=login)
    assert refused.value.sqlstate == "DJ002"
    site.run(f"SET ROLE {site.role('retention')}; {delete}", login=login)
    assert (await served.list_job_events(done)).items == []


# ---- the tenant


@pytest_asyncio.fixture
async def two_tenants(served: DurableJobService) -> dict[str, list[UUID]]:
    """Two organizations that no other test has, each with a completed and a queued job of its own."""
    made: dict[str, list[UUID]] = {}
    mark = token_hex(4)
    for tenant in TENANTS:
        organization = f"{tenant}-{mark}"
        fixed = {"organization": organization, "project": "alpha", "job_type": "probe", "queue": f"of-{organization}"}
        secret = {"secret": organization}
        done = (await served.create_job(JobSpec(**fixed, idempotency_key="done", payload=secret))).job
        waits = (await served.create_job(JobSpec(**fixed, idempotency_key="waits", payload=secret))).job
        outcome = await served.claim_job("worker", uuid4(), job_id=done.id)
        assert outcome is not None
        assert outcome.claim is not None
        await served.renew_lease(outcome.claim)
        await served.complete_job(outcome.claim, secret)
        await served.cancel_job(done.id, "too late", "ann")
        made[organization] = [done.id, waits.id]
    return made


@contextmanager
def report(site: Site, organization: str | None) -> Iterator[psycopg.Connection[Json]]:
    """A transaction of the tenant role, as a product's report has it; `None`: it does not say whose rows it means."""
    with psycopg.connect(site.as_login(site.member("tenant")), row_factory=dict_row) as own, own.transaction():
        if organization is not None:
            own.execute("SELECT set_config('durable_jobs.organization', %s, true)", [organization])
        yield own


def seen(site: Site, own: psycopg.Connection[Json]) -> dict[str, set[UUID]]:
    """The jobs that each of the three tables shows."""
    columns = {"jobs": "id", "job_events": "job_id", "job_attempts": "job_id"}
    return {
        table: {row["id"] for row in own.execute(f"SELECT {column} AS id FROM {site.schema}.{table}".encode())}
        for table, column in columns.items()
    }


NOTHING: dict[str, set[UUID]] = {"jobs": set(), "job_events": set(), "job_attempts": set()}


def test_a_tenant_sees_its_own_rows_and_no_others(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    for organization, (done, waits) in two_tenants.items():
        with report(site, organization) as own:
            assert seen(site, own) == {"jobs": {done, waits}, "job_events": {done}, "job_attempts": {done}}
            counted = own.execute(
                f"SELECT organization_id, count(*) AS n FROM {site.schema}.jobs GROUP BY 1".encode()
            ).fetchall()
            assert counted == [{"organization_id": organization, "n": 2}]
            # Nor by its name, its id or a join.
            (stranger,) = set(two_tenants) - {organization}
            for where in (
                f"organization_id = '{stranger}'",
                f"id = '{two_tenants[stranger][0]}'",
                f"payload ->> 'secret' = '{stranger}'",
                "organization_id <> current_setting('durable_jobs.organization')",
            ):
                assert own.execute(f"SELECT id FROM {site.schema}.jobs WHERE {where}".encode()).fetchall() == []
            joined = f"SELECT j.id FROM {site.schema}.job_events e RIGHT JOIN {site.schema}.jobs j ON true"
            assert {row["id"] for row in own.execute(joined.encode())} == {done, waits}


def test_who_does_not_say_whose_rows_sees_none(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    one, two = two_tenants
    for organization in (None, "", "%", "*", f"{one},{two}", one.upper(), f"{one}' OR 'a' = 'a", f" {one}", "initech"):
        with report(site, organization) as own:
            assert seen(site, own) == NOTHING, organization


def test_the_setting_ends_with_its_transaction(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    """On one connection, as a pooler hands it from tenant to tenant: after a commit, and after a rollback."""
    one, two = two_tenants
    said = "SELECT set_config('durable_jobs.organization', %s, true)"
    with psycopg.connect(site.as_login(site.member("tenant")), autocommit=True, row_factory=dict_row) as own:
        for organization in (one, two):
            with own.transaction():
                own.execute(said, [organization])
                assert seen(site, own)["jobs"] == set(two_tenants[organization])
            assert seen(site, own) == NOTHING
            with own.transaction():
                assert seen(site, own) == NOTHING
            with own.transaction(force_rollback=True):
                own.execute(said, [organization])
                assert seen(site, own)["jobs"] == set(two_tenants[organization])
            assert seen(site, own) == NOTHING
        own.execute(said, [one])  # outside of a transaction it is over with the statement
        assert seen(site, own) == NOTHING


def test_a_tenant_writes_nothing(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    """Not even to its own rows, by whatever verb; nor does it lock one, which would hold the workers up."""
    organization, (done, _) = next(iter(two_tenants.items()))
    statements = [
        "UPDATE {s}.jobs SET priority = 2",
        "DELETE FROM {s}.jobs",
        "DELETE FROM {s}.job_events",
        "UPDATE {s}.job_attempts SET worker_id = 'eve'",
        f"INSERT INTO {{s}}.jobs SELECT * FROM {{s}}.jobs WHERE id = '{done}'",
        "INSERT INTO {s}.job_attempts SELECT * FROM {s}.job_attempts",
        "SELECT FROM {s}.jobs FOR UPDATE",
        "SELECT FROM {s}.jobs FOR KEY SHARE",
        "LOCK TABLE {s}.jobs IN SHARE MODE",
        "TRUNCATE {s}.job_attempts",
        "COPY {s}.jobs FROM STDIN",
        f"SELECT {{s}}.enqueue('{organization}', 'alpha', 'probe', 'mine', '{{\"n\": 1}}')",
    ]
    for statement in statements:
        with pytest.raises(psycopg.errors.InsufficientPrivilege), report(site, organization) as own:
            own.execute(statement.replace("{s}", site.schema).encode())


def test_a_tenant_reads_no_other_table(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    organization = next(iter(two_tenants))
    for table in RIGHTS.keys() - {"jobs", "job_events", "job_attempts"}:
        with pytest.raises(psycopg.errors.InsufficientPrivilege), report(site, organization) as own:
            own.execute(f"SELECT * FROM {site.schema}.{table}".encode())


def test_no_side_channel_shows_a_row(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    """A function that tells what it was given, an error on a row, the planner's statistics, security switched off."""
    one, two = two_tenants
    site.run("ANALYZE {s}.jobs")
    (known,) = site.run("SELECT count(*) AS n FROM pg_stats WHERE schemaname = '{s}' AND tablename = 'jobs'")
    assert known["n"] > 0
    with report(site, one) as own:
        told: list[str] = []
        own.add_notice_handler(lambda notice: told.append(str(notice.message_primary)))
        own.execute(
            b"CREATE FUNCTION pg_temp.tell(text) RETURNS boolean LANGUAGE plpgsql COST 0.0001"
            b" AS $$ BEGIN RAISE NOTICE '%', $1; RETURN true; END $$"
        )
        rows = own.execute(f"SELECT id FROM {site.schema}.jobs WHERE pg_temp.tell(organization_id)".encode()).fetchall()
        assert {row["id"] for row in rows} == set(two_tenants[one])
        assert set(told) == {one}
        broken = f"SELECT id FROM {site.schema}.jobs WHERE 1 / (organization_id <> '{two}')::int = 1"
        assert len(own.execute(broken.encode()).fetchall()) == 2
        for view in ("pg_stats", "pg_stats_ext"):
            stats = f"SELECT * FROM pg_catalog.{view} WHERE schemaname = '{site.schema}'"
            assert own.execute(stats.encode()).fetchall() == []
    with report(site, one) as own:
        own.execute("SET LOCAL row_security = off")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"), own.transaction():
            own.execute(f"SELECT id FROM {site.schema}.jobs".encode())


def test_a_notification_wakes_the_workers_and_tells_no_tenant(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    """LISTEN asks for no right: what is told there is told to every login of the database."""
    stranger = list(two_tenants)[1]
    logins = [site.member(role) for role in ("service", "tenant")]
    told: list[list[str]] = []
    with ExitStack() as stack:
        listening = [stack.enter_context(psycopg.connect(site.as_login(login), autocommit=True)) for login in logins]
        for each in listening:
            each.execute(f'LISTEN "{site.schema}_enqueued"'.encode())
        site.run(
            f"SELECT {{s}}.enqueue('{stranger}', 'alpha', 'probe', '{token_hex(4)}', '{{\"n\": 1}}', isolated => true)",
            login=logins[0],
        )
        told += [[heard.payload for heard in each.notifies(timeout=1, stop_after=1)] for each in listening]
    assert len(told[0]) == 1, "the workers hear of it"
    assert [payload for payload in told[1] if stranger in payload] == [], "a tenant hears of no other"


def test_the_owner_is_held_to_it_as_well(site: Site, two_tenants: dict[str, list[UUID]]) -> None:
    """FORCE: whoever owns the tables sees nobody's rows in them, whatever it says, and writes none."""
    with psycopg.connect(site.url, row_factory=dict_row) as own:
        assert (
            two_tenants.items()
            <= {
                row["organization_id"]: row["ids"]
                for row in own.execute(
                    f"SELECT organization_id, array_agg(id ORDER BY idempotency_key) AS ids FROM {site.schema}.jobs"
                    " GROUP BY 1".encode()
                )
            }.items()
        )
        own.execute(f"SET ROLE {site.role('owner')}".encode())
        for organization in two_tenants:
            own.execute("SELECT set_config('durable_jobs.organization', %s, true)", [organization])
            assert seen(site, own) == NOTHING
        assert own.execute(f"UPDATE {site.schema}.jobs SET priority = 2".encode()).rowcount == 0
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
            own.execute(
                f"INSERT INTO {site.schema}.job_attempts (job_id, generation, organization_id, project_id,"
                " intent_number, worker_id, claimed_at)"
                " VALUES (gen_random_uuid(), 1, 'acme', 'alpha', 0, 'w', now())".encode()
            )


async def test_the_service_role_sees_every_tenant_and_needs_no_setting(
    served: DurableJobService, two_tenants: dict[str, list[UUID]]
) -> None:
    for organization, ids in two_tenants.items():
        assert {job.id for job in (await served.list_jobs(organization=organization)).items} == set(ids)
        assert len((await served.list_job_events(ids[0])).items) == 3
