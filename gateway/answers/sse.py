"""The stream encoder of all generating APIs: server-sent events (SSE), unless a subclass overrides the format."""

from abc import ABC, abstractmethod
from typing import ClassVar

from google.protobuf import duration_pb2

from gateway.answers.answer_builder import MAX_NOTICES, NOTICES, AnswerIdentity, AnswerState, notice_text
from gateway.errors import envelope
from weft.api.common.v1 import event_pb2, receipt_pb2
from weft.dispatch.frames import has_content
from weft.dispatch.request_receipt import accelerator_time
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.requests.request_values import Priority
from weft.kernel.values.units import wait_words

KEEPALIVE = b": keepalive\n\n"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
_UNITS = {
    event_pb2.WORK_UNIT_STEPS: "steps",
    event_pb2.WORK_UNIT_AUDIO_SECONDS: "audio_seconds",
    event_pb2.WORK_UNIT_CHARACTERS: "characters",
}
_MAX_COMMENT_CHARS = 200
_MAX_RAW_COMMENT_CHARS = 2_000


class StreamEncoder(AnswerState, ABC):
    """Encodes the events of an answer, frame by frame in order.

    Waiting, loading and prefill become comments, which clients ignore. So do signals, warnings and calls of the mesh's
    tools, unless the request wants them as events. Until the answer begins, the mesh may retry on another runner:
    events are held back, and discarded when another attempt starts.
    """

    content_kinds: ClassVar[frozenset[str]] = frozenset()
    """Kinds of events with content, for an API whose answers have no deltas."""
    reads_joined_texts: ClassVar[bool] = False
    """Whether it encodes the texts of a joined delta separately."""
    keepalive = KEEPALIVE
    """Sent while there are no events."""
    content_type = EVENT_STREAM

    def __init__(self, identity: AnswerIdentity, *, choice_count: int, include_events: bool = False) -> None:
        """`include_events`: whether notices are events instead of comments."""
        super().__init__(identity, choice_count=choice_count)
        self._include_events = include_events
        self._held: list[event_pb2.InferenceEvent] = []
        self.has_content = False
        """Whether content has been encoded, after which the request cannot be retried."""
        self.is_done = False
        """Whether the last bytes of a complete answer have been encoded."""
        self.shows_receipt = True
        """Whether the stream ends with the receipt as a comment."""

    def encode(self, frame: list[event_pb2.InferenceEvent]) -> bytes:
        """Returns the bytes of one write, possibly none. Raises BACKEND_PROTOCOL_ERROR if a choice has not ended."""
        out: list[bytes] = []
        for event in frame:
            kind = event.WhichOneof("event")
            if kind == "delta" and self.has_content:
                self._encode_delta(event.delta, out)
            elif kind == "delta" or kind in NOTICES or kind in self.content_kinds:
                self._take(event, out)
            elif kind == "usage":
                self.usage = event.usage
            elif kind == "finished":
                self._encode_end(event.finished.receipt, out)
            elif kind == "started":
                self._model = event.started.model or self._model
                self._held.clear()
            else:
                out.append(self._aside(event, kind))
        return b"".join(out)

    def failure(self, error: WeftError, request_id: str = "") -> bytes:
        """Returns the last event of a failed answer. No [DONE] follows."""
        return b"data: " + envelope(error, request_id) + b"\n\n"

    def _take(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        if not self.has_content:
            if not has_content([event]):
                self._hold(event)
                return
            self._begin(out)
        self._encode(event, out)

    def _hold(self, event: event_pb2.InferenceEvent) -> None:
        # Deltas are kept, because one may end its choice; warnings are limited in number.
        is_warning = event.HasField("warning")
        if not is_warning or sum(held.HasField("warning") for held in self._held) < MAX_NOTICES:
            self._held.append(event)

    def _begin(self, out: list[bytes]) -> None:
        self.has_content = True
        for event in self._held:
            self._encode(event, out)
        self._held.clear()

    def _encode(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        kind = event.WhichOneof("event")
        if kind == "delta":
            self._encode_delta(event.delta, out)
        elif kind in self.content_kinds:
            self._encode_content(event, out)
        elif self._include_events and kind is not None:
            self._notice(event, kind, out)
        else:
            out.append(self._aside(event, kind))

    def _aside(self, event: event_pb2.InferenceEvent, kind: str | None) -> bytes:
        """Encodes an event that is not content as a comment, which clients ignore."""
        return comment_of(event, kind)

    def _notice(self, event: event_pb2.InferenceEvent, kind: str, out: list[bytes]) -> None:
        """Appends a notice as an event, or as a comment in an API without such events."""
        out.append(self._aside(event, kind))

    def _encode_content(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        """Appends the bytes of an event of `content_kinds`."""

    def _receipt_comment(self, receipt: receipt_pb2.Receipt) -> bytes:
        return receipt_comment(receipt) if self.shows_receipt else b""

    def _complete(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        """Encodes the events held back, and ends the answer. Raises as `_end`."""
        if not self.has_content:
            self._begin(out)
        self._end(receipt)

    @abstractmethod
    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        """Appends the chunks of a delta."""

    @abstractmethod
    def _encode_end(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        """Appends the end of a complete answer, and sets `is_done`. Raises as `_complete`."""


def comment_of(event: event_pb2.InferenceEvent, kind: str | None) -> bytes:
    """Returns an event as an SSE comment; empty for kinds of events without one."""
    if kind == "queued":
        facts = f": queued position={event.queued.position}"
        facts += _eta(event.queued) + f" reason={event.queued.reason}"
    elif kind == "loading":
        share = f" progress={event.loading.progress:.2f}" if event.loading.HasField("progress") else ""
        facts = f": loading{share}{_eta(event.loading)} stage={event.loading.stage}"
    elif kind == "progress":
        facts = f": prefill {event.progress.processed_tokens}/{event.progress.prompt_tokens} tokens"
    elif kind == "work_progress":
        facts = _work(event.work_progress)
    elif kind in NOTICES:
        facts = f": {notice_text(event, kind)}"
    else:
        return b""
    # A line break in a reason would end the comment; and people read comments in terminals.
    safe = "".join(character if character.isprintable() else " " for character in facts[:_MAX_RAW_COMMENT_CHARS])
    return " ".join(safe.split())[:_MAX_COMMENT_CHARS].encode() + b"\n\n"


def receipt_comment(receipt: receipt_pb2.Receipt) -> bytes:
    """Returns the receipt as SSE comments, sent before the end of a completed stream."""
    facts = receipt_facts(receipt)
    return b": " + b" ".join([name + b"=" + value for name, value in facts]) + b"\n\n"


def receipt_facts(receipt: receipt_pb2.Receipt) -> list[tuple[bytes, bytes]]:
    """Returns a receipt as response headers; times in whole milliseconds, unknown values left out."""
    cached = receipt.usage.cached_prompt_tokens
    return [
        (b"x-queue-wait-ms", b"%d" % _millis(receipt.queue_wait)),
        (b"x-load-wait-ms", b"%d" % _millis(receipt.load_wait)),
        *_gpu_facts(receipt),
        (b"x-cache-hit", b"true" if cached else b"false"),
        (b"x-cache-tokens-reused", b"%d" % cached),
        *_media_facts(receipt),
        (b"x-left-premises", b"true" if receipt.left_premises else b"false"),
        *_priority_facts(receipt),
        *([(b"x-keep-alive", b"ignored")] if receipt.keep_alive_ignored else []),
    ]


def _priority_facts(receipt: receipt_pb2.Receipt) -> list[tuple[bytes, bytes]]:
    """Returns the priority class if it was lowered."""
    lowered = Priority.from_wire(receipt.lowered_priority) if receipt.lowered_priority else None
    return [] if lowered is None else [(b"x-priority", lowered.name.lower().encode())]


def _media_facts(receipt: receipt_pb2.Receipt) -> list[tuple[bytes, bytes]]:
    """Returns the work on images and recordings, if any."""
    usage = receipt.usage
    figures = (
        (b"x-image-steps", usage.image_steps),
        (b"x-image-pixels", usage.image_pixels),
        (b"x-audio-ms", usage.audio_milliseconds),
    )
    return [(name, b"%d" % number) for name, number in figures if number]


def _gpu_facts(receipt: receipt_pb2.Receipt) -> list[tuple[bytes, bytes]]:
    """Returns the accelerator time and its source: measured by the devices, or reported by the engine."""
    usage = receipt.device_usage
    facts: list[tuple[bytes, bytes]] = []
    if (found := accelerator_time(receipt)) is not None:
        time, source = found
        facts += [(b"x-gpu-time-ms", b"%d" % _millis(time)), (b"x-gpu-time-source", source.encode())]
    if usage.HasField("energy_millijoules"):
        facts.append((b"x-gpu-energy-mj", b"%d" % usage.energy_millijoules))
    return facts


def _work(progress: event_pb2.WorkProgress) -> str:
    """Returns the progress of work on images or recordings, such as ": steps 3/20"."""
    total = f"/{progress.total:g}" if progress.total else ""
    stage = f" stage={progress.stage}" if progress.stage else ""
    return f": {_UNITS.get(progress.unit, 'work')} {progress.done:g}{total}{stage}"


def _eta(event: event_pb2.Queued | event_pb2.Loading) -> str:
    return f" eta_seconds={wait_words(event.eta.ToNanoseconds() / 1e9)}" if event.HasField("eta") else ""


def _millis(duration: duration_pb2.Duration) -> int:
    return duration.seconds * 1_000 + duration.nanos // 1_000_000
