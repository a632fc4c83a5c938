"""Fields of a chat payload that several APIs translate to: functions, tool choice, output schema, thinking."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Protocol

from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.dispatch.schema_guard import SchemaGuard
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import to_json_object

FUNCTION = "function"
ROLES: dict[str, chat_pb2.Role.ValueType] = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_DEVELOPER,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
    "function": chat_pb2.ROLE_TOOL,
}
TOOL_MODES: dict[str, chat_pb2.ToolChoice.Mode.ValueType] = {
    "none": chat_pb2.ToolChoice.MODE_NONE,
    "auto": chat_pb2.ToolChoice.MODE_AUTO,
    "required": chat_pb2.ToolChoice.MODE_REQUIRED,
    "any": chat_pb2.ToolChoice.MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class ChatTranslation:
    """A chat payload, with warnings for the caller."""

    payload: chat_pb2.ChatPayload
    warnings: list[warning_pb2.Warning] = dataclass_field(default_factory=list)


class Described(Protocol):
    """What the schemas of functions and of output formats have in common."""

    @property
    def description(self) -> str | None:
        """What it is for, for the model to read."""
        ...

    @property
    def strict(self) -> bool | None:
        """Whether the schema must be followed exactly."""
        ...


def add_function(
    payload: chat_pb2.ChatPayload,
    name: str,
    tool: Described,
    schema: Mapping[str, Any] | None,
    field: str,
    guard: SchemaGuard,
) -> None:
    """Offer a function to the model. `schema`: of its arguments, at `field`; None: it has no arguments."""
    target = payload.tools.add().function
    target.name = name
    _describe(target, tool)
    if schema is not None:
        target.parameters.CopyFrom(to_json_object(guard.require_safe(schema, field), field))


def fill_json_schema(
    payload: chat_pb2.ChatPayload,
    name: str,
    output: Described | None,
    schema: Mapping[str, Any],
    field: str,
    guard: SchemaGuard,
) -> None:
    """Set the schema that the answer must follow; errors name its `field`."""
    target = payload.response_format.json_schema
    target.name = name
    if output is not None:
        _describe(target, output)
    target.schema.CopyFrom(to_json_object(guard.require_safe(schema, field), field))


def _describe(target: chat_pb2.FunctionTool | chat_pb2.JsonSchemaFormat, source: Described) -> None:
    if source.description is not None:
        target.description = source.description
    if source.strict is not None:
        target.strict = source.strict


def require_offered(
    payload: chat_pb2.ChatPayload, names: Collection[str | None], field: str, message: str = "names none of the tools"
) -> None:
    """Raises INVALID_ARGUMENT naming `field` unless all names are functions that are offered to the model."""
    if not {tool.function.name for tool in payload.tools}.issuperset(names):
        raise invalid_field(field, message)


def keep_functions(payload: chat_pb2.ChatPayload, names: Collection[str | None], field: str) -> None:
    """Offer only these functions: engines have no choice of several. Raises INVALID_ARGUMENT for none."""
    if not names:
        raise invalid_field(field, "must have a tool of type 'function'")
    kept = [tool for tool in payload.tools if tool.function.name in names]
    del payload.tools[:]
    payload.tools.extend(kept)


def fill_tool_mode(payload: chat_pb2.ChatPayload, mode: str, field: str) -> None:
    """Set whether a tool must be called. Raises INVALID_ARGUMENT naming `field` where none can be."""
    if mode == "required" and not payload.tools:
        raise invalid_field(field, "cannot be 'required' without a tool of type 'function'")
    payload.tool_choice.mode = TOOL_MODES[mode]


def fill_thinking(payload: chat_pb2.ChatPayload, spellings: Mapping[str, bool | None]) -> None:
    """Set whether the model thinks, by the fields that say so. Raises INVALID_ARGUMENT where they differ."""
    given = {name: value for name, value in spellings.items() if value is not None}
    if len(set(given.values())) > 1:
        first, *others = given
        raise invalid_field(others[-1], f"must not differ from '{first}'")
    if given:
        payload.thinking = next(iter(given.values()))


def reasoning_effort(name: str) -> chat_pb2.ReasoningEffort.ValueType:
    """Returns the effort of this name, one of the request schema's."""
    return chat_pb2.ReasoningEffort.Value(f"REASONING_EFFORT_{name.upper()}")
