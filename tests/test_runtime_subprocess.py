"""An agent in its own process gets at nothing but its request, can't outlive its worker, and fails in typed ways."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from activities.runtime import (
    AgentRef,
    Evidence,
    OutcomeInvalid,
    RuntimeCrashed,
    RuntimeOutcome,
    RuntimeRefused,
    RuntimeRequest,
    RuntimeTimedOut,
)
from activities.runtime.subprocess_adapter import MIB, SubprocessAdapter
from tests.agents import AGENT, KEY, adapter_of, request_of
from tests.isolation import STRONGEST
from tests.probes import eventually, noticed

ANSWER = {"decision": "refund", "score": 0.75}
SEEN = "print(json.dumps({'decision': 'seen', 'score': 0, 'trace': [{'note': str(seen)[:500]}]}))"

Run = Callable[..., Any]


def strong(folder: Path, code: str) -> SubprocessAdapter:
    """Shut in as strongly as this machine allows."""
    return adapter_of(folder, code, isolation=STRONGEST)


FULL = pytest.mark.skipif(STRONGEST != "full", reason="this machine denies namespaces or Landlock")


@pytest.fixture(params=[pytest.param("full", marks=FULL), "filter"])
def isolation(request: pytest.FixtureRequest) -> str:
    """Both ways of shutting an agent in."""
    return str(request.param)


@pytest.fixture
def run(tmp_path: Path, isolation: str) -> Run:
    """Runs the code as the agent."""

    async def ran(code: str, request: RuntimeRequest | None = None, **settings: Any) -> RuntimeOutcome:
        adapter = adapter_of(tmp_path, code, **({"isolation": isolation} | settings))
        return await adapter.run(request or request_of(), key=KEY)

    return ran


async def seen_by(run: Run, code: str, **settings: Any) -> str:
    """What the agent noted as `seen`."""
    outcome = await run(textwrap.dedent(code) + "\n" + SEEN, **settings)
    return str(outcome.trace[0].note)


async def test_the_request_goes_in_on_stdin_and_the_outcome_comes_out_on_stdout(run: Run) -> None:
    outcome = await run("""
        asked = json.load(sys.stdin)
        used = [piece["evidence_id"] for piece in asked["evidence"]]
        trace = [{"note": asked["key"]}, {"note": asked["policy"]["base"], "evidence_id": "e1", "value": -0.25}]
        print(json.dumps({"decision": asked["question"]["request"], "score": asked["seed"] / 8, "confidence": 1,
                          "evidence_used": used, "trace": trace, "agent": asked["agent"]}))
    """)
    assert (outcome.decision, outcome.score, outcome.confidence) == ("refund", 0.875, 1)
    assert outcome.evidence_used == ("e1", "e2")
    assert [step.note for step in outcome.trace] == [KEY, "0.5"]
    assert (outcome.trace[1].evidence_id, outcome.trace[1].value) == ("e1", -0.25)
    assert outcome.agent == AGENT
    assert outcome.build.startswith("sha256:")


async def test_the_build_names_the_bytes_that_ran(run: Run) -> None:
    first, again = await run(f"print({json.dumps(ANSWER)!r})"), await run(f"print({json.dumps(ANSWER)!r})")
    other = await run(f"print({json.dumps(ANSWER)!r})  # changed")
    assert first.build == again.build != other.build


async def test_an_agent_that_declines_is_a_refusal(run: Run) -> None:
    with pytest.raises(RuntimeRefused, match="the agent refused: no policy for this") as caught:
        await run("""print('{"refused": "no policy for this"}')""")
    assert caught.value.definite


async def test_an_agent_that_is_not_hosted_is_a_refusal(run: Run) -> None:
    with pytest.raises(RuntimeRefused, match="agent: probe 2 is not hosted here"):
        await run("", request_of(agent=AgentRef(name="probe", version="2")))


async def test_a_large_request_meets_an_agent_that_reads_nothing(run: Run) -> None:
    evidence = tuple(Evidence(evidence_id=f"e{n}", kind="chat", text="x" * 60_000) for n in range(16))
    outcome = await run(f"print({json.dumps(ANSWER)!r})", request_of(evidence=evidence))
    assert outcome.score == 0.75


# --- network ---


@pytest.fixture
def listeners(tmp_path: Path) -> Iterator[dict[str, socket.socket]]:
    """Servers on loopback, IPv4 and IPv6, and on a Unix socket that anybody may use."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, family, address in (
            ("inet", socket.AF_INET, ("127.0.0.1", 0)),
            ("inet6", socket.AF_INET6, ("::1", 0)),
            ("unix", socket.AF_UNIX, str(tmp_path / "socket")),
        ):
            listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            found[name] = listener
        (tmp_path / "socket").chmod(0o777)
        yield found


async def test_no_server_hears_of_an_agent(run: Run, listeners: dict[str, socket.socket]) -> None:
    addresses = {name: listener.getsockname() for name, listener in listeners.items()}
    for listener in listeners.values():
        with socket.socket(listener.family, socket.SOCK_STREAM) as client:
            client.connect(listener.getsockname())
            listener.accept()[0].close()
    seen = await seen_by(
        run,
        f"""
        import socket
        seen = []
        for name, address in {addresses!r}.items():
            family = {{"inet": socket.AF_INET, "inet6": socket.AF_INET6, "unix": socket.AF_UNIX}}[name]
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                try:
                    with socket.socket(family, kind) as client:
                        client.connect(tuple(address) if isinstance(address, list) else address)
                        client.send(b"hello")
                    seen.append(name + " connected")
                except OSError as error:
                    seen.append(error.errno)
        """,
    )
    assert seen == str([1] * 6)
    for listener in listeners.values():
        with pytest.raises(BlockingIOError):
            listener.accept()


@FULL
async def test_the_network_namespace_alone_holds_nothing_but_a_loopback_that_is_down(tmp_path: Path) -> None:
    """The filter refuses every socket before it gets there; the namespace stands behind it."""
    ours = os.readlink("/proc/self/ns/net")
    # /proc is closed to the agent; the launcher's steps before Landlock are looked at instead.
    work = tmp_path / "work"
    work.mkdir()
    code = f"""
import os, sys
sys.path.insert(0, {str(Path.cwd())!r})
from activities.runtime import launcher
launcher._enter_namespaces({str(work)!r}, 1048576)
print(os.readlink("/proc/self/ns/net"), [line.split(":")[0].strip() for line in open("/proc/net/dev")][2:])
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, cwd=Path.cwd()
    )
    out, _ = await process.communicate()
    namespace, devices = out.decode().split(maxsplit=1)
    assert namespace != ours
    assert devices.strip() == "['lo']"


# --- what it can see and touch ---


async def test_it_inherits_no_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DURABLE_JOBS_DATABASE_URL", "postgresql://secret")
    assert await seen_by(run, "seen = sorted(os.environ)") == str(["HOME", "LANG", "PATH", "TMPDIR"])


async def test_it_can_read_neither_its_workers_environment_nor_its_files(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("expected decision")
    seen = await seen_by(
        run,
        f"""
        seen = []
        for path in ("/proc/{os.getpid()}/environ", {str(secret)!r}, {__file__!r}, "/etc/passwd"):
            try:
                open(path).read()
                seen.append(path)
            except OSError as error:
                seen.append(error.errno)
        """,
    )
    assert seen == str([13] * 4)


async def test_it_writes_only_in_a_fresh_folder_that_is_gone_afterwards(run: Run, tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        seen = [os.getcwd(), os.listdir(".")]
        Path("note").write_text("kept while it runs")
        seen.append(Path("note").read_text())
        for path in ({str(tmp_path / "left")!r}, "/dev/shm/left", "../program.py"):
            try:
                Path(path).write_text("x")
                seen.append(path)
            except OSError as error:
                seen.append(error.errno)
    """
    first, second = [json.loads((await seen_by(run, code)).replace("'", '"')) for _ in range(2)]
    assert first[1:] == second[1:] == [[], "kept while it runs", 13, 13, 13]
    assert first[0] != second[0]
    assert not Path(first[0]).parent.exists()


async def test_it_can_signal_nobody_and_holds_no_capability(run: Run, isolation: str) -> None:
    seen = await seen_by(
        run,
        f"""
        import signal
        seen = []
        for pid in ({os.getpid()}, os.getppid(), -1):
            try:
                os.kill(pid, 0 if pid > 0 else signal.SIGCONT)
                seen.append("sent")
            except OSError as error:
                seen.append(error.errno)
        try:
            os.chroot(".")
            seen.append("root")
        except OSError as error:
            seen.append(error.errno)
        """,
    )
    assert seen == str([1] * 4)


# --- limits ---


async def test_memory_is_bounded(run: Run) -> None:
    with pytest.raises(RuntimeCrashed, match=r"(?s)exited with 1; stderr ends: .*MemoryError") as caught:
        await run("x = bytearray(2 * 1024 ** 3)")
    assert caught.value.definite


async def test_a_sleeper_is_killed_at_the_wall_limit(run: Run) -> None:
    with pytest.raises(RuntimeTimedOut, match=r"killed after 0\.5 s"):
        await run("import time; time.sleep(600)", wall_seconds=0.5)


async def test_a_spinner_is_killed_at_its_limit_of_processor_time(run: Run) -> None:
    with pytest.raises(RuntimeTimedOut, match="used up its 1 s of processor time"):
        await run("while True: pass", cpu_seconds=1)


async def test_it_can_make_no_process_by_any_call_but_may_have_threads(run: Run) -> None:
    seen = await seen_by(
        run,
        """
        import subprocess, threading
        seen = []
        for make in (os.fork, lambda: os.posix_spawn(sys.executable, ["python"], {}),
                     lambda: subprocess.run([sys.executable, "-c", ""])):
            try:
                if make() == 0:
                    os._exit(0)
                seen.append("made")
            except OSError as error:
                seen.append(error.errno)
        thread = threading.Thread(target=lambda: seen.append("thread"))
        thread.start()
        thread.join()
        """,
    )
    assert seen == str([1, 1, 1, "thread"])


async def test_the_size_of_a_file_is_bounded(run: Run) -> None:
    with pytest.raises(RuntimeCrashed, match=r"OSError: \[Errno (27|28)\]"):
        await run("open('big', 'wb').write(bytes(3 * 1024 ** 2))", file_bytes=MIB)


@FULL
async def test_the_working_folder_is_bounded_as_a_whole(tmp_path: Path) -> None:
    adapter = adapter_of(
        tmp_path,
        "for n in range(8): open(str(n), 'wb').write(bytes(512 * 1024))",
        file_bytes=MIB,
    )
    with pytest.raises(RuntimeCrashed, match="No space left on device"):
        await adapter.run(request_of(), key=KEY)


async def test_open_files_are_bounded(run: Run) -> None:
    with pytest.raises(RuntimeCrashed, match="Too many open files"):
        await run("files = [open('/dev/null') for _ in range(100)]")


async def test_output_is_bounded(run: Run) -> None:
    with pytest.raises(OutcomeInvalid, match="stdout: must be at most 1048576 bytes"):
        await run("for _ in range(100): sys.stdout.write('x' * 1024 ** 2)")


# --- outcomes ---


@pytest.mark.parametrize(
    ("printed", "problem"),
    [
        ("", "stdout: .*is not JSON"),
        ("rubbish", "stdout: .*is not JSON"),
        ("[]", "stdout: .*must be a JSON object"),
        ('{"decision": "a", "score": 1} {}', "stdout: .*is not JSON"),
        ('{"decision": "a", "score": NaN}', r"stdout\.score: must be finite"),
        ('{"decision": "a", "score": 1e999}', r"stdout\.score: must be finite"),
        ('{"decision": "a", "score": 0.1, "score": 0.9}', "score: stands twice"),
        ('{"decision": "a", "score": 1, "trace": [{"note": "\\ud800"}]}', "lone surrogate"),
        ('{"decision": "a\\u0000", "score": 1}', "U.0000"),
        ('{"decision": "a", "score": 1.5}', "score: .*less than or equal to 1"),
        ('{"decision": "a", "score": true}', "score: .*valid number"),
        ('{"decision": "a", "score": "1"}', "score: .*valid number"),
        ('{"decision": "", "score": 1}', "decision: "),
        ('{"score": 1}', "decision: Field required"),
        ('{"decision": "a", "score": 1, "more": 1}', "more: Extra inputs"),
        ('{"decision": "a", "score": 1, "evidence_used": ["e9"]}', "e9 is no evidence of this request"),
        ('{"decision": "a", "score": 1, "evidence_used": ["e1", "e1"]}', "evidence_used: an id stands twice"),
        ('{"decision": "a", "score": 1, "trace": [{"note": "n", "evidence_id": "e9"}]}', "e9 is no evidence"),
        ('{"decision": "a", "score": 1, "agent": {"name": "probe", "version": "2"}}', "agent: must be probe 1"),
        ("[" * 100_000, "stdout: "),
    ],
)
async def test_what_is_no_outcome_is_refused_by_name(tmp_path: Path, printed: str, problem: str) -> None:
    adapter = strong(tmp_path, f"print({printed!r})")
    with pytest.raises(OutcomeInvalid, match=problem):
        await adapter.run(request_of(), key=KEY)


async def test_output_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutcomeInvalid, match="must be UTF-8"):
        await strong(tmp_path, "sys.stdout.buffer.write(b'{\\xff}')").run(request_of(), key=KEY)


async def test_a_trace_is_bounded(tmp_path: Path) -> None:
    long = json.dumps(ANSWER | {"trace": [{"note": "n"}] * 129})
    with pytest.raises(OutcomeInvalid, match="trace: Tuple should have at most 128 items"):
        await strong(tmp_path, f"print({long!r})").run(request_of(), key=KEY)


async def test_a_crash_quotes_the_end_of_stderr_bounded_and_storable(run: Run) -> None:
    with pytest.raises(RuntimeCrashed, match="exited with 3; stderr ends: ") as caught:
        await run("sys.stderr.write('x' * 1024 ** 2 + '\\0 the end'); sys.exit(3)")
    message = str(caught.value)
    assert message.endswith("\\u0000 the end")
    assert len(message) < 2048


async def test_death_by_a_signal_is_a_crash(run: Run) -> None:
    with pytest.raises(RuntimeCrashed, match="ended by SIGSEGV"):
        await run("import ctypes; ctypes.string_at(0)")


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("evidence", (Evidence(evidence_id="e1", kind="a", text=""),) * 2, "e1 stands twice"),
        ("policy", {"weight": float("nan")}, "weight: must be finite"),
        ("question", {"text": "\ud800"}, "lone surrogate"),
        ("question", {"text": "x" * 2_000_000}, "must be at most 1048576 bytes"),
        ("seed", -1, "greater than or equal to 0"),
        ("case_id", "", "must match"),
    ],
)
def test_a_request_that_breaks_a_rule_is_never_made(field: str, value: object, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        request_of(**{field: value})


def test_a_piece_of_evidence_is_left_out_by_its_id() -> None:
    assert [piece.evidence_id for piece in request_of().without("e1").evidence] == ["e2"]
    with pytest.raises(RuntimeRefused, match="the request holds no e9"):
        request_of().without("e9")


# --- its end ---


def children(pid: int) -> set[int]:
    """The live processes that it started."""
    return {each.pid for each in psutil.Process(pid).children() if each.status() != psutil.STATUS_ZOMBIE}


def ended(pid: int) -> bool:
    """Whether the process is gone, or only waits to be reaped."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def agent_of(worker: int, besides: set[int]) -> int:
    """The process of the agent that the worker started, once it runs the agent's own program."""

    async def look() -> int | None:
        for pid in children(worker) - besides:
            if any(part.endswith("program.py") for part in psutil.Process(pid).cmdline()):
                return pid
        return None

    return int(await eventually(look, "an agent"))


async def test_a_cancelled_run_leaves_no_process(run: Run) -> None:
    before = children(os.getpid())
    task = asyncio.create_task(run("import time; time.sleep(600)"))
    pid = await agent_of(os.getpid(), before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended(pid)


async def test_a_run_cancelled_as_it_starts_leaves_no_process(run: Run) -> None:
    before = children(os.getpid())
    for turns in range(12):
        task = asyncio.create_task(run("import time; time.sleep(600)"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await noticed(lambda: children(os.getpid()) <= before)


WORKER = """
import asyncio, sys
from pathlib import Path
from tests.agents import adapter_of, request_of
asyncio.run(adapter_of(Path(sys.argv[1]), "import time; time.sleep(600)", isolation=sys.argv[2]).run(
    request_of(), key="k"))
"""


async def test_a_killed_worker_leaves_no_agent(tmp_path: Path, isolation: str) -> None:
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WORKER, str(tmp_path), isolation),
        env=os.environ | {"TMPDIR": str(tmp_path)},  # what a killed worker leaves there is its one trace
    )
    try:
        agent = await agent_of(worker.pid, set())
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
        await noticed(lambda: ended(agent))
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


@FULL
async def test_a_machine_that_denies_namespaces_is_a_refusal(tmp_path: Path) -> None:
    """The worker forbids itself the call, as a container's profile would."""
    code = """
import asyncio, ctypes, errno, sys
from pathlib import Path
from activities.runtime import IsolationUnavailable
from activities.runtime import launcher
from tests.agents import KEY, adapter_of, request_of
launcher._prctl(launcher.PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(launcher.SCMP_ACT_ALLOW)))
call = library.seccomp_syscall_resolve_name(b"unshare")
action = ctypes.c_uint32(launcher.SCMP_ACT_ERRNO | errno.EPERM)
assert library.seccomp_rule_add_array(context, action, call, 0, None) == 0
assert library.seccomp_load(context) == 0
run = "print('{\\"decision\\": \\"ran\\", \\"score\\": 1}')"
for isolation in ("full", "filter"):
    try:
        print(asyncio.run(adapter_of(Path(sys.argv[1]), run, isolation=isolation).run(request_of(), key=KEY)).decision)
    except IsolationUnavailable as error:
        print(error)
"""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await worker.communicate()
    refusal, decision = out.decode().splitlines()
    assert refusal == "isolation full: new namespaces: Operation not permitted"
    assert decision == "ran"
