"""Answers of the Messages API: complete messages and streamed events.

A stream is message_start; for each block content_block_start, deltas and content_block_stop; then message_delta and
message_stop. One block is open at a time. Events are assembled by hand, because this runs once per token. A call's
input is sent only as far as it can begin a JSON object: clients parse it as it arrives, and fail on anything else.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from typing_extensions import override

from gateway.answers.answer_builder import AnswerIdentity, CalledTool, DocumentAnswer, add_call
from gateway.answers.call_arguments import (
    CUTTING,
    arguments_object,
    bad_arguments,
    cut_call,
    is_object_so_far,
    is_whole_object,
)
from gateway.answers.server_tools import ServerTool
from gateway.answers.sse import StreamEncoder
from gateway.anthropic.message_context import ManagedContext, message_usage
from gateway.errors import Dialect, envelope
from weft.api.common.v1 import event_pb2, receipt_pb2, usage_pb2
from weft.dispatch.extra_fields import JsonMap
from weft.dispatch.frames import is_seal, texts_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.json_lines import encode_json
from weft.kernel.text.json_objects import plain_object
from weft.kernel.values.names import new_id

_STOP_REASONS: dict[int, str] = {
    event_pb2.FINISH_REASON_LENGTH: "max_tokens",
    event_pb2.FINISH_REASON_CONTENT_FILTER: "refusal",
}


def stop_reason(finish: int, *, has_calls: bool, has_refusal: bool, stop_sequence: str = "") -> str:
    """Returns Anthropic's stop reason: `end_turn` if the engine does not report which stop string ended the message."""
    cut = _STOP_REASONS.get(finish)
    if cut is not None:
        return cut
    if has_calls:
        return "tool_use"
    if stop_sequence:
        return "stop_sequence"
    return "refusal" if has_refusal else "end_turn"


@dataclass(slots=True)
class Block:
    """A block of text, thinking or redacted_thinking."""

    kind: str
    pieces: list[str] = field(default_factory=list)
    signature: str = ""
    """A provider's signature, which closes a block of thinking; models of the mesh have none."""


_URL = re.compile(r"https?://[^\s\"'<>]+")
_SERVER_TOOLS = ("web_search", "web_fetch", "code_execution", "tool_search", "advisor")
"""Beginnings of the types of tools that a server runs, and of the types of their result blocks."""
_NO_REQUESTS: dict[str, object] = {"server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0}}


def failed_call(tool: ServerTool) -> list[dict[str, object]]:
    """Returns the blocks of a call of a server's tool that failed as unavailable; empty for one without such blocks."""
    kind = next((kind for kind in _SERVER_TOOLS if tool.type.startswith(kind)), "")
    if not kind:
        return []
    call_id, given = new_id("srvtoolu"), dict[str, object]()
    if kind == "web_search":
        given = {"query": tool.query}
    elif kind == "web_fetch" and (found := _URL.search(tool.query)):
        given = {"url": found[0]}
    result = f"{kind}_tool_result"
    error = {"type": f"{result}_error", "error_code": "unavailable"}
    return [
        {"type": "server_tool_use", "id": call_id, "name": tool.name, "input": given},
        {"type": result, "tool_use_id": call_id, "content": error},
    ]


class MessagesAnswer(DocumentAnswer):
    """Builds a complete message."""

    context: ManagedContext | None = None
    """How its conversation was edited or compacted; None: the request asks for neither."""

    def __init__(self, identity: AnswerIdentity, blocks: Sequence[dict[str, object]] = ()) -> None:
        """`blocks`: a failed call, with which the message begins."""
        super().__init__(identity, choice_count=1)
        self._failed = blocks
        self._blocks: list[Block | CalledTool | dict[str, object]] = []
        self._calls: dict[int, CalledTool] = {}
        self._has_refusal = False
        self._finish = 0
        self._stop_sequence = ""

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        if delta.index:
            return
        self._add_text("thinking", delta.reasoning)
        if is_seal(delta):
            self._seal(delta)
        self._add_text("text", delta.text)
        self._add_text("text", delta.refusal)
        self._has_refusal = self._has_refusal or bool(delta.refusal)
        for piece in delta.tool_calls:
            call = add_call(self._calls, piece, "toolu")
            if call is not None:
                self._blocks.append(call)
        if delta.finish_reason:
            self._close_choice(0)
            self._finish, self._stop_sequence = delta.finish_reason, delta.stop_sequence

    def _add_text(self, kind: str, text: str) -> None:
        if not text:
            return
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, Block) or last.kind != kind or last.signature:
            last = Block(kind)
            self._blocks.append(last)
        last.pieces.append(text)

    def _seal(self, delta: event_pb2.Delta) -> None:
        if delta.reasoning_signature:
            last = self._blocks[-1] if self._blocks else None
            if not isinstance(last, Block) or last.kind != "thinking" or last.signature:
                # The provider sends the signature without the thinking.
                last = Block("thinking")
                self._blocks.append(last)
            last.signature = delta.reasoning_signature
        if delta.redacted_reasoning:
            self._blocks.append(Block("redacted_thinking", [delta.redacted_reasoning]))

    def _forget(self) -> None:
        self._blocks.clear()
        self._calls.clear()
        self._has_refusal = False

    def _document(self) -> dict[str, object]:
        said = [message for message in map(self._block_json, self._blocks) if message is not None]
        context = self.context
        return {
            "id": self._identity.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [*([] if context is None else context.blocks), *self._failed, *said],
            "stop_reason": (context and context.stop_reason)
            or stop_reason(
                self._finish,
                has_calls=bool(self._calls),
                has_refusal=self._has_refusal,
                stop_sequence=self._stop_sequence,
            ),
            "stop_sequence": self._stop_sequence or None,
            "usage": self._counts(),
            **({} if context is None else context.members()),
        }

    def _counts(self) -> dict[str, object]:
        more = {} if self.context is None else self.context.counts(self.usage)
        return message_usage(self.usage) | (_NO_REQUESTS if self._failed else {}) | more

    def _block_json(self, block: Block | CalledTool | dict[str, object]) -> dict[str, object] | None:
        if isinstance(block, dict):
            return block
        if isinstance(block, CalledTool):
            return self._call_block(block)
        text = "".join(block.pieces)
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "redacted_thinking":
            return {"type": "redacted_thinking", "data": text}
        return {"type": "thinking", "thinking": text, "signature": block.signature}

    def _call_block(self, call: CalledTool) -> dict[str, object] | None:
        """Returns the call as a block; for a truncated call, adds a warning and returns None."""
        arguments = arguments_object(call, is_cut=self._finish in CUTTING)
        if arguments is not None:
            return {**call.extra, "type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
        self.warnings.append(cut_call(call))
        return None


# New text is checked together with all earlier text. Waiting until it is 1/64 of that keeps the work proportional to
# the length of the arguments. Short arguments are sent delta by delta.
_SHARE_TO_CHECK = 64


class CallInput:
    """The arguments of one call, as they arrive."""

    def __init__(self, call_id: str, name: str, extra: JsonMap) -> None:
        """`extra`: fields of the call that weft does not know."""
        self.id = call_id
        self.name = name
        self.extra = extra
        self.is_sent = False
        """Whether its block has been opened."""
        self._checked = ""
        self._new: list[str] = []
        self._new_chars = 0

    def add(self, text: str) -> None:
        """Adds a delta."""
        self._new.append(text)
        self._new_chars += len(text)

    @property
    def may_end(self) -> bool:
        """Whether the arguments are empty or a complete object."""
        text = self._checked + "".join(self._new)
        return not text.strip() or is_whole_object(text)

    def sendable(self) -> str:
        """Returns new text that can be sent. Raises TOOL_CALL_INVALID if the arguments cannot become a JSON object."""
        if self._new_chars * _SHARE_TO_CHECK < len(self._checked):
            return ""
        return self._take()

    def rest(self, *, is_cut: bool) -> str:
        """Returns the unsent rest. Raises TOOL_CALL_INVALID if the arguments are not an object, unless `is_cut`."""
        if not (is_cut or self.may_end):
            raise bad_arguments()
        return self._take()

    def _take(self) -> str:
        new = "".join(self._new)
        if not self._checked:
            # Clients parse from the first byte and fail on leading white space.
            new = new.lstrip()
        text = self._checked + new
        if not is_object_so_far(text):
            raise bad_arguments()
        self._checked = text
        self._new.clear()
        self._new_chars = 0
        return new


class OpenCalls:
    """The calls of one answer by index, and the one being streamed."""

    def __init__(self) -> None:
        self._calls: dict[int, CallInput] = {}
        self.open: CallInput | None = None

    @property
    def any(self) -> bool:
        """Whether the answer has called a tool."""
        return bool(self._calls)

    @property
    def is_within(self) -> bool:
        """Whether the open call is incomplete, so that nothing else can be sent."""
        return self.open is not None and not self.open.may_end

    @property
    def waiting(self) -> list[CallInput]:
        """The calls that have not been sent, in order."""
        return [call for _, call in sorted(self._calls.items()) if not call.is_sent]

    def take(self, piece: event_pb2.ToolCallDelta) -> CallInput | None:
        """Adds a delta to its call; None: the call has ended. Raises TOOL_CALL_INVALID if an ended call continues."""
        call = self._calls.get(piece.index)
        if call is None:
            call = self._calls[piece.index] = CallInput(
                piece.id or new_id("toolu"), piece.name, plain_object(piece.extra_fields)
            )
        elif call.is_sent and call is not self.open:
            # A closed block without arguments already means an empty object.
            if piece.arguments_text.strip() not in ("", "{}"):
                raise bad_arguments()
            return None
        call.add(piece.arguments_text)
        return call

    def begin(self, call: CallInput) -> None:
        """Makes a call the open one."""
        call.is_sent = True
        self.open = call

    def end(self, *, is_cut: bool) -> str:
        """Closes the open call; returns its unsent rest. Raises as `CallInput.rest`."""
        call, self.open = self.open, None
        return "" if call is None else call.rest(is_cut=is_cut)


_END = b"}\n\n"
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":%b,%b:'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_KINDS: dict[str, tuple[bytes, bytes]] = {
    "text": (b'"text_delta"', b'"text"'),
    "thinking": (b'"thinking_delta"', b'"thinking"'),
    "tool_use": (b'"input_json_delta"', b'"partial_json"'),
}
_EMPTY: dict[str, dict[str, object]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessagesStream(StreamEncoder):
    """Encodes one streamed message."""

    context: ManagedContext | None = None
    """As `MessagesAnswer.context`."""
    reads_joined_texts = True
    keepalive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self,
        identity: AnswerIdentity,
        estimated_prompt_tokens: int = 0,
        blocks: Sequence[dict[str, object]] = (),
    ) -> None:
        """`estimated_prompt_tokens`: sent in the first event if the engine has not counted the prompt yet.

        `blocks`: a failed call, with which the message begins.
        """
        super().__init__(identity, choice_count=1)
        self._failed = blocks
        self._estimated_prompt_tokens = estimated_prompt_tokens
        self._block = -1
        """Index of the newest block; -1: none."""
        self._kind = ""
        """Kind of the open block: text, thinking, tool_use, or empty."""
        self._head = b""
        """First bytes of every delta of the open block."""
        self._signature = ""
        """A provider's signature of the open block of thinking."""
        self._calls = OpenCalls()
        self._late: list[tuple[str, str]] = []
        self._has_refusal = False
        self._finish = 0
        self._stop_sequence = ""
        self._prompt = usage_pb2.Usage()

    @override
    def encode(self, frame: list[event_pb2.InferenceEvent]) -> bytes:
        """Raises TOOL_CALL_INVALID if a call's arguments are not a JSON object."""
        if not self.has_content:
            for event in frame:
                if event.HasField("progress"):
                    # message_start reports these counts, which only progress events have at that time.
                    self._prompt.prompt_tokens = event.progress.prompt_tokens
                    self._prompt.cached_prompt_tokens = event.progress.cached_tokens
                elif event.HasField("started"):
                    self._prompt.Clear()
        return super().encode(frame)

    def failure(self, error: WeftError, request_id: str = "") -> bytes:
        """Returns the last event of a failed message. No message_stop follows."""
        return b"event: error\ndata: " + envelope(error, request_id, Dialect.ANTHROPIC) + b"\n\n"

    def _begin(self, out: list[bytes]) -> None:
        # Content does not wait for the engine's count, which the last event reports.
        counted = self._prompt.prompt_tokens or self.usage.prompt_tokens
        known = self._prompt if self._prompt.prompt_tokens else self.usage
        context = self.context
        estimated = (context and context.estimated_tokens) or self._estimated_prompt_tokens
        prompt = known if counted else usage_pb2.Usage(prompt_tokens=estimated)
        message: dict[str, object] = {
            "id": self._identity.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": message_usage(
                usage_pb2.Usage(prompt_tokens=prompt.prompt_tokens, cached_prompt_tokens=prompt.cached_prompt_tokens)
            ),
        }
        out += (b'event: message_start\ndata: {"type":"message_start","message":', encode_json(message), _END)
        for block in (*(() if context is None else context.blocks), *self._failed):
            self._send_block(block, out)
        super()._begin(out)

    def _send_block(self, block: dict[str, object], out: list[bytes]) -> None:
        """Sends a block of a failed call. Clients read the input from deltas."""
        if block["type"] == "compaction":
            self._open("", block | {"content": None}, out)
            if block["content"] is not None:
                head = _DELTA % (self._block, b'"compaction_delta"', b'"content"')
                out += (head, encode_json(block["content"]), b"}", _END)
            out.append(_STOP % self._block)
            return
        has_input = "input" in block
        self._open("tool_use" if has_input else "", block | ({"input": {}} if has_input else {}), out)
        if has_input:
            self._add_arguments(encode_json(block["input"]).decode(), out)
        out.append(_STOP % self._block)
        self._kind = ""

    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        if delta.index:
            return
        if delta.reasoning:
            self._add_text("thinking", delta.reasoning, out)
        if delta.reasoning_signature:
            self._add_seal("signature", delta.reasoning_signature, out)
        if delta.redacted_reasoning:
            self._add_seal("redacted_thinking", delta.redacted_reasoning, out)
        if delta.text:
            for text in texts_of(delta):
                self._add_text("text", text, out)
        if delta.refusal:
            self._has_refusal = True
            self._add_text("text", delta.refusal, out)
        for piece in delta.tool_calls:
            self._call(piece, out)
        if delta.finish_reason:
            self._finish, self._stop_sequence = delta.finish_reason, delta.stop_sequence
            self._close_choice(0)

    def _add_text(self, kind: str, text: str, out: list[bytes]) -> None:
        if self._kind == kind:
            out += (self._head, encode_json(text), b"}", _END)
        elif self._calls.is_within:
            # Sent after the open call's arguments.
            self._late.append((kind, text))
        else:
            self._close(out)
            self._flush_late_text(out)
            if self._kind != kind:
                self._close(out)
                self._open(kind, _EMPTY[kind], out)
            out += (self._head, encode_json(text), b"}", _END)

    def _add_seal(self, kind: str, seal: str, out: list[bytes]) -> None:
        """Ends the thinking block with its signature, or sends encrypted thinking as a separate block."""
        if self._calls.is_within:
            self._late.append((kind, seal))
            return
        if self._late:
            self._close(out)
            self._flush_late_text(out)
        if kind != "signature":
            self._close(out)
            self._open(kind, {"type": kind, "data": seal}, out)
        elif self._kind != "thinking":
            # The provider sends the signature without the thinking.
            self._close(out)
            self._open("thinking", _EMPTY["thinking"], out)
        self._signature = seal if kind == "signature" else ""
        self._close(out)

    def _flush_late_text(self, out: list[bytes]) -> None:
        late, self._late = self._late, []
        for kind, text in late:
            if kind in _EMPTY:
                self._add_text(kind, text, out)
            else:
                self._add_seal(kind, text, out)

    def _call(self, piece: event_pb2.ToolCallDelta, out: list[bytes]) -> None:
        call = self._calls.take(piece)
        if call is None:
            return
        if call is not self._calls.open:
            if self._calls.is_within:
                # The open call is incomplete; this one is sent after it.
                return
            self._close(out)
            self._open_call(call, out)
        self._add_arguments(call.sendable(), out)

    def _open_call(self, call: CallInput, out: list[bytes]) -> None:
        self._calls.begin(call)
        block = {**call.extra, "type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self._open("tool_use", block, out)

    def _add_arguments(self, arguments: str, out: list[bytes]) -> None:
        if arguments:
            out += (self._head, encode_json(arguments), b"}", _END)

    def _open(self, kind: str, block: dict[str, object], out: list[bytes]) -> None:
        self._block += 1
        self._kind = kind
        if kind in _KINDS:
            self._head = _DELTA % (self._block, *_KINDS[kind])
        out += (
            b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":'
            % self._block,
            encode_json(block),
            _END,
        )

    def _close(self, out: list[bytes], *, is_cut: bool = False) -> None:
        if not self._kind:
            return
        if self._kind == "tool_use":
            self._add_arguments(self._calls.end(is_cut=is_cut), out)
        elif self._kind == "thinking":
            # Clients discard a thinking block without a signature.
            head = _DELTA % (self._block, b'"signature_delta"', b'"signature"')
            out += (head, encode_json(self._signature), b"}", _END)
            self._signature = ""
        out.append(_STOP % self._block)
        self._kind = ""

    def _encode_end(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        self._complete(receipt, out)
        self._finish_blocks(out)
        context = self.context
        reason = (context and context.stop_reason) or stop_reason(
            self._finish,
            has_calls=self._calls.any,
            has_refusal=self._has_refusal,
            stop_sequence=self._stop_sequence,
        )
        message = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": self._stop_sequence or None},
            "usage": self._counts(),
            **({} if context is None else context.members()),
        }
        out += (b"event: message_delta\ndata: ", encode_json(message), b"\n\n")
        out += (self._receipt_comment(receipt), _MESSAGE_STOP)
        self.is_done = True

    def _counts(self) -> dict[str, object]:
        more = {} if self.context is None else self.context.counts(self.usage)
        return message_usage(self.usage) | (_NO_REQUESTS if self._failed else {}) | more

    def _finish_blocks(self, out: list[bytes]) -> None:
        is_cut = self._finish in CUTTING
        self._close(out, is_cut=is_cut)
        for call in self._calls.waiting:
            self._open_call(call, out)
            self._close(out, is_cut=is_cut)
        self._flush_late_text(out)
        self._close(out)
