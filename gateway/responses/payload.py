"""Translates a Responses request to its payload: input, tools, tool choice, text format and decoding."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gateway.answers.compaction import Summary, SummarySeal, summary_request
from gateway.answers.server_tools import ServerTool, failing_tool, is_run_by_server, last_query
from gateway.gateway_config import RequestLimits, ResponseEnvelope
from gateway.media import RequestMedia
from gateway.openai.chat_builder import FUNCTION, ChatBuilder, ChatTranslation, entries
from gateway.openai.chat_schema import FUNCTION_NAME_PATTERN, MAX_FUNCTION_NAME_CHARS, MAX_NAME_CHARS
from gateway.openai.extension_fields import unknown_fields, unsupported
from gateway.openai.sampling import fill_sampling, require_choices, require_stream_options_fit
from gateway.responses.compaction_items import COMPACTION, Entries, is_compaction, remaining
from gateway.responses.input_items import PART_TYPES, ItemReader
from gateway.responses.namespaces import (
    CLIENT_SEARCH,
    NAMESPACE,
    SEARCH,
    Member,
    flat_name,
    functions_of,
    is_client_search,
    members_by_flat_name,
)
from gateway.responses.schema import (
    Decoding,
    InputItem,
    InputPart,
    PoolMessage,
    ResponsesRequest,
    ResponsesToolChoiceObject,
    ResponseTool,
    TextFormat,
    ToolReference,
)
from gateway.server_tools.request_tools import WEB_FETCH, WEB_SEARCH, RequestTools
from weft.api.common.v1 import chat_pb2, sampling_pb2, warning_pb2
from weft.kernel.errors.error_tree import invalid_field

LOGPROBS = "message.output_text.logprobs"
METRICS = "metrics"
_ENCRYPTED = "reasoning.encrypted_content"
_INCLUDES = frozenset({
    LOGPROBS, METRICS, _ENCRYPTED, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
})  # fmt: skip
# Fields about OpenAI's own service that clients send by default. They are not used, without a warning.
_NOT_USED = frozenset({"client_metadata", "access_programs", "image"})
# Unsupported fields that would have changed the answer. Each causes a warning.
_MAX_CALLS = "max_tool_calls"
_NOT_OFFERED = (_MAX_CALLS, "moderation")
# The number of characters of a tool's type that versions share, such as `web_search` of `web_search_2025_08_26`.
_FAMILY_CHARS = 10


@dataclass(frozen=True, slots=True)
class Conversation:
    """Input items with resolved references, except those to items that are not stored."""

    items: Sequence[InputItem]
    """The request's own items."""
    earlier: Sequence[InputItem] = ()
    """Input and output of the responses that it continues, oldest first."""
    seal: SummarySeal | None = None
    """Seals its summary and opens earlier ones; None: it has none."""

    @property
    def seal_of_answer(self) -> Callable[[Summary], str] | None:
        """Seals the answer if that is a summary; None: it is an answer."""
        return self.seal.seal if self.seal is not None and is_compaction(self.items) else None


def to_response_request(
    request: ResponsesRequest,
    conversation: Conversation,
    media: RequestMedia,
    limits: RequestLimits,
    hosted: RequestTools | None = None,
) -> ChatTranslation:
    """Returns the payload. Raises INVALID_ARGUMENT naming the wrong field.

    `hosted`: the tools that the gateway may run for the request; None: none.
    """
    require_stream_options_fit(request)
    _require_offered(request, limits)
    chat = ChatBuilder(limits, media)
    payload = chat.payload
    compacts = is_compaction(conversation.items)
    _add_messages(chat, request, conversation, limits, hosted)
    _fill_sampling(payload, request, limits)
    _add_tools(chat, request, limits, hosted)
    failing = None if compacts else _failing(chat, request, () if hosted is None else hosted.fields)
    if request.tool_choice is not None and failing is None:
        _choose(chat, request.tool_choice, request.tools)
    if request.parallel_tool_calls is not None:
        payload.parallel_tool_calls = request.parallel_tool_calls
    if request.text is not None and request.text.format is not None:
        _set_format(chat, request.text.format)
    is_default = request.thinking in {None, "default"}
    chat.set_thinking(request, None if is_default else request.thinking == "enabled")
    chat.set_effort(None if request.reasoning is None else request.reasoning.effort)
    _set_extra(chat, request)
    payload = summary_request(payload) if compacts else payload
    runs = hosted is not None and not compacts and bool(hosted.offered)
    warnings = chat.warnings + _unused(request, conversation, caps_calls=runs)
    return ChatTranslation(payload, warnings, failing, hosted if runs else None)


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Whether the text has log probabilities."""
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


def envelope_of(request: ResponsesRequest, default: ResponseEnvelope) -> ResponseEnvelope:
    """Returns the envelope of the response: that of the request, otherwise the gateway's setting."""
    return default if request.envelope is None else ResponseEnvelope(request.envelope)


def asks_for_metrics(request: ResponsesRequest) -> bool:
    """Whether the answer has `output_text` and `metrics` in either form: if the request uses an extension's field."""
    params = request.messages, request.decoding, request.thinking, request.source_lang_code, request.target_lang_code
    return (
        any(value is not None for value in params)
        or METRICS in (request.include or ())
        or (isinstance(request.input, list) and is_parts(request.input))
    )


def is_parts(items: Sequence[InputItem]) -> bool:
    """Whether content parts of one message replace the items."""
    return bool(items) and items[0].type in PART_TYPES


def own_items(request: ResponsesRequest) -> list[InputItem]:
    """Returns the request's input as items, from any of its forms. Raises INVALID_ARGUMENT for none or two inputs."""
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
    if request.prompt is not None:
        raise invalid_field("prompt", "is not supported: prompts are not stored; send the text as 'instructions'")
    for index, name in enumerate(request.include or ()):
        if name not in _INCLUDES:
            raise invalid_field(f"include[{index}]", f"must be one of {', '.join(sorted(_INCLUDES))}")


def entries_of(request: ResponsesRequest, conversation: Conversation) -> Entries:
    """Returns what the model reads of a conversation, with paths. Raises as `remaining`."""
    name = "input" if request.messages is None else "messages"
    is_text = isinstance(request.input, str)
    own = [(name if is_text else f"{name}[{index}]", item) for index, item in enumerate(conversation.items)]
    before = "previous_response_id" if request.conversation is None else "conversation"
    return remaining([*((before, item) for item in conversation.earlier), *own], conversation.seal)


def _add_messages(
    chat: ChatBuilder,
    request: ResponsesRequest,
    conversation: Conversation,
    limits: RequestLimits,
    hosted: RequestTools | None,
) -> None:
    items, earlier = conversation.items, conversation.earlier
    name = "messages" if request.messages is not None else "input"
    if not items and not earlier:
        raise invalid_field(name, "must have at least one item")
    if len(items) + len(earlier) > limits.max_messages:
        raise invalid_field(name, f"must have at most {limits.max_messages} items, those before it included")
    entries = entries_of(request, conversation)
    reader = ItemReader(chat, [item for _, item in entries], members_by_flat_name(request.tools), hosted)
    if request.instructions:
        chat.add_message("system").content.add(text=request.instructions)
    if request.messages is not None:
        require_pool_messages(request.messages)
    parts = items[0] if isinstance(request.input, list) and is_parts(request.input) else None
    for field, item in entries:
        if item is parts:
            reader.add_parts(item, name)
        else:
            reader.add(item, field)
    reader.end()
    if not chat.messages:
        raise invalid_field(name, "must have at least one message")
    if reader.reasoning_unread:
        chat.warnings.append(unsupported(name, "reasoning that another service has encrypted was omitted"))
    fill_languages(chat.payload, request)


def _fill_sampling(payload: chat_pb2.ChatPayload, request: ResponsesRequest, limits: RequestLimits) -> None:
    max_tokens = request.max_output_tokens
    fill_sampling(payload.sampling, request, request.max_tokens if max_tokens is None else max_tokens, limits)
    if request.decoding is not None:
        fill_decoding(payload.sampling, request.decoding, limits)
    if wants_logprobs(request):
        payload.logprobs = True
        if request.top_logprobs is not None:
            payload.top_logprobs = request.top_logprobs


def _set_extra(chat: ChatBuilder, request: ResponsesRequest) -> None:
    unknown = request.model_extra or {}
    given = {name: value for name, value in unknown.items() if name not in _NOT_USED and name not in _NOT_OFFERED}
    if request.text is not None and request.text.verbosity is not None:
        given["verbosity"] = request.text.verbosity
    if request.decoding is not None and (request.decoding.beam_size or 1) > 1:
        given["beam_size"] = request.decoding.beam_size
    chat.set_extra(given, request, languages_of(request))


def _unused(request: ResponsesRequest, conversation: Conversation, *, caps_calls: bool) -> list[warning_pb2.Warning]:
    """Returns warnings for unsupported fields, except tools. `caps_calls`: whether `max_tool_calls` is used."""
    warnings = unknown_fields(request)
    for index, entry in enumerate(request.context_management or ()):
        if conversation.seal is None or entry.type != COMPACTION:
            warnings.append(unsupported(f"context_management[{index}]", "is not supported here; it was not done"))
    if request.truncation == "auto":
        warnings.append(unsupported("truncation", "input that is too long is refused, not truncated"))
    reasoning = request.reasoning
    if reasoning is not None and (reasoning.summary or reasoning.generate_summary):
        warnings.append(unsupported("reasoning.summary", "reasoning is not summarized; it is returned in full"))
    if _ENCRYPTED in (request.include or ()):
        warnings.append(unsupported("include", "reasoning is not encrypted; it is in its item's content"))
    warnings += [
        unsupported(name, "is not supported; it was not used")
        for name in _NOT_OFFERED
        if (request.model_extra or {}).get(name) is not None and not (caps_calls and name == _MAX_CALLS)
    ]
    return warnings


_UNKNOWN_SOURCES = frozenset({None, "auto", "mixed"})
# Translation templates need one source language; the text added below says that it may be another.
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
    """Adds the options of `decoding`. Raises INVALID_ARGUMENT if they contradict other fields of the request."""
    for name, known_as in _NAMES.items():
        value = getattr(decoding, name)
        if value is None:
            continue
        if target.HasField(known_as) and getattr(target, known_as) != value:  # type: ignore[arg-type]
            raise invalid_field(f"decoding.{name}", "must not differ from the same option outside of 'decoding'")
        setattr(target, known_as, value)
    if decoding.stop:
        if len(target.stop) + len(decoding.stop) > limits.max_stop:
            raise invalid_field("decoding.stop", f"must have at most {limits.max_stop} strings")
        target.stop.extend(decoding.stop)


def languages_of(request: ResponsesRequest) -> dict[str, object]:
    """Returns the template arguments of a translation; empty: none is requested."""
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
    """Asks in the last message to detect its language, if the request does not state it."""
    if request.target_lang_code is None or request.source_lang_code not in _UNKNOWN_SOURCES:
        return
    for part in payload.messages[-1].content:
        if part.WhichOneof("kind") == "text":
            part.text = _DETECT + part.text
            return


_FUNCTION_NAME = re.compile(rf"(?=.{{1,{MAX_FUNCTION_NAME_CHARS}}}$){FUNCTION_NAME_PATTERN}")
_FUNCTION_NAME_RULE = (
    f"must be 1 to {MAX_FUNCTION_NAME_CHARS} letters, digits, '_', '-' or '.', with '/' or ':' between them"
)
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME_CHARS}}}")
_NAME_RULE = f"must be 1 to {MAX_NAME_CHARS} letters, digits, '_' or '-'"
_MAX_SHOWN_CHARS = 64


def _add_tools(
    chat: ChatBuilder, request: ResponsesRequest, limits: RequestLimits, hosted: RequestTools | None
) -> None:
    """Adds the functions, including those of namespaces, and the tools that the gateway runs.

    Adds a warning for each other tool, which is not offered.
    """
    flat_names = _flat_names(request.tools)
    count = 0
    for field, tool in entries(request.tools, "tools", limits.max_tools):
        if tool.type == FUNCTION:
            name = _required_name(tool.name, f"{field}.name", _FUNCTION_NAME, _FUNCTION_NAME_RULE)
            chat.add_function(name, tool, tool.parameters, f"{field}.parameters")
            count += 1
            continue
        if hosted is not None and is_run_by_server(tool.type):
            _offer(chat, request, tool, field, hosted)
            continue
        if is_client_search(tool) and CLIENT_SEARCH in flat_names:
            chat.add_function(SEARCH, tool, tool.parameters, f"{field}.parameters")
            continue
        members = list(functions_of(tool, field))
        count += len(members)
        if count > limits.max_tools:
            raise invalid_field(field, f"has more functions than the request may have: at most {limits.max_tools}")
        for where, function in members:
            name = flat_names[Member(tool.name or "", function.name or "")]
            chat.add_function(name, function, function.parameters, f"{where}.parameters")
        left_out = len(tool.tools or ()) - len(members)
        if tool.type != NAMESPACE or left_out or not members:
            message = _omitted(tool)
            if tool.type == NAMESPACE:
                message = f"has {len(members)} functions with a name; its other tools were left out"
            chat.warnings.append(unsupported(field, message))


def _omitted(tool: ResponseTool) -> str:
    return f"tools of type '{tool.type[:_MAX_SHOWN_CHARS]}' are not supported; it was omitted"


def _offer(chat: ChatBuilder, request: ResponsesRequest, tool: ResponseTool, field: str, hosted: RequestTools) -> None:
    """Offers a tool of a server to the model, or adds a warning with the reason why not."""
    from gateway.responses.search_history import offer  # noqa: PLC0415 - few requests need it

    why = offer(chat, hosted, tool, field, (request.model_extra or {}).get(_MAX_CALLS))
    if why is not None:
        chat.warnings.append(unsupported(field, f"{why}; it was omitted" if why else _omitted(tool)))


def _failing(chat: ChatBuilder, request: ResponsesRequest, runs: Collection[str]) -> ServerTool | None:
    """Returns the server's tool that the request forces, or the first if it offers nothing else.

    `runs`: the places of those that the gateway runs.
    """
    query = last_query(chat.messages)
    tools = [
        ServerTool(f"tools[{index}]", tool.type, tool.type, tool.server_label or "", query)
        for index, tool in enumerate(request.tools or ())
        if is_run_by_server(tool.type) and f"tools[{index}]" not in runs
    ]
    choice, has_functions = request.tool_choice, bool(chat.payload.tools)
    if not isinstance(choice, ResponsesToolChoiceObject):
        return failing_tool(tools, has_functions=has_functions, forced=None, may_call=choice != "none")
    named = [each.type for each in choice.tools or ()] if choice.type == "allowed_tools" else [choice.type]
    if not all(map(is_run_by_server, named)):
        return None
    forced = next((tool for tool in tools for kind in named if tool.type[:_FAMILY_CHARS] == kind[:_FAMILY_CHARS]), None)
    return failing_tool(tools, has_functions=has_functions, forced=forced, may_call=False)


def failed_call(tool: ServerTool) -> tuple[str, dict[str, object]] | None:
    """Returns the type and the fields of the item of a call that failed; None: the API has none for this tool."""
    found: tuple[tuple[str, dict[str, object]], ...] = (
        ("web_search", {"action": {"type": "search", "query": tool.query, "queries": [tool.query]}}),
        ("file_search", {"queries": [tool.query], "results": None}),
        ("code_interpreter", {"code": None, "container_id": "", "outputs": None}),
        ("image_generation", {"result": None}),
    )
    for kind, fields in found:
        if tool.type.startswith(kind):
            return f"{kind}_call", fields
    if tool.type == "mcp":
        return "mcp_list_tools", {"server_label": tool.label, "tools": [], "error": tool.words}
    return None


def _choose(chat: ChatBuilder, choice: str | ResponsesToolChoiceObject, tools: Sequence[ResponseTool] | None) -> None:
    if isinstance(choice, str):
        chat.choose_mode(choice, "tool_choice")
    elif choice.type == FUNCTION:
        if choice.name is None:
            raise invalid_field("tool_choice.name", "is required")
        chat.choose_function(_offered_name(choice, _flat_names(tools)) or choice.name, "tool_choice.name")
    elif choice.type == "allowed_tools":
        _choose_allowed(chat, choice, tools)
    elif choice.type.startswith(WEB_SEARCH):
        chat.choose_function(WEB_SEARCH, "tool_choice.type")
    else:
        raise invalid_field("tool_choice.type", "must be 'function' or 'allowed_tools': other tools are not supported")


def _choose_allowed(chat: ChatBuilder, choice: ResponsesToolChoiceObject, tools: Sequence[ResponseTool] | None) -> None:
    if choice.tools is None or choice.mode is None:
        raise invalid_field("tool_choice.tools" if choice.tools is None else "tool_choice.mode", "is required")
    flat_names = _flat_names(tools)
    names: set[str | None] = {_offered_name(tool, flat_names) for tool in choice.tools if tool.type == FUNCTION}
    if any(tool.type.startswith(WEB_SEARCH) for tool in choice.tools):
        own = {tool.name for tool in tools or () if tool.type == FUNCTION}
        names |= {name for name in (WEB_SEARCH, WEB_FETCH) if name not in own and chat.offers(name)}
    namespaces = {tool.name for tool in choice.tools if tool.type == NAMESPACE}
    names |= {flat for member, flat in flat_names.items() if member.namespace in namespaces}
    chat.require_offered(names, "tool_choice.tools", "is a function that is not in the tools")
    chat.keep_functions(names, "tool_choice.tools")
    chat.choose_mode(choice.mode, "tool_choice.mode")


def _flat_names(tools: Sequence[ResponseTool] | None) -> Mapping[Member, str]:
    return {member: flat for flat, member in members_by_flat_name(tools).items()}


def _offered_name(chosen: ToolReference | ResponsesToolChoiceObject, flat_names: Mapping[Member, str]) -> str | None:
    """Returns the offered name of the tool that a choice names. `flat_names`: of the functions of namespaces."""
    if chosen.namespace is None or chosen.name is None:
        return chosen.name
    wanted = Member(chosen.namespace, chosen.name)
    return flat_names.get(wanted) or flat_name(wanted)


def _set_format(chat: ChatBuilder, wanted: TextFormat) -> None:
    if chat.set_plain_format(wanted.type, wanted.schema_):
        return
    # An object with a schema must follow it, as in chat completions.
    given = "answer" if wanted.name is None and wanted.type == "json_object" else wanted.name
    name, field = _required_name(given, "text.format.name"), "text.format.schema"
    if wanted.schema_ is None:
        raise invalid_field(field, "is required for type 'json_schema'")
    chat.set_schema(name, wanted, wanted.schema_, field)


def _required_name(name: str | None, field: str, form: re.Pattern[str] = _NAME, rule: str = _NAME_RULE) -> str:
    if name is None:
        raise invalid_field(field, "is required")
    if form.fullmatch(name) is None:
        raise invalid_field(field, rule)
    return name
