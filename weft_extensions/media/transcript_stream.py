"""The event stream of a transcription, in OpenAI's format: each event has the text recognized since the last one."""

from collections.abc import Sequence

from typing_extensions import override

from gateway.answers.answer_builder import AnswerIdentity
from gateway.answers.sse import StreamEncoder
from weft.api.common.v1 import audio_pb2, event_pb2, receipt_pb2, usage_pb2
from weft.dispatch.frames import collected_transcription
from weft.kernel.text.json_lines import encode_json

_DONE = b"data: [DONE]\n\n"


class TranscriptStream(StreamEncoder):
    """Encodes a transcription: a `transcript.text.delta` for each piece, then `transcript.text.done` with all words.

    With segments, a `transcript.text.segment` with times, and words if requested, precedes each piece. Progress in a
    silent part is a comment.
    """

    def __init__(self, identity: AnswerIdentity, *, with_segments: bool) -> None:
        super().__init__(identity, choice_count=0)
        self._with_segments = with_segments
        self._parts: list[audio_pb2.TranscriptPart] = []
        self._segment_count = 0

    @override
    def encode(self, frame: Sequence[event_pb2.InferenceEvent]) -> bytes:
        out: list[bytes] = []
        for event in frame:
            if event.HasField("transcript"):
                self._add(event, out)
            else:
                out.append(super().encode([event]))
        return b"".join(out)

    def _add(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        if not self.has_content:
            self._begin(out)
        part = event.transcript
        # Without times, which the collected answer does not use: a long recording has many words.
        self._parts.append(
            audio_pb2.TranscriptPart(text=part.text, language=part.language, duration_seconds=part.duration_seconds)
        )
        if self._with_segments and part.HasField("segment"):
            out.append(_data(self._segment(part.segment)))
        if part.text:
            out.append(_data({"type": "transcript.text.delta", "delta": part.text}))

    def _segment(self, segment: audio_pb2.TranscriptionSegment) -> dict[str, object]:
        number, self._segment_count = self._segment_count, self._segment_count + 1
        event: dict[str, object] = {
            "type": "transcript.text.segment",
            "id": f"seg_{number}",
            "start": segment.start_seconds,
            "end": segment.end_seconds,
            "speaker": "",
            "text": segment.text,
        }
        if segment.words:
            event["words"] = [word_json(word) for word in segment.words]
        return event

    @override
    def _aside(self, event: event_pb2.InferenceEvent, kind: str | None) -> bytes:
        if kind != "work_progress":
            return super()._aside(event, kind)
        work = event.work_progress
        of_all = f"/{work.total:.0f}" if work.total else ""
        return f": heard {work.done:.0f}{of_all} s\n\n".encode()

    @override
    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        """Does nothing: a transcription has no choices."""

    @override
    def _encode_end(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        self._complete(receipt, out)
        usage = self.usage if self.usage.audio_milliseconds else receipt.usage
        event = event_pb2.InferenceEvent
        whole = collected_transcription([[event(transcript=part) for part in self._parts]])
        done = {"type": "transcript.text.done", "text": whole.text, "language": whole.language}
        out.append(_data({**done, **duration_usage(usage, whole.duration_seconds)}))
        out += (self._receipt_comment(receipt), _DONE)
        self.is_done = True


def duration_usage(usage: usage_pb2.Usage, stated_seconds: float) -> dict[str, object]:
    """Returns the member `usage` of an answer, with the seconds that were transcribed; empty: unknown."""
    seconds = usage.audio_milliseconds / 1000 or stated_seconds
    return {"usage": {"type": "duration", "seconds": seconds}} if seconds else {}


def word_json(word: audio_pb2.TranscriptionWord) -> dict[str, object]:
    """Returns a word with its times."""
    return {"word": word.text, "start": word.start_seconds, "end": word.end_seconds}


def _data(event: dict[str, object]) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"
