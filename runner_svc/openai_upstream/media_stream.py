"""Converts OpenAI's image, transcription and speech streams to events of the mesh."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec

from runner_svc.openai_upstream.chunks import Index
from runner_svc.openai_upstream.dialects import count_of, figure, read_json
from runner_svc.openai_upstream.errors import ErrorBody, error_fields, stated_answer, stated_error
from runner_svc.openai_upstream.openai_stream import DONE
from runner_svc.openai_upstream.sse import ErrorPayload
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2, receipt_pb2, usage_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.parameter_checks import MAX_IMAGE_SEED
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.media_types import UNKNOWN_TYPE, image_type_of


def image_part(text: str) -> chat_pb2.MediaPart:
    """Returns an image with the type that its first bytes show. Raises BACKEND_PROTOCOL_ERROR for invalid base64."""
    data = _bytes(text, "an image")
    return chat_pb2.MediaPart(media_type=image_type_of(data) or UNKNOWN_TYPE, data=data)


def _bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, f"the engine sent {what} that is not valid base64") from None


_EVENT = "the engine's event is"
MAX_SECONDS = 10_000_000.0


class _Progress(msgspec.Struct):
    done: float
    total: float = 0.0
    stage: str = ""


class _Event(msgspec.Struct):
    type: str | None = None
    usage: object = None
    work_progress: _Progress | None = None
    """From weft's own server programs, like `timings`."""
    timings: object = None

    def is_of(self, kind: str) -> bool:
        return (self.type or "").endswith(kind)

    @property
    def audio_milliseconds(self) -> int:
        """Length of the recording; 0: unknown."""
        return round(seconds_of(_member(self.usage, "seconds")) * 1000)

    @property
    def work_seconds(self) -> float:
        """Work time of the engine; 0: unknown."""
        return seconds_of(_member(self.timings, "predicted_ms")) / 1e3


class _ImageEvent(_Event):
    b64_json: str | None = None
    partial_image_index: Index = 0
    image_index: Index | None = None
    """Extension for several images."""
    seed: object = None
    revised_prompt: object = None


class _SpeechEvent(_Event):
    audio: str | None = None
    media_type: str = ""


class Word(msgspec.Struct):
    """A transcribed word."""

    word: str | None = None
    start: object = None
    end: object = None
    probability: object = None


class Segment(msgspec.Struct):
    """A transcribed segment."""

    start: object = None
    end: object = None
    text: str | None = None
    words: list[Word] | None = None
    avg_logprob: object = None
    no_speech_prob: object = None
    compression_ratio: object = None
    temperature: object = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _TranscriptEvent(_Event):
    delta: str | None = None
    text: str | None = None
    choices: list[_Choice] | None = None
    """vLLM streams transcriptions as chat chunks."""
    segment: Segment | None = None
    """From weft's own server programs, like `language` and `duration`."""
    language: object = None
    duration: object = None

    @property
    def piece(self) -> str:
        """The added text."""
        return self.delta or "".join((choice.delta and choice.delta.content) or "" for choice in self.choices or ())


class ImageEvents:
    """Converts the events of an image stream."""

    def __init__(self) -> None:
        self.usage = usage_pb2.Usage()
        """Usage reported so far."""
        self.work_seconds = 0.0
        """Work time of the engine; 0: unknown."""
        self._complete = 0

    def read(self, data: bytes) -> Frame:
        """Returns the events for one event; empty at the end. Raises BACKEND_PROTOCOL_ERROR or the reported error."""
        event = _decoded(data, _ImageEvent)
        if event is not None and event.work_progress is not None:
            return _progress(event.work_progress, event_pb2.WORK_UNIT_STEPS)
        if event is None or event.b64_json is None:
            return []
        index = self._complete if event.image_index is None else event.image_index
        if event.is_of(".partial_image"):
            part = image_pb2.PartialImage(
                index=index, partial_index=event.partial_image_index, image=image_part(event.b64_json)
            )
            return [event_pb2.InferenceEvent(partial_image=part)]
        self._complete += 1
        made = image_pb2.GeneratedImage(
            index=index, image=image_part(event.b64_json), revised_prompt=text_of(event.revised_prompt)
        )
        if (seed := count_of(event.seed)) is not None and seed <= MAX_IMAGE_SEED:
            made.seed = seed
        self.usage.prompt_tokens += figure(event.usage, "input_tokens")
        self.usage.completion_tokens += figure(event.usage, "output_tokens")
        self.usage.image_steps += figure(event.usage, "image_steps")
        self.usage.image_pixels += figure(event.usage, "image_pixels")
        self.work_seconds += event.work_seconds
        return [event_pb2.InferenceEvent(image=made)]

    def require_end(self) -> None:
        """Raises BACKEND_PROTOCOL_ERROR if the stream contained no image."""
        if not self._complete:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's stream ended without an image")


class _UntilDone:
    _is_done = False

    def require_end(self) -> None:
        """Raises BACKEND_PROTOCOL_ERROR if the stream was cut off."""
        if not self._is_done:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's stream ended before the answer was complete")


class TranscriptEvents(_UntilDone):
    """Converts the events of a transcription stream."""

    def __init__(self) -> None:
        self.usage = usage_pb2.Usage()
        self.work_seconds = 0.0
        self._has_text = False
        self._has_language = False

    def read(self, data: bytes) -> Frame:
        """Returns the events for one event; empty at the end. Raises BACKEND_PROTOCOL_ERROR or the reported error."""
        event = _decoded(data, _TranscriptEvent)
        if event is None:
            self._is_done = True
            return []
        if event.work_progress is not None:
            return _progress(event.work_progress, event_pb2.WORK_UNIT_AUDIO_SECONDS)
        text = event.piece
        if event.is_of(".done"):
            self._is_done = True
            self.usage.audio_milliseconds = event.audio_milliseconds
            self.usage.completion_tokens = figure(event.timings, "predicted_n")
            self.work_seconds = event.work_seconds
            # The final event repeats the whole text; it is used only if the server sent no pieces.
            text = "" if self._has_text else event.text or ""
        self._has_text = self._has_text or bool(text)
        part = audio_pb2.TranscriptPart(text=text)
        if event.segment is not None:
            part.segment.CopyFrom(segment_of(event.segment, event.segment.words or ()))
        if not self._has_language and (event.language or event.duration):
            self._has_language = True
            part.language, part.duration_seconds = text_of(event.language), seconds_of(event.duration)
        return [event_pb2.InferenceEvent(transcript=part)] if part.ListFields() else []


class SpeechEvents(_UntilDone):
    """Converts the events of a speech stream."""

    def __init__(self) -> None:
        self.media_type = ""
        self.receipt = receipt_pb2.Receipt()
        """The engine's part of the receipt, available at the end."""

    def read(self, data: bytes) -> bytes:
        """Returns the audio bytes in one event; empty for progress. Raises as `ImageEvents.read` does."""
        event = _decoded(data, _SpeechEvent)
        if event is not None and event.is_of(".done"):
            self._is_done = True
            self.receipt = receipt_of(usage_pb2.Usage(audio_milliseconds=event.audio_milliseconds), event.work_seconds)
        if event is None or event.audio is None:
            return b""
        self.media_type = event.media_type
        return _bytes(event.audio, "sound")


def receipt_of(usage: usage_pb2.Usage, work_seconds: float) -> receipt_pb2.Receipt:
    """Returns the engine's part of the receipt; 0 s: unknown work time."""
    receipt = receipt_pb2.Receipt(usage=usage)
    if work_seconds > 0:
        receipt.gpu_time.FromMicroseconds(int(work_seconds * 1e6))
    return receipt


def segment_of(segment: Segment, words: Sequence[Word]) -> audio_pb2.TranscriptionSegment:
    """Converts a segment and its words."""
    return audio_pb2.TranscriptionSegment(
        start_seconds=seconds_of(segment.start),
        end_seconds=seconds_of(segment.end),
        text=segment.text or "",
        words=map(word_of, words),
        mean_logprob=_number(segment.avg_logprob),
        no_speech_probability=_number(segment.no_speech_prob),
        compression_ratio=_number(segment.compression_ratio),
        temperature=_number(segment.temperature),
    )


def word_of(word: Word) -> audio_pb2.TranscriptionWord:
    """Returns a word without its leading space."""
    return audio_pb2.TranscriptionWord(
        start_seconds=seconds_of(word.start),
        end_seconds=seconds_of(word.end),
        text=(word.word or "").strip(),
        probability=_number(word.probability),
    )


def text_of(value: object) -> str:
    """Returns `value` if it is a text, otherwise an empty text."""
    return value if isinstance(value, str) else ""


def seconds_of(value: object) -> float:
    """Returns a time, which some servers send as text; 0: invalid or over MAX_SECONDS."""
    try:
        seconds = float(value) if isinstance(value, str) else _number(value) or 0.0
    except ValueError:
        return 0.0
    return seconds if 0.0 <= seconds <= MAX_SECONDS else 0.0


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _member(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else None


def _progress(progress: _Progress, unit: event_pb2.WorkUnit.ValueType) -> Frame:
    work = event_pb2.WorkProgress(unit=unit, done=progress.done, total=progress.total, stage=progress.stage)
    return [event_pb2.InferenceEvent(work_progress=work)]


def _decoded(data: bytes, kind: type[Any]) -> Any:
    """Decodes an event; None: the end marker. Raises the error that the event reports."""
    if data == DONE:
        return None
    if isinstance(data, ErrorPayload):
        message, error_type = error_fields(data)
        body = ErrorBody(message=message or "an error without a message", type=error_type)
        raise stated_error(body, has_begun=False)
    if b'"error"' in data and (stated := stated_answer(data)) is not None:
        raise stated
    return read_json(data, kind, _EVENT)
