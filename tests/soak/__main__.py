"""Many jobs over several worker processes, under faults, and all invariants checked at the end.

    python -m tests.soak --jobs 500 --workers 3 --seconds 90 --seed 7         make soak ARGS="--seed 7"

For `--seconds`, jobs of every shape (see `shapes.py`) are submitted while every few seconds, by a plan drawn from the
seed, a worker is killed and another started, or stopped past its lease (SIGSTOP, later SIGCONT), or ended by SIGTERM
and replaced; Postgres is restarted at once, or all its sessions are terminated; Temporal is stopped or killed, and
started on its database file. Then the faults end, every worker is replaced, and the run goes on until all jobs are
settled: what was escalated, by an operator who asks the provider; `--limit` seconds at most. Then the tables and the
provider are held against the invariants of the design.

The last line is one JSON object; above it stands a line for each violation, and then the exit code is 1, the logs of
all processes are kept, and the line before the last says where. The same seed draws the same jobs and the same faults;
how they meet is up to the machine.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from temporalio.client import Client
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.service import RPCError

from durable_jobs import DurableJobs
from durable_jobs.contract.errors import StoreUnavailable
from durable_jobs.dev import DATABASE_URL_VARIABLE, TEMPORAL_ADDRESS_VARIABLE
from examples.research.processes import Children
from tests.servers import own_servers, scratch_folder
from tests.soak.checks import Found, ask_provider, read_tables, told_to_clients, trails_that_differ, violations
from tests.soak.clients import Clients, asking, is_open
from tests.soak.faults import Fault, Fleet, draw_plan
from tests.soak.shapes import draw_specs, provider_rules

GRACE_SECONDS = 4.0
SUBMITTED_BY = 0.8
"""The part of the time under faults in which the jobs are submitted."""
CLOSING_SECONDS = 60.0
"""How long workflows may stay open once every row is settled."""


class Soak:
    """One run."""

    def __init__(self, arguments: argparse.Namespace, clients: Clients, fleet: Fleet, temporal: Client) -> None:
        self.arguments = arguments
        self.clients = clients
        self.fleet = fleet
        self.temporal = temporal
        self.started = time.monotonic()
        self.open_workflows = 0
        self.found = Found({})
        """What the run left, at its end."""

    async def run(self) -> tuple[dict[str, Any], list[str]]:
        """Returns the last line, and the violations."""
        # Drawn one after the other from one seed: neither depends on how the run goes.
        chance = random.Random(self.arguments.seed)
        specs = draw_specs(chance, self.arguments.jobs)
        plan = draw_plan(chance, self.arguments.seconds)
        supervising = asyncio.create_task(self.fleet.supervise())
        operating = asyncio.create_task(self.clients.operate())
        submitting = asyncio.create_task(
            self.clients.submit(specs, self.arguments.seconds * SUBMITTED_BY, random.Random(chance.random()))
        )
        try:
            await self._under_faults(plan)
            say(f"{self.seconds:6.1f} s faults end")
            await self.fleet.calm_down()
            await self._settled(submitting)
            operating.cancel()
            await self._workflows_closed()
        finally:
            for task in (supervising, operating, submitting):
                task.cancel()
            ended = await asyncio.gather(supervising, operating, submitting, return_exceptions=True)
        broken = [f"the soak itself failed: {error!r}" for error in ended if isinstance(error, Exception)]
        return await self._conclude(broken)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    async def _under_faults(self, plan: list[Fault]) -> None:
        for fault in plan:
            await asyncio.sleep(fault.at - self.seconds)
            say(f"{self.seconds:6.1f} s {fault.kind}, planned for {fault.at:.1f} s")
            await self.fleet.inject(fault)
        await asyncio.sleep(self.arguments.seconds - self.seconds)

    async def _settled(self, submitting: "asyncio.Task[None]") -> None:
        """Returns once every job is settled and everybody who waits has been answered, or the time is up."""
        said = 0.0
        while self.seconds < self.arguments.seconds + self.arguments.limit:
            await asyncio.sleep(1)
            with suppress(StoreUnavailable):
                open_jobs = [job for job in await self.clients.list_jobs() if is_open(job)]
                if not open_jobs and submitting.done():
                    return
                if self.seconds - said >= 10:
                    said = self.seconds
                    say(f"{said:6.1f} s still open: {dict(Counter(str(job.status) for job in open_jobs))}")
        say(f"{self.seconds:6.1f} s time is up")

    async def _workflows_closed(self) -> None:
        """Waits for the workflows to notice that their rows are settled."""
        ends = time.monotonic() + CLOSING_SECONDS
        while True:
            with suppress(RPCError):
                query = "WorkflowType = 'DurableJob' AND ExecutionStatus = 'Running'"
                self.open_workflows = (await self.temporal.count_workflows(query)).count
                if not self.open_workflows:
                    return
            if time.monotonic() > ends:
                return
            await asyncio.sleep(1)

    async def _conclude(self, problems: list[str]) -> tuple[dict[str, Any], list[str]]:
        seconds, clients, fleet = self.seconds, self.clients, self.fleet
        found = read_tables(fleet.stack.database_url)
        await ask_provider(found, clients.provider)
        self.found = found
        problems += [*fleet.problems, *clients.problems, *violations(found)]
        problems += told_to_clients(found, clients.acknowledged, clients.cancels, clients.awaited)
        problems += await trails_that_differ(clients.jobs.service, found)
        if len(clients.acknowledged) != self.arguments.jobs:
            problems.append(f"{len(clients.acknowledged)} of {self.arguments.jobs} jobs were acknowledged")
        if self.open_workflows:
            problems.append(f"{self.open_workflows} workflows are open though their jobs are settled")
        jobs, attempts = found.jobs.values(), [each for of_job in found.attempts.values() for each in of_job]
        line = {
            "seed": self.arguments.seed,
            "jobs": len(jobs),
            "statuses": dict(sorted(Counter(job["status"] for job in jobs).items())),
            "faults": dict(sorted(fleet.counts.items())),
            "sends": sum(found.sends.values()),
            "max_sends_per_key": max(found.sends.values(), default=0),
            "reconciled": dict(sorted(Counter(j["reconciliation"]["by"] for j in jobs if j["reconciliation"]).items())),
            "escalated": sum(any(e["name"] == "escalated" for e in found.events[job["id"]]) for job in jobs),
            "marked_and_never_sent": sum(
                each["operation_key"] is not None and each["operation_key"] not in found.sends for each in attempts
            ),
            "attempts": dict(sorted(Counter(str(each["outcome"]) for each in attempts).items())),
            "late_results": sum(each["late_result"] is not None for each in attempts),
            "workers": {"started": len(fleet.started), "ended_while_starting": fleet.ended_while_starting},
            "clients": dict(clients.counts),
            "seconds": round(seconds, 1),
            "violations": len(problems),
        }
        return line, problems


def say(text: str) -> None:
    print(text, flush=True)


@asynccontextmanager
async def soak(
    arguments: argparse.Namespace, folder: Path, clients: Callable[..., Clients] = Clients
) -> AsyncIterator[Soak]:
    """The servers, the provider, the workers and the clients, made by `clients` as `Clients` is."""
    environment = dict(os.environ)
    with own_servers(folder / "servers") as stack:
        quiet = LoggingConfig(filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"))
        runtime = Runtime(telemetry=TelemetryConfig(logging=quiet))
        temporal = await Client.connect(stack.temporal_address, namespace=stack.namespace, runtime=runtime)
        async with Children(folder, environment) as children:
            ledger = str(folder / "provider.sqlite3")
            provider = await children.start("provider", "examples.research.provider", "--database", ledger, *QUICK)
            url = await provider.prints(r"listening on (\S+)")
            environment |= {
                DATABASE_URL_VARIABLE: stack.database_url,
                TEMPORAL_ADDRESS_VARIABLE: stack.temporal_address,
                "TEMPORAL_NAMESPACE": stack.namespace,
                "SOAK_PROVIDER_URL": url,
                "SOAK_GRACE_SECONDS": str(GRACE_SECONDS),
            }
            fleet = Fleet(folder, environment, stack, arguments.workers)
            async with (
                asking(url) as http,
                await DurableJobs.connect(stack.database_url, temporal, pool_size=20) as jobs,
            ):
                (await http.put("/rules", json=provider_rules())).raise_for_status()
                try:
                    await fleet.start()
                    yield Soak(arguments, clients(jobs, http, fleet.alive), fleet, temporal)
                finally:
                    await fleet.aclose()


QUICK = ("--quick", "0.05", "0.4")
"""How long the provider's work takes, where no rule says otherwise."""


async def main(arguments: argparse.Namespace, folder: Path) -> int:
    async with soak(arguments, folder) as run:
        line, problems = await run.run()
    for problem in problems:
        say(f"violation: {problem}")
    if problems or arguments.keep:
        say(f"the logs are in {folder}")
    say(json.dumps(line))
    return 1 if problems else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=500, help="to submit; follow-ups come on top")
    parser.add_argument("--workers", type=int, default=3, help="processes")
    parser.add_argument("--seconds", type=float, default=90, help="under faults")
    parser.add_argument("--limit", type=float, default=300, help="seconds for all to be settled after the faults")
    parser.add_argument("--seed", type=int, default=None, help="of jobs and faults; drawn if not given")
    parser.add_argument("--keep", action="store_true", help="keep the logs and the servers' data")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1_000_000)
    return arguments


if __name__ == "__main__":
    chosen = parse()
    place = scratch_folder("durable-jobs-soak-")
    logging.basicConfig(filename=place / "soak.log", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    say(f"seed {chosen.seed}, {chosen.jobs} jobs, {chosen.workers} workers, {chosen.seconds:g} s under faults")
    code = 2
    try:
        code = asyncio.run(main(chosen, place))
    finally:
        if code == 0 and not chosen.keep:
            shutil.rmtree(place, ignore_errors=True)
    sys.exit(code)
