"""POST /v1/messages and /v1/messages/count_tokens. Each tool result becomes a separate message."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import MAX_NOTICES, new_identity
from gateway.answers.generation import Work, streamed, unary
from gateway.answers.prompt_count import counted
from gateway.answers.server_tools import ServerTool, failed, failing_tool, is_run_by_server, last_query
from gateway.anthropic.deferred_tools import offered
from gateway.anthropic.managed_context import SummaryAnswer, SummaryStream, compacting, managed
from gateway.anthropic.message_stream import MessagesAnswer, MessagesStream, failed_call
from gateway.anthropic.schema import (
    NOT_OFFERED,
    Base64Source,
    ContentBlock,
    CountTokensRequest,
    FunctionTool,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    OtherBlock,
    OtherTool,
    RedactedThinkingBlock,
    ResultBlock,
    Source,
    TextBlock,
    ThinkingBlock,
    ThinkingParam,
    ToolChoiceParam,
    ToolParam,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    UrlSource,
)
from gateway.deps import Inference
from gateway.errors import DetailedError
from gateway.gateway_config import RequestLimits
from gateway.intake.body import body_of
from gateway.intake.request_model import require_few
from gateway.media import RequestMedia
from gateway.openai.chat_builder import ROLES, ChatBuilder, ChatTranslation, entries
from gateway.openai.chat_schema import arguments_text
from gateway.openai.extension_fields import LANGUAGES, fill_extra, unknown_fields, unsupported
from gateway.openai.readable_text import document_text, text_in
from gateway.server_tools.request_tools import RequestTools
from weft.api.common.v1 import chat_pb2
from weft.dispatch.extra_fields import carried_only
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_objects import add_member

if TYPE_CHECKING:
    from gateway.anthropic.server_calls import ServerBlocks

SURFACE = "messages"


async def create_message(
    deps: Inference, request: Request, params: Annotated[MessagesRequest, body_of(MessagesRequest)]
) -> Response:
    """Continues a conversation, as one message or as a stream of server-sent events."""
    scope = request.scope
    context = deps.context(scope, surface=SURFACE, params=params, model=params.model, operation=Operation.CHAT)
    media = deps.request_media(params)
    wanted = to_payload(params, deps.config.limits, media, deps.request_tools(scope, params, context))
    work = Work(deps, scope, context, wanted.payload, wanted.warnings, media)
    identity = new_identity(deps.clock, "msg", params.model)
    if wanted.failing is not None:
        blocks = failed_call(wanted.failing)
        refusal = "" if blocks else wanted.failing.words
        work = Work(deps, scope, context, wanted.payload, layers=(failed(deps.fleet.view, refusal, wanted.warnings),))
        if params.stream:
            return streamed(work, MessagesStream(identity, blocks=blocks))
        return unary(work, MessagesAnswer(identity, blocks))
    shortened = None
    if params.context_management is not None or params.compaction is not None:
        shortened = managed(work, params, wanted.hosted)
        work = compacting(work, shortened)
        if shortened.is_summary:
            return (
                streamed(work, SummaryStream(identity, shortened))
                if params.stream
                else unary(work, SummaryAnswer(identity, shortened))
            )
    if wanted.hosted is not None:
        from gateway.anthropic.server_calls import answered  # noqa: PLC0415 - few requests need it

        return answered(work, identity, wanted.hosted, stream=bool(params.stream), context=shortened)
    if not params.stream:
        answer = MessagesAnswer(identity)
        answer.context = shortened
        return unary(work, answer)
    encoder = MessagesStream(identity, estimated_prompt_tokens(wanted.payload))
    encoder.context = shortened
    return streamed(work, encoder)


async def count_tokens(
    deps: Inference, request: Request, params: Annotated[CountTokensRequest, body_of(CountTokensRequest)]
) -> Response:
    """Counts the tokens of a request with the model's tokenizer; the count is never an estimate."""
    scope = request.scope
    context = deps.context(scope, surface=SURFACE, params=params, model=params.model, operation=Operation.TOKENIZE)
    media = deps.request_media(params)
    wanted = to_countable(params, deps.config.limits, media)
    work = Work(deps, scope, context, wanted.payload, wanted.warnings, media)
    if params.context_management is None:
        return counted(work, lambda count: {"input_tokens": count})
    short = managed(work, params)
    others = [wanted.payload] if short.applied else []
    work = replace(work, payload=short.chat, warnings=[*work.warnings, *short.warnings])
    return counted(work, _edited_count, *others)


def _edited_count(count: int, original: int | None = None) -> dict[str, object]:
    original = count if original is None else original
    return {"input_tokens": count, "context_management": {"original_input_tokens": original}}


_COPIED = ("max_tokens", "temperature", "top_p", "top_k")
_SCHEMA_NAME = "output"
# The engine parameter that limits thinking. Engines without it report a warning.
_BUDGET = "thinking_budget_tokens"
# What they are if they ask for nothing.
_ASKS_NOTHING: tuple[object, ...] = ("standard",)
# Clients recognize a refused thread by these details, and then send the complete conversation.
_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def to_payload(
    request: MessagesRequest, limits: RequestLimits, media: RequestMedia, hosted: RequestTools | None = None
) -> ChatTranslation:
    """Returns the chat payload. Raises INVALID_ARGUMENT naming the wrong field.

    `hosted`: the tools that the gateway may run for the request; None: none.
    """
    translated = to_countable(request, limits, media, hosted)
    payload = translated.payload
    for name in _COPIED:
        value = getattr(request, name)
        if value is not None:
            setattr(payload.sampling, name, value)
    require_few(request.stop_sequences, "stop_sequences", limits.max_stop, "strings")
    payload.sampling.stop.extend(request.stop_sequences or ())
    return translated


def to_countable(
    request: CountTokensRequest, limits: RequestLimits, media: RequestMedia, hosted: RequestTools | None = None
) -> ChatTranslation:
    """Returns the payload whose tokens are counted. Raises INVALID_ARGUMENT naming the wrong field."""
    if request.thread is not None:
        raise _no_threads()
    chat = ChatBuilder(limits, media)
    read = remaining(request.messages)
    turns = Turns(chat, hosted, [message for _, message in read])
    if request.system is not None:
        turns.add_system(request.system)
    require_few(request.messages, "messages", limits.max_messages, "entries")
    chat.expect([_role_of(message) for _, message in read])
    for index, (field, message) in enumerate(read):
        chat.turn_to(index)
        turns.add(message, field)
    for field, tool in offered(list(entries(request.tools, "tools", limits.max_tools)), request):
        _add_tool(chat, tool, field, hosted)
    failing = _failing(chat, request, () if hosted is None else hosted.fields)
    if request.tool_choice is not None and failing is None:
        _choose(chat, request.tool_choice)
    if failing is None:
        turns.begin_server_calls(request.tool_choice)
    _set_output(chat, request)
    if request.thinking is not None:
        _set_thinking(chat.payload, request.thinking)
    given = request.model_extra or {}
    fill_extra(chat.payload.extra_parameters, {name: given.get(name) for name in LANGUAGES})
    asked = [name for name in NOT_OFFERED if given.get(name) and given[name] not in _ASKS_NOTHING]
    not_offered = [unsupported(name, "is not supported; it was not used") for name in asked]
    warnings = chat.warnings + not_offered + unknown_fields(request)
    runs = hosted is not None and (hosted.offered or hosted.first)
    return ChatTranslation(chat.payload, warnings[:MAX_NOTICES], failing, hosted if runs else None)


def _add_tool(chat: ChatBuilder, tool: ToolParam, field: str, hosted: RequestTools | None) -> None:
    """Offers a function, or a tool that the gateway runs, to the model; adds a warning for any other."""
    why = ""
    if isinstance(tool, FunctionTool):
        chat.add_function(tool.name, tool, tool.input_schema, f"{field}.input_schema")
        _mark(chat.payload.tools[-1].function, tool.cache_control)
        return
    if hosted is not None and is_run_by_server(tool.type):
        from gateway.anthropic.server_calls import offer  # noqa: PLC0415 - few requests need it

        found = offer(chat, hosted, tool, field)
        if found is None:
            return
        why = found
    why = why or f"tools of type '{tool.type[:64]}' are not supported"
    chat.warnings.append(unsupported(field, f"{why}; it was not offered to the model"))


def _failing(chat: ChatBuilder, request: CountTokensRequest, runs: Collection[str]) -> ServerTool | None:
    """Returns the server's tool that the request forces, or the first if it offers nothing else.

    `runs`: the places of those that the gateway runs.
    """
    choice = request.tool_choice or ToolChoiceParam(type="auto")
    query = last_query(chat.messages)
    tools = [
        ServerTool(f"tools[{index}]", tool.type, tool.name or tool.type, query=query)
        for index, tool in enumerate(request.tools or ())
        if isinstance(tool, OtherTool) and is_run_by_server(tool.type) and f"tools[{index}]" not in runs
    ]
    named = choice.name if choice.type == "tool" else None
    offered = {tool.function.name for tool in chat.payload.tools}
    forced = next((tool for tool in tools if tool.name == named and named not in offered), None)
    may_call = choice.type != "none" and named is None
    return failing_tool(tools, has_functions=bool(offered), forced=forced, may_call=may_call)


def _choose(chat: ChatBuilder, choice: ToolChoiceParam) -> None:
    payload = chat.payload
    if choice.type == "tool":
        if choice.name is None:
            raise invalid_field("tool_choice.name", "is required for type 'tool'")
        chat.choose_function(choice.name, "tool_choice.name", "is not one of the tools offered to the model")
    elif payload.tools or choice.type == "any":
        problem = "cannot be 'any' without a tool that has an 'input_schema'"
        chat.choose_mode(choice.type, "tool_choice.type", problem)
    if choice.disable_parallel_tool_use is not None and payload.tools:
        payload.parallel_tool_calls = not choice.disable_parallel_tool_use


def _set_output(chat: ChatBuilder, request: CountTokensRequest) -> None:
    config, wanted, field = request.output_config, request.output_format, "output_format.schema"
    chat.set_effort(None if config is None else config.effort)
    if config is not None and config.format is not None:
        wanted, field = config.format, "output_config.format.schema"
    if wanted is not None:
        chat.payload.response_format.json_schema.strict = True
        chat.set_schema(_SCHEMA_NAME, None, wanted.schema_, field)


def _set_thinking(payload: chat_pb2.ChatPayload, wanted: ThinkingParam) -> None:
    if wanted.type == "disabled":
        payload.thinking = False
    elif wanted.type == "enabled":
        payload.thinking = True
        if wanted.budget_tokens is not None:
            add_member(payload.extra_parameters, _BUDGET, wanted.budget_tokens, "thinking.budget_tokens")


def _no_threads() -> WeftError:
    message = "thread: conversations are not stored: send the whole conversation without 'thread'"
    error = DetailedError(Reason.INVALID_ARGUMENT, message, details={"details": _NO_THREADS})
    error.metadata["field"] = "thread"
    return error


CACHE_TTLS = frozenset({"5m", "1h"})
"""Cache lifetimes of Anthropic's API."""
TOOL_FAILED = "The tool failed: "
"""Prefix of a tool result with `is_error`, for which engines have no field."""

# Not `encode_json`, which rejects integers beyond 64 bits.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def remaining(messages: Sequence[MessageParam]) -> Sequence[tuple[str, MessageParam]]:
    """Returns the messages that the model reads, with paths: the newest summary in the place of those before it.

    System messages remain. Raises INVALID_ARGUMENT naming a summary without text.
    """
    read = [(f"messages[{index}]", message) for index, message in enumerate(messages)]
    for index in reversed(range(len(messages))):
        content = messages[index].content
        for at, block in reversed(list(enumerate(content)) if isinstance(content, list) else ()):
            if not isinstance(block, OtherBlock) or block.type != "compaction":
                continue
            text, field = (block.model_extra or {}).get("content"), f"messages[{index}].content[{at}]"
            if text is None:
                # The compaction failed.
                continue
            if not isinstance(text, str) or not text:
                raise invalid_field(f"{field}.content", "must be the text of a summary, or null")
            summary = MessageParam.model_construct(role="user", content=text)
            rest = messages[index].model_copy(update={"content": content[at + 1 :]})
            kept = [entry for entry in read[:index] if entry[1].role == "system"]
            after = [(f"messages[{index}]", rest)] if rest.content else []
            return [*kept, (field, summary), *after, *read[index + 1 :]]
    return read


class Turns:
    """Adds messages to a chat; joins successive turns of the same role, as Anthropic's API does."""

    def __init__(
        self, chat: ChatBuilder, hosted: RequestTools | None = None, messages: Sequence[MessageParam] = ()
    ) -> None:
        """`hosted`: the tools that the gateway may run; `messages`: all that will be added."""
        self._chat = chat
        self._hosted = hosted
        self._messages = messages
        self._server_blocks: ServerBlocks | None = None
        """None: no message so far has a call of a server's tool."""

    def add_system(self, system: str | list[TextBlock]) -> None:
        """Adds the system prompt, without empty blocks."""
        blocks = [TextBlock(type="text", text=system)] if isinstance(system, str) else system
        for block in blocks:
            if block.text:
                _mark(self._turn("system").content.add(text=block.text), block.cache_control)

    def add(self, message: MessageParam, field: str) -> None:
        """Adds a message. Raises INVALID_ARGUMENT naming a misplaced block."""
        content = message.content
        if isinstance(content, str):
            self._turn(message.role).content.add(text=content)
            return
        if not content and message.role != "assistant" and not self._chat.is_answered:
            raise invalid_field(f"{field}.content", "must have at least one block")
        if message.role == "assistant":
            # An assistant turn without content is still a turn.
            self._turn("assistant")
        for index, block in enumerate(content):
            self._add_block(message.role, block, f"{field}.content[{index}]")
        if self._server_blocks is not None and message.role == "assistant":
            self._server_blocks.end_message()

    def _add_block(self, role: str, block: ContentBlock, field: str) -> None:
        if isinstance(block, TextBlock):
            _mark(self._turn(role).content.add(text=block.text), block.cache_control)
        elif role == "user" and isinstance(block, ImageBlock):
            turn = self._turn(role)
            self._add_image(turn, block.source, f"{field}.source")
            _mark(turn.content[-1], block.cache_control)
        elif role == "user" and isinstance(block, ToolResultBlock):
            self._add_result(block, field)
        elif role == "assistant" and isinstance(block, ToolUseBlock):
            turn = self._turn(role)
            extra = carried_only(block.model_extra)
            self._chat.add_call(turn, block.id, block.name, arguments_text(block.input), extra)
            _mark(turn.tool_calls[-1], block.cache_control)
        elif role == "assistant" and isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            self._add_thinking(self._turn(role), block, field)
        elif isinstance(block, OtherBlock):
            if role == "assistant" and self._hosted is not None and self._add_server_block(block, self._hosted):
                return
            self._add_other(self._turn(role), block, field, _misplaced(role, block.type))
        elif isinstance(block, ImageBlock) and self._chat.is_answered:
            self._chat.add_readable(self._turn(role), "", "image", f"{field}.type", _misplaced(role, block.type))
        else:
            raise invalid_field(f"{field}.type", _misplaced(role, block.type))

    def _add_server_block(self, block: OtherBlock, hosted: RequestTools) -> bool:
        """Adds a block of a call of a server's tool; False: it is none, or another service's."""
        if self._server_blocks is None:
            if block.type != "server_tool_use":
                return False
            from gateway.anthropic.server_calls import ServerBlocks  # noqa: PLC0415 - few requests need it

            self._server_blocks = ServerBlocks(self._chat, hosted, self._messages)
        return self._server_blocks.add(block, lambda: self._turn("assistant"))

    def begin_server_calls(self, choice: ToolChoiceParam | None) -> None:
        """Has calls of servers' tools run that the last message lacks, or with which the conversation begins."""
        hosted = self._hosted
        if self._server_blocks is not None:
            self._server_blocks.run_waiting()
        if hosted is not None and hosted.offered:
            from gateway.anthropic.server_calls import begin  # noqa: PLC0415 - few requests need it

            begin(self._chat, hosted, choice)

    def _add_thinking(
        self, turn: chat_pb2.ChatMessage, block: ThinkingBlock | RedactedThinkingBlock, field: str
    ) -> None:
        if isinstance(block, ThinkingBlock):
            turn.reasoning += block.thinking
            if block.signature:
                turn.signed_reasoning.add(text=block.thinking, signature=block.signature)
            return
        self._chat.warnings.append(unsupported(field, "only its provider can decrypt it"))
        if block.data:
            turn.signed_reasoning.add(redacted=block.data)

    def _add_other(self, turn: chat_pb2.ChatMessage, block: OtherBlock, field: str, problem: str) -> None:
        """Adds a block that engines do not support as text or as a note; otherwise rejects it with `problem`."""
        what, given = block.type[:64], block.model_extra or {}
        if block.type == "document":
            text, what = document_text(given), str(given.get("title") or "document")[:64]
        elif block.type == "search_result":
            text = text_in(given)
        elif block.type.endswith("tool_use"):
            text = f"[{str(given.get('name'))[:64]} was called with {_encode(given.get('input'))}]"
        else:
            text = text_in(given) if self._chat.is_earlier else ""
        self._chat.add_readable(turn, text, what, f"{field}.type", problem)

    def _turn(self, role: str) -> chat_pb2.ChatMessage:
        messages = self._chat.messages
        last = messages[-1] if messages else None
        return self._chat.add_message(role) if last is None or last.role != ROLES[role] else last

    def _add_result(self, block: ToolResultBlock, field: str) -> None:
        problem = "does not match a tool_use of an earlier assistant message"
        orphan = self._chat.add_orphan(block.tool_use_id, f"{field}.tool_use_id", problem)
        turn = orphan or self._chat.add_result(block.tool_use_id)
        if orphan is None:
            _mark(turn, block.cache_control)
        self._chat.add_content(turn, block.content or "", f"{field}.content", self._add_result_part)
        if block.is_error:
            _mark_failed(turn)

    def _add_result_part(self, turn: chat_pb2.ChatMessage, part: ResultBlock, field: str) -> None:
        if isinstance(part, TextBlock):
            _mark(turn.content.add(text=part.text), part.cache_control)
        elif isinstance(part, ImageBlock):
            self._add_image(turn, part.source, f"{field}.source")
            _mark(turn.content[-1], part.cache_control)
        elif isinstance(part, ToolReferenceBlock):
            turn.content.add(text=f"The tool {part.tool_name} is available.")
        else:
            problem = f"'{part.type[:64]}' is not supported here: send text or images"
            self._add_other(turn, part, field, problem)

    def _add_image(self, turn: chat_pb2.ChatMessage, source: Source, field: str) -> None:
        if isinstance(source, Base64Source):
            self._chat.add_encoded_image(turn, source.data, f"{field}.data")
        elif isinstance(source, UrlSource):
            self._chat.add_image(turn, source.url, f"{field}.url")
        else:
            problem = "must be 'base64' or 'url', as uploaded files are not supported"
            self._chat.add_readable(turn, "", "image", f"{field}.type", problem)


Marked = chat_pb2.ContentPart | chat_pb2.ChatMessage | chat_pb2.ToolCallRecord | chat_pb2.FunctionTool


def _mark(target: Marked, control: object) -> None:
    """Sets the cache mark that `control` requests; ignores values that Anthropic's API does not define."""
    if isinstance(control, dict) and control.get("type") == "ephemeral":
        target.cache_mark.SetInParent()
        ttl = control.get("ttl")
        if isinstance(ttl, str) and ttl in CACHE_TTLS:
            target.cache_mark.ttl = ttl


def _mark_failed(turn: chat_pb2.ChatMessage) -> None:
    first = turn.content[0] if turn.content else turn.content.add(text="")
    if first.WhichOneof("kind") == "text":
        first.text = TOOL_FAILED + first.text
    else:
        rest = list(turn.content)
        del turn.content[:]
        turn.content.add(text=TOOL_FAILED)
        turn.content.extend(rest)


def _misplaced(role: str, kind: str) -> str:
    if kind == "document":
        return "only text documents are supported: send the text in a text block"
    return f"'{kind[:64]}' is not supported in a message of role '{role}'"


def _role_of(message: MessageParam) -> chat_pb2.Role.ValueType:
    """Returns the role of a message, which is `tool` for a user message with a tool result."""
    has_result = isinstance(message.content, list) and any(
        isinstance(each, ToolResultBlock) for each in message.content
    )
    return ROLES["tool" if has_result and message.role == "user" else message.role]
