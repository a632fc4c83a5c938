"""POST /v1/audio/speech."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.binary import BinaryAnswer, Headers
from gateway.answers.unary import cut_off_seconds
from gateway.deps import InferenceDeps
from gateway.intake.body import read_model
from gateway.intake.request_model import HandledRequest, ModelName, Word
from gateway.request_facts import facts_of
from weft.api.common.v1 import audio_pb2
from weft.dispatch.call import Call
from weft.dispatch.operations import SPEECH, SpeechPiece
from weft.dispatch.parameter_checks import MAX_SPEECH_CHARS, MAX_SPEED, MIN_SPEED
from weft.kernel.errors import FieldError, WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


class SpeechRequest(HandledRequest):
    """A request for speech."""

    model: ModelName
    input: str = Field(min_length=1, max_length=MAX_SPEECH_CHARS)
    voice: Word
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] | None = None
    instructions: Annotated[str, Field(max_length=MAX_SPEECH_CHARS)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    """Only bytes are streamed; `sse` is refused."""


async def speak(deps: InferenceDeps, request: Request) -> Response:
    """Generates speech. The bytes of the recording are streamed."""
    scope = request.scope
    params = await read_model(request, SpeechRequest, deps.config)
    context = deps.context(scope, surface="speech", params=params, model=params.model, operation=Operation.SPEECH)
    payload = to_speech(params)
    speech = _GeneratedSpeech(deps.dispatcher.call(SPEECH, context, payload))
    facts_of(scope).was_dispatched = True
    return BinaryAnswer(
        speech.chunks(),
        speech.headers,
        kind="recording",
        write_timeout_seconds=deps.config.write_timeout_seconds,
        cut_off_seconds=cut_off_seconds(deps, context),
    )


class _GeneratedSpeech:
    """Generated speech as bytes, with the media type of its first chunk."""

    def __init__(self, speech: Call[SpeechPiece]) -> None:
        self._speech = speech
        self._media_type = ""

    def headers(self) -> Headers:
        """Returns the headers of the answer; call it after the first chunk."""
        media_type = self._media_type.encode("latin-1", "replace") or b"application/octet-stream"
        return [(b"content-type", media_type)]

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the recording. Raises BACKEND_PROTOCOL_ERROR for an empty one."""
        is_empty = True
        async with aclosing(self._speech.chunks()) as pieces:
            async for piece in pieces:
                if is_empty:
                    self._media_type = piece.media_type
                is_empty = False
                yield piece.data
        if is_empty:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model sent an empty recording")


def to_speech(request: SpeechRequest) -> audio_pb2.SpeechPayload:
    """Returns the payload of speech. Raises UNSUPPORTED_OPERATION for events instead of bytes."""
    if request.stream_format == "sse":
        message = "'sse' is not supported: bytes are streamed; use audio"
        raise FieldError("stream_format", message, Reason.UNSUPPORTED_OPERATION)
    payload = audio_pb2.SpeechPayload(
        input=request.input,
        voice=request.voice,
        format=request.response_format or "",
        instructions=request.instructions or "",
    )
    if request.speed is not None:
        payload.speed = request.speed
    return payload
