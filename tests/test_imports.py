"""What an import loads: the package, its contract and its workflow module stay light, for Temporal's sandbox."""

import json
import subprocess
import sys
from pathlib import Path

HEAVY = (
    "sqlalchemy",
    "psycopg",
    "psycopg_pool",
    "alembic",
    "fastapi",
    "starlette",
    "uvicorn",
    "httpx",
    "typer",
    "rich",
)

LOOK = """
import importlib, json, sys
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""

CONTRACT = """
import pkgutil
import durable_jobs.contract
found = pkgutil.iter_modules(durable_jobs.contract.__path__)
print(json.dumps(["durable_jobs.contract." + each.name for each in found]))
"""


def python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def loaded_by(*names: str) -> set[str]:
    return set(json.loads(python(LOOK.format(names=list(names)))))


def heavy(modules: set[str]) -> list[str]:
    return sorted(name for name in modules if name.split(".")[0] in HEAVY)


def test_what_workflow_code_and_products_import_loads_no_database_and_no_http() -> None:
    """All at once: what none of them loads here, none loads alone."""
    names = (
        "durable_jobs",
        "durable_jobs.contract",
        "durable_jobs.workflow",
        "durable_jobs.temporal",
        "durable_jobs.temporal.messages",
        "durable_jobs.temporal.steps",
        "durable_jobs.temporal.job_workflow",
        "durable_jobs.handler",
    )
    modules = loaded_by(*names)
    assert set(names) <= modules
    assert heavy(modules) == []


def test_the_providers_protocol_loads_no_providers_client() -> None:
    """Each client is loaded by the module of its own provider, as its extra may not be installed."""
    modules = loaded_by("durable_jobs", "durable_jobs.providers")
    assert "durable_jobs.providers" in modules
    assert heavy(modules) == []
    assert not [name for name in modules if name.split(".")[0] in ("openai", "boto3", "botocore", "temporalio")]


def test_the_whole_contract_loads_no_database_no_http_and_no_temporal() -> None:
    names = json.loads(python("import json\n" + CONTRACT))
    assert "durable_jobs.contract.states" in names
    assert "durable_jobs.contract.specs" in names
    modules = loaded_by(*names)
    assert heavy(modules) == []
    assert not [name for name in modules if name.split(".")[0] == "temporalio"]


def test_the_package_loads_no_temporal_and_no_pydantic() -> None:
    """Until one of its names is used."""
    modules = loaded_by("durable_jobs")
    assert not [name for name in modules if name.split(".")[0] in ("temporalio", "pydantic")]
    assert sorted(name for name in modules if name.startswith("durable_jobs")) == ["durable_jobs"]


def test_a_name_of_the_package_is_loaded_when_used() -> None:
    code = """
import json, sys
import durable_jobs
before = set(sys.modules)
durable_jobs.JobSpec
light = set(sys.modules)
durable_jobs.DurableJobService
print(json.dumps([sorted(light - before), sorted(set(sys.modules) - light)]))
"""
    light, full = json.loads(python(code))
    assert "durable_jobs.contract.specs" in light
    assert heavy(set(light)) == []
    assert "sqlalchemy" in full


def test_every_public_name_is_there() -> None:
    code = """
import durable_jobs
for name in durable_jobs.__all__:
    getattr(durable_jobs, name)
print(hasattr(durable_jobs, "no_such_name"))
"""
    assert python(code).strip() == "False"


SANDBOX = """
import asyncio, json, sys
from pathlib import Path
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import _Definition
from durable_jobs.temporal.job_workflow import JobWorkflow

# It asks to be run without, for speed.
object.__setattr__(_Definition.must_from_class(JobWorkflow), "sandboxed", True)

history = WorkflowHistory.from_json("durable-job/stored", Path({path!r}).read_text())
asyncio.run(Replayer(workflows=[JobWorkflow]).replay_workflow(history))
print(json.dumps(sorted(sys.modules)))
"""


def test_the_sandbox_runs_the_workflow_and_loads_nothing_heavy() -> None:
    """Under the sandbox's restrictions, by replaying a stored history; what passes through them counts."""
    path = Path(__file__).parent / "histories" / "completed.json"
    modules = set(json.loads(python(SANDBOX.format(path=str(path)))))
    assert "durable_jobs.temporal.steps" in modules
    assert heavy(modules) == []


def test_what_passes_through_the_sandbox_imports_no_clock_and_no_randomness() -> None:
    """A module that is passed through the sandbox loses its guards: it must not need them."""
    code = """
import ast, inspect, json
from durable_jobs.temporal import messages, steps
used = set()
for module in (messages, steps):
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
print(json.dumps(sorted(used)))
"""
    used = json.loads(python(code))
    allowed = ("dataclasses.", "enum.", "typing.", "uuid.UUID", "durable_jobs.temporal.messages.")
    assert [name for name in used if not name.startswith(allowed)] == []
