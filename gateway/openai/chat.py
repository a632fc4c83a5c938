"""POST /v1/chat/completions: the handler, and the translation of messages, tools and options to a chat payload."""

from collections import deque
from typing import Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import MAX_NOTICES, new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.answers.server_tools import ServerTool, failing_tool, is_run_by_server, require_no_failing_tool
from gateway.deps import Inference
from gateway.gateway_config import RequestLimits
from gateway.intake.body import body_of
from gateway.media import RequestMedia
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.chat_builder import FUNCTION, ROLES, ChatBuilder, entries
from gateway.openai.chat_schema import (
    MAX_NAME_CHARS,
    MESSAGE_ROLES,
    PART_MEMBERS,
    AllowedTools,
    ChatRequest,
    ContentPart,
    FunctionDefinition,
    Message,
    NamedFunction,
    ResponseFormatChoice,
    ToolCallMade,
    ToolChoiceObject,
)
from gateway.openai.extension_fields import unknown_fields, unsupported
from gateway.openai.sampling import (
    fill_sampling,
    require_choices,
    require_stream_options_fit,
    wants_events,
    wants_usage,
)
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.dispatch.extra_fields import handed_back
from weft.dispatch.history import converted
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json


async def chat_completions(
    deps: Inference, request: Request, params: Annotated[ChatRequest, body_of(ChatRequest)]
) -> Response:
    """Continues a conversation, as one answer or as a stream of server-sent events."""
    scope = request.scope
    context = deps.context(scope, surface="chat", params=params, model=params.model, operation=Operation.CHAT)
    media = deps.request_media(params)
    payload, warnings = to_chat(params, deps.config.limits, media)
    work = Work(deps, scope, context, payload, (warnings + warnings_of(params))[:MAX_NOTICES], media)
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


_PASSED_THROUGH = ("verbosity", "prediction", "web_search_options")
"""Fields that are validated here and passed to the engine."""
_PART_TYPES = "'text', 'image_url', 'input_audio', 'audio_url' or 'refusal'"


def to_payload(request: ChatRequest, limits: RequestLimits, media: RequestMedia | None = None) -> chat_pb2.ChatPayload:
    """Returns the chat payload of `to_chat`."""
    return to_chat(request, limits, media)[0]


def to_chat(
    request: ChatRequest, limits: RequestLimits, media: RequestMedia | None = None
) -> tuple[chat_pb2.ChatPayload, list[warning_pb2.Warning]]:
    """Returns the chat payload, and warnings about conversions in it.

    Raises INVALID_ARGUMENT naming the wrong field, UNSUPPORTED_OPERATION for audio output. `media` collects the URLs to
    fetch; None: URLs are refused.
    """
    require_stream_options_fit(request)
    _require_text_is_enough(request)
    _require_short_keys(request)
    chat = ChatBuilder(limits, media)
    payload, conversation = chat.payload, _Conversation(chat)
    chat.expect([ROLES.get(message.role, chat_pb2.ROLE_USER) for message in request.messages])
    for index, (field, message) in enumerate(entries(request.messages, "messages", limits.max_messages)):
        chat.turn_to(index)
        conversation.add(message, field)
    max_tokens = request.max_completion_tokens
    fill_sampling(payload.sampling, request, request.max_tokens if max_tokens is None else max_tokens, limits)
    count = require_choices(request, limits)
    if count != 1:
        payload.choice_count = count
    _fill_logprobs(payload, request)
    if request.functions is not None or request.function_call is not None:
        _add_functions(chat, request, limits)
    elif request.tools or request.tool_choice is not None or request.parallel_tool_calls is not None:
        _add_tools(chat, request, limits)
    if request.response_format is not None:
        _set_format(chat, request.response_format)
    chat.set_effort(request.reasoning_effort)
    chat.set_thinking(request)
    _set_extra(chat, request)
    return payload, chat.warnings


def warnings_of(request: ChatRequest) -> list[warning_pb2.Warning]:
    """Returns at most MAX_NOTICES warnings about known fields that are not supported."""
    found = [
        unsupported(f"tools[{index}]", "is a tool of an unsupported type and was omitted")
        for index, tool in enumerate(request.tools or ())
        if tool.type != "function"
    ]
    if request.audio is not None:
        found.append(unsupported("audio", "is not supported: the answer is text"))
    if request.store:
        found.append(unsupported("store", "responses of this API are not stored"))
    if request.moderation is not None:
        found.append(unsupported("moderation", "was not done"))
    return (found + unknown_fields(request))[:MAX_NOTICES]


def _require_text_is_enough(request: ChatRequest) -> None:
    if "audio" in (request.modalities or ()):
        raise FieldError("modalities", "cannot hold 'audio': chat answers are text here", Reason.UNSUPPORTED_OPERATION)


def _require_short_keys(request: ChatRequest) -> None:
    if request.metadata and any(len(key) > MAX_NAME_CHARS for key in request.metadata):
        raise invalid_field("metadata", f"keys must have at most {MAX_NAME_CHARS} characters")


def _set_extra(chat: ChatBuilder, request: ChatRequest) -> None:
    given: dict[str, object] = dict(request.__pydantic_extra__ or {})
    if not request.__pydantic_fields_set__.isdisjoint(_PASSED_THROUGH):
        given |= request.model_dump(include=set(_PASSED_THROUGH), exclude_none=True)
    chat.set_extra(given, request)


def _fill_logprobs(payload: chat_pb2.ChatPayload, request: ChatRequest) -> None:
    payload.logprobs = bool(request.logprobs)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise invalid_field("top_logprobs", "is only allowed when 'logprobs' is true")
        payload.top_logprobs = request.top_logprobs


def _set_format(chat: ChatBuilder, wanted: ResponseFormatChoice) -> None:
    if chat.set_plain_format(wanted.type, wanted.schema_):
        return
    definition = wanted.json_schema
    if wanted.type == "json_object" or (definition is None and wanted.schema_ is not None):
        chat.set_schema("answer", None, wanted.schema_ or {}, "response_format.schema")
    elif definition is None:
        raise invalid_field("response_format.json_schema", "is required for type 'json_schema'")
    else:
        chat.set_schema(definition.name, definition, definition.schema_ or {}, "response_format.json_schema.schema")


def uses_functions(request: ChatRequest) -> bool:
    """Whether calls in the answer have to use the older form, `function_call`."""
    return bool(request.functions)


def _add_tools(chat: ChatBuilder, request: ChatRequest, limits: RequestLimits) -> None:
    for field, tool in entries(request.tools, "tools", limits.max_tools):
        # Tools of vendors' platforms are left out, so that the model cannot call them.
        if tool.type != FUNCTION:
            continue
        if tool.function is None:
            raise invalid_field(f"{field}.function", "is required for a tool of type 'function'")
        _add_function(chat, tool.function, f"{field}.function")
    tools = [
        ServerTool(f"tools[{index}].type", tool.type, tool.type)
        for index, tool in enumerate(request.tools or ())
        if is_run_by_server(tool.type)
    ]
    has_functions, may_call = bool(chat.payload.tools), request.tool_choice != "none"
    # This API has no form for the failed call of such a tool.
    require_no_failing_tool(failing_tool(tools, has_functions=has_functions, forced=None, may_call=may_call))
    if request.tool_choice is not None:
        _choose(chat, request.tool_choice)
    if request.parallel_tool_calls is not None:
        chat.payload.parallel_tool_calls = request.parallel_tool_calls


def _add_functions(chat: ChatBuilder, request: ChatRequest, limits: RequestLimits) -> None:
    """Adds tools and their choice in the older form."""
    choice = request.function_call
    if request.tools or request.tool_choice is not None:
        raise invalid_field("functions", "is the older form of 'tools': use only one of them")
    for field, function in entries(request.functions, "functions", limits.max_tools):
        _add_function(chat, function, field)
    if isinstance(choice, NamedFunction):
        chat.choose_function(choice.name, "function_call.name")
    elif choice is not None:
        chat.choose_mode(choice, "function_call")
    if request.functions:
        # The older form allows one call.
        chat.payload.parallel_tool_calls = False


def _add_function(chat: ChatBuilder, function: FunctionDefinition, field: str) -> None:
    chat.add_function(function.name, function, function.parameters, f"{field}.parameters")


def _choose(chat: ChatBuilder, choice: str | ToolChoiceObject) -> None:
    if isinstance(choice, str):
        chat.choose_mode(choice, "tool_choice")
    elif choice.type == "custom":
        raise invalid_field("tool_choice.type", "cannot be 'custom': models here call tools of type 'function' only")
    elif choice.type == FUNCTION:
        if choice.function is None:
            raise invalid_field("tool_choice.function", "is required for type 'function'")
        chat.choose_function(choice.function.name, "tool_choice.function.name")
    elif choice.allowed_tools is None:
        raise invalid_field("tool_choice.allowed_tools", "is required for type 'allowed_tools'")
    else:
        _choose_allowed(chat, choice.allowed_tools)


def _choose_allowed(chat: ChatBuilder, allowed: AllowedTools) -> None:
    names: set[str] = set()
    for index, tool in enumerate(allowed.tools):
        if tool.type == FUNCTION and tool.function is not None:
            chat.require_offered((tool.function.name,), f"tool_choice.allowed_tools.tools[{index}].function.name")
            names.add(tool.function.name)
    chat.keep_functions(names, "tool_choice.allowed_tools.tools")
    chat.choose_mode(allowed.mode, "tool_choice.allowed_tools.mode")


class _Conversation:
    """Adds messages to a chat, in order. Raises INVALID_ARGUMENT naming the wrong field."""

    def __init__(self, chat: ChatBuilder) -> None:
        self._chat = chat
        # The older form has no ids: a result answers the last call of its function.
        self._last_calls: dict[str, str] = {}
        self._without_id: deque[str] = deque()
        """Ids generated for calls without one, until their results arrive in the same order."""

    def add(self, message: Message, field: str) -> None:
        role = self._role(message, field)
        self._require_fit(message, field)
        answered = message.tool_call_id or ""
        if message.role == "tool" and not answered and self._without_id:
            answered = self._without_id.popleft()
        orphan = self._orphan(message, answered, field)
        target = orphan or self._chat.add_message(role)
        if message.content is not None:
            self._chat.add_content(target, message.content, f"{field}.content", self._add_part)
        if orphan is not None:
            return
        if message.role == "tool":
            target.tool_call_id = answered
        if message.role == "function":
            target.tool_call_id = self._last_calls[message.name or ""]
        elif message.name is not None:
            target.name = message.name
        if message.role == "assistant":
            self._add_assistant(target, message, field)

    def _role(self, message: Message, field: str) -> str:
        """Returns the role of a message; `user` for an unknown role in an earlier turn."""
        if message.role in MESSAGE_ROLES:
            return message.role
        if not self._chat.is_answered:
            raise invalid_field(f"{field}.role", _ROLES_ALLOWED)
        self._chat.warnings.append(converted(f"{field}.role", _ROLES_ALLOWED))
        return "user"

    def _require_fit(self, message: Message, field: str) -> None:
        if message.role == "tool" and not (message.tool_call_id or self._without_id or self._chat.is_answered):
            raise invalid_field(f"{field}.tool_call_id", "is required for role 'tool'")
        if message.role != "assistant":
            for name, given in (("tool_calls", message.tool_calls), ("function_call", message.function_call)):
                if given:
                    raise invalid_field(f"{field}.{name}", "is only allowed for role 'assistant'")
        if self._chat.is_answered:
            return
        if message.content is None and not _may_lack_content(message):
            raise invalid_field(f"{field}.content", "is required")
        if message.content == [] and message.role not in _MAY_SAY_NOTHING:
            raise invalid_field(f"{field}.content", "must have at least one part")

    def _orphan(self, message: Message, answered: str, field: str) -> chat_pb2.ChatMessage | None:
        """As `ChatBuilder.add_orphan`. `answered`: the call id of a tool's result."""
        if message.role == "tool":
            problem = "does not match a tool call of an earlier assistant message"
            return self._chat.add_orphan(answered, f"{field}.tool_call_id", problem)
        if message.role == "function" and message.name not in self._last_calls:
            problem = "is not a function that an earlier assistant message called"
            return self._chat.add_orphan("", f"{field}.name", problem)
        return None

    def _add_assistant(self, target: chat_pb2.ChatMessage, message: Message, field: str) -> None:
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            target.reasoning = reasoning
        if message.refusal:
            target.refusal = message.refusal
        if (extra := handed_back(message.model_extra)).fields:
            target.extra_fields.CopyFrom(extra)
        for index, call in enumerate(message.tool_calls or ()):
            name, arguments = _called(call, f"{field}.tool_calls[{index}]")
            call_id = call.id
            if not call_id:
                call_id = f"call_{len(self._chat.messages)}_{index}"
                self._without_id.append(call_id)
            self._chat.add_call(target, call_id, name or _UNNAMED, arguments, _unknown_fields(call))
        if message.function_call is not None:
            made = message.function_call
            call_id = f"call_{len(self._chat.messages)}"
            target.tool_calls.add(id=call_id, name=made.name or _UNNAMED, arguments_text=made.arguments_text)
            self._last_calls[made.name or ""] = call_id

    def _add_part(self, target: chat_pb2.ChatMessage, part: ContentPart, field: str) -> None:
        self._chat.add_part(target, part, field, PART_MEMBERS, _PART_TYPES)


_ROLES_ALLOWED = "must be 'system', 'developer', 'user', 'assistant', 'tool' or 'function'"
_UNNAMED = "unknown"
"""Placeholder for the missing name of an earlier call, which chat templates require."""
_OF_RESULTS = frozenset({"tool", "function"})
_MAY_SAY_NOTHING = _OF_RESULTS | {"assistant"}


def _may_lack_content(message: Message) -> bool:
    if message.role in _OF_RESULTS:
        # Clients write null for a function that returns nothing.
        return True
    says_otherwise = (
        message.tool_calls,
        message.function_call,
        message.refusal,
        message.reasoning_content,
        message.reasoning,
    )
    return message.role == "assistant" and any(says_otherwise)


def _called(call: ToolCallMade, field: str) -> tuple[str, str]:
    if call.type == "custom":
        if call.custom is None:
            raise invalid_field(f"{field}.custom", "is required for a call of type 'custom'")
        # Chat templates read arguments as JSON.
        return call.custom.name, encode_json({"input": call.custom.input}).decode()
    return ("", "{}") if call.function is None else (call.function.name or "", call.function.arguments_text)


def _unknown_fields(call: ToolCallMade) -> dict[str, object]:
    """Returns the fields of a call that weft does not know; those of its function are under `function`."""
    of_function = {} if call.function is None else call.function.model_extra or {}
    return {**(call.model_extra or {}), "function": of_function}
