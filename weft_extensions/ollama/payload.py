"""Translation of Ollama's requests to the mesh's messages: pure functions.

Fields that cannot be honored are rejected if they would change the answer, and cause a warning otherwise.
"""

from collections.abc import Mapping, Sequence

from gateway.answers.answer_builder import MAX_NOTICES
from gateway.gateway_config import RequestLimits
from gateway.intake.request_model import require_few
from gateway.media import RequestMedia
from gateway.openai.chat_builder import FUNCTION, ROLES, ChatBuilder, ChatTranslation, entries
from gateway.openai.chat_schema import arguments_text
from gateway.openai.extension_fields import LANGUAGES, fill_extra, unknown_fields, unsupported
from gateway.openai.sampling import SAMPLING_FIELDS
from weft.api.common.v1 import chat_pb2, completion_pb2, sampling_pb2, warning_pb2
from weft.dispatch.extra_fields import OF_FUNCTION, carried_only
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft_extensions.ollama.schema import (
    EFFORTS,
    ChatMessage,
    GeneratingRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    Options,
    ToolDefinition,
)

_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_WITH_IMAGES = frozenset({"user", "tool"})
# Options that apply when an engine starts; requests cannot change them.
_LOAD_OPTIONS = frozenset({
    "draft_num_predict", "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_gpu",
    "num_gqa", "num_thread", "numa", "rope_frequency_base", "rope_frequency_scale", "use_mlock", "use_mmap",
    "vocab_only",
})  # fmt: skip
_SCHEMA_NAME = "answer"
_NEVER_TRUNCATED = "input that is too long is refused, never truncated"
_NEVER_SHIFTED = "the answer ends where the context is full"


def to_chat(request: OllamaChatRequest, limits: RequestLimits, media: RequestMedia, context: int) -> ChatTranslation:
    """Returns the chat payload. Raises INVALID_ARGUMENT naming the wrong field. `context`: in tokens; 0: unknown."""
    chat = ChatBuilder(limits, media)
    turns = _Turns(chat)
    chat.expect([ROLES[_role_of(message)] for message in request.messages or ()])
    for index, (field, message) in enumerate(entries(request.messages, "messages", limits.max_messages)):
        chat.turn_to(index)
        turns.add(message, field)
    for field, tool in entries(request.tools, "tools", limits.max_tools):
        _add_tool(chat, tool, field)
    return _completed(chat, request, limits, context)


def prompt_to_chat(
    request: OllamaGenerateRequest, limits: RequestLimits, media: RequestMedia, context: int
) -> ChatTranslation:
    """Returns the chat payload of a prompt, to which the model's template is applied. Raises as `to_chat`."""
    _require_own_template(request)
    chat = ChatBuilder(limits, media)
    if request.system:
        chat.add_message("system").content.add(text=request.system)
    turn = chat.add_message("user")
    if request.prompt or not request.images:
        turn.content.add(text=request.prompt or "")
    _add_images(chat, turn, request.images, "images")
    return _completed(chat, request, limits, context)


def is_raw(request: OllamaGenerateRequest) -> bool:
    """Whether a prompt is completed without the model's template."""
    return bool(request.raw) or bool(request.suffix)


def to_completion(
    request: OllamaGenerateRequest, limits: RequestLimits, context: int
) -> tuple[completion_pb2.CompletionPayload, list[warning_pb2.Warning]]:
    """Returns the payload of a raw prompt, and warnings. Raises INVALID_ARGUMENT naming the wrong field."""
    _require_own_template(request)
    for name in ("system", "images", "format"):
        if getattr(request, name):
            raise invalid_field(name, "needs the model's template: leave out 'raw' and 'suffix'")
    payload = completion_pb2.CompletionPayload()
    payload.prompts.add(text=request.prompt or "")
    if request.suffix:
        payload.suffix = request.suffix
    if request.logprobs:
        payload.logprobs = request.top_logprobs or 0
    warnings = _warnings_of(request, context)
    if request.think is not None:
        warnings.append(unsupported("think", "needs the model's template; it was not used"))
    _fill_sampling(payload.sampling, request.options, limits)
    fill_extra(payload.extra_parameters, _engine_options(request.options))
    return payload, warnings[:MAX_NOTICES]


def request_warnings(request: OllamaRequest) -> list[warning_pb2.Warning]:
    """Returns warnings about unknown fields, and about `options` that apply only when an engine starts."""
    given = (request.options and request.options.model_extra) or {}
    at_start = [
        unsupported(f"options.{name}", "is set in the configuration of the model and was ignored")
        for name in given
        if name in _LOAD_OPTIONS and given[name] is not None
    ]
    return unknown_fields(request) + at_start


def _completed(chat: ChatBuilder, request: GeneratingRequest, limits: RequestLimits, context: int) -> ChatTranslation:
    """Adds the fields of both kinds of requests, and returns the translation."""
    payload = chat.payload
    _fill_sampling(payload.sampling, request.options, limits)
    given = request.model_extra or {}
    languages = {name: given.get(name) for name in LANGUAGES}
    fill_extra(payload.extra_parameters, {**languages, **_engine_options(request.options)})
    _set_format(chat, request.format)
    _set_thinking(chat, request.think)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_field("top_logprobs", "is only allowed when 'logprobs' is true")
    payload.logprobs = bool(request.logprobs)
    if request.logprobs and request.top_logprobs is not None:
        payload.top_logprobs = request.top_logprobs
    warnings = chat.warnings + _warnings_of(request, context)
    return ChatTranslation(payload, warnings[:MAX_NOTICES])


def _warnings_of(request: GeneratingRequest, context: int) -> list[warning_pb2.Warning]:
    found = request_warnings(request)
    if request.truncate:
        found.append(unsupported("truncate", _NEVER_TRUNCATED))
    if request.shift:
        found.append(unsupported("shift", _NEVER_SHIFTED))
    wanted = request.options.num_ctx if request.options is not None else None
    if wanted is not None and wanted > context:
        has = f"its {context} tokens are" if context else "the context is"
        found.append(unsupported("options.num_ctx", f"{has} set where the model is configured; it was not used"))
    return found


def _require_own_template(request: OllamaGenerateRequest) -> None:
    if request.template:
        problem = "cannot be changed: omit it, or send the complete prompt with 'raw': true"
        raise FieldError("template", problem, Reason.UNSUPPORTED_OPERATION)
    if request.context:
        problem = "is not stored: send the conversation to /api/chat"
        raise FieldError("context", problem, Reason.UNSUPPORTED_OPERATION)
    if request.prompt is None and not request.images:
        raise invalid_field("prompt", "is required")


def _fill_sampling(target: sampling_pb2.SamplingParams, options: Options | None, limits: RequestLimits) -> None:
    if options is None:
        return
    for name in SAMPLING_FIELDS:
        value = getattr(options, name)
        if value is not None:
            setattr(target, name, value)
    if options.num_predict is not None and options.num_predict > 0:
        target.max_tokens = options.num_predict
    stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
    require_few(stop, "options.stop", limits.max_stop, "strings")
    for index, text in enumerate(stop):
        require_few(text, f"options.stop[{index}]", limits.max_stop_chars, "characters")
    target.stop.extend(stop)


def _engine_options(options: Options | None) -> Mapping[str, object]:
    """Returns the options that are passed to the engine by name."""
    given = (options and options.model_extra) or {}
    return {name: value for name, value in given.items() if name not in _LOAD_OPTIONS}


def _set_format(chat: ChatBuilder, wanted: object) -> None:
    if wanted in (None, "", []):
        return
    if wanted == "json":
        chat.payload.response_format.json_object = True
    elif isinstance(wanted, dict):
        chat.payload.response_format.json_schema.strict = True
        chat.set_schema(_SCHEMA_NAME, None, wanted, "format")
    else:
        raise invalid_field("format", "must be 'json' or a JSON schema")


def _set_thinking(chat: ChatBuilder, wanted: object) -> None:
    if wanted is None:
        return
    if isinstance(wanted, bool):
        chat.payload.thinking = wanted
    elif isinstance(wanted, str) and wanted in EFFORTS:
        chat.set_effort(wanted)
    else:
        raise invalid_field("think", f"must be true, false, or one of {', '.join(EFFORTS)}")


def _add_tool(chat: ChatBuilder, tool: ToolDefinition, field: str) -> None:
    """Offers a function to the model; adds a warning for a tool of another type."""
    if (tool.type or FUNCTION) != FUNCTION:
        chat.warnings.append(unsupported(field, "is a tool of an unsupported type and was omitted"))
        return
    if tool.function is None:
        raise invalid_field(f"{field}.function", "is required for a tool of type 'function'")
    chat.add_function(tool.function.name, tool.function, tool.function.parameters, f"{field}.function.parameters")


def _add_images(chat: ChatBuilder, turn: chat_pb2.ChatMessage, images: Sequence[str] | None, field: str) -> None:
    for index, data in enumerate(images or ()):
        chat.add_encoded_image(turn, data, f"{field}[{index}]")


def _role_of(message: ChatMessage) -> str:
    """Returns the role of a message: Ollama accepts any."""
    return message.role if message.role in _ROLES else "user"


class _Turns:
    """Adds the messages of a conversation, in order. Raises INVALID_ARGUMENT naming the wrong field."""

    def __init__(self, chat: ChatBuilder) -> None:
        self._chat = chat
        self._call_count = 0
        # Clients drop the ids of calls: a result answers the oldest open call, of the function that it names if any.
        self._open_calls: list[tuple[str, str]] = []

    def add(self, message: ChatMessage, field: str) -> None:
        role = _role_of(message)
        if role != message.role:
            self._chat.warnings.append(unsupported(f"{field}.role", "is unknown; the message was used as the user's"))
        self._require_fit(message, role, field)
        turn = self._result(message, field) if role == "tool" else self._chat.add_message(role)
        if message.thinking:
            turn.reasoning = message.thinking
        for call in message.tool_calls or ():
            self._call_count += 1
            call_id = call.id or f"call_{self._call_count}"
            function = call.function
            extra = carried_only({**(call.model_extra or {}), OF_FUNCTION: function.model_extra})
            self._chat.add_call(turn, call_id, function.name, arguments_text(function.arguments), extra)
            self._open_calls.append((call_id, function.name))
        if message.content or not (message.images or message.tool_calls):
            turn.content.add(text=message.content or "")
        _add_images(self._chat, turn, message.images, f"{field}.images")

    def _require_fit(self, message: ChatMessage, role: str, field: str) -> None:
        if self._chat.is_answered:
            return
        for name in ("tool_calls", "thinking"):
            if getattr(message, name) and role != "assistant":
                raise invalid_field(f"{field}.{name}", "is only allowed for role 'assistant'")
        if message.images and role not in _WITH_IMAGES:
            raise invalid_field(f"{field}.images", "is only allowed for roles 'user' and 'tool'")
        if message.content is None and not (message.images or message.tool_calls or message.thinking):
            raise invalid_field(f"{field}.content", "is required")

    def _result(self, message: ChatMessage, field: str) -> chat_pb2.ChatMessage:
        named, name = message.tool_call_id, message.tool_name
        found = next(
            (call for call in self._open_calls if (call[0] == named if named else not name or call[1] == name)), None
        )
        if found is not None:
            self._open_calls.remove(found)
            return self._chat.add_result(found[0])
        where = "tool_call_id" if named else "tool_name" if name else "role"
        problem = "does not match a tool call of an earlier assistant message"
        return self._chat.add_orphan(named or "", f"{field}.{where}", problem) or self._chat.add_result(named or "")
