"""What an agent may ask the mesh to do around its chats, checked where it enters the mesh."""

from collections.abc import Sequence

from weft.api.common.v1 import agent_behaviour_pb2
from weft.kernel.agent_limits import (
    MAX_AGENT_SIGNALS,
    MAX_AGENT_TOOLS,
    MAX_TOOL_ITERATIONS,
    SIGNAL_NAME_RULE,
    is_signal_name,
)
from weft.kernel.errors import invalid_field
from weft.kernel.names import require_name


def check_behaviour(behaviour: agent_behaviour_pb2.AgentBehaviour, field: str) -> None:
    """Raises INVALID_ARGUMENT naming the part below `field`."""
    _check_list(behaviour.tools, f"{field}.tools", MAX_AGENT_TOOLS)
    for index, name in enumerate(behaviour.tools):
        require_name(name, f"{field}.tools[{index}]")
    if behaviour.HasField("max_tool_iterations") and not 0 <= behaviour.max_tool_iterations <= MAX_TOOL_ITERATIONS:
        raise invalid_field(f"{field}.max_tool_iterations", f"must be 0 to {MAX_TOOL_ITERATIONS}")
    _check_list(behaviour.signals, f"{field}.signals", MAX_AGENT_SIGNALS)
    for index, name in enumerate(behaviour.signals):
        if not is_signal_name(name):
            raise invalid_field(f"{field}.signals[{index}]", SIGNAL_NAME_RULE)
    if behaviour.repetition_policy not in agent_behaviour_pb2.RepetitionPolicy.values():
        raise invalid_field(f"{field}.repetition_policy", "must be off, warn or kill")


def _check_list(names: Sequence[str], field: str, most: int) -> None:
    if len(names) > most:
        raise invalid_field(field, f"must have at most {most} entries, has {len(names)}")
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise invalid_field(f"{field}[{index}]", "must not appear twice")
        seen.add(name)
