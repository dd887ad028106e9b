"""The wheel, installed alone in a fresh environment, runs the README's example on `durable-jobs dev`.

It builds, and downloads what the wheel depends on: `-k "not wheel"` leaves it out.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).parent.parent
SECONDS = 120


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder outside the repository, which also a Postgres that isn't root can pass through."""
    path = Path(tempfile.mkdtemp(prefix="durable-jobs-wheel-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def environment(folder: Path) -> Path:
    """A virtual environment that holds the wheel with its extras for the command line and the servers."""
    build = ["build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True, timeout=SECONDS, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    environment = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=SECONDS)
    pip = ["pip", "--python", str(environment), "--quiet", "--disable-pip-version-check"]
    constraints = str(ROOT / "constraints.txt")
    install = ["install", "--no-compile", "--constraint", constraints, f"{wheel}[cli,dev-stack]"]
    subprocess.run([sys.executable, "-m", *pip, *install], check=True, timeout=SECONDS)
    return environment


def variables(**more: str) -> dict[str, str]:
    """This process's variables, without those that lead back to the repository or to servers of the test run."""
    ours = re.compile(r"PYTHON|VIRTUAL_ENV|DURABLE_JOBS_|TEMPORAL_")
    return {name: value for name, value in os.environ.items() if not ours.match(name)} | more


def python(environment: Path, script: str, **more: str) -> str:
    """What the script prints; it must succeed."""
    done = subprocess.run(
        [environment / "bin" / "python", "-c", script],
        cwd=environment.parent,
        env=variables(**more),
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def dev(environment: Path) -> Iterator[dict[str, str]]:
    """`durable-jobs dev`, run in an empty folder: the addresses that it prints. Ctrl-C ends it with 0."""
    place = environment.parent / "product"
    place.mkdir()
    command = [environment / "bin" / "durable-jobs", "dev", "--json"]
    with subprocess.Popen(command, cwd=place, env=variables(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()


def first_python_block(markdown: Path) -> str:
    found = re.search(r"^```python\n(.*?)^```$", markdown.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_it_brings_nothing_else(environment: Path) -> None:
    script = """
from importlib.metadata import files
from importlib.util import find_spec
print(sorted({path.parts[0] for path in files("durable-jobs") if path.parts[0] != ".."}))
print([name for name in ("tests", "examples", "workflows", "activities", "worker", "pytest") if find_spec(name)])
import durable_jobs
print(durable_jobs.__file__)
"""
    tops, strangers, home = python(environment, script).splitlines()
    assert re.fullmatch(r"\['durable_jobs', 'durable_jobs-[^/]+\.dist-info'\]", tops)
    assert strangers == "[]"
    assert Path(home).is_relative_to(environment)


def test_the_readme_example_runs_and_runs_again(environment: Path) -> None:
    example = first_python_block(ROOT / "README.md")
    with dev(environment) as addresses:
        named = {
            "DURABLE_JOBS_DATABASE_URL": addresses["database_url"],
            "TEMPORAL_ADDRESS": addresses["temporal_address"],
        }
        first, again = (python(environment, example, **named) for _ in range(2))
        with psycopg.connect(addresses["database_url"]) as connection:
            rows = connection.execute("SELECT status, lease_generation, result FROM durable_jobs.jobs").fetchall()
    ((status, generation, result),) = rows
    assert (status, generation) == ("completed", 1)
    assert ast.literal_eval(first) == result
    assert again == first
