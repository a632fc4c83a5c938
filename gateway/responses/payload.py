"""Responses requests to payloads, with the checks that need more than one field."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.config import RequestLimits
from gateway.media import RequestMedia
from gateway.openai.extension_fields import fill_extra, unknown_extensions
from gateway.openai.sampling import fill_sampling, require_choices, require_stream_options_fit
from gateway.responses.input_items import PART_TYPES, ConversationBuilder
from gateway.responses.schema import InputItem, InputPart, ResponsesRequest
from gateway.responses.tools import (
    fill_decoding,
    fill_format,
    fill_languages,
    fill_tool_choice,
    fill_tools,
    languages_of,
    require_pool_messages,
    unsupported,
)
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.kernel.errors import invalid_field

LOGPROBS = "message.output_text.logprobs"
METRICS = "metrics"
_ENCRYPTED = "reasoning.encrypted_content"
_INCLUDES = frozenset({
    LOGPROBS, METRICS, _ENCRYPTED, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
})  # fmt: skip
# Fields about a service elsewhere that clients send on their own account: not used, without a warning.
_NOT_USED = frozenset({"client_metadata", "access_programs", "image"})
# Fields that would have changed what happens, had they been used.
_NOT_OFFERED = ("max_tool_calls", "context_management", "moderation")


@dataclass(frozen=True, slots=True)
class ResponsePayload:
    """The payload of a request, with warnings for its caller."""

    payload: chat_pb2.ChatPayload
    warnings: list[warning_pb2.Warning] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Input items with resolved references."""

    items: Sequence[InputItem]
    """The request's own items."""
    earlier: Sequence[InputItem] = ()
    """Input and output of the responses that it continues, the oldest first."""


def to_response_request(
    request: ResponsesRequest, conversation: Conversation, media: RequestMedia, limits: RequestLimits
) -> ResponsePayload:
    """Returns the payload.

    Raises INVALID_ARGUMENT naming the wrong field.
    """
    require_stream_options_fit(request)
    _require_offered(request, limits)
    params = ResponsePayload(chat_pb2.ChatPayload())
    payload, warnings = params.payload, params.warnings
    _fill_messages(params, request, conversation, media, limits)
    _fill_sampling(payload, request, limits)
    warnings += fill_tools(payload, request.tools or [], limits)
    if request.tool_choice is not None:
        fill_tool_choice(payload, request.tool_choice)
    if request.parallel_tool_calls is not None:
        payload.parallel_tool_calls = request.parallel_tool_calls
    if request.text is not None and request.text.format is not None:
        fill_format(payload, request.text.format, limits)
    _fill_thinking(payload, request)
    _fill_extra(payload, request)
    warnings += _unused(request)
    return params


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether log probabilities come with the text."""
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


def uses_pool_envelope(request: ResponsesRequest) -> bool:
    """Whether the answer has `output_text` and `metrics` besides: where the request has a field that goes with them."""
    params = request.messages, request.decoding, request.thinking, request.source_lang_code, request.target_lang_code
    return (
        any(value is not None for value in params)
        or METRICS in (request.include or ())
        or (isinstance(request.input, list) and is_parts(request.input))
    )


def is_parts(items: Sequence[InputItem]) -> bool:
    """Whether content parts of one message stand in place of items."""
    return bool(items) and items[0].type in PART_TYPES


def own_items(request: ResponsesRequest) -> list[InputItem]:
    """The request's input as items, whichever way it was written. Raises INVALID_ARGUMENT for none or two inputs."""
    if (request.input is None) == (request.messages is None):
        raise invalid_field("input", "is required" if request.input is None else "must not stand beside 'messages'")
    if request.messages is not None:
        return [InputItem(role=message.role, content=message.content) for message in request.messages]
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    items = request.input or []
    return [_as_message(items)] if is_parts(items) else items


def _as_message(parts: Sequence[InputItem]) -> InputItem:
    content = [
        InputPart.model_construct(type=part.kind, text=part.text, image_url=part.image_url, detail=part.detail)
        for part in parts
    ]
    return InputItem(role="user", content=content)


def _require_offered(request: ResponsesRequest, limits: RequestLimits) -> None:
    if require_choices(request, limits) > 1:
        raise invalid_field("n", "must be 1: a response is one answer")
    if request.conversation is not None:
        raise invalid_field("conversation", "is not offered here; use 'previous_response_id', or send the whole input")
    if request.prompt is not None:
        raise invalid_field("prompt", "is not offered here: no prompts are kept; send the text as 'instructions'")
    for index, name in enumerate(request.include or ()):
        if name not in _INCLUDES:
            raise invalid_field(f"include[{index}]", f"must be one of {', '.join(sorted(_INCLUDES))}")


def _fill_messages(
    params: ResponsePayload,
    request: ResponsesRequest,
    conversation: Conversation,
    media: RequestMedia,
    limits: RequestLimits,
) -> None:
    items, earlier = conversation.items, conversation.earlier
    name = "messages" if request.messages is not None else "input"
    if not items and not earlier:
        raise invalid_field(name, "must have at least one item")
    if len(items) + len(earlier) > limits.max_messages:
        raise invalid_field(name, f"must have at most {limits.max_messages} items, those before it included")
    builder = ConversationBuilder(params.payload, media)
    if request.instructions:
        builder.add_text("system", request.instructions)
    for item in earlier:
        builder.add(item, "previous_response_id")
    if request.messages is not None:
        require_pool_messages(request.messages)
    if isinstance(request.input, list) and is_parts(request.input):
        builder.add_parts(items[0], name)
    else:
        for index, item in enumerate(items):
            builder.add(item, name if isinstance(request.input, str) else f"{name}[{index}]")
    if not params.payload.messages:
        raise invalid_field(name, "must have at least one message")
    if builder.reasoning_unread:
        params.warnings.append(unsupported(name, "reasoning that another service has encrypted was left out"))
    fill_languages(params.payload, request)


def _fill_sampling(payload: chat_pb2.ChatPayload, request: ResponsesRequest, limits: RequestLimits) -> None:
    max_tokens = request.max_output_tokens
    fill_sampling(payload.sampling, request, request.max_tokens if max_tokens is None else max_tokens, limits)
    if request.decoding is not None:
        fill_decoding(payload.sampling, request.decoding, limits)
    if wants_logprobs(request):
        payload.logprobs = True
        if request.top_logprobs is not None:
            payload.top_logprobs = request.top_logprobs


def _fill_thinking(payload: chat_pb2.ChatPayload, request: ResponsesRequest) -> None:
    arguments = request.chat_template_kwargs
    said = {
        "enable_thinking": request.enable_thinking,
        "thinking": None if request.thinking in {None, "default"} else request.thinking == "enabled",
        "chat_template_kwargs.enable_thinking": None if arguments is None else arguments.enable_thinking,
    }
    given = {name: value for name, value in said.items() if value is not None}
    if len(set(given.values())) > 1:
        first, *others = given
        raise invalid_field(others[-1], f"must not differ from '{first}'")
    if given:
        payload.thinking = next(iter(given.values()))
    if request.reasoning is not None and request.reasoning.effort is not None:
        payload.reasoning_effort = chat_pb2.ReasoningEffort.Value(
            f"REASONING_EFFORT_{request.reasoning.effort.upper()}"
        )


def _fill_extra(payload: chat_pb2.ChatPayload, request: ResponsesRequest) -> None:
    unknown = request.model_extra or {}
    given = {name: value for name, value in unknown.items() if name not in _NOT_USED and name not in _NOT_OFFERED}
    if request.text is not None and request.text.verbosity is not None:
        given["verbosity"] = request.text.verbosity
    if request.decoding is not None and (request.decoding.beam_size or 1) > 1:
        given["beam_size"] = request.decoding.beam_size
    arguments = dict((request.chat_template_kwargs and request.chat_template_kwargs.model_extra) or {})
    arguments |= languages_of(request)
    if arguments:
        given["chat_template_kwargs"] = arguments
    fill_extra(payload.extra_parameters, given)


def _unused(request: ResponsesRequest) -> list[warning_pb2.Warning]:
    """Returns warnings for unsupported fields, except tools."""
    warnings = unknown_extensions(request.model_extra or {})
    if request.truncation == "auto":
        warnings.append(unsupported("truncation", "input that is too long is refused, not cut"))
    reasoning = request.reasoning
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        warnings.append(unsupported("reasoning.summary", "reasoning is not summarized; it is told as it is"))
    if _ENCRYPTED in (request.include or ()):
        warnings.append(unsupported("include", "reasoning is not encrypted; it is in its item's content"))
    warnings += [
        unsupported(name, "is not offered here; it was not used")
        for name in _NOT_OFFERED
        if (request.model_extra or {}).get(name) is not None
    ]
    return warnings
