"""The embedded servers: kept data, one holder for each folder, and nothing left behind however the holder ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import psutil
import psycopg
import pytest
from temporalio.client import Client

from durable_jobs.dev import DevStack, DevStackError, DevStackInUseError

DEV = [sys.executable, "-c", "from durable_jobs.cli import main; main()", "dev"]
OUTSIDE = ("DURABLE_JOBS_DATABASE_URL", "TEMPORAL_ADDRESS")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for embedded servers, which also a Postgres that isn't root can reach."""
    for variable in OUTSIDE:
        monkeypatch.delenv(variable, raising=False)
    path = Path(tempfile.mkdtemp(prefix="durable-jobs-dev-"))
    yield path
    shutil.rmtree(path)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_gone(processes: list[psutil.Process]) -> None:
    deadline = monotonic() + 30
    while left := alive(processes):
        assert monotonic() < deadline, left
        sleep(0.05)


@contextmanager
def running_dev(folder: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str], list[psutil.Process]]]:
    """A `durable-jobs dev` that serves: its process, the addresses that it printed, and the servers' processes."""
    with subprocess.Popen([*DEV, "--json", "--folder", str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        servers: list[psutil.Process] = []
        try:
            addresses = json.loads(process.stdout.readline())
            servers = psutil.Process(process.pid).children(recursive=True)
            yield process, addresses, servers
        finally:
            process.kill()
            wait_gone(servers)


def note(database_url: str, text: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS notes (note text)")
        connection.execute("INSERT INTO notes VALUES (%s)", (text,))


def notes(database_url: str) -> list[str]:
    with psycopg.connect(database_url) as connection:
        return [row[0] for row in connection.execute("SELECT note FROM notes")]


async def test_a_restart_keeps_data_and_addresses(folder: Path) -> None:
    with DevStack(folder) as stack:
        before = stack.addresses
        note(stack.database_url, "kept")
        client = await Client.connect(stack.temporal_address, namespace=stack.namespace)
        await client.start_workflow("Nobody", id="kept", task_queue="nobody")

    with DevStack(folder) as stack:
        assert stack.addresses == before
        assert set(before) == {"database_url", "temporal_address", "namespace", "ui_url"}
        assert notes(stack.database_url) == ["kept"]
        client = await Client.connect(stack.temporal_address, namespace=stack.namespace)
        assert (await client.get_workflow_handle("kept").describe()).workflow_type == "Nobody"


def test_the_schema_is_in_place(folder: Path) -> None:
    with DevStack(folder) as stack, psycopg.connect(stack.database_url) as connection:
        assert connection.execute("SELECT count(*) FROM durable_jobs.jobs").fetchone() == (0,)


def test_a_second_start_is_refused_and_told_the_addresses(folder: Path) -> None:
    with running_dev(folder) as (_, addresses, _):
        with pytest.raises(DevStackInUseError) as refused:
            DevStack(folder).start()
        assert refused.value.addresses == addresses
        assert addresses["database_url"] in str(refused.value)

        second = subprocess.run([*DEV, "--folder", str(folder)], capture_output=True, text=True, check=False)
        assert second.returncode == 3
        assert "already running" in second.stderr
        assert all(address in second.stderr for address in addresses.values())
        note(addresses["database_url"], "the first one still serves")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_servers_and_leaves_no_process(folder: Path, signum: signal.Signals) -> None:
    with running_dev(folder) as (process, _, servers):
        assert len(servers) >= 2
        process.send_signal(signum)
        assert process.wait(30) == 0
        assert not alive(servers)


def test_after_kill_9_the_same_folder_starts_again(folder: Path) -> None:
    with running_dev(folder) as (process, addresses, servers):
        note(addresses["database_url"], "kept")
        process.kill()
        process.wait()

        with DevStack(folder) as stack:
            assert notes(stack.database_url) == ["kept"]
            assert not alive(servers)


def test_servers_that_outlived_their_parent_are_ended_and_others_are_not(folder: Path) -> None:
    # Where the kernel can't end them with their parent, they are known by the process id and command of the last run.
    with DevStack(folder, migrate=False) as stack:
        note(stack.database_url, "kept")
    state = folder / "state.json"
    remembered = json.loads(state.read_text())
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command) as orphan, subprocess.Popen(command) as stranger:
        try:
            remembered["processes"] = [(orphan.pid, command), (stranger.pid, [*command, "another"])]
            state.write_text(json.dumps(remembered))
            with DevStack(folder, migrate=False) as stack:
                assert orphan.poll() is not None
                assert stranger.poll() is None
                assert notes(stack.database_url) == ["kept"]
        finally:
            orphan.kill()
            stranger.kill()


async def test_each_server_restarts_alone(folder: Path) -> None:
    with DevStack(folder, persistent=False, migrate=False) as stack:
        note(stack.database_url, "committed before the crash")
        stack.restart_postgres(immediate=True)
        assert notes(stack.database_url) == ["committed before the crash"]

        stack.stop_temporal()
        note(stack.database_url, "Postgres goes on")
        with pytest.raises(RuntimeError):
            await Client.connect(stack.temporal_address)
        with pytest.raises(DevStackError, match="Temporal has ended"):
            stack.check()
        stack.start_temporal()
        await Client.connect(stack.temporal_address)
        stack.check()


def test_servers_named_in_the_environment_are_used_and_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = folder / "other"
    other.mkdir()
    with DevStack(folder, persistent=False, migrate=False) as outside:
        for variable, address in zip(OUTSIDE, (outside.database_url, outside.temporal_address), strict=True):
            monkeypatch.setenv(variable, address)
        with DevStack(other) as stack:
            assert stack.addresses == outside.addresses
            with pytest.raises(DevStackError, match="not ours to touch"):
                stack.restart_postgres()
            with pytest.raises(DevStackError, match="not ours to touch"):
                stack.stop_temporal()
        outside.check()


def test_an_unreachable_server_in_the_environment_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_JOBS_DATABASE_URL", "postgresql://nobody@127.0.0.1:1/nothing")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    with pytest.raises(DevStackError, match="DURABLE_JOBS_DATABASE_URL"):
        DevStack(folder).start()
    monkeypatch.delenv("DURABLE_JOBS_DATABASE_URL")
    with pytest.raises(DevStackError, match=r"TEMPORAL_ADDRESS=127\.0\.0\.1:1"):
        DevStack(folder).start()


@pytest.mark.parametrize("which", ["first", "second"])
def test_each_test_has_a_fresh_migrated_database(database_url: str, which: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        assert connection.execute("SELECT count(*) FROM durable_jobs.jobs").fetchone() == (0,)
    note(database_url, which)
    assert notes(database_url) == [which]


async def test_the_temporal_client_is_connected(temporal_client: Client, durable_jobs_stack: DevStack) -> None:
    assert await temporal_client.service_client.check_health()
    assert temporal_client.namespace == os.environ.get("TEMPORAL_NAMESPACE", durable_jobs_stack.namespace)
