"""How much an agent may ask the mesh to do around its chats: as common/v1/agent_behaviour.proto says."""

import re

MAX_AGENT_TOOLS = 64
MAX_AGENT_SIGNALS = 64
MAX_TOOL_ITERATIONS = 64
MAX_SIGNAL_NAME_CHARS = 64
SIGNAL_NAME_PATTERN = r"^[A-Z][A-Z0-9_]{0,63}$"
SIGNAL_NAME_RULE = f"must be 1 to {MAX_SIGNAL_NAME_CHARS} capital letters, digits or '_', starting with a letter"

_SIGNAL_NAME = re.compile(r"[A-Z][A-Z0-9_]{0,63}")


def is_signal_name(text: str) -> bool:
    """Whether `text` may name a control signal."""
    return _SIGNAL_NAME.fullmatch(text) is not None
