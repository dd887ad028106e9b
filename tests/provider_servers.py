"""Real servers for the providers' clients, proxies that lose answers, and the handler that a product would write."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from durable_jobs import DurableJobs, Job, JobContext, JobHandler, JobSpec, JobStatus, ProviderState
from durable_jobs._processes import ServerProcess, free_port
from durable_jobs.client import JobHandle
from durable_jobs.providers import Provider
from tests.probes import eventually, until
from tests.servers import scratch_folder

ROOT = Path(__file__).parent.parent
AIMOCK = ROOT / ".venv/aimock/node_modules/@copilotkit/aimock/dist/cli.js"


class Calls(JobHandler[dict[str, Any], dict[str, Any]]):
    """Sends its payload to the provider, as a product would, and waits for the result."""

    job_type = "probe"
    consequential = False

    def __init__(self, provider: Provider[Any]) -> None:
        self.provider = provider

    async def run(self, job: JobContext, request: dict[str, Any]) -> dict[str, Any]:
        async with job.dispatch(f"summary:{job.id}") as operation_key:
            sent = await self.provider.send(operation_key, request)
        result: dict[str, Any] = await sent.result(job)
        return result

    async def provider_state(self, operation_key: str, job: Job) -> ProviderState[dict[str, Any]]:
        return await self.provider.state(operation_key, job.dispatched_at)


async def lost(jobs: DurableJobs, spec: JobSpec) -> JobHandle:
    """A new job, once it is indeterminate: its send was accepted, and the answer lost."""
    handle = await jobs.create_job(spec)
    await until(jobs.service, handle.id, JobStatus.INDETERMINATE)
    return handle


async def swept_until_completed(jobs: DurableJobs, queue: str, handle: JobHandle) -> dict[str, Any]:
    """Sweep until the provider's word has completed the job; its result."""

    async def look() -> bool:
        await jobs.sweep(queue)
        job = await jobs.service.get_job(handle.id)
        assert job.escalated_at is None, job.escalation_reason
        return job.status is not JobStatus.INDETERMINATE

    await eventually(look, "the sweep finds the result")
    job = await jobs.service.get_job(handle.id)
    assert job.status is JobStatus.COMPLETED
    assert job.reconciliation is not None
    assert job.reconciliation["by"] == "provider"
    result: dict[str, Any] = await handle.result(timeout=20)
    return result


class LossyProxy:
    """An HTTP/1.1 proxy before `upstream`, one request for each connection.

    `requests` are those that the upstream has answered, as (method, path); `lose` names those whose answer is then
    dropped, and the connection closed.
    """

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        assert address.hostname is not None
        self._upstream = (address.hostname, address.port)
        self.requests: list[tuple[str, str]] = []
        self.lose: set[tuple[str, str]] = set()
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            kept = [line for line in lines if line and not line.lower().startswith("connection:")]
            answer = await self._forward(
                "\r\n".join([first, *kept, "connection: close", "", ""]).encode("latin-1") + body
            )
            request = (method, urlsplit(target).path)
            self.requests.append(request)
            if request not in self.lose:
                writer.write(answer)
                await writer.drain()
        finally:
            writer.close()

    async def _forward(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*self._upstream)
        try:
            writer.write(request)
            return await reader.read()
        finally:
            writer.close()

    @classmethod
    @asynccontextmanager
    async def before(cls, upstream: str) -> AsyncIterator["LossyProxy"]:
        proxy = cls(upstream)
        server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        async with server:
            proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield proxy


@contextmanager
def _process(name: str, command: list[str], url: str) -> Iterator[str]:
    """The server, until the end of the block; `url` is where it answers."""
    folder = scratch_folder(f"durable-jobs-{name}-")
    server = ServerProcess(name, command, folder / "log", stop_signal=signal.SIGTERM)

    def serves() -> bool:
        try:
            httpx.get(url, timeout=5)
        except httpx.TransportError:
            return False
        return True

    try:
        server.start()
        server.wait_until(serves, timeout=60)
        yield url
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def aimock() -> Iterator[str]:
    """A stateful mock of OpenAI's files and batches; its base URL."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is absent: aimock, the server of files and batches, is a program for it")
    assert AIMOCK.exists(), "aimock is not installed: `make test` does it"
    port = free_port()
    command = [node, str(AIMOCK), "--port", str(port), "--log-level", "warn"]
    command += ["--fixtures", str(AIMOCK.parent.parent / "fixtures")]
    with _process("aimock", command, f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def moto() -> Iterator[str]:
    """A server of AWS's services that runs state machines; its base URL."""
    port = free_port()
    command = [str(Path(sys.executable).parent / "moto_server"), "--host", "127.0.0.1", "--port", str(port)]
    with _process("moto", command, f"http://127.0.0.1:{port}") as url:
        setting = {"stepfunctions": {"execute_state_machine": True}}
        httpx.post(f"{url}/moto-api/config", json=setting, timeout=60).raise_for_status()
        yield url


class CutOffProxy:
    """A TCP proxy before a server. `deaf` drops whatever the server answers; `cut` ends all connections for good."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._upstream = (host, int(port))
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.deaf = False
        self.address = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._upstream)
        self._writers |= {writer, server_writer}
        await asyncio.gather(self._pump(reader, server_writer), self._pump(server_reader, writer, answers=True))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False) -> None:
        try:
            while data := await reader.read(65_536):
                if not (answers and self.deaf):
                    writer.write(data)
                    await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def drop(self) -> None:
        """End the connections there are; new ones are taken."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def cut(self) -> None:
        """End the connections there are, and take no more."""
        assert self._server is not None
        self._server.close()
        self.drop()

    @classmethod
    @asynccontextmanager
    async def before(cls, address: str) -> AsyncIterator["CutOffProxy"]:
        proxy = cls(address)
        proxy._server = await asyncio.start_server(proxy._serve, "127.0.0.1", 0)
        proxy.address = f"127.0.0.1:{proxy._server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            proxy.cut()
            await asyncio.sleep(0)


def aws_variables() -> dict[str, str]:
    """Credentials that the mock takes, and no configuration of this machine's."""
    nowhere = os.devnull
    return {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": nowhere,
        "AWS_SHARED_CREDENTIALS_FILE": nowhere,
    }
