"""What the mesh does around the chats of an agent, as an immutable value."""

from dataclasses import dataclass
from enum import Enum


class Repetition(Enum):
    """What happens to an answer that repeats itself."""

    OFF = "off"
    WARN = "warn"
    KILL = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBehaviour:
    """All of it is off unless the agent asks for it, so that the value without arguments is an agent without any."""

    platform_prompt: bool = False
    """Whether the conversation begins with the platform's own system prompt."""
    tools: tuple[str, ...] = ()
    """Tools that the mesh runs for the model, by the names of the runner's configuration."""
    max_tool_iterations: int | None = None
    """How many times the model may be asked again with results of tools; None: the runner's own limit."""
    signals: tuple[str, ...] = ()
    """Control signals that the model may raise."""
    stop_on_decision_request: bool = True
    """Whether a signal that asks for a decision ends the answer."""
    repetition: Repetition | None = None
    """None: the model's own setting."""
    parse_text_tool_calls: bool = True
    """Whether calls that the model writes as text count as calls."""


NO_BEHAVIOUR = AgentBehaviour()
"""Of an agent that asks for nothing."""
