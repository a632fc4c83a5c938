"""The words with which an agent's document asks for what the mesh does around its chats."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from weft.documents.document_base import Name
from weft.kernel.agent_limits import (
    MAX_AGENT_SIGNALS,
    MAX_AGENT_TOOLS,
    MAX_SIGNAL_NAME_CHARS,
    MAX_TOOL_ITERATIONS,
    SIGNAL_NAME_PATTERN,
    SIGNAL_NAME_RULE,
    is_signal_name,
)


def _signal_name(text: str) -> str:
    if not is_signal_name(text):
        raise ValueError(SIGNAL_NAME_RULE)
    return text


def _once_each(names: tuple[str, ...]) -> tuple[str, ...]:
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise ValueError(f"must not have {twice} twice")
    return names


def _off_is_a_word(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


SignalName = Annotated[
    str,
    AfterValidator(_signal_name),
    Field(json_schema_extra={"pattern": SIGNAL_NAME_PATTERN, "minLength": 1, "maxLength": MAX_SIGNAL_NAME_CHARS}),
]
SignalNames = Annotated[
    tuple[SignalName, ...], Field(max_length=MAX_AGENT_SIGNALS, strict=False), AfterValidator(_once_each)
]
ToolNames = Annotated[tuple[Name, ...], Field(max_length=MAX_AGENT_TOOLS, strict=False), AfterValidator(_once_each)]
ToolIterations = Annotated[int, Field(ge=0, le=MAX_TOOL_ITERATIONS)]
Repetition = Annotated[Literal["off", "warn", "kill"], BeforeValidator(_off_is_a_word)]
