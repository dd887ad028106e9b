"""Dataset, evaluation, experiment, replay, causal audit, on the application's own worker: `python -m examples.audit`.

The worker is killed with SIGKILL in the middle of the experiment, and its successor in the middle of an audit. The last
line is one JSON object. Exits with 1 when anything is lost, doubled, or not as promised.
"""

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from activities.store.migrate import migrate
from durable_jobs import DurableJobs
from durable_jobs.dev import DevStack, DevStackError
from examples.audit.story import QUEUE, Story
from examples.research.processes import Children, DemoError
from examples.research.worker import connect_temporal


async def run(stack: DevStack, folder: Path, console: Console) -> Story:
    """The story, on running servers."""
    environment = {
        **os.environ,
        "DURABLE_JOBS_DATABASE_URL": stack.database_url,
        "DURABLE_JOBS_WORKER_QUEUES": QUEUE,
        "DURABLE_JOBS_RECONCILE_SECONDS": "2",
        "TEMPORAL_ADDRESS": stack.temporal_address,
        "TEMPORAL_NAMESPACE": stack.namespace,
    }
    async with Children(folder, environment) as children:
        temporal = await connect_temporal(environment)
        async with await DurableJobs.connect(stack.database_url, temporal) as jobs:
            story = Story(jobs, children, console, stack.database_url)
            await story.run()
            return story


def main() -> int:
    """Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=120)
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="durable-jobs-audit-") as name:
            folder = Path(name)
            folder.chmod(0o711)  # Postgres, which refuses to run as root, must get through as another user
            console.print("starting Postgres and Temporal")
            with DevStack(folder / "stack") as stack:
                migrate(stack.database_url)
                story = asyncio.run(run(stack, folder, console))
        for problem in story.problems:
            console.print(f"[bold red]not as promised:[/] {problem}")
        print(json.dumps({**story.counts, "seconds": round(time.monotonic() - started, 1)}), flush=True)
        return 1 if story.problems else 0
    except KeyboardInterrupt:
        return 130
    except (DemoError, DevStackError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
