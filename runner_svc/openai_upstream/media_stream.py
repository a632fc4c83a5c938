"""Readers of OpenAI's streams of images and transcriptions: events of a server to events of the mesh."""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from runner_svc.openai_upstream.chunks import Place
from runner_svc.openai_upstream.dialects import figure
from runner_svc.openai_upstream.errors import JSON_FAULTS, malformed, stated_answer
from runner_svc.openai_upstream.sse import ErrorPayload
from runner_svc.openai_upstream.stream import DONE
from weft.api.common.v1 import audio_pb2, chat_pb2, event_pb2, image_pb2, receipt_pb2, usage_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.parameter_checks import MAX_IMAGE_SEED
from weft.kernel.errors import WeftError
from weft.kernel.media_types import UNKNOWN_TYPE, image_type_of
from weft.kernel.reasons import Reason


def image_part(text: str) -> chat_pb2.MediaPart:
    """Returns an image with the type that its first bytes say. Raises BACKEND_PROTOCOL_ERROR for no base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine sent an image that is no base64") from None
    return chat_pb2.MediaPart(media_type=image_type_of(data) or UNKNOWN_TYPE, data=data)


_EVENT = "the engine's event is"


class _Progress(msgspec.Struct):
    done: float
    total: float = 0.0
    stage: str = ""


class _Timings(msgspec.Struct):
    predicted_n: Place = 0
    predicted_ms: float = 0.0


class _Event(msgspec.Struct):
    type: str = ""
    usage: object = None
    work_progress: _Progress | None = None
    """Of weft's own server programs, as the timings."""
    timings: _Timings = msgspec.field(default_factory=_Timings)


class _ImageEvent(_Event):
    b64_json: str | None = None
    partial_image_index: Place = 0
    image_index: Place | None = None
    """An extension, where there are several images."""
    seed: int | None = None
    revised_prompt: str | None = None


class _SpeechEvent(_Event):
    audio: str | None = None
    media_type: str = ""


class Word(msgspec.Struct):
    """A word of a recording."""

    word: str = ""
    start: float = 0.0
    end: float = 0.0
    probability: float | None = None


class Segment(msgspec.Struct):
    """A part of a recording."""

    start: float = 0.0
    end: float = 0.0
    text: str = ""
    words: list[Word] | None = None
    avg_logprob: float | None = None
    no_speech_prob: float | None = None
    compression_ratio: float | None = None
    temperature: float | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Duration(msgspec.Struct):
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _TranscriptEvent(_Event):
    delta: str = ""
    text: str = ""
    choices: list[_Choice] | None = None
    """vLLM streams transcriptions as chunks of chats."""
    segment: Segment | None = None
    """Of weft's own server programs, as the next two."""
    language: str | None = None
    duration: float | str | None = None


class ImageEvents:
    """Translates the events of one stream of images."""

    def __init__(self) -> None:
        self.usage = usage_pb2.Usage()
        """What the engine counted so far."""
        self.work_seconds = 0.0
        """How long it worked; 0: unknown."""
        self._complete = 0

    def read(self, data: bytes) -> Frame:
        """Returns the events of one event; none for its end. Raises BACKEND_PROTOCOL_ERROR, or the stated error."""
        event = _decoded(data, _ImageEvent)
        if event is not None and event.work_progress is not None:
            return _progress(event.work_progress, event_pb2.WORK_UNIT_STEPS)
        if event is None or event.b64_json is None:
            return []
        index = self._complete if event.image_index is None else event.image_index
        if event.type.endswith(".partial_image"):
            part = image_pb2.PartialImage(
                index=index, partial_index=event.partial_image_index, image=image_part(event.b64_json)
            )
            return [event_pb2.InferenceEvent(partial_image=part)]
        self._complete += 1
        made = image_pb2.GeneratedImage(
            index=index, image=image_part(event.b64_json), revised_prompt=event.revised_prompt or ""
        )
        if event.seed is not None and 0 <= event.seed <= MAX_IMAGE_SEED:
            made.seed = event.seed
        self.usage.prompt_tokens += figure(event.usage, "input_tokens")
        self.usage.completion_tokens += figure(event.usage, "output_tokens")
        self.usage.image_steps += figure(event.usage, "image_steps")
        self.usage.image_pixels += figure(event.usage, "image_pixels")
        self.work_seconds += event.timings.predicted_ms / 1e3
        return [event_pb2.InferenceEvent(image=made)]

    def require_end(self) -> None:
        """Raises BACKEND_PROTOCOL_ERROR where the stream had no image."""
        if not self._complete:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's stream ended without an image")


class TranscriptEvents:
    """Translates the events of one stream of a transcription."""

    def __init__(self) -> None:
        self.usage = usage_pb2.Usage()
        """What the engine counted."""
        self.work_seconds = 0.0
        """How long it worked; 0: unknown."""
        self._has_text = False
        self._has_language = False
        self._is_done = False

    def read(self, data: bytes) -> Frame:
        """Returns the events of one event; none for its end. Raises BACKEND_PROTOCOL_ERROR, or the stated error."""
        event = _decoded(data, _TranscriptEvent)
        if event is None:
            self._is_done = True
            return []
        if event.work_progress is not None:
            return _progress(event.work_progress, event_pb2.WORK_UNIT_AUDIO_SECONDS)
        text = event.delta or "".join(choice.delta.content or "" for choice in event.choices or ())
        if event.type.endswith(".done"):
            self._is_done = True
            self.usage.audio_milliseconds = round(_seconds(event.usage) * 1000)
            self.usage.completion_tokens = event.timings.predicted_n
            self.work_seconds = event.timings.predicted_ms / 1e3
            # The whole text once more, of a server that sent no pieces the only time.
            text = "" if self._has_text else event.text
        self._has_text = self._has_text or bool(text)
        part = audio_pb2.TranscriptPart(text=text)
        if event.segment is not None:
            part.segment.CopyFrom(segment_of(event.segment, event.segment.words or ()))
        if not self._has_language and (event.language or event.duration):
            self._has_language = True
            part.language, part.duration_seconds = event.language or "", seconds_of(event.duration)
        return [event_pb2.InferenceEvent(transcript=part)] if part.ListFields() else []

    def require_end(self) -> None:
        """Raises BACKEND_PROTOCOL_ERROR where the stream was cut off."""
        if not self._is_done:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's stream ended in the middle")


class SpeechEvents:
    """Translates the events of one stream of speech."""

    def __init__(self) -> None:
        self.media_type = ""
        """Of the recording."""
        self.receipt = receipt_pb2.Receipt()
        """The engine's part of the receipt, at the end."""
        self._is_done = False

    def read(self, data: bytes) -> bytes:
        """Returns the bytes of the recording in one event; none of progress. Raises as ImageEvents.read."""
        event = _decoded(data, _SpeechEvent)
        if event is not None and event.type.endswith(".done"):
            self._is_done = True
            usage = usage_pb2.Usage(audio_milliseconds=round(_seconds(event.usage) * 1000))
            self.receipt = receipt_of(usage, event.timings.predicted_ms / 1e3)
        if event is None or event.audio is None:
            return b""
        self.media_type = event.media_type
        try:
            return base64.b64decode(event.audio, validate=True)
        except (binascii.Error, ValueError):
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine sent sound that is no base64") from None

    def require_end(self) -> None:
        """Raises BACKEND_PROTOCOL_ERROR where the stream was cut off."""
        if not self._is_done:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's stream ended in the middle")


def receipt_of(usage: usage_pb2.Usage, work_seconds: float) -> receipt_pb2.Receipt:
    """Returns the engine's part of the receipt; 0 s: it is not known how long it worked."""
    receipt = receipt_pb2.Receipt(usage=usage)
    if work_seconds > 0:
        receipt.gpu_time.FromMicroseconds(int(work_seconds * 1e6))
    return receipt


def segment_of(segment: Segment, words: Sequence[Word]) -> audio_pb2.TranscriptionSegment:
    """Returns a segment with these words."""
    return audio_pb2.TranscriptionSegment(
        start_seconds=segment.start,
        end_seconds=segment.end,
        text=segment.text,
        words=[
            audio_pb2.TranscriptionWord(
                start_seconds=word.start,
                end_seconds=word.end,
                text=word.word.strip(),
                probability=word.probability,
            )
            for word in words
        ],
        mean_logprob=segment.avg_logprob,
        no_speech_probability=segment.no_speech_prob,
        compression_ratio=segment.compression_ratio,
        temperature=segment.temperature,
    )


def seconds_of(duration: float | str | None) -> float:
    """Reads a duration, which some servers write as text."""
    try:
        seconds = float(duration or 0.0)
    except ValueError:
        return 0.0
    return seconds if 0.0 <= seconds < float("inf") else 0.0


def _progress(progress: _Progress, unit: event_pb2.WorkUnit.ValueType) -> Frame:
    work = event_pb2.WorkProgress(unit=unit, done=progress.done, total=progress.total, stage=progress.stage)
    return [event_pb2.InferenceEvent(work_progress=work)]


def _decoded(data: bytes, kind: type[Any]) -> Any:
    """Returns an event; None for the mark of the end. Raises the error that it states."""
    if data == DONE:
        return None
    if isinstance(data, ErrorPayload) or b'"error"' in data:
        stated = stated_answer(data)
        if stated is not None:
            raise stated
    try:
        return msgspec.json.decode(data, type=kind)
    except JSON_FAULTS as error:
        raise malformed(f"{_EVENT} malformed:", error) from error


def _seconds(usage: object) -> float:
    """Returns the length of a recording; 0: not known."""
    try:
        return msgspec.convert(usage, _Duration).seconds
    except msgspec.ValidationError:
        return 0.0
