"""POST /v1/chat/completions: the handler, and the translation of messages, tools and options to a chat payload."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import MAX_NOTICES, encode_json, new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.config import MediaConfig, RequestLimits
from gateway.deps import InferenceDeps
from gateway.intake.body import read_model
from gateway.intake.request_model import require_few
from gateway.media import RequestMedia
from gateway.openai.chat_answer import ChatAnswer, ChatStream
from gateway.openai.chat_fields import (
    FUNCTION,
    ROLES,
    add_function,
    fill_json_schema,
    fill_thinking,
    fill_tool_mode,
    keep_functions,
    reasoning_effort,
    require_offered,
)
from gateway.openai.chat_schema import (
    MAX_NAME_CHARS,
    AllowedTools,
    ChatRequest,
    ContentPart,
    Message,
    NamedFunction,
    ResponseFormatChoice,
    ToolCallMade,
    ToolChoiceObject,
)
from gateway.openai.extension_fields import fill_extra, unknown_extensions, unsupported
from gateway.openai.sampling import (
    fill_sampling,
    require_choices,
    require_stream_options_fit,
    wants_events,
    wants_usage,
)
from weft.api.common.v1 import chat_pb2, warning_pb2
from weft.dispatch.schema_guard import SchemaGuard
from weft.kernel.errors import FieldError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


async def chat_completions(deps: InferenceDeps, request: Request) -> Response:
    """Continues a conversation, as one answer or as a stream of server-sent events."""
    scope = request.scope
    params = await read_model(request, ChatRequest, deps.config)
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


_PASSED_THROUGH = ("verbosity", "prediction", "web_search_options")
"""Fields that are validated here and passed to the engine."""


def to_payload(request: ChatRequest, limits: RequestLimits, media: RequestMedia | None = None) -> chat_pb2.ChatPayload:
    """Returns the chat payload. Raises INVALID_ARGUMENT naming the wrong field, UNSUPPORTED_OPERATION for audio output.

    `media` collects the addresses to fetch; without it addresses are refused.
    """
    require_stream_options_fit(request)
    _require_text_is_enough(request)
    _require_short_keys(request)
    require_few(request.messages, "messages", limits.max_messages, "entries")
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
        payload.reasoning_effort = reasoning_effort(request.reasoning_effort)
    arguments = request.chat_template_kwargs
    spellings = {
        "enable_thinking": request.enable_thinking,
        "chat_template_kwargs.enable_thinking": None if arguments is None else arguments.enable_thinking,
    }
    fill_thinking(payload, spellings)
    _fill_extra(payload, request)
    return payload


def warnings_of(request: ChatRequest) -> list[warning_pb2.Warning]:
    """Returns warnings for known fields that are not supported; at most MAX_NOTICES_TOLD."""
    found = [
        unsupported(f"tools[{index}]", "is a tool of a type that models here cannot call; it was left out")
        for index, tool in enumerate(request.tools or ())
        if tool.type != "function"
    ]
    if request.audio is not None:
        found.append(unsupported("audio", "is not supported: the answer is text"))
    if request.store:
        found.append(unsupported("store", "answers of this API are not stored"))
    if request.moderation is not None:
        found.append(unsupported("moderation", "was not done"))
    return (found + unknown_extensions(request.model_extra or {}))[:MAX_NOTICES]


def _require_text_is_enough(request: ChatRequest) -> None:
    if "audio" in (request.modalities or ()):
        raise FieldError("modalities", "cannot hold 'audio': chat answers are text here", Reason.UNSUPPORTED_OPERATION)


def _require_short_keys(request: ChatRequest) -> None:
    if any(len(key) > MAX_NAME_CHARS for key in request.metadata or ()):
        raise invalid_field("metadata", f"keys must have at most {MAX_NAME_CHARS} characters")


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


def _fill_response_format(payload: chat_pb2.ChatPayload, wanted: ResponseFormatChoice, limits: RequestLimits) -> None:
    guard, definition = SchemaGuard(limits.schemas), wanted.json_schema
    if wanted.type == "text":
        payload.response_format.text = True
    elif wanted.type == "json_object" and wanted.schema_ is None:
        payload.response_format.json_object = True
    elif wanted.type == "json_object":
        fill_json_schema(payload, "answer", None, wanted.schema_ or {}, "response_format.schema", guard)
    elif definition is None:
        raise invalid_field("response_format.json_schema", "is required for type 'json_schema'")
    else:
        field = "response_format.json_schema.schema"
        fill_json_schema(payload, definition.name, definition, definition.schema_ or {}, field, guard)


def uses_functions(request: ChatRequest) -> bool:
    """Whether the answer must use the older form of calls, `function_call`."""
    return bool(request.functions)


def fill_tools(payload: chat_pb2.ChatPayload, request: ChatRequest, limits: RequestLimits) -> None:
    """Add tools and tool choice to a payload. Raises INVALID_ARGUMENT naming the wrong field."""
    if request.functions is not None or request.function_call is not None:
        _fill_functions(payload, request, limits)
        return
    tools = request.tools or []
    require_few(tools, "tools", limits.max_tools, "entries")
    guard = SchemaGuard(limits.schemas)
    for index, tool in enumerate(tools):
        # Tools of a vendor's platform are left out, so that the model cannot call them.
        if tool.type != "function":
            continue
        field = f"tools[{index}].function"
        if tool.function is None:
            raise invalid_field(field, "is required for a tool of type 'function'")
        add_function(payload, tool.function.name, tool.function, tool.function.parameters, f"{field}.parameters", guard)
    if request.tool_choice is not None:
        _fill_choice(payload, request.tool_choice)
    if request.parallel_tool_calls is not None:
        payload.parallel_tool_calls = request.parallel_tool_calls


def _fill_functions(payload: chat_pb2.ChatPayload, request: ChatRequest, limits: RequestLimits) -> None:
    functions, choice = request.functions or [], request.function_call
    if request.tools or request.tool_choice is not None:
        raise invalid_field("functions", "is the older form of 'tools': a request has one of the two")
    require_few(functions, "functions", limits.max_tools, "entries")
    guard = SchemaGuard(limits.schemas)
    for index, function in enumerate(functions):
        field = f"functions[{index}].parameters"
        add_function(payload, function.name, function, function.parameters, field, guard)
    if isinstance(choice, NamedFunction):
        require_offered(payload, (choice.name,), "function_call.name")
        payload.tool_choice.function_name = choice.name
    elif choice is not None:
        fill_tool_mode(payload, choice, "function_call")
    if functions:
        # The older form allows one call.
        payload.parallel_tool_calls = False


def _fill_choice(payload: chat_pb2.ChatPayload, choice: str | ToolChoiceObject) -> None:
    if isinstance(choice, str):
        fill_tool_mode(payload, choice, "tool_choice")
    elif choice.type == "custom":
        raise invalid_field("tool_choice.type", "cannot be 'custom': models here call tools of type 'function' only")
    elif choice.type == FUNCTION:
        if choice.function is None:
            raise invalid_field("tool_choice.function", "is required for type 'function'")
        require_offered(payload, (choice.function.name,), "tool_choice.function.name")
        payload.tool_choice.function_name = choice.function.name
    elif choice.allowed_tools is None:
        raise invalid_field("tool_choice.allowed_tools", "is required for type 'allowed_tools'")
    else:
        _fill_allowed(payload, choice.allowed_tools)


def _fill_allowed(payload: chat_pb2.ChatPayload, allowed: AllowedTools) -> None:
    names: set[str] = set()
    for index, tool in enumerate(allowed.tools):
        if tool.type == FUNCTION and tool.function is not None:
            require_offered(payload, (tool.function.name,), f"tool_choice.allowed_tools.tools[{index}].function.name")
            names.add(tool.function.name)
    keep_functions(payload, names, "tool_choice.allowed_tools.tools")
    fill_tool_mode(payload, allowed.mode, "tool_choice.allowed_tools.mode")


class Conversation:
    """Adds messages to a payload, in order. Raises INVALID_ARGUMENT naming the wrong field."""

    def __init__(self, payload: chat_pb2.ChatPayload, media: RequestMedia) -> None:
        self._payload = payload
        self._media = media
        self._calls: set[str] = set()
        # The older form has no ids: a result answers the last call of its function.
        self._last_calls: dict[str, str] = {}

    def add(self, message: Message, field: str) -> None:
        """Add a turn; `field` is its path in the request."""
        self._require_fit(message, field)
        target = self._payload.messages.add(role=ROLES[message.role])
        content = message.content
        if isinstance(content, str):
            target.content.add(text=content)
        elif content is not None:
            for index, part in enumerate(content):
                self._add_part(target, part, f"{field}.content[{index}]")
        if message.role == "tool" and message.tool_call_id is not None:
            target.tool_call_id = message.tool_call_id
        if message.role == "function":
            target.tool_call_id = self._call_of(message, field)
        elif message.name is not None:
            target.name = message.name
        if message.role == "assistant":
            self._add_assistant(target, message, field)

    def _require_fit(self, message: Message, field: str) -> None:
        if message.role == "tool":
            if message.tool_call_id is None:
                raise invalid_field(f"{field}.tool_call_id", "is required for role 'tool'")
            if message.tool_call_id not in self._calls:
                raise invalid_field(f"{field}.tool_call_id", "answers no tool call of an earlier assistant message")
        if message.role != "assistant":
            for name, given in (("tool_calls", message.tool_calls), ("function_call", message.function_call)):
                if given:
                    raise invalid_field(f"{field}.{name}", "is only allowed for role 'assistant'")
        if message.content is None and not _may_lack_content(message):
            raise invalid_field(f"{field}.content", "is required")
        if message.content == [] and message.role != "assistant":
            raise invalid_field(f"{field}.content", "must have at least one part")

    def _call_of(self, message: Message, field: str) -> str:
        call = self._last_calls.get(message.name or "")
        if call is None:
            raise invalid_field(f"{field}.name", "names no function that an earlier assistant message called")
        return call

    def _add_assistant(self, target: chat_pb2.ChatMessage, message: Message, field: str) -> None:
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            target.reasoning = reasoning
        if message.refusal:
            target.refusal = message.refusal
        for index, call in enumerate(message.tool_calls or ()):
            target.tool_calls.append(_call_record(call, f"{field}.tool_calls[{index}]"))
            self._calls.add(call.id)
        if message.function_call is not None:
            made = message.function_call
            call_id = f"call_{len(self._payload.messages)}"
            target.tool_calls.add(id=call_id, name=made.name, arguments_text=made.arguments)
            self._last_calls[made.name] = call_id

    def _add_part(self, target: chat_pb2.ChatMessage, part: ContentPart, field: str) -> None:
        if part.type == "text" and part.text is not None:
            target.content.add(text=part.text)
        elif part.type == "refusal" and part.refusal is not None:
            target.refusal += part.refusal
        elif part.type == "image_url" and part.image_url is not None:
            image = part.image_url
            found = self._media.image(image.url, f"{field}.image_url.url", detail=image.detail or "")
            target.content.add(image=found)
        elif part.type == "input_audio" and part.input_audio is not None:
            audio = part.input_audio
            recording = self._media.encoded_audio(audio.data, audio.format, f"{field}.input_audio.data")
            target.content.add(audio=recording)
        elif part.type in {"text", "refusal", "image_url", "input_audio"}:
            raise invalid_field(f"{field}.{part.type}", "is required for a part of this type")
        else:
            raise invalid_field(f"{field}.type", "must be 'text', 'image_url', 'input_audio' or 'refusal'")


def _may_lack_content(message: Message) -> bool:
    if message.role == "function":
        # The older form writes null for a function that returns nothing.
        return True
    says_otherwise = (
        message.tool_calls,
        message.function_call,
        message.refusal,
        message.reasoning_content,
        message.reasoning,
    )
    return message.role == "assistant" and any(says_otherwise)


def _call_record(call: ToolCallMade, field: str) -> chat_pb2.ToolCallRecord:
    if call.type == "custom":
        if call.custom is None:
            raise invalid_field(f"{field}.custom", "is required for a call of type 'custom'")
        # Templates of models read arguments as JSON.
        arguments = encode_json({"input": call.custom.input}).decode()
        return chat_pb2.ToolCallRecord(id=call.id, name=call.custom.name, arguments_text=arguments)
    if call.function is None:
        raise invalid_field(f"{field}.function", "is required for a call of type 'function'")
    return chat_pb2.ToolCallRecord(id=call.id, name=call.function.name, arguments_text=call.function.arguments)
