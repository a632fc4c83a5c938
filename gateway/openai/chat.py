"""POST /v1/chat/completions."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_fields import MAX_NOTICES_TOLD, new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.config import MediaConfig, RequestLimits
from gateway.deps import InferenceDeps
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.media import RequestMedia
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.chat_messages import Conversation
from gateway.openai.chat_schema import MAX_NAME_CHARS, ChatRequest, ResponseFormatChoice
from gateway.openai.chat_tools import fill_tools, uses_functions
from gateway.openai.extension_fields import fill_extra, unknown_extensions
from gateway.openai.sampling import (
    fill_sampling,
    require_choices,
    require_stream_options_fit,
    wants_events,
    wants_usage,
)
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.dispatch.schema_guard import require_safe_schema
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.json_objects import to_json_object
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


async def chat_completions(deps: InferenceDeps, request: Request) -> Response:
    """Continue a conversation, as one answer or as a stream of server-sent events."""
    scope = request.scope
    raw = await read_json_body(scope, request.receive, deps.config)
    params = parse(ChatRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(scope, surface="chat", params=params, model=params.model, operation=Operation.CHAT)
    media = deps.request_media(params)
    payload = to_payload(params, deps.config.limits, media)
    work = Work(deps, scope, context, payload, warnings_of(params), media)
    identity = new_identity(deps.clock, "chatcmpl", params.model)
    count, functions = payload.choice_count or 1, uses_functions(params)
    if params.stream:
        encoder = ChatStream(
            identity,
            choice_count=count,
            logprobs=payload.logprobs,
            include_usage=wants_usage(params),
            include_events=wants_events(params),
            functions=functions,
        )
        return streamed(work, encoder)
    answer = ChatAnswer(identity, choice_count=count, logprobs=payload.logprobs, functions=functions)
    return unary(work, answer)


_EFFORTS: dict[str, chat_pb2.ReasoningEffort.ValueType] = {
    "none": chat_pb2.REASONING_EFFORT_NONE,
    "minimal": chat_pb2.REASONING_EFFORT_MINIMAL,
    "low": chat_pb2.REASONING_EFFORT_LOW,
    "medium": chat_pb2.REASONING_EFFORT_MEDIUM,
    "high": chat_pb2.REASONING_EFFORT_HIGH,
    "xhigh": chat_pb2.REASONING_EFFORT_XHIGH,
    "max": chat_pb2.REASONING_EFFORT_MAX,
}
_PASSED_THROUGH = ("verbosity", "prediction", "web_search_options")
"""Fields that are validated here and passed to the engine."""


def to_payload(request: ChatRequest, limits: RequestLimits, media: RequestMedia | None = None) -> chat_pb2.ChatPayload:
    """Returns the chat payload. Raises INVALID_ARGUMENT naming the wrong field, UNSUPPORTED_OPERATION for audio output.

    `media` collects the addresses to fetch; without it addresses are refused.
    """
    require_stream_options_fit(request)
    _require_text_is_enough(request)
    _require_short_keys(request)
    if len(request.messages) > limits.max_messages:
        raise invalid_field("messages", f"must have at most {limits.max_messages} entries")
    payload = chat_pb2.ChatPayload()
    conversation = Conversation(payload, media or RequestMedia(MediaConfig()))
    for index, message in enumerate(request.messages):
        conversation.add(message, f"messages[{index}]")
    max_tokens = request.max_completion_tokens
    fill_sampling(payload.sampling, request, request.max_tokens if max_tokens is None else max_tokens, limits)
    count = require_choices(request, limits)
    if count != 1:
        payload.choice_count = count
    _fill_logprobs(payload, request)
    fill_tools(payload, request, limits)
    if request.response_format is not None:
        _fill_response_format(payload, request.response_format, limits)
    if request.reasoning_effort is not None:
        payload.reasoning_effort = _EFFORTS[request.reasoning_effort]
    _fill_thinking(payload, request)
    _fill_extra(payload, request)
    return payload


def warnings_of(request: ChatRequest) -> list[warning_pb2.Warning]:
    """Returns warnings for fields that are understood and not supported; at most MAX_NOTICES_TOLD."""
    found = [
        _unused(f"tools[{index}]", "is a tool of a type that models here cannot call; it was left out")
        for index, tool in enumerate(request.tools or ())
        if tool.type != "function"
    ]
    if request.audio is not None:
        found.append(_unused("audio", "is how an answer should sound; this one is text"))
    if request.store:
        found.append(_unused("store", "answers of this API are not kept"))
    if request.moderation is not None:
        found.append(_unused("moderation", "was not done"))
    return (found + unknown_extensions(request.model_extra or {}))[:MAX_NOTICES_TOLD]


def _unused(field: str, message: str) -> warning_pb2.Warning:
    code = warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER
    return warning_pb2.Warning(code=code, field=field, message=message)


def _require_text_is_enough(request: ChatRequest) -> None:
    if "audio" in (request.modalities or ()):
        raise FieldError("modalities", "cannot hold 'audio': chat answers are text here", Reason.UNSUPPORTED_OPERATION)


def _require_short_keys(request: ChatRequest) -> None:
    if any(len(key) > MAX_NAME_CHARS for key in request.metadata or ()):
        raise invalid_field("metadata", f"keys must have at most {MAX_NAME_CHARS} characters")


def _fill_thinking(payload: chat_pb2.ChatPayload, request: ChatRequest) -> None:
    arguments = request.chat_template_kwargs
    also = None if arguments is None else arguments.enable_thinking
    thinking = also if request.enable_thinking is None else request.enable_thinking
    if also is not None and also != thinking:
        raise invalid_field("chat_template_kwargs.enable_thinking", "must not differ from 'enable_thinking'")
    if thinking is not None:
        payload.thinking = thinking


def _fill_extra(payload: chat_pb2.ChatPayload, request: ChatRequest) -> None:
    given: dict[str, object] = dict(request.model_extra or {})
    arguments = request.chat_template_kwargs
    if arguments is not None and arguments.model_extra:
        given["chat_template_kwargs"] = arguments.model_extra
    if not request.model_fields_set.isdisjoint(_PASSED_THROUGH):
        given |= request.model_dump(include=set(_PASSED_THROUGH), exclude_none=True)
    fill_extra(payload.extra_parameters, given)


def _fill_logprobs(payload: chat_pb2.ChatPayload, request: ChatRequest) -> None:
    payload.logprobs = bool(request.logprobs)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise invalid_field("top_logprobs", "is only allowed when 'logprobs' is true")
        payload.top_logprobs = request.top_logprobs


def _fill_json_object(target: chat_pb2.ResponseFormat, schema: Mapping[str, Any] | None, limits: RequestLimits) -> None:
    if schema is None:
        target.json_object = True
        return
    field = "response_format.schema"
    safe = require_safe_schema(schema, field, limits.schemas)
    target.json_schema.name = "answer"
    target.json_schema.schema.CopyFrom(to_json_object(safe, field))


def _fill_response_format(payload: chat_pb2.ChatPayload, wanted: ResponseFormatChoice, limits: RequestLimits) -> None:
    target = payload.response_format
    if wanted.type == "text":
        target.text = True
        return
    if wanted.type == "json_object":
        _fill_json_object(target, wanted.schema_, limits)
        return
    definition = wanted.json_schema
    if definition is None:
        raise invalid_field("response_format.json_schema", "is required for type 'json_schema'")
    target.json_schema.name = definition.name
    if definition.description is not None:
        target.json_schema.description = definition.description
    if definition.strict is not None:
        target.json_schema.strict = definition.strict
    field = "response_format.json_schema.schema"
    schema = require_safe_schema(definition.schema_ or {}, field, limits.schemas)
    target.json_schema.schema.CopyFrom(to_json_object(schema, field))
