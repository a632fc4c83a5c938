"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_fields import MAX_NOTICES_TOLD, new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.answers.sse import encode_json, receipt_facts
from gateway.answers.unary import JsonAnswer, UnaryAnswer, cut_off_seconds
from gateway.anthropic.answer import MessagesAnswer
from gateway.anthropic.schema import (
    CountTokensRequest,
    FunctionTool,
    MessagesRequest,
    OutputFormatParam,
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
)
from gateway.anthropic.stream import MessagesStream
from gateway.anthropic.turns import Turns
from gateway.config import RequestLimits
from gateway.deps import InferenceDeps
from gateway.errors import DetailedError
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia, supply
from gateway.openai.extension_fields import unknown_extensions
from gateway.request_facts import facts_of
from weft.api.common.v1 import chat_pb2, tokenize_pb2, warning_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.dispatch.schema_guard import SchemaGuard
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.json_objects import add_member, to_json_object
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation

SURFACE = "messages"


async def create_message(deps: InferenceDeps, request: Request) -> Response:
    """Continue a conversation, as one message or as a stream of server-sent events."""
    scope = request.scope
    raw = await read_json_body(scope, request.receive, deps.config)
    params = parse(MessagesRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(scope, surface=SURFACE, params=params, model=params.model, operation=Operation.CHAT)
    media = deps.request_media(params)
    wanted = to_payload(params, deps.config.limits, media)
    work = Work(deps, scope, context, wanted.payload, wanted.warnings, media)
    identity = new_identity(deps.clock, "msg", params.model)
    if not params.stream:
        return unary(work, MessagesAnswer(identity))
    return streamed(work, MessagesStream(identity, estimated_prompt_tokens(wanted.payload)))


async def count_tokens(deps: InferenceDeps, request: Request) -> Response:
    """How many tokens the model itself makes of a request; never an estimate."""
    scope = request.scope
    raw = await read_json_body(scope, request.receive, deps.config)
    params = parse(CountTokensRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(scope, surface=SURFACE, params=params, model=params.model, operation=Operation.TOKENIZE)
    media = deps.request_media(params)
    wanted = to_countable(params, deps.config.limits, media)

    async def produce() -> JsonAnswer:
        await supply(wanted.payload, media, deps.media)
        facts_of(scope).was_dispatched = True
        call = deps.dispatcher.tokenize(context, tokenize_pb2.TokenizePayload(chat=wanted.payload))
        result = await call.result()
        told = [] if call.receipt is None else receipt_facts(call.receipt)
        return JsonAnswer(encode_json({"input_tokens": result.count}), told)

    return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(deps, context))


_EFFORTS: dict[str, chat_pb2.ReasoningEffort.ValueType] = {
    "low": chat_pb2.REASONING_EFFORT_LOW,
    "medium": chat_pb2.REASONING_EFFORT_MEDIUM,
    "high": chat_pb2.REASONING_EFFORT_HIGH,
    "xhigh": chat_pb2.REASONING_EFFORT_XHIGH,
    "max": chat_pb2.REASONING_EFFORT_MAX,
}
_TOOL_MODES: dict[str, chat_pb2.ToolChoice.Mode.ValueType] = {
    "none": chat_pb2.ToolChoice.MODE_NONE,
    "auto": chat_pb2.ToolChoice.MODE_AUTO,
    "any": chat_pb2.ToolChoice.MODE_REQUIRED,
}
_COPIED = ("max_tokens", "temperature", "top_p", "top_k")
_SCHEMA_NAME = "output"
# What engines call the bound on thinking; those that have none warn about it.
_BUDGET = "thinking_budget_tokens"
# Fields with which a caller asks for a service rather than tunes one: whoever sends them should hear that it is not
# rendered here.
_NOT_OFFERED = ("compaction", "container", "fallbacks", "inference_geo", "mcp_servers")
# What clients read of a refused thread, before they send the whole conversation without one.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedMessages:
    """A chat payload, with warnings for the caller."""

    payload: chat_pb2.ChatPayload
    warnings: tuple[warning_pb2.Warning, ...]


def to_payload(request: MessagesRequest, limits: RequestLimits, media: RequestMedia) -> TranslatedMessages:
    """Returns the chat payload. Raises INVALID_ARGUMENT naming the wrong field."""
    translated = to_countable(request, limits, media)
    payload = translated.payload
    for name in _COPIED:
        value = getattr(request, name)
        if value is not None:
            setattr(payload.sampling, name, value)
    stops = request.stop_sequences or []
    if len(stops) > limits.max_stop:
        raise invalid_field("stop_sequences", f"must have at most {limits.max_stop} strings")
    payload.sampling.stop.extend(stops)
    return translated


def to_countable(request: CountTokensRequest, limits: RequestLimits, media: RequestMedia) -> TranslatedMessages:
    """Returns the payload whose tokens are counted. Raises INVALID_ARGUMENT naming the wrong field."""
    if request.thread is not None:
        raise _no_threads()
    if len(request.messages) > limits.max_messages:
        raise invalid_field("messages", f"must have at most {limits.max_messages} entries")
    payload = chat_pb2.ChatPayload()
    turns = Turns(payload, media)
    if request.system is not None:
        turns.add_system(request.system)
    for index, message in enumerate(request.messages):
        turns.add(message, f"messages[{index}]")
    warnings = [_warning(field, "cannot be read here and was left out") for field in turns.unreadable]
    guard = SchemaGuard(limits.schemas)
    warnings += _fill_tools(payload, request.tools or [], limits, guard)
    if request.tool_choice is not None:
        _fill_tool_choice(payload, request.tool_choice)
    _fill_output(payload, request, guard)
    if request.thinking is not None:
        _fill_thinking(payload, request.thinking)
    given = request.model_extra or {}
    warnings += [_warning(name, "is not offered here; it was not used") for name in _NOT_OFFERED if given.get(name)]
    warnings += unknown_extensions(given)
    return TranslatedMessages(payload=payload, warnings=tuple(warnings[:MAX_NOTICES_TOLD]))


def _fill_tools(
    payload: chat_pb2.ChatPayload, tools: list[ToolParam], limits: RequestLimits, guard: SchemaGuard
) -> list[warning_pb2.Warning]:
    """Add the tools; returns a warning for each that is not offered to the model."""
    if len(tools) > limits.max_tools:
        raise invalid_field("tools", f"must have at most {limits.max_tools} entries")
    warnings = []
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            schema = guard.require_safe(tool.input_schema, f"tools[{index}].input_schema")
            _fill_tool(payload.tools.add(), tool, schema, f"tools[{index}]")
        else:
            message = f"tools of type '{tool.type[:64]}' are not offered here; the model was not told of it"
            warnings.append(_warning(f"tools[{index}]", message))
    return warnings


def _fill_tool(target: chat_pb2.Tool, tool: FunctionTool, schema: Mapping[str, Any], field: str) -> None:
    target.function.name = tool.name
    if tool.description is not None:
        target.function.description = tool.description
    target.function.parameters.CopyFrom(to_json_object(schema, f"{field}.input_schema"))
    if tool.strict is not None:
        target.function.strict = tool.strict


def _fill_tool_choice(payload: chat_pb2.ChatPayload, choice: ToolChoiceParam) -> None:
    if choice.type == "tool":
        if choice.name is None:
            raise invalid_field("tool_choice.name", "is required for type 'tool'")
        if all(tool.function.name != choice.name for tool in payload.tools):
            raise invalid_field("tool_choice.name", "names none of the tools that the model can be told of")
        payload.tool_choice.function_name = choice.name
    elif payload.tools:
        payload.tool_choice.mode = _TOOL_MODES[choice.type]
    elif choice.type == "any":
        raise invalid_field("tool_choice.type", "cannot be 'any' without a tool that has an 'input_schema'")
    if choice.disable_parallel_tool_use is not None and payload.tools:
        payload.parallel_tool_calls = not choice.disable_parallel_tool_use


def _fill_output(payload: chat_pb2.ChatPayload, request: CountTokensRequest, guard: SchemaGuard) -> None:
    config = request.output_config
    if config is not None and config.effort is not None:
        payload.reasoning_effort = _EFFORTS[config.effort]
    if config is not None and config.format is not None:
        _fill_format(payload, config.format, "output_config.format.schema", guard)
    elif request.output_format is not None:
        _fill_format(payload, request.output_format, "output_format.schema", guard)


def _fill_format(payload: chat_pb2.ChatPayload, wanted: OutputFormatParam, field: str, guard: SchemaGuard) -> None:
    schema = guard.require_safe(wanted.schema_, field)
    target = payload.response_format.json_schema
    target.name = _SCHEMA_NAME
    target.strict = True
    target.schema.CopyFrom(to_json_object(schema, field))


def _fill_thinking(payload: chat_pb2.ChatPayload, wanted: ThinkingParam) -> None:
    if wanted.type == "disabled":
        payload.thinking = False
    elif wanted.type == "enabled":
        payload.thinking = True
        if wanted.budget_tokens is not None:
            add_member(payload.extra_parameters, _BUDGET, wanted.budget_tokens, "thinking.budget_tokens")


def _no_threads() -> WeftError:
    told = "thread: conversations are not kept here: send the whole conversation without 'thread'"
    error = DetailedError(Reason.INVALID_ARGUMENT, told, details={"details": _NO_THREADS})
    error.metadata["field"] = "thread"
    return error


def _warning(field: str, message: str) -> warning_pb2.Warning:
    return warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field=field, message=message)
