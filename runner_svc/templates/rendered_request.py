"""Translates payloads to completions of rendered prompts for library servers. Pure except for `render`."""

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from runner_svc.openai_upstream.openai_request import (
    Json,
    PreparedBody,
    chat_body,
    choices_per_prompt,
    completion_body,
    json_object,
    warning_frame,
)
from runner_svc.policy.parameters import TEMPLATE_ARGUMENTS, ParameterProfile, untaken_warning
from runner_svc.templates.sandbox import ModelTemplates
from runner_svc.templates.translation import (
    LANGUAGES,
    Languages,
    languages_of,
    translates,
    translation_messages,
)
from weft.api.common.v1 import chat_pb2, completion_pb2, json_value_pb2
from weft.dispatch.frames import GenerationPayload
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

Render = Callable[[str, Mapping[str, Any]], Awaitable[str]]

_NOT_SAMPLING = frozenset(
    {
        *("stream", "stream_options", "messages", "prompt", "n", "tools", "tool_choice", "parallel_tool_calls"),
        *("response_format", "reasoning_effort", "max_tokens", "seed", "stop", "logit_bias", "grammar"),
        *(TEMPLATE_ARGUMENTS, "logprobs", "top_logprobs"),
    }
)


class _RenderedRequest(msgspec.Struct, kw_only=True):
    """A completion of rendered prompts, with the field names of its body."""

    prompt: list[str | list[int]]
    n: int = 1
    """Choices per prompt."""
    max_tokens: int | None = None
    """Maximum per choice; None: the rest of the context."""
    seed: int | None = None
    stop: list[str] = []
    logit_bias: dict[int, float] = {}
    grammar: str = ""
    """GBNF; empty: none."""
    json_schema: str = ""
    """JSON text of a schema; empty: none."""
    add_special: bool = True
    """Whether the tokenizer adds the begin token; False for chats because the template does."""
    sampling: dict[str, Any] = {}
    """Sampling parameters with the library's names; missing ones have the library's defaults."""


async def prepare(
    payload: GenerationPayload, templates: ModelTemplates, profile: ParameterProfile, render: Render
) -> PreparedBody:
    """Builds the completion for a payload.

    Raises INVALID_ARGUMENT naming an unsupported parameter, UNSUPPORTED_OPERATION for a chat without a template, and
    TEMPLATE_FAILED.
    """
    if isinstance(payload, chat_pb2.ChatPayload):
        return await _chat(payload, templates, profile, render)
    return _completion(payload, profile)


def _completion(payload: completion_pb2.CompletionPayload, profile: ParameterProfile) -> PreparedBody:
    if payload.HasField("logprobs"):
        raise _no_logprobs()
    prepared = completion_body(payload, "", profile)
    prompt = prepared.body["prompt"]
    # One prompt is a text or a list of token ids; several are a list of those.
    several = isinstance(prompt, list) and not all(isinstance(item, int) for item in prompt)
    prompts = prompt if several else [prompt]
    return PreparedBody(_request(prepared.body, prompts, choices_per_prompt(payload)), prepared.warnings)


async def _chat(
    payload: chat_pb2.ChatPayload, templates: ModelTemplates, profile: ParameterProfile, render: Render
) -> PreparedBody:
    if payload.logprobs:
        raise _no_logprobs()
    template = templates.pick(bool(payload.tools))
    if template is None:
        raise WeftError(Reason.UNSUPPORTED_OPERATION, "this model has no chat template; name one in chat_template_path")
    if TEMPLATE_ARGUMENTS in profile.engine.allowed:
        profile = replace(profile, templates=(template,))
    languages = None
    if translates(template):
        payload, languages = _without_languages(payload)
    prepared = chat_body(payload, "", profile)
    body = prepared.body
    variables = _variables(body, templates)
    if languages is not None:
        variables["messages"] = translation_messages(variables["messages"], languages)
    prompt = await render(template, variables)
    request = _request(body, [prompt], choices_per_prompt(payload))
    request["add_special"] = False
    if templates.eos_token:
        request["stop"].append(templates.eos_token)
    # With `passthrough`, unsupported parameters are still in the body.
    untaken = [untaken_warning(name, profile.engine) for name in sorted(profile.engine.untaken) if name in body]
    return PreparedBody(request, [*prepared.warnings, *warning_frame(untaken)])


async def rendered_translation(
    payload: chat_pb2.ChatPayload, templates: ModelTemplates, profile: ParameterProfile, render: Render
) -> chat_pb2.ChatPayload:
    """Returns a request to a translation model with the rendered prompt as its only message.

    For engines with a template that inserts a message unchanged. Raises as `prepare`.
    """
    assert templates.usual is not None, "that of a model that translates"
    plain, languages = _without_languages(payload)
    variables = _variables(chat_body(plain, "", profile).body, templates)
    variables["messages"] = translation_messages(variables["messages"], languages)
    prompt = await render(templates.usual, variables)
    del plain.messages[:]
    plain.messages.add(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=prompt)])
    return plain


def template_part(chat: chat_pb2.ChatPayload) -> chat_pb2.ChatPayload:
    """Returns the fields of a chat that its template renders."""
    part = chat_pb2.ChatPayload(
        messages=chat.messages, reasoning_effort=chat.reasoning_effort, extra_parameters=chat.extra_parameters
    )
    if chat.HasField("thinking"):
        part.thinking = chat.thinking
    if chat.tool_choice.mode != chat_pb2.ToolChoice.MODE_NONE:
        part.tools.extend(chat.tools)
    return part


def _without_languages(payload: chat_pb2.ChatPayload) -> tuple[chat_pb2.ChatPayload, Languages]:
    """Separates the languages from a payload's extra parameters and template arguments.

    Raises INVALID_ARGUMENT for tools, and as `languages_of`.
    """
    plain = chat_pb2.ChatPayload()
    plain.CopyFrom(payload)
    found: Json = {}
    kept = []
    for item in plain.extra_parameters.fields:
        if item.name == TEMPLATE_ARGUMENTS and item.value.WhichOneof("kind") == "object_value":
            arguments = item.value.object_value
            found |= _languages_in(arguments)
            others = [argument for argument in arguments.fields if argument.name not in LANGUAGES]
            del arguments.fields[:]
            arguments.fields.extend(others)
            if not others:
                continue
        if item.name not in LANGUAGES:
            kept.append(item)
    found |= _languages_in(payload.extra_parameters)
    del plain.extra_parameters.fields[:]
    plain.extra_parameters.fields.extend(kept)
    languages = languages_of(found)
    if plain.tools:
        raise invalid_field("tools", "this model only translates and does not support tools; omit them")
    return plain, languages


def _languages_in(document: json_value_pb2.JsonObject) -> Json:
    return {name: value for name, value in json_object(document).items() if name in LANGUAGES and value is not None}


def _request(body: Json, prompts: list[str | list[int]], choice_count: int) -> Json:
    response_format = body.get("response_format", {})
    kind = response_format.get("type", "text")
    grammar = body.get("grammar", "")
    if grammar and kind != "text":
        raise invalid_field("grammar", "cannot be combined with a response format")
    schemas: Json = {"json_object": {"type": "object"}}
    schema = response_format["json_schema"]["schema"] if kind == "json_schema" else schemas.get(kind)
    try:
        request = msgspec.convert(
            {
                "prompt": prompts,
                "n": choice_count,
                "max_tokens": body.get("max_tokens"),
                "seed": body.get("seed"),
                "stop": body.get("stop", []),
                "sampling": {name: value for name, value in body.items() if name not in _NOT_SAMPLING},
                "logit_bias": {int(token): bias for token, bias in body.get("logit_bias", {}).items()},
                "grammar": grammar,
                "json_schema": "" if schema is None else json.dumps(schema),
            },
            _RenderedRequest,
        )
    except (msgspec.ValidationError, ValueError, AttributeError) as error:
        # Caused only by parameters that `passthrough` leaves unchecked; sending them would crash the engine.
        raise invalid_field("extra_parameters", f"cannot be sent to this engine: {error}") from error
    rendered: Json = msgspec.to_builtins(request)
    return {**rendered.pop("sampling"), **rendered}


def _variables(body: Json, templates: ModelTemplates) -> Json:
    """Returns the variables of the template, with the usual names in chat templates."""
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise invalid_field("tool_choice", "this runtime cannot force a tool call; use auto or none")
    variables: Json = {
        **body.get(TEMPLATE_ARGUMENTS, {}),
        "messages": [_template_message(message, index) for index, message in enumerate(body["messages"])],
        "add_generation_prompt": True,
        "bos_token": templates.bos_token,
        "eos_token": templates.eos_token,
    }
    if "tools" in body and choice != "none":
        variables["tools"] = body["tools"]
    return variables


def _template_message(message: Json, index: int) -> Json:
    content = message["content"]
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise invalid_field(f"messages[{index}].content", "this runtime supports text only")
        content = "\n".join(part["text"] for part in content)
    result = {**message, "content": content or ""}
    if "tool_calls" in message:
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": msgspec.json.decode(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return result


def _no_logprobs() -> WeftError:
    return invalid_field("logprobs", "this runtime does not support log probabilities; omit it")
