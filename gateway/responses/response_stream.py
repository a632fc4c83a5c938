"""Streamed and unary responses. Events are assembled by hand, because this runs once per token.

A stream is response.created, response.in_progress; per item output_item.added, parts and deltas, output_item.done; then
response.completed or response.incomplete, or else response.failed and an `error` event. Every event has its name twice
(as the SSE event and as `type`) and the next sequence number. `response.created` may be sent before the answer begins,
because the response is still empty when another runner takes over.
"""

import msgspec
from typing_extensions import override

from gateway.answers.answer_builder import MAX_NOTICES, AnswerBuilder, AnswerIdentity, AnswerState, notice_json
from gateway.answers.sse import StreamEncoder
from gateway.errors import envelope
from gateway.responses.document import CANCELLED, FAILED, IN_PROGRESS, ResponseDocument
from gateway.responses.output import OUTPUT_TEXT, REASONING_TEXT, REFUSAL, Item, Logprobs, OutputSink, Part
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json

_TEXTS = {
    OUTPUT_TEXT: b"response.output_text",
    REFUSAL: b"response.refusal",
    REASONING_TEXT: b"response.reasoning_text",
}
_ARGUMENTS = b"response.function_call_arguments"


class PartialResponse(AnswerState):
    """A response that is being generated, streamed or unary."""

    document: ResponseDocument
    """The response so far."""

    def snapshot(self, status: str = IN_PROGRESS) -> bytes:
        """Returns the current response as JSON, the final one once it is concluded."""
        document = self.document
        document.model, document.usage = self._model, self.usage
        return document.render(status)

    def conclude(self, receipt: receipt_pb2.Receipt) -> bytes:
        """Concludes the response; returns it as JSON. Raises BACKEND_PROTOCOL_ERROR for an invalid end."""
        self._end(receipt)
        self.document.conclude(receipt)
        return self.snapshot()


class ResponsesStream(PartialResponse, StreamEncoder, OutputSink):
    """Encodes one answer of the Responses API as server-sent events, from the output items that it collects."""

    def __init__(self, document: ResponseDocument, *, include_events: bool = False) -> None:
        super().__init__(_identity(document), choice_count=1, include_events=include_events)
        self.document = document
        document.items.sink = self
        self._out: list[bytes] = []
        self._sequence = 0
        self._is_opened = False

    @override
    def encode(self, frame: list[event_pb2.InferenceEvent]) -> bytes:
        """Begins with the opening events of every response."""
        if self._is_opened:
            return super().encode(frame)
        for event in frame:
            if event.HasField("started"):
                self._model = event.started.model or self._model
        return self._first_events() + super().encode(frame)

    @override
    def conclude(self, receipt: receipt_pb2.Receipt) -> bytes:
        self._out = []
        self._complete(receipt, self._out)
        return super().conclude(receipt)

    @override
    def failure(self, error: WeftError, request_id: str = "") -> bytes:
        """Sends the `error` event last, so that clients that stop at it have the complete response."""
        opening = b"" if self._is_opened else self._first_events()
        if self.document.final_status:
            # It failed while it was stored: the end of its items has not been sent.
            self.document.final_status = ""
            opening += b"".join(self._out)
        is_cancelled = error.reason is Reason.CANCELLED
        if not is_cancelled:
            self.document.error = error
            # A task stores its response even if it failed.
            self.document.is_stored = self.document.is_of_task and self.document.is_stored
        failed = self._event(b"response.failed", self.snapshot(CANCELLED if is_cancelled else FAILED))
        return opening + failed + error_event(error, request_id, self._next())

    @override
    def item_added(self, item: Item) -> None:
        if item.kind == "function_call":
            item.head = _delta_head(_ARGUMENTS, item, b"")
        self._emit_item(b"response.output_item.added", item, empty=True)
        if item.kind == "compaction":
            place = b'"item_id":%b,"output_index":%d' % (encode_json(item.id), item.index)
            self._emit(b"response.compaction.compacting", place)

    @override
    def part_added(self, item: Item, part: Part) -> None:
        part.head = _delta_head(_TEXTS[part.kind], item, b',"content_index":%d' % part.index)
        self._emit_part(b"response.content_part.added", item, part, empty=True)

    @override
    def text_added(self, item: Item, part: Part, text: str, logprobs: Logprobs) -> None:
        sequence = self._sequence
        self._sequence = sequence + 1
        if part.kind != OUTPUT_TEXT:
            self._out += (part.head, encode_json(text), b',"sequence_number":%d}\n\n' % sequence)
        elif not logprobs:
            self._out += (part.head, encode_json(text), b',"logprobs":[],"sequence_number":%d}\n\n' % sequence)
        else:
            told = b',"logprobs":%b,"sequence_number":%d}\n\n' % (encode_json(logprobs), sequence)
            self._out += (part.head, encode_json(text), told)

    @override
    def arguments_added(self, item: Item, text: str) -> None:
        if item.kind != "function_call":
            return
        self._out += (item.head, encode_json(text), b',"sequence_number":%d}\n\n' % self._next())

    @override
    def part_done(self, item: Item, part: Part) -> None:
        name = _TEXTS[part.kind] + b".done"
        members = b'"item_id":%b,"output_index":%d,"content_index":%d,' % (
            encode_json(item.id),
            item.index,
            part.index,
        )
        said = b'"refusal":' if part.kind == REFUSAL else b'"text":'
        logprobs = b',"logprobs":' + encode_json(part.logprobs) if part.kind == OUTPUT_TEXT else b""
        self._emit(name, members + said + encode_json(part.text) + logprobs)
        self._emit_part(b"response.content_part.done", item, part)

    @override
    def item_done(self, item: Item) -> None:
        if item.kind == "function_call":
            members = b'"item_id":%b,"output_index":%d,"name":%b,"arguments":%b' % (
                encode_json(item.id),
                item.index,
                encode_json(item.name),
                encode_json("".join(item.arguments)),
            )
            self._emit(_ARGUMENTS + b".done", members)
        self._emit_item(b"response.output_item.done", item)

    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        self._out = out
        self.document.items.add(delta)
        if delta.finish_reason:
            self._close_choice(delta.index)

    @override
    def _encode(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        kind = event.WhichOneof("event") or ""
        kept = {"warning": self.document.warnings, "signal": self.document.signals}.get(kind)
        if kept is not None and len(kept) < MAX_NOTICES:
            kept.append(notice_json(event, kind))
        super()._encode(event, out)

    @override
    def _notice(self, event: event_pb2.InferenceEvent, kind: str, out: list[bytes]) -> None:
        self._out = out
        self._emit(b"response.weft", b'"%b":%b' % (kind.encode(), encode_json(notice_json(event, kind))))

    def _encode_end(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        document = self.document
        if not document.final_status:
            self.conclude(receipt)
        out += self._out
        self._out = out
        out.append(self._receipt_comment(receipt))
        if document.has_metrics:
            self._emit(b"response.metrics", b'"metrics":' + encode_json(document.metrics()))
        out.append(self._event(b"response." + document.final_status.encode(), self.snapshot()))
        self.is_done = True

    def _first_events(self) -> bytes:
        self._is_opened = True
        response = self.snapshot()
        return self._event(b"response.created", response) + self._event(b"response.in_progress", response)

    def _event(self, name: bytes, response: bytes) -> bytes:
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n' % (
            name,
            name,
            self._next(),
            response,
        )

    def _emit(self, name: bytes, members: bytes) -> None:
        head = b'event: %b\ndata: {"type":"%b",' % (name, name)
        self._out += (head, members, b',"sequence_number":%d}\n\n' % self._next())

    def _emit_item(self, name: bytes, item: Item, *, empty: bool = False) -> None:
        self._emit(name, b'"output_index":%d,"item":%b' % (item.index, encode_json(item.json(empty=empty))))

    def _emit_part(self, name: bytes, item: Item, part: Part, *, empty: bool = False) -> None:
        place = b'"item_id":%b,"output_index":%d,"content_index":%d' % (encode_json(item.id), item.index, part.index)
        self._emit(name, place + b',"part":' + encode_json(part.json(empty=empty)))

    def _next(self) -> int:
        sequence = self._sequence
        self._sequence = sequence + 1
        return sequence


def error_event(error: WeftError, request_id: str, number: int) -> bytes:
    """Returns the `error` event, which clients raise."""
    fields: dict[str, object] = msgspec.json.decode(envelope(error, request_id))
    told = fields["error"]
    assert isinstance(told, dict)
    # The Python client raises for a member `error`, and ignores other members.
    own = {"code": told["code"], "message": told["message"], "param": told["param"]}
    members = encode_json({"type": "error", "sequence_number": number} | own | fields)
    return b"event: error\ndata: " + members + b"\n\n"


def _delta_head(name: bytes, item: Item, place: bytes) -> bytes:
    """Returns the first bytes of each delta of a part or of a call's arguments."""
    return b'event: %b.delta\ndata: {"type":"%b.delta","item_id":%b,"output_index":%d%b,"delta":' % (
        name,
        name,
        encode_json(item.id),
        item.index,
        place,
    )


class ResponsesAnswer(PartialResponse, AnswerBuilder):
    """Builds a unary response."""

    def __init__(self, document: ResponseDocument) -> None:
        super().__init__(_identity(document), choice_count=1)
        self.document = document
        document.warnings, document.signals = self.warnings, self._signals

    @override
    def body(self) -> bytes:
        receipt = self._ended()
        return self.snapshot() if self.document.final_status else self.conclude(receipt)

    def _add_delta(self, delta: event_pb2.Delta) -> None:
        self.document.items.add(delta)
        if delta.finish_reason:
            self._close_choice(delta.index)

    def _forget(self) -> None:
        self.document.items.begin_again()


def _identity(document: ResponseDocument) -> AnswerIdentity:
    return AnswerIdentity(answer_id=document.response_id, created=document.created, model=document.model)
