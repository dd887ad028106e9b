"""The network vanishes under a connection, packets and all: no FIN, no RST, nothing acknowledged any more.

The proxy listens on an address of its own that is taken from the machine's loopback device, as configured the kernel's
`tcp_user_timeout` and keepalives notice after some fifteen seconds. It takes the right to configure the network.
"""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from secrets import randbelow
from typing import Any

import pytest

from durable_jobs import Database, DurableJobService, JobStatus
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.store import database as store_database
from tests.conftest import Specs
from tests.netfaults import Proxy, proxied
from tests.support import dispatched, row_locked, until_waiting

pytestmark = pytest.mark.proof
PATIENCE = 60.0


def address(verb: str, ip: str) -> bool:
    """Whether the loopback device could be given the address, or parted from it."""
    tool = shutil.which("ip")
    command = [tool or "ip", "address", verb, f"{ip}/32", "dev", "lo"]
    return tool is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def ip() -> Iterator[str]:
    """An address of this test's own."""
    ip = f"10.253.{randbelow(256)}.{1 + randbelow(254)}"
    if not address("add", ip):
        pytest.skip("the network can't be configured: it takes `ip` and CAP_NET_ADMIN")
    try:
        yield ip
    finally:
        address("del", ip)


@pytest.fixture
async def proxy(database_url: str, ip: str) -> AsyncIterator[Proxy]:
    async with proxied(database_url, ip) as proxy:
        yield proxy


@pytest.fixture
async def behind(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DurableJobService]:
    """The verbs through the proxy, whose own patience with a silent server is out of the way."""
    monkeypatch.setattr(store_database, "ANSWER_SECONDS", 1000.0)
    database = Database(proxy.address)
    try:
        yield DurableJobService(database, grace_seconds=5)
    finally:
        await database.close()


async def completes(service: DurableJobService, claim: Any) -> Any:
    async with asyncio.timeout(PATIENCE):
        return await service.complete_job(claim, {"ok": True})


async def test_before_the_call(service: DurableJobService, behind: DurableJobService, spec: Specs, ip: str) -> None:
    """What is sent is never acknowledged."""
    claim = await dispatched(service, spec())
    await behind.get_job(claim.job_id)
    address("del", ip)
    with pytest.raises(StoreUnavailable):
        await completes(behind, claim)
    assert (await service.get_job(claim.job_id)).status is JobStatus.RUNNING
    address("add", ip)
    completed = await completes(behind, claim)
    assert completed.job.status is JobStatus.COMPLETED


async def test_during_the_call(
    service: DurableJobService, behind: DurableJobService, spec: Specs, database_url: str, ip: str
) -> None:
    """All that was sent is acknowledged, and no answer comes."""
    claim = await dispatched(service, spec(lease_seconds=600))
    async with row_locked(database_url, claim.job_id):
        calling = asyncio.create_task(completes(behind, claim))
        await until_waiting(database_url)
        address("del", ip)
        with pytest.raises(StoreUnavailable):
            await calling
    address("add", ip)
    job = await service.get_job(claim.job_id)
    assert job.status is JobStatus.RUNNING  # its own lock_timeout ended that statement
    completed = await completes(behind, claim)
    assert completed.job.status is JobStatus.COMPLETED
