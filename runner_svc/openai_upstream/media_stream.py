"""Readers of OpenAI's streams of images and transcriptions: events of a server to events of the mesh."""

from typing import Annotated, Any

import msgspec

from runner_svc.openai_upstream.chunks import Place
from runner_svc.openai_upstream.dialects import figure
from runner_svc.openai_upstream.errors import JSON_FAULTS, malformed, stated_answer
from runner_svc.openai_upstream.images import image_part
from runner_svc.openai_upstream.sse import ErrorPayload
from runner_svc.openai_upstream.stream import DONE
from weft.api.common.v1 import audio_pb2, event_pb2, image_pb2, usage_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.parameter_checks import MAX_IMAGE_SEED
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

_EVENT = "the engine's event is"


class _ImageEvent(msgspec.Struct):
    type: str = ""
    b64_json: str | None = None
    partial_image_index: Place = 0
    image_index: Place | None = None
    """An extension, where there are several images."""
    seed: int | None = None
    revised_prompt: str | None = None
    usage: object = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Duration(msgspec.Struct):
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _TranscriptEvent(msgspec.Struct):
    type: str = ""
    delta: str = ""
    text: str = ""
    choices: list[_Choice] | None = None
    """vLLM streams transcriptions as chunks of chats."""
    usage: object = None


class ImageEvents:
    """Translates the events of one stream of images."""

    def __init__(self) -> None:
        self.usage = usage_pb2.Usage()
        """What the engine counted so far."""
        self._complete = 0

    def read(self, data: bytes) -> Frame:
        """Returns the events of one event; none for its end. Raises BACKEND_PROTOCOL_ERROR, or the stated error."""
        event = _decoded(data, _ImageEvent)
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
        return [event_pb2.InferenceEvent(image=made)]

    def require_end(self) -> None:
        """Raises BACKEND_PROTOCOL_ERROR where the stream had no image."""
        if not self._complete:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's stream ended without an image")


class TranscriptEvents:
    """Translates the events of one stream of a transcription."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Length of the recording; 0: unknown."""
        self._has_text = False
        self._is_done = False

    def read(self, data: bytes) -> Frame:
        """Returns the events of one event; none for its end. Raises BACKEND_PROTOCOL_ERROR, or the stated error."""
        event = _decoded(data, _TranscriptEvent)
        if event is None:
            self._is_done = True
            return []
        text = event.delta or "".join(choice.delta.content or "" for choice in event.choices or ())
        if event.type.endswith(".done"):
            self._is_done = True
            self.seconds = _seconds(event.usage)
            # The whole text once more, of a server that sent no pieces the only time.
            text = "" if self._has_text else event.text
        self._has_text = self._has_text or bool(text)
        return [event_pb2.InferenceEvent(transcript=audio_pb2.TranscriptPart(text=text))] if text else []

    def require_end(self) -> None:
        """Raises BACKEND_PROTOCOL_ERROR where the stream was cut off."""
        if not self._is_done:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the engine's stream ended in the middle")


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
