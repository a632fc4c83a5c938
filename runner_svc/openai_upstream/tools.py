"""The functions of a request as an engine takes them: names that a provider allows, and schemas that it can follow."""

import re
from collections.abc import Mapping
from typing import Any

from runner_svc.policy.parameters import ParameterWarning
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import Frame
from weft.kernel.errors import WeftError
from weft.kernel.json_schema import MAP_KEYS, SCHEMA_TYPES
from weft.kernel.reasons import Reason

Json = dict[str, Any]

MAX_PROVIDER_NAME_CHARS = 64
"""Maximum length of a function's name at OpenAI."""
_FOREIGN_TO_PROVIDERS = re.compile(r"[^A-Za-z0-9_-]")
_FOREIGN_TO_ENGINES = re.compile(r"[^A-Za-z0-9_.-]")
_SCHEMA_WORDS = re.compile(
    r"schema|grammar|parser for this template|function_?(declaration|parameter)s|tools?[\[.]", re.IGNORECASE
)
_KEPT = frozenset({"type", "description", "properties", "required", "items", "enum", "anyOf"})
"""Keywords that every engine can follow."""


def engine_names(payload: chat_pb2.ChatPayload, *, is_strict: bool) -> Mapping[str, str]:
    """Returns a plain name for each function of a chat with a name that its engine may refuse.

    Engines take letters, digits, `_`, `-` and `.`. A strict API takes no dots and MAX_PROVIDER_NAME_CHARS at most.
    MCP servers also have names such as `files/read`.
    """
    foreign = _FOREIGN_TO_PROVIDERS if is_strict else _FOREIGN_TO_ENGINES
    names = dict.fromkeys(tool.function.name for tool in payload.tools)
    names |= dict.fromkeys(call.name for message in payload.messages for call in message.tool_calls)
    taken = {name for name in names if not foreign.search(name) and not (is_strict and _is_long(name))}
    found: dict[str, str] = {}
    for name in names:
        if name in taken:
            continue
        plain, count = foreign.sub("_", name)[:MAX_PROVIDER_NAME_CHARS], 1
        while plain in taken:
            count += 1
            end = f"_{count}"
            plain = foreign.sub("_", name)[: MAX_PROVIDER_NAME_CHARS - len(end)] + end
        taken.add(plain)
        found[name] = plain
    return found


def _is_long(name: str) -> bool:
    return len(name) > MAX_PROVIDER_NAME_CHARS


def with_names(payload: chat_pb2.ChatPayload, names: Mapping[str, str]) -> chat_pb2.ChatPayload:
    """Returns a copy of a chat whose functions have other names."""
    copy = chat_pb2.ChatPayload()
    copy.CopyFrom(payload)
    for tool in copy.tools:
        tool.function.name = names.get(tool.function.name, tool.function.name)
    for message in copy.messages:
        for call in message.tool_calls:
            call.name = names.get(call.name, call.name)
    if copy.tool_choice.WhichOneof("kind") == "function_name":
        copy.tool_choice.function_name = names.get(copy.tool_choice.function_name, copy.tool_choice.function_name)
    return copy


def restore_names(frame: Frame, own_names: Mapping[str, str]) -> None:
    """Give the calls of an answer the names that the caller has for its functions."""
    for event in frame:
        if event.WhichOneof("event") == "delta":
            for call in event.delta.tool_calls:
                call.name = own_names.get(call.name, call.name)


def refuses_tool_schemas(error: WeftError, body: Json) -> bool:
    """Whether an engine has probably refused a request for a schema of its functions."""
    return (
        bool(body.get("tools")) and error.reason is Reason.BACKEND_REJECTED and bool(_SCHEMA_WORDS.search(str(error)))
    )


def with_plain_schemas(body: Json) -> tuple[Json, list[ParameterWarning]]:
    """Returns a copy of a body whose functions have schemas that every engine can follow, and what was left out."""
    tools: list[Json] = []
    warnings: list[ParameterWarning] = []
    for index, tool in enumerate(body["tools"]):
        function = tool.get("function", {})
        parameters = function.get("parameters", {})
        plain = _plain(parameters)
        if plain == parameters:
            tools.append(tool)
            continue
        others = {key: value for key, value in function.items() if key != "strict"}
        tools.append({**tool, "function": {**others, "parameters": {"type": "object", **plain}}})
        field = f"tools[{index}].function.parameters"
        message = f"{field} was simplified: the engine refused the schemas of the tools"
        warnings.append(ParameterWarning(field=field, message=message))
    return {**body, "tools": tools}, warnings


def _plain(schema: object) -> Json:
    if not isinstance(schema, dict):
        return {}
    kept = {key: value for key, value in schema.items() if key in _KEPT and _is_plain(key, value)}
    for key, value in kept.items():
        if key in MAP_KEYS:
            kept[key] = {name: _plain(inner) for name, inner in value.items()}
        elif key == "items":
            kept[key] = _plain(value)
        elif key == "anyOf":
            kept[key] = [_plain(inner) for inner in value]
    return kept


def _is_plain(key: str, value: object) -> bool:
    match key:
        case "type":
            names = value if isinstance(value, list) else [value]
            return bool(names) and all(name in SCHEMA_TYPES for name in names)
        case "description":
            return isinstance(value, str)
        case "properties" | "items":
            return isinstance(value, dict)
        case _:  # lists: required, enum, anyOf
            return isinstance(value, list) and bool(value)
