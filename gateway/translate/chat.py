"""Chat completion requests to payloads, with the checks that need more than one field."""

from gateway.config import RequestLimits
from gateway.schemas.chat import (
    ChatRequest,
    ContentPart,
    Message,
    NamedToolChoice,
    ResponseFormatChoice,
    ToolCallMade,
    ToolDefinition,
)
from gateway.translate.extra import fill_extra
from gateway.translate.media import to_audio, to_image
from gateway.translate.sampling import fill_sampling, require_choices, require_stream_options_fit
from weft.api.common.v1 import chat_pb2
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import to_json_object

_ROLES: dict[str, chat_pb2.Role.ValueType] = {
    "system": chat_pb2.ROLE_SYSTEM,
    "developer": chat_pb2.ROLE_DEVELOPER,
    "user": chat_pb2.ROLE_USER,
    "assistant": chat_pb2.ROLE_ASSISTANT,
    "tool": chat_pb2.ROLE_TOOL,
}
_EFFORTS: dict[str, chat_pb2.ReasoningEffort.ValueType] = {
    "none": chat_pb2.REASONING_EFFORT_NONE,
    "minimal": chat_pb2.REASONING_EFFORT_MINIMAL,
    "low": chat_pb2.REASONING_EFFORT_LOW,
    "medium": chat_pb2.REASONING_EFFORT_MEDIUM,
    "high": chat_pb2.REASONING_EFFORT_HIGH,
    "xhigh": chat_pb2.REASONING_EFFORT_XHIGH,
    "max": chat_pb2.REASONING_EFFORT_MAX,
}
_TOOL_MODES: dict[str, chat_pb2.ToolChoice.Mode.ValueType] = {
    "none": chat_pb2.ToolChoice.MODE_NONE,
    "auto": chat_pb2.ToolChoice.MODE_AUTO,
    "required": chat_pb2.ToolChoice.MODE_REQUIRED,
}


def to_payload(request: ChatRequest, limits: RequestLimits) -> chat_pb2.ChatPayload:
    """What the mesh is asked. Raises INVALID_ARGUMENT naming the field that is wrong."""
    require_stream_options_fit(request)
    if len(request.messages) > limits.max_messages:
        raise invalid_field("messages", f"must have at most {limits.max_messages} entries")
    payload = chat_pb2.ChatPayload()
    _fill_messages(payload, request.messages)
    max_tokens = request.max_completion_tokens
    fill_sampling(payload.sampling, request, request.max_tokens if max_tokens is None else max_tokens, limits)
    count = require_choices(request, limits)
    if count != 1:
        payload.choice_count = count
    _fill_logprobs(payload, request)
    _fill_tools(payload, request, limits)
    if request.response_format is not None:
        _fill_response_format(payload, request.response_format)
    if request.reasoning_effort is not None:
        payload.reasoning_effort = _EFFORTS[request.reasoning_effort]
    _fill_thinking(payload, request)
    _fill_extra(payload, request)
    return payload


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
    fill_extra(payload.extra_parameters, given)


def _fill_messages(payload: chat_pb2.ChatPayload, messages: list[Message]) -> None:
    calls: set[str] = set()
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        _require_fit(message, field, calls)
        _fill_message(payload.messages.add(), message, field)
        for call in message.tool_calls or ():
            calls.add(call.id)


def _require_fit(message: Message, field: str, calls: set[str]) -> None:
    """Raises INVALID_ARGUMENT where role and fields do not go together; `calls` are the tool calls so far."""
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid_field(f"{field}.tool_call_id", "is required for role 'tool'")
        if message.tool_call_id not in calls:
            raise invalid_field(f"{field}.tool_call_id", "answers no tool call of an earlier assistant message")
    if message.tool_calls and message.role != "assistant":
        raise invalid_field(f"{field}.tool_calls", "is only allowed for role 'assistant'")
    if message.content is None and not _may_lack_content(message):
        raise invalid_field(f"{field}.content", "is required")
    if message.content == [] and message.role != "assistant":
        raise invalid_field(f"{field}.content", "must have at least one part")


def _may_lack_content(message: Message) -> bool:
    says_otherwise = (message.tool_calls, message.refusal, message.reasoning_content, message.reasoning)
    return message.role == "assistant" and any(says_otherwise)


def _fill_message(target: chat_pb2.ChatMessage, message: Message, field: str) -> None:
    target.role = _ROLES[message.role]
    content = message.content
    if isinstance(content, str):
        target.content.add(text=content)
    elif content is not None:
        for index, part in enumerate(content):
            _fill_part(target, part, f"{field}.content[{index}]")
    if message.name is not None:
        target.name = message.name
    if message.tool_call_id is not None and message.role == "tool":
        target.tool_call_id = message.tool_call_id
    if message.role == "assistant":
        _fill_assistant(target, message)


def _fill_assistant(target: chat_pb2.ChatMessage, message: Message) -> None:
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        target.reasoning = reasoning
    if message.refusal:
        target.refusal = message.refusal
    target.tool_calls.extend(_call_record(call) for call in message.tool_calls or ())


def _call_record(call: ToolCallMade) -> chat_pb2.ToolCallRecord:
    return chat_pb2.ToolCallRecord(id=call.id, name=call.function.name, arguments_text=call.function.arguments)


def _fill_part(target: chat_pb2.ChatMessage, part: ContentPart, field: str) -> None:
    if part.type == "text" and part.text is not None:
        target.content.add(text=part.text)
    elif part.type == "refusal" and part.refusal is not None:
        target.refusal += part.refusal
    elif part.type == "image_url" and part.image_url is not None:
        target.content.add(image=to_image(part.image_url, f"{field}.image_url"))
    elif part.type == "input_audio" and part.input_audio is not None:
        target.content.add(audio=to_audio(part.input_audio, f"{field}.input_audio"))
    elif part.type in {"text", "refusal", "image_url", "input_audio"}:
        raise invalid_field(f"{field}.{part.type}", "is required for a part of this type")
    else:
        raise invalid_field(f"{field}.type", "must be 'text', 'image_url', 'input_audio' or 'refusal'")


def _fill_logprobs(payload: chat_pb2.ChatPayload, request: ChatRequest) -> None:
    payload.logprobs = bool(request.logprobs)
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise invalid_field("top_logprobs", "is only allowed when 'logprobs' is true")
        payload.top_logprobs = request.top_logprobs


def _fill_tools(payload: chat_pb2.ChatPayload, request: ChatRequest, limits: RequestLimits) -> None:
    tools = request.tools or []
    if len(tools) > limits.max_tools:
        raise invalid_field("tools", f"must have at most {limits.max_tools} entries")
    for index, tool in enumerate(tools):
        # Clients announce tools of their vendor's platform; a model that never hears of them cannot call them.
        if tool.type == "function":
            _fill_tool(payload.tools.add(), tool, f"tools[{index}].function")
    if request.tool_choice is not None:
        _fill_tool_choice(payload, request.tool_choice)
    if request.parallel_tool_calls is not None:
        payload.parallel_tool_calls = request.parallel_tool_calls


def _fill_tool(target: chat_pb2.Tool, tool: ToolDefinition, field: str) -> None:
    function = tool.function
    if function is None:
        raise invalid_field(field, "is required for a tool of type 'function'")
    target.function.name = function.name
    if function.description is not None:
        target.function.description = function.description
    if function.parameters is not None:
        target.function.parameters.CopyFrom(to_json_object(function.parameters, f"{field}.parameters"))
    if function.strict is not None:
        target.function.strict = function.strict


def _fill_tool_choice(payload: chat_pb2.ChatPayload, choice: str | NamedToolChoice) -> None:
    if isinstance(choice, str):
        if choice == "required" and not payload.tools:
            raise invalid_field("tool_choice", "cannot be 'required' without a tool of type 'function'")
        payload.tool_choice.mode = _TOOL_MODES[choice]
        return
    name = choice.function.name
    if all(tool.function.name != name for tool in payload.tools):
        raise invalid_field("tool_choice.function.name", "names none of the tools")
    payload.tool_choice.function_name = name


def _fill_response_format(payload: chat_pb2.ChatPayload, wanted: ResponseFormatChoice) -> None:
    target = payload.response_format
    if wanted.type == "text":
        target.text = True
        return
    if wanted.type == "json_object":
        target.json_object = True
        return
    definition = wanted.json_schema
    if definition is None:
        raise invalid_field("response_format.json_schema", "is required for type 'json_schema'")
    target.json_schema.name = definition.name
    if definition.description is not None:
        target.json_schema.description = definition.description
    if definition.strict is not None:
        target.json_schema.strict = definition.strict
    schema = to_json_object(definition.schema_ or {}, "response_format.json_schema.schema")
    target.json_schema.schema.CopyFrom(schema)
