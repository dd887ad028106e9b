"""How this machine lets an agent be shut in: containers often forbid namespaces, which leaves the filter."""

import asyncio
import tempfile
from pathlib import Path
from typing import Literal

from activities.runtime import IsolationUnavailable
from tests.agents import KEY, adapter_of, request_of


def _strongest() -> Literal["full", "filter"]:
    with tempfile.TemporaryDirectory() as folder:
        adapter = adapter_of(Path(folder), """print('{"decision": "ran", "score": 1}')""", isolation="full")
        try:
            asyncio.run(adapter.run(request_of(), key=KEY))
        except IsolationUnavailable:
            return "filter"
    return "full"


STRONGEST = _strongest()
