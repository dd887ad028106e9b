"""The whole story on real input: `python -m examples.research.demo`.

Starts the servers, the provider and a worker as separate processes, submits all questions twice, kills the worker with
SIGKILL while its calls are in flight, starts another, and waits until the sweep has found what became of every call, or
has put it before an operator, who decides. Counts at the provider what was sent. The last line is one JSON object.
Exits with 1 when anything did not go as promised: a job lost or unresolved, an operation key sent twice.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote, urlencode

import httpx

from durable_jobs import DurableJobs
from durable_jobs.dev import DevStack, DevStackError
from examples.research.accounts import Accounts
from examples.research.plan import Question, read_questions
from examples.research.processes import Children, DemoError
from examples.research.screen import Screen
from examples.research.story import Story, workflow_of
from examples.research.worker import PROVIDER_URL_VARIABLE, RECONCILE_SECONDS_VARIABLE, connect_temporal

RECONCILE_SECONDS = "5"
SWEEPS = "WorkflowType = 'DurableJobsReconciliation'"


async def run(stack: DevStack, folder: Path, screen: Screen, questions: list[Question]) -> Accounts:
    """The demo, on running servers."""
    environment = {
        **os.environ,
        "DURABLE_JOBS_DATABASE_URL": stack.database_url,
        "TEMPORAL_ADDRESS": stack.temporal_address,
        "TEMPORAL_NAMESPACE": stack.namespace,
    }
    async with Children(folder, environment) as children:
        database = str(folder / "provider.sqlite3")
        provider = await children.start("provider", "examples.research.provider", "--database", database)
        url = await provider.prints(r"listening on (\S+)")
        screen.say(f"the provider, process {provider.pid}, listens on {url}")
        children.environment |= {PROVIDER_URL_VARIABLE: url, RECONCILE_SECONDS_VARIABLE: RECONCILE_SECONDS}
        temporal = await connect_temporal(environment)
        async with (
            await DurableJobs.connect(stack.database_url, temporal) as jobs,
            httpx.AsyncClient(base_url=url) as http,
        ):
            return await Story(jobs, temporal, http, children, screen, questions).run()


def where_to_look(stack: DevStack, accounts: Accounts) -> list[str]:
    """How to see it in Temporal: addresses in its UI, or commands where there is none."""
    named = [("a job that the operator resolved", workflow_of(job_id)) for job_id in accounts.escalated[:1]]
    if accounts.survivor:
        named.insert(0, ("a job that lived through the kill", workflow_of(accounts.survivor.id)))
    if stack.ui_url is None:
        command = f"temporal workflow {{}} --address {stack.temporal_address} --namespace {stack.namespace}"
        lines = [f"{what}: {command.format('show')} --workflow-id {workflow}" for what, workflow in named]
        return [*lines, f'the sweeps: {command.format("list")} --query "{SWEEPS}"']
    workflows = f"{stack.ui_url}/namespaces/{stack.namespace}/workflows"
    lines = [f"{what}: {workflows}/{quote(workflow, safe='')}" for what, workflow in named]
    return [*lines, f"the sweeps, each with its summary as its result: {workflows}?{urlencode({'query': SWEEPS})}"]


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.research.demo", description=__doc__)
    parser.add_argument("--stay", action="store_true", help="leave the servers running at the end, until Ctrl-C")
    stay = parser.parse_args().stay
    # A plain kill cleans up as Ctrl-C does, also in the background, where shells have Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    questions = read_questions()
    screen = Screen(len(questions))
    try:
        with tempfile.TemporaryDirectory(prefix="durable-jobs-demo-") as name:
            folder = Path(name)
            # Postgres, which refuses to run as root, must get through to its own folder as another user.
            folder.chmod(0o711)
            screen.say("starting Postgres and Temporal")
            with DevStack(folder / "stack") as stack:
                screen.say(f"Postgres: {stack.database_url.rpartition('@')[2]}, Temporal: {stack.temporal_address}")
                accounts = asyncio.run(run(stack, folder, screen, questions))
                for problem in accounts.problems:
                    screen.say(f"[bold red]not as promised:[/] {problem}")
                print("In Temporal:", *where_to_look(stack, accounts), sep="\n  ")
                print("The servers stay up until Ctrl-C." if stay else "With --stay the servers stay up.")
                print(json.dumps(accounts.counts), flush=True)
                if stay:
                    with contextlib.suppress(KeyboardInterrupt):
                        signal.pause()
                return 1 if accounts.problems else 0
    except KeyboardInterrupt:
        return 130
    except (DemoError, DevStackError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
