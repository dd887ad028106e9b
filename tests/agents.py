"""Agents of the tests' own: a program of a few lines, and a request to run it with."""

import textwrap
from pathlib import Path
from typing import Any

from activities.runtime import AgentRef, Evidence, RuntimeRequest
from activities.runtime.subprocess_adapter import AgentProgram, SubprocessAdapter, SubprocessSettings

AGENT = AgentRef(name="probe", version="1")
KEY = "replay:case-1"


def request_of(**overrides: Any) -> RuntimeRequest:
    fields: dict[str, Any] = {
        "agent": AGENT,
        "case_id": "case-1",
        "question": {"request": "refund"},
        "policy": {"base": "0.5"},
        "evidence": (
            Evidence(evidence_id="e1", kind="order_record", text="paid 10.00 USD"),
            Evidence(evidence_id="e2", kind="photo_report", text="damage grade 4 of 5", fields={"n": 4}),
        ),
        "seed": 7,
    }
    return RuntimeRequest(**(fields | overrides))


def adapter_of(folder: Path, code: str, **settings: Any) -> SubprocessAdapter:
    """An adapter over an agent with this code."""
    path = folder / "probe.py"
    path.write_text("import json, os, sys\n" + textwrap.dedent(code))
    return SubprocessAdapter([AgentProgram(agent=AGENT, path=path)], SubprocessSettings(**settings))
