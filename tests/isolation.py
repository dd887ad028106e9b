"""How this machine lets an agent be shut in: containers often forbid namespaces, which leaves the filter."""

import asyncio
import tempfile
from pathlib import Path
from typing import Literal

from activities.runtime import AgentRef, IsolationUnavailable, RuntimeRequest
from activities.runtime.subprocess_adapter import AgentProgram, SubprocessAdapter


def _strongest() -> Literal["full", "filter"]:
    agent = AgentRef(name="probe", version="1")
    request = RuntimeRequest(agent=agent, case_id="c", question={}, policy={}, evidence=(), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "probe.py"
        program.write_text("""print('{"decision": "ran", "score": 1}')""")
        try:
            asyncio.run(SubprocessAdapter([AgentProgram(agent=agent, path=program)]).run(request, key="k"))
        except IsolationUnavailable:
            return "filter"
    return "full"


STRONGEST = _strongest()
