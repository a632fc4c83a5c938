"""Translation of payloads to the JSON requests of an OpenAI-compatible server. Pure."""

import base64
from collections.abc import Sequence
from typing import Any

from runner_svc.backend.port import CacheUse
from runner_svc.openai_upstream.infill import infill_prompt
from runner_svc.policy.grammar_schema import fitted_schema
from runner_svc.policy.parameters import (
    TEMPLATE_ARGUMENTS,
    ParameterProfile,
    ParameterWarning,
    admit,
    plain_name,
    unread_arguments,
    unread_effort,
    untaken_warning,
)
from weft.api.common.v1 import (
    chat_pb2,
    completion_pb2,
    embedding_pb2,
    event_pb2,
    json_value_pb2,
    sampling_pb2,
    warning_pb2,
)
from weft.dispatch.extra_fields import OF_FUNCTION, carried_only
from weft.dispatch.frames import Frame
from weft.dispatch.history import MAX_HISTORY_WARNINGS, SYSTEM_ROLES, object_arguments
from weft.dispatch.payload_description import steady_text
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.fast_dataclass import fast_dataclass

Json = dict[str, Any]

_ROLES = {
    chat_pb2.ROLE_SYSTEM: "system",
    # Chat templates of open models have no developer role; system is equivalent.
    chat_pb2.ROLE_DEVELOPER: "system",
    chat_pb2.ROLE_USER: "user",
    chat_pb2.ROLE_ASSISTANT: "assistant",
    chat_pb2.ROLE_TOOL: "tool",
}
_TOOL_MODES = {
    chat_pb2.ToolChoice.MODE_NONE: "none",
    chat_pb2.ToolChoice.MODE_AUTO: "auto",
    chat_pb2.ToolChoice.MODE_REQUIRED: "required",
}
_AUDIO_FORMATS = {"audio/mpeg": "mp3"}
"""Format names in the API that differ from the media subtype."""
_PLAIN_SOUND = frozenset({"wav", "mp3"})
_SCALARS = frozenset(
    {
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
        *("presence_penalty", "frequency_penalty", "repeat_penalty"),
    }
)
_SCHEMA_HOLDERS = frozenset({"json_schema", "response_format", "tools"})
_ENABLE_THINKING = "enable_thinking"
"""Chat template argument that switches thinking on and off."""
_TOKEN_LIMIT = "max_tokens"  # noqa: S105 - a parameter's name
STREAM_OPTIONS = "stream_options"
_CHOICES = "n"
_VOLATILE = "differs in every request and was removed, so that the engine's prefix cache can be used"
_NOT_AN_OBJECT = "is not a JSON object; it was sent to the model as a string"


@fast_dataclass()
class PreparedBody:
    """A request body, and warnings for the caller."""

    body: Json
    warnings: Frame
    """One `warning` event for each parameter that is not sent; at most 64."""


def chat_body(payload: chat_pb2.ChatPayload, model: str, profile: ParameterProfile) -> PreparedBody:
    """Builds the body of POST /v1/chat/completions: always a stream with usage. An empty `model` is omitted.

    Raises INVALID_ARGUMENT naming an extra parameter with an invalid value.
    """
    body, warnings = _chat_fields(payload, model, profile), _rewritten(payload)
    warnings += _steadied(payload, body["messages"])
    _fit_engine(body, profile)
    if profile.engine.other_sound_name:
        _name_sound(body["messages"], profile.engine.other_sound_name)
    if profile.engine.format_excludes_calls:
        warnings += _choose_calls_or_format(body)
    if profile.engine.forces_one_tool and payload.tool_choice.WhichOneof("kind") == "function_name":
        _force(body, payload.tool_choice.function_name)
    arguments, unused = _add_extras(body, payload.extra_parameters, profile)
    warnings += unused
    _fit_schemas(body, profile)
    if arguments:
        # Engines read this argument themselves, whatever the template does.
        read_by_template = {name: value for name, value in arguments.items() if name != _ENABLE_THINKING}
        warnings += unread_arguments(read_by_template, profile)
    warnings += unread_effort(payload.reasoning_effort > chat_pb2.REASONING_EFFORT_NONE, profile)
    thinking = _thinking(payload, arguments, profile)
    warnings += _leave_out(body, profile)
    if profile.engine.is_strict:
        warnings += _fit_provider(body, thinking, profile)
    elif thinking is not None:
        arguments[_ENABLE_THINKING] = thinking
    if arguments:
        body[TEMPLATE_ARGUMENTS] = arguments
    return PreparedBody(body, warning_frame(warnings))


def _fit_engine(body: Json, profile: ParameterProfile) -> None:
    """Renames parameters for the engine, and limits the answer length to its maximum.

    Must run before extra parameters are added, which never replace a parameter of the API.
    """
    most = profile.most_answer_tokens
    if most is not None and body.get(_TOKEN_LIMIT, 0) > most:
        body[_TOKEN_LIMIT] = most
    for name, own_name in profile.engine.renamed.items():
        if name in body:
            body[own_name] = body.pop(name)


def _fit_schemas(body: Json, profile: ParameterProfile) -> None:
    """Rewrites the schemas of the answer and of functions for an engine that makes llama.cpp's grammars of them."""
    if not profile.engine.makes_gbnf or _SCHEMA_HOLDERS.isdisjoint(body):
        return
    holders = [(body, "json_schema"), (body.get("response_format", {}).get("json_schema", {}), "schema")]
    holders += [(tool["function"], "parameters") for tool in body.get("tools", ())]
    for holder, name in holders:
        if name in holder:
            holder[name] = fitted_schema(holder[name])


def _leave_out(body: Json, profile: ParameterProfile) -> list[ParameterWarning]:
    """Removes the parameters that the engine does not support and returns warnings about them.

    Raises INVALID_ARGUMENT if several choices are requested from an engine that returns one.
    """
    if profile.passthrough or profile.engine.untaken.isdisjoint(body):
        return []
    untaken = sorted(profile.engine.untaken & body.keys())
    for name in untaken:
        if name == _CHOICES and body[name] > 1:
            raise invalid_field(
                _CHOICES, f"must be 1: this model's engine ({profile.engine.engine}) supports one choice"
            )
        del body[name]
    return [untaken_warning(name, profile.engine) for name in untaken if name != _CHOICES]


def _fit_provider(body: Json, thinking: bool | None, profile: ParameterProfile) -> list[ParameterWarning]:
    """Adapts a body to a provider, which rejects unknown fields; returns warnings about removed ones."""
    untaken = []
    if thinking is not None and profile.thinking is None:
        untaken.append("thinking")
    elif thinking is not None:
        body["thinking"] = {"type": "enabled" if thinking else "disabled"}
    if _TOKEN_LIMIT in body:
        body[profile.token_limit_name] = body.pop(_TOKEN_LIMIT)
    return [untaken_warning(name, profile.engine) for name in untaken]


def _choose_calls_or_format(body: Json) -> list[ParameterWarning]:
    """Removes the format if a call is forced; returns a warning about the conflict."""
    if "tools" not in body or "response_format" not in body:
        return []
    choice = body.get("tool_choice", "auto")
    if choice == "none" or body["response_format"]["type"] == "text":
        return []
    if choice == "auto":
        message = "this model's engine cannot combine tools with response_format: its schema forbids tool calls"
        return [ParameterWarning(field="tools", message=message)]
    del body["response_format"]
    message = "response_format was not used: on this model's engine it forbids the calls that tool_choice requires"
    return [ParameterWarning(field="response_format", message=message)]


def _name_sound(messages: Sequence[Json], name: str) -> None:
    for message in messages:
        content = message["content"]
        for part in content if isinstance(content, list) else ():
            if (sound := part.get("input_audio")) and sound["format"] not in _PLAIN_SOUND:
                sound["format"] = name


def _force(body: Json, name: str) -> None:
    """Forces a call of one function for llama-server, which silently treats a choice by name as `auto`."""
    body["tools"] = [tool for tool in body.get("tools", ()) if tool["function"]["name"] == name]
    if not body["tools"]:
        raise invalid_field("tool_choice", f"names {name[:64]}, which is not among the tools")
    body["tool_choice"] = "required"


def _chat_fields(payload: chat_pb2.ChatPayload, model: str, profile: ParameterProfile) -> Json:
    body = _stream_body(payload.sampling, model)
    is_strict = profile.engine.is_strict
    body["messages"] = [_message(message, is_strict=is_strict) for message in payload.messages]
    if payload.HasField("choice_count"):
        body["n"] = payload.choice_count
    if payload.logprobs:
        body["logprobs"] = True
        if payload.HasField("top_logprobs"):
            body["top_logprobs"] = payload.top_logprobs
    if payload.tools:
        body["tools"] = [_tool(tool.function) for tool in payload.tools]
    if payload.HasField("tool_choice"):
        body["tool_choice"] = _tool_choice(payload.tool_choice)
    if payload.HasField("parallel_tool_calls"):
        body["parallel_tool_calls"] = payload.parallel_tool_calls
    if payload.HasField("response_format"):
        body["response_format"] = _response_format(payload.response_format)
    if payload.reasoning_effort:
        name = chat_pb2.ReasoningEffort.Name(payload.reasoning_effort)
        body["reasoning_effort"] = name.removeprefix("REASONING_EFFORT_").lower()
    return body


def completion_body(payload: completion_pb2.CompletionPayload, model: str, profile: ParameterProfile) -> PreparedBody:
    """Builds the body of POST /v1/completions, with a suffix that of /infill: always a stream with usage.

    Raises INVALID_ARGUMENT for echo, a suffix that the engine does not support and wrong extra parameters.
    """
    body = _stream_body(payload.sampling, model)
    prompts = [_prompt(prompt) for prompt in payload.prompts]
    body["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    if payload.HasField("suffix"):
        if not profile.engine.infills:
            raise invalid_field("suffix", f"{profile.engine.engine} does not support fill-in-the-middle; omit it")
        body |= infill_prompt(payload)
    if payload.HasField("choice_count"):
        body["n"] = payload.choice_count
    if payload.HasField("logprobs"):
        body["logprobs"] = payload.logprobs
    # llama-server silently ignores it and would answer a different request.
    if payload.echo:
        raise invalid_field("echo", "this runtime cannot repeat the prompt; omit it")
    _fit_engine(body, profile)
    arguments, warnings = _add_extras(body, payload.extra_parameters, profile)
    _fit_schemas(body, profile)
    warnings += _leave_out(body, profile)
    if arguments and profile.passthrough:
        body[TEMPLATE_ARGUMENTS] = arguments
    elif arguments:
        # Prompts are not rendered by a template: servers accept the arguments and ignore them.
        warnings.append(untaken_warning(TEMPLATE_ARGUMENTS, profile.engine))
    return PreparedBody(body, warning_frame(warnings))


def embedding_body(payload: embedding_pb2.EmbeddingPayload, model: str = "") -> Json:
    """Builds the body of POST /v1/embeddings."""
    body: Json = {**model_field(model), "input": [_prompt(item) for item in payload.inputs], "encoding_format": "float"}
    if payload.HasField("dimensions"):
        body["dimensions"] = payload.dimensions
    return body


def add_cache_use(body: Json, use: CacheUse, *, has_slots: bool) -> None:
    """Adds the prefix cache options to a body if the server supports them."""
    if has_slots and use.slot is not None:
        body["id_slot"] = use.slot
    if has_slots and use.fresh:
        body["cache_prompt"] = False
    if use.salt:
        body["cache_salt"] = use.salt
    if use.session:
        body["session_id"] = use.session


def choices_per_prompt(payload: chat_pb2.ChatPayload | completion_pb2.CompletionPayload) -> int:
    """Returns the requested number of choices per prompt."""
    return payload.choice_count if payload.HasField("choice_count") else 1


def call_ids(payload: chat_pb2.ChatPayload | completion_pb2.CompletionPayload) -> set[str]:
    """Returns the ids of the tool calls in a conversation."""
    if not isinstance(payload, chat_pb2.ChatPayload):
        return set()
    return {call.id for message in payload.messages for call in message.tool_calls}


def expected_choices(payload: chat_pb2.ChatPayload | completion_pb2.CompletionPayload) -> int:
    """Returns the number of choices in a complete answer."""
    prompts = len(payload.prompts) if isinstance(payload, completion_pb2.CompletionPayload) else 1
    return prompts * choices_per_prompt(payload)


def warning_frame(warnings: Sequence[ParameterWarning]) -> Frame:
    """Returns an event for each warning."""
    if not warnings:
        return []
    code = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
    return [
        event_pb2.InferenceEvent(warning=warning_pb2.Warning(code=code, field=warning.field, message=warning.message))
        for warning in warnings
    ]


def _add_extras(
    body: Json, extra: json_value_pb2.JsonObject, profile: ParameterProfile
) -> tuple[Json, list[ParameterWarning]]:
    """Adds the supported extra parameters to `body`; returns the template's arguments, and warnings about the rest."""
    if not extra.fields:
        return {}, []
    admitted = admit(json_object(extra), profile)
    send = dict(admitted.send)
    arguments = send.pop(TEMPLATE_ARGUMENTS, {})
    if not isinstance(arguments, dict):
        raise invalid_field(TEMPLATE_ARGUMENTS, "must be an object")
    for name, whole in profile.engine.members.items():
        if name in send and not profile.passthrough:
            send[whole] = {**send.get(whole, {}), name: send.pop(name)}
    # An extra parameter never replaces a parameter of the API.
    body.update({name: value for name, value in send.items() if plain_name(name) not in body})
    return arguments, list(admitted.warnings)


def _thinking(payload: chat_pb2.ChatPayload, arguments: Json, profile: ParameterProfile) -> bool | None:
    """Whether the model thinks; None: as the template decides. The request takes precedence over the configuration."""
    if payload.HasField("thinking"):
        return payload.thinking
    if (enabled := arguments.get(_ENABLE_THINKING)) is not None:
        if not isinstance(enabled, bool):
            raise invalid_field(f"{TEMPLATE_ARGUMENTS}.{_ENABLE_THINKING}", "must be true or false")
        return enabled
    if payload.reasoning_effort == chat_pb2.REASONING_EFFORT_NONE:
        # Strict servers reject unknown fields, and support "none" themselves.
        knows_thinking = profile.engine.is_strict and profile.thinking is not None
        return False if knows_thinking or profile.engine.thinks_by_template else None
    return profile.thinking


def model_field(name: str) -> Json:
    """Returns the field with the model's name; empty for llama-server, which serves one model without a name."""
    return {"model": name} if name else {}


def _stream_body(sampling: sampling_pb2.SamplingParams, model: str) -> Json:
    body: Json = {**model_field(model), "stream": True, STREAM_OPTIONS: {"include_usage": True}}
    for field, value in sampling.ListFields():
        if field.name in _SCALARS:
            body[field.name] = value
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return body


def _message(message: chat_pb2.ChatMessage, *, is_strict: bool) -> Json:
    result: Json = _extra(message.extra_fields, is_strict=is_strict)
    result |= {"role": _ROLES[message.role], "content": _content(message)}
    if message.HasField("name"):
        result["name"] = message.name
    if message.HasField("tool_call_id"):
        result["tool_call_id"] = message.tool_call_id
    if message.HasField("reasoning"):
        result["reasoning_content"] = message.reasoning
    if message.tool_calls:
        result["tool_calls"] = [
            _call(call, _extra(call.extra_fields, is_strict=is_strict)) for call in message.tool_calls
        ]
    return result


def _extra(fields: json_value_pb2.JsonObject, *, is_strict: bool) -> Json:
    """Returns the unknown fields of an earlier turn; for a strict engine only those that providers need."""
    found = json_object(fields) if fields.fields else {}
    return carried_only(found) if is_strict else found


def _call(call: chat_pb2.ToolCallRecord, extra: Json) -> Json:
    of_function = extra.get(OF_FUNCTION)
    function: Json = {"name": call.name, "arguments": object_arguments(call.arguments_text)}
    if isinstance(of_function, dict):
        function = of_function | function
    return extra | {"id": call.id, "type": "function", "function": function}


def _rewritten(payload: chat_pb2.ChatPayload) -> list[ParameterWarning]:
    """Returns warnings about earlier calls with arguments that are not a JSON object."""
    warnings = []
    for index, message in enumerate(payload.messages):
        for position, call in enumerate(message.tool_calls):
            if call.arguments_text.strip() and object_arguments(call.arguments_text) != call.arguments_text:
                field = f"messages[{index}].tool_calls[{position}].function.arguments"
                warnings.append(ParameterWarning(field=field, message=_NOT_AN_OBJECT))
    return warnings[:MAX_HISTORY_WARNINGS]


def _steadied(payload: chat_pb2.ChatPayload, messages: Sequence[Json]) -> list[ParameterWarning]:
    """Removes volatile text from system prompts so that the engine's prefix cache holds; returns warnings."""
    left_out: dict[str, str] = {}
    for index, (message, sent) in enumerate(zip(payload.messages, messages, strict=True)):
        if message.role not in SYSTEM_ROLES or not all(part.HasField("text") for part in message.content):
            continue
        found = [steady_text(part.text) for part in message.content]
        if not any(what for _, what in found):
            continue
        left_out |= {what: f"messages[{index}].content" for _, what in found if what}
        parts = [{"type": "text", "text": text} for text, what in found if text or not what]
        sent["content"] = parts if len(parts) > 1 else "".join(part["text"] for part in parts)
    if not left_out:
        return []
    return [ParameterWarning(field=field, message=f"{what} {_VOLATILE}") for what, field in left_out.items()]


def _content(message: chat_pb2.ChatMessage) -> str | list[Json] | None:
    parts = message.content
    if not parts:
        return None if message.tool_calls else ""
    if len(parts) == 1 and parts[0].WhichOneof("kind") == "text":
        return parts[0].text
    return [_part(part) for part in parts]


def _part(part: chat_pb2.ContentPart) -> Json:
    match part.WhichOneof("kind"):
        case "image":
            image = part.image
            data = base64.b64encode(image.data).decode("ascii")
            url: Json = {"url": f"data:{image.media_type};base64,{data}"}
            if image.detail:
                url["detail"] = image.detail
            return {"type": "image_url", "image_url": url}
        case "audio":
            audio = part.audio
            data = base64.b64encode(audio.data).decode("ascii")
            name = _AUDIO_FORMATS.get(audio.media_type) or audio.media_type.split("/")[-1]
            return {"type": "input_audio", "input_audio": {"data": data, "format": name}}
        case _:
            return {"type": "text", "text": part.text}


def _tool(function: chat_pb2.FunctionTool) -> Json:
    result: Json = {"name": function.name}
    if function.HasField("description"):
        result["description"] = function.description
    if function.HasField("parameters"):
        result["parameters"] = json_object(function.parameters)
    if function.HasField("strict"):
        result["strict"] = function.strict
    return {"type": "function", "function": result}


def _tool_choice(choice: chat_pb2.ToolChoice) -> str | Json:
    if choice.WhichOneof("kind") == "function_name":
        return {"type": "function", "function": {"name": choice.function_name}}
    return _TOOL_MODES.get(choice.mode, "auto")


def _response_format(response_format: chat_pb2.ResponseFormat) -> Json:
    match response_format.WhichOneof("kind"):
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            declared = response_format.json_schema
            schema: Json = {"name": declared.name, "schema": json_object(declared.schema)}
            if declared.HasField("strict"):
                schema["strict"] = declared.strict
            if declared.HasField("description"):
                schema["description"] = declared.description
            return {"type": "json_schema", "json_schema": schema}
        case _:
            return {"type": "text"}


def _prompt(prompt: completion_pb2.PromptInput) -> str | list[int]:
    return list(prompt.tokens.ids) if prompt.WhichOneof("kind") == "tokens" else prompt.text


def json_object(document: json_value_pb2.JsonObject) -> Json:
    """Returns a JsonObject as plain data."""
    return {item.name: _json_value(item.value) for item in document.fields}


def _json_value(value: json_value_pb2.JsonValue) -> Any:
    kind = value.WhichOneof("kind")
    match kind:
        case None | "null_value":
            return None
        case "array_value":
            return [_json_value(item) for item in value.array_value.values]
        case "object_value":
            return json_object(value.object_value)
        case _:
            return getattr(value, kind)
