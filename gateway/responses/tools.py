"""Tools, tool choice, text format and decoding of a Responses request."""

import re

from gateway.config import RequestLimits
from gateway.openai.chat_schema import MAX_NAME_CHARS
from gateway.responses.schema import (
    Decoding,
    PoolMessage,
    ResponsesRequest,
    ResponsesToolChoiceObject,
    ResponseTool,
    TextFormat,
)
from weft.api.common.v1 import chat_pb2, sampling_pb2, warning_pb2
from weft.dispatch.schema_guard import SchemaGuard, require_safe_schema
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import to_json_object

_UNKNOWN_SOURCES = frozenset({None, "auto", "mixed"})
# A template for translation names one source language in any case; the words below say that it may be another.
_FALLBACK_SOURCE = "en"
_FALLBACK_FOR_ENGLISH = "fr"
_DETECT = (
    "The text may be in any language, or in several. Find out each segment's language and translate all of it.\n\n"
)
_NAMES = {
    "top_k": "top_k",
    "top_p": "top_p",
    "temperature": "temperature",
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "max_tokens",
}


def require_pool_messages(messages: list[PoolMessage]) -> None:
    """Raises INVALID_ARGUMENT unless the last turn is the user's."""
    if messages[-1].role != "user":
        raise invalid_field(f"messages[{len(messages) - 1}].role", "must be 'user': the last turn is the user's")


def fill_decoding(target: sampling_pb2.SamplingParams, decoding: Decoding, limits: RequestLimits) -> None:
    """Add what `decoding` says. Raises INVALID_ARGUMENT where the request says something else in another place."""
    for name, known_as in _NAMES.items():
        value = getattr(decoding, name)
        if value is None:
            continue
        if target.HasField(known_as) and getattr(target, known_as) != value:  # type: ignore[arg-type]
            raise invalid_field(f"decoding.{name}", "must not differ from what the request says outside of 'decoding'")
        setattr(target, known_as, value)
    if decoding.stop:
        if len(target.stop) + len(decoding.stop) > limits.max_stop:
            raise invalid_field("decoding.stop", f"must have at most {limits.max_stop} strings")
        target.stop.extend(decoding.stop)


def languages_of(request: ResponsesRequest) -> dict[str, object]:
    """Returns the template's arguments for a translation; none where none is requested."""
    target = request.target_lang_code
    if target is None:
        if request.source_lang_code is not None:
            raise invalid_field("target_lang_code", "is required with 'source_lang_code'")
        return {}
    source = request.source_lang_code
    if source in _UNKNOWN_SOURCES:
        is_english = target.lower().partition("-")[0].partition("_")[0] == _FALLBACK_SOURCE
        source = _FALLBACK_FOR_ENGLISH if is_english else _FALLBACK_SOURCE
    return {"source_lang_code": source, "target_lang_code": target}


def fill_languages(payload: chat_pb2.ChatPayload, request: ResponsesRequest) -> None:
    """Say before the last message's text that its language is to be found out, where that is so."""
    if request.target_lang_code is None or request.source_lang_code not in _UNKNOWN_SOURCES:
        return
    for part in payload.messages[-1].content:
        if part.WhichOneof("kind") == "text":
            part.text = _DETECT + part.text
            return


FUNCTION = "function"
_MODES: dict[str, chat_pb2.ToolChoice.Mode.ValueType] = {
    "none": chat_pb2.ToolChoice.MODE_NONE,
    "auto": chat_pb2.ToolChoice.MODE_AUTO,
    "required": chat_pb2.ToolChoice.MODE_REQUIRED,
}
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}")
_NAME_RULE = f"must be 1 to {MAX_NAME_CHARS} letters, digits, '_' or '-'"
_MAX_SHOWN_CHARS = 64


def fill_tools(
    payload: chat_pb2.ChatPayload, tools: list[ResponseTool], limits: RequestLimits
) -> list[warning_pb2.Warning]:
    """Add the functions. Returns a warning for each other tool: a model that never hears of it cannot call it."""
    if len(tools) > limits.max_tools:
        raise invalid_field("tools", f"must have at most {limits.max_tools} entries")
    warnings, guard = [], SchemaGuard(limits.schemas)
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if tool.type == FUNCTION:
            _fill_tool(payload.tools.add(), tool, field, guard)
        else:
            shown = tool.type[:_MAX_SHOWN_CHARS]
            warnings.append(unsupported(field, f"tools of type '{shown}' are not offered here; it was left out"))
    return warnings


def _fill_tool(target: chat_pb2.Tool, tool: ResponseTool, field: str, guard: SchemaGuard) -> None:
    target.function.name = _required_name(tool.name, f"{field}.name")
    if tool.description is not None:
        target.function.description = tool.description
    if tool.parameters is not None:
        schema = guard.require_safe(tool.parameters, f"{field}.parameters")
        target.function.parameters.CopyFrom(to_json_object(schema, f"{field}.parameters"))
    if tool.strict is not None:
        target.function.strict = tool.strict


def fill_tool_choice(payload: chat_pb2.ChatPayload, choice: str | ResponsesToolChoiceObject) -> None:
    """Set whether and what must be called. Raises INVALID_ARGUMENT for what is not offered."""
    if isinstance(choice, str):
        _fill_mode(payload, choice, "tool_choice")
    elif choice.type == FUNCTION:
        name = choice.name
        if name is None:
            raise invalid_field("tool_choice.name", "is required")
        if all(tool.function.name != name for tool in payload.tools):
            raise invalid_field("tool_choice.name", "names none of the tools")
        payload.tool_choice.function_name = name
    elif choice.type == "allowed_tools":
        _fill_allowed(payload, choice)
    else:
        raise invalid_field(
            "tool_choice.type", "must be 'function' or 'allowed_tools': other tools are not offered here"
        )


def _fill_mode(payload: chat_pb2.ChatPayload, mode: str, field: str) -> None:
    if mode == "required" and not payload.tools:
        raise invalid_field(field, "cannot be 'required' without a tool of type 'function'")
    payload.tool_choice.mode = _MODES[mode]


def _fill_allowed(payload: chat_pb2.ChatPayload, choice: ResponsesToolChoiceObject) -> None:
    """Adds only the allowed tools to the payload."""
    if choice.tools is None or choice.mode is None:
        raise invalid_field("tool_choice.tools" if choice.tools is None else "tool_choice.mode", "is required")
    names = {tool.name for tool in choice.tools if tool.type == FUNCTION}
    unknown = names - {tool.function.name for tool in payload.tools}
    if unknown:
        raise invalid_field("tool_choice.tools", "names a function that is none of the tools")
    if not names:
        raise invalid_field("tool_choice.tools", "must have a tool of type 'function'")
    kept = [tool for tool in payload.tools if tool.function.name in names]
    del payload.tools[:]
    payload.tools.extend(kept)
    _fill_mode(payload, choice.mode, "tool_choice.mode")


def fill_format(payload: chat_pb2.ChatPayload, wanted: TextFormat, limits: RequestLimits) -> None:
    """Set the form of the answer."""
    target = payload.response_format
    if wanted.type == "text":
        target.text = True
        return
    if wanted.type == "json_object" and wanted.schema_ is None:
        target.json_object = True
        return
    # An object with a schema is meant to follow it, as it is in chat completions.
    name = "answer" if wanted.name is None and wanted.type == "json_object" else wanted.name
    target.json_schema.name = _required_name(name, "text.format.name")
    if wanted.schema_ is None:
        raise invalid_field("text.format.schema", "is required for type 'json_schema'")
    if wanted.description is not None:
        target.json_schema.description = wanted.description
    if wanted.strict is not None:
        target.json_schema.strict = wanted.strict
    schema = require_safe_schema(wanted.schema_, "text.format.schema", limits.schemas)
    target.json_schema.schema.CopyFrom(to_json_object(schema, "text.format.schema"))


def _required_name(name: str | None, field: str) -> str:
    if name is None:
        raise invalid_field(field, "is required")
    if _NAME.fullmatch(name) is None:
        raise invalid_field(field, _NAME_RULE)
    return name


def unsupported(field: str, message: str) -> warning_pb2.Warning:
    """Returns the warning for an unsupported part of a request."""
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field=field, message=message)
