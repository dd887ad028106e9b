"""Agent programs: each stands alone, needs the standard library only, and runs as a process of its own."""

from pathlib import Path

from activities.agents import support_agent
from activities.runtime.models import AgentRef
from activities.runtime.subprocess_adapter import AgentProgram

SUPPORT_AGENT = AgentProgram(
    agent=AgentRef(name=support_agent.NAME, version=support_agent.VERSION), path=Path(support_agent.__file__)
)

__all__ = ["SUPPORT_AGENT"]
