"""Converts chat payloads to JSON bodies of Anthropic's Messages API. Pure functions."""

import base64
import json
from collections.abc import Iterable, Sequence

from runner_svc.openai_upstream.openai_request import Json, PreparedBody, json_object, warning_frame
from runner_svc.policy.parameters import ParameterProfile, untaken_warning
from weft.api.common.v1 import chat_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.history import object_arguments
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

DEFAULT_MAX_TOKENS = 4_096
"""Answer length limit for requests without one: the API requires it."""
MIN_THINKING_TOKENS = 1_024
"""The API's minimum thinking budget."""
_THINKING_TOKENS = {
    chat_pb2.REASONING_EFFORT_MINIMAL: 1_024,
    chat_pb2.REASONING_EFFORT_LOW: 2_048,
    chat_pb2.REASONING_EFFORT_UNSPECIFIED: 8_192,
    chat_pb2.REASONING_EFFORT_MEDIUM: 8_192,
    chat_pb2.REASONING_EFFORT_HIGH: 16_384,
    chat_pb2.REASONING_EFFORT_XHIGH: 32_000,
    chat_pb2.REASONING_EFFORT_MAX: 32_000,
}
_SAMPLED = ("temperature", "top_p", "top_k")
_UNTAKEN = ("min_p", "seed", "presence_penalty", "frequency_penalty", "repeat_penalty")
_TOOL_CHOICES = {
    chat_pb2.ToolChoice.MODE_NONE: "none",
    chat_pb2.ToolChoice.MODE_AUTO: "auto",
    chat_pb2.ToolChoice.MODE_REQUIRED: "any",
}
_BUDGET = "thinking_budget_tokens"
"""The mesh's name for the thinking limit."""
_SYSTEM = frozenset({chat_pb2.ROLE_SYSTEM, chat_pb2.ROLE_DEVELOPER})


def messages_body(payload: chat_pb2.ChatPayload, model: str, profile: ParameterProfile) -> PreparedBody:
    """Builds the body of POST /v1/messages; always with streaming.

    Raises INVALID_ARGUMENT naming what the API does not support, MODALITY_UNSUPPORTED for a recording.
    """
    if payload.choice_count > 1:
        raise invalid_field("n", "must be 1: a provider with Anthropic's API supports one choice")
    if payload.response_format.WhichOneof("kind") in ("json_object", "json_schema"):
        raise invalid_field("response_format", "is not available from a provider with Anthropic's API; use a tool")
    sampling = payload.sampling
    limit = sampling.max_tokens if sampling.HasField("max_tokens") else DEFAULT_MAX_TOKENS
    body: Json = {"model": model, "max_tokens": limit, "stream": True, "messages": _turns(payload.messages)}
    if system := [_part(part) for message in payload.messages if message.role in _SYSTEM for part in message.content]:
        body["system"] = system
    for name in _SAMPLED:
        if sampling.HasField(name):  # type: ignore[arg-type]  # the names are fields
            body[name] = getattr(sampling, name)
    if sampling.stop:
        body["stop_sequences"] = list(sampling.stop)
    if payload.tools:
        body["tools"] = [_tool(tool.function) for tool in payload.tools]
        if (choice := _tool_choice(payload)) is not None:
            body["tool_choice"] = choice
    untaken = _untaken(payload) + _set_thinking(body, payload, profile)
    return PreparedBody(body, _warnings(untaken, profile))


def _warnings(names: Iterable[str], profile: ParameterProfile) -> Frame:
    return warning_frame([untaken_warning(name, profile.engine) for name in names])


def _untaken(payload: chat_pb2.ChatPayload) -> list[str]:
    """Returns the request parameters that the API does not support."""
    names = [name for name in _UNTAKEN if payload.sampling.HasField(name)]  # type: ignore[arg-type]  # fields
    if payload.sampling.logit_bias:
        names.append("logit_bias")
    if payload.logprobs:
        names.append("logprobs")
    return names + [name for name in _extras(payload) if name != _BUDGET]


def _extras(payload: chat_pb2.ChatPayload) -> Json:
    return json_object(payload.extra_parameters)


def _set_thinking(body: Json, payload: chat_pb2.ChatPayload, profile: ParameterProfile) -> list[str]:
    """Sets the thinking mode; returns the parameters that must be dropped because of it."""
    effort = payload.reasoning_effort
    if payload.HasField("thinking"):
        wanted = payload.thinking
    elif effort:
        wanted = effort != chat_pb2.REASONING_EFFORT_NONE
    elif profile.thinking is None:
        return []
    else:
        wanted = profile.thinking
    if not wanted:
        body["thinking"] = {"type": "disabled"}
        return []
    named = _extras(payload).get(_BUDGET)
    budget = named if isinstance(named, int) else _THINKING_TOKENS.get(effort, MIN_THINKING_TOKENS)
    budget = min(budget, body["max_tokens"] - 1)
    forces_tool = body.get("tool_choice", {}).get("type") in ("any", "tool")
    if budget < MIN_THINKING_TOKENS or forces_tool or _goes_on_unsigned(payload.messages):
        return ["thinking"]
    body["thinking"] = {"type": "enabled", "budget_tokens": budget}
    refused: list[str] = [name for name in ("temperature", "top_k") if name in body]
    for name in refused:
        del body[name]
    return refused


def _goes_on_unsigned(messages: Sequence[chat_pb2.ChatMessage]) -> bool:
    """Whether the turn continues after a tool result but the caller has not returned the signed thinking before it.

    The API then rejects further thinking in that turn. Callers of OpenAI's APIs never have signatures.
    """
    if not messages or messages[-1].role != chat_pb2.ROLE_TOOL:
        return False
    calling = next((message for message in reversed(messages) if message.role == chat_pb2.ROLE_ASSISTANT), None)
    return calling is None or not calling.signed_reasoning


def _turns(messages: Sequence[chat_pb2.ChatMessage]) -> list[Json]:
    """Returns the conversation with one turn per speaker; tool results belong to the user."""
    turns: list[Json] = []
    for message in messages:
        if message.role in _SYSTEM:
            continue
        is_assistant = message.role == chat_pb2.ROLE_ASSISTANT
        role, blocks = ("assistant" if is_assistant else "user"), _blocks(message)
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: chat_pb2.ChatMessage) -> list[Json]:
    # The API rejects empty texts.
    parts = [_part(part) for part in message.content if part.WhichOneof("kind") != "text" or part.text]
    if message.role == chat_pb2.ROLE_TOOL:
        result: Json = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": parts}
        return [_marked(result, message)]
    return [
        *map(_thinking, message.signed_reasoning),
        *parts,
        *map(_tool_use, message.tool_calls),
    ]


def _thinking(piece: chat_pb2.SignedReasoning) -> Json:
    if piece.redacted:
        return {"type": "redacted_thinking", "data": piece.redacted}
    return {"type": "thinking", "thinking": piece.text, "signature": piece.signature}


def _part(part: chat_pb2.ContentPart) -> Json:
    match part.WhichOneof("kind"):
        case "image":
            data = base64.b64encode(part.image.data).decode("ascii")
            source = {"type": "base64", "media_type": part.image.media_type, "data": data}
            return _marked({"type": "image", "source": source}, part)
        case "audio":
            raise WeftError(Reason.MODALITY_UNSUPPORTED, "a provider with Anthropic's API does not support recordings")
        case _:
            return _marked({"type": "text", "text": part.text}, part)


def _tool_use(call: chat_pb2.ToolCallRecord) -> Json:
    arguments: Json = json.loads(object_arguments(call.arguments_text))
    return _marked({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}, call)


def _tool(function: chat_pb2.FunctionTool) -> Json:
    result: Json = {"name": function.name}
    if function.HasField("description"):
        result["description"] = function.description
    has_schema = function.HasField("parameters")
    result["input_schema"] = json_object(function.parameters) if has_schema else {"type": "object", "properties": {}}
    return _marked(result, function)


def _tool_choice(payload: chat_pb2.ChatPayload) -> Json | None:
    """Returns the tool choice; None: the API's default."""
    is_named = payload.tool_choice.WhichOneof("kind") == "function_name"
    if not payload.HasField("tool_choice") and not payload.HasField("parallel_tool_calls"):
        return None
    if is_named:
        choice: Json = {"type": "tool", "name": payload.tool_choice.function_name}
    else:
        choice = {"type": _TOOL_CHOICES.get(payload.tool_choice.mode, "auto")}
    if payload.HasField("parallel_tool_calls") and choice["type"] != "none":
        choice["disable_parallel_tool_use"] = not payload.parallel_tool_calls
    return choice


Marked = chat_pb2.ContentPart | chat_pb2.ChatMessage | chat_pb2.ToolCallRecord | chat_pb2.FunctionTool


def _marked(block: Json, source: Marked) -> Json:
    """Returns a block with a cache mark (the provider caches the prompt up to it) if the request has one there."""
    if source.HasField("cache_mark"):
        mark: Json = {"type": "ephemeral"}
        if source.cache_mark.ttl:
            mark["ttl"] = source.cache_mark.ttl
        block["cache_control"] = mark
    return block
