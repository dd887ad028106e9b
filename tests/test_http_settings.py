"""The settings from the environment, and the handlers that a worker's setting names."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from durable_jobs import JobContext, JobHandler
from durable_jobs.hosting import load_handlers
from durable_jobs.settings import InvalidSettings, Settings, is_loopback

URL = {"DURABLE_JOBS_DATABASE_URL": "postgresql://user:secret@host/db"}


class Nothing(JobHandler[dict[str, Any], dict[str, Any]]):
    job_type = "nothing"

    async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        return {}


HANDLERS = [Nothing()]
NO_HANDLERS: list[Any] = []
CLASSES = [Nothing]
TEXT = "Nothing"


class Box:
    inner = (Nothing(),)


def test_defaults() -> None:
    settings = Settings.from_environment(URL)
    assert (settings.http_host, settings.http_port, settings.http_tokens) == ("127.0.0.1", 8080, "required")
    assert (settings.database_schema, settings.queues, settings.run_worker) == ("durable_jobs", ("default",), False)
    assert settings.worker_stale_seconds == 60
    assert settings.temporal == {"target_host": "localhost:7233"}


def test_every_variable() -> None:
    given = {
        "DATABASE_URL": ("postgresql://h/d", "postgresql://h/d"),
        "SCHEMA": ("jobs", "jobs"),
        "POOL_SIZE": ("4", 4),
        "HTTP_HOST": ("::1", "::1"),
        "HTTP_PORT": ("0", 0),
        "HTTP_TOKENS": ("off", "off"),
        "METRICS_TOKEN": ("a-secret-of-some-length", "**********"),
        "LOCAL_ORGANIZATION": ("acme", "acme"),
        "LOCAL_PROJECT": ("alpha", "alpha"),
        "DEFAULT_QUEUE": ("q", "q"),
        "TYPE_QUEUES": ("Evaluation=evals, replay = replays,", {"evaluation": "evals", "replay": "replays"}),
        "RUN_WORKER": ("true", True),
        "WORKER_APP": ("app:handlers", "app:handlers"),
        "WORKER_QUEUES": ("a, b@acme,", ("a", "b@acme")),
        "WORKER_ORGANIZATIONS": ("acme", ("acme",)),
        "WORKER_SLOTS": ("8", 8),
        "WORKER_GRACE_SECONDS": ("2.5", 2.5),
        "WORKER_STALE_SECONDS": ("11", 11),
        "RECONCILE_SECONDS": ("5", 5),
        "ESCALATION_URL": ("https://hooks.example/x", "https://hooks.example/x"),
        "TEMPORAL_UI_URL": ("https://temporal.example", "https://temporal.example"),
    }
    assert {f"DURABLE_JOBS_{name}" for name in given} == Settings.variables().keys()
    settings = Settings.from_environment({f"DURABLE_JOBS_{name}": text for name, (text, _) in given.items()})
    for name, (_, value) in given.items():
        found = getattr(settings, Settings.variables()[f"DURABLE_JOBS_{name}"])
        assert (str(found) if name == "METRICS_TOKEN" else found) == value, name
    assert settings.queues == ("a", "b@acme")


def test_temporals_own_settings() -> None:
    temporal = {"TEMPORAL_ADDRESS": "temporal:7233", "TEMPORAL_NAMESPACE": "jobs", "TEMPORAL_API_KEY": "key"}
    settings = Settings.from_environment(URL | temporal)
    assert settings.temporal["target_host"] == "temporal:7233"
    assert settings.temporal["namespace"] == "jobs"
    assert "secret" not in repr(settings)
    assert "key" not in repr(settings)


def test_overrides_come_first_an_empty_variable_is_none() -> None:
    environment = URL | {"DURABLE_JOBS_HTTP_PORT": "9", "DURABLE_JOBS_HTTP_HOST": "", "DURABLE_JOBS_WORKER_QUEUES": ""}
    settings = Settings.from_environment(environment, http_port=10, http_host=None, worker_queues=["x"])
    assert (settings.http_port, settings.http_host, settings.queues) == (10, "127.0.0.1", ("x",))
    routed = {"DURABLE_JOBS_TYPE_QUEUES": "a=one,b=two,c=one", "DURABLE_JOBS_DEFAULT_QUEUE": "two"}
    assert Settings.from_environment(URL | routed).queues == ("two", "one")


BAD = {
    "HTTP_PORT": ["http", "-1", "65536", "80.5"],
    "HTTP_TOKENS": ["on", "OFF"],
    "METRICS_TOKEN": ["short"],
    "LOCAL_ORGANIZATION": ["a b"],
    "DEFAULT_QUEUE": ["q.reconciliation", "q@acme"],
    "TYPE_QUEUES": ["evaluation", "evaluation=a b", "a b=q"],
    "RUN_WORKER": ["perhaps"],
    "WORKER_QUEUES": ["a b", "q@", "@acme", "a@b@c"],
    "WORKER_SLOTS": ["0"],
    "WORKER_STALE_SECONDS": ["10", "9.9", "0", "nan", "inf", "soon"],
    "WORKER_GRACE_SECONDS": ["-1"],
    "ESCALATION_URL": ["ftp://x", "x"],
    "POOL_SIZE": ["0"],
}


def test_bad_values_name_their_variable_and_tell_no_secret() -> None:
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(InvalidSettings) as refused:
                Settings.from_environment(URL | {f"DURABLE_JOBS_{name}": value})
            assert [problem.field for problem in refused.value.problems] == [f"DURABLE_JOBS_{name}"], value
            assert "secret" not in str(refused.value)
    with pytest.raises(InvalidSettings, match="DURABLE_JOBS_DATABASE_URL"):
        Settings.from_environment({})
    several = {"DURABLE_JOBS_HTTP_PORT": "x", "DURABLE_JOBS_POOL_SIZE": "x"}
    with pytest.raises(InvalidSettings) as refused:
        Settings.from_environment(several)
    assert {problem.field for problem in refused.value.problems} == several.keys() | URL.keys()


def test_what_does_not_go_together() -> None:
    """Without tokens the API listens on loopback alone; a worker beside it needs handlers."""
    off = URL | {"DURABLE_JOBS_HTTP_TOKENS": "off"}
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.com", "127.0.0.1.example.com"):
        with pytest.raises(InvalidSettings, match="DURABLE_JOBS_HTTP_HOST"):
            Settings.from_environment(off | {"DURABLE_JOBS_HTTP_HOST": host})
    for host in ("localhost", "127.0.0.1", "127.1.2.3", "::1"):
        assert is_loopback(Settings.from_environment(off | {"DURABLE_JOBS_HTTP_HOST": host}).http_host)
    with pytest.raises(InvalidSettings, match="DURABLE_JOBS_WORKER_APP"):
        Settings.from_environment(URL | {"DURABLE_JOBS_RUN_WORKER": "1"})


def test_settings_are_checked_when_made_in_code_too() -> None:
    with pytest.raises(ValidationError):
        Settings(database_url="postgresql://h/d", worker_stale_seconds=10)


@pytest.mark.parametrize("name", ["HANDLERS", "Box.inner", "handlers"])
def test_handlers_are_found(name: str) -> None:
    (handler,) = load_handlers(f"tests.test_http_settings:{name}")
    assert handler.job_type == "nothing"


def handlers() -> tuple[JobHandler[Any, Any], ...]:
    return (Nothing(),)


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("", "must be module:attribute"),
        ("tests.test_http_settings", "must be module:attribute"),
        (":HANDLERS", "must be module:attribute"),
        ("no.such.module:HANDLERS", "there is no module 'no'"),
        ("tests.nothing:HANDLERS", "there is no module 'tests.nothing'"),
        ("tests.test_http_settings:nothing", "has no 'nothing'"),
        ("tests.test_http_settings:Box.nothing", "has no 'Box.nothing'"),
        ("tests.test_http_settings:NO_HANDLERS", "must be a sequence of JobHandler instances, not empty"),
        ("tests.test_http_settings:CLASSES", "must be a sequence of JobHandler instances"),
        ("tests.test_http_settings:Nothing", "must be a sequence of JobHandler instances"),
        ("tests.test_http_settings:TEXT", "must be a sequence of JobHandler instances"),
        ("tests.test_http_settings:URL", "must be a sequence of JobHandler instances"),
    ],
)
def test_what_are_no_handlers(reference: str, problem: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        load_handlers(reference)
    assert problem in str(refused.value)
    assert refused.value.problems[0].field == "DURABLE_JOBS_WORKER_APP"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, from which modules may be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_the_working_directory_is_looked_in(folder: Path) -> None:
    (folder / "my_app_of_jobs.py").write_text("from tests.test_http_settings import HANDLERS")
    assert [handler.job_type for handler in load_handlers("my_app_of_jobs:HANDLERS")] == ["nothing"]


def test_what_the_module_misses_is_not_taken_for_the_module(folder: Path) -> None:
    (folder / "my_broken_app.py").write_text("import a_library_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_library_that_is_not_there"):
        load_handlers("my_broken_app:HANDLERS")
