"""POST /v1/audio/transcriptions, /v1/audio/translations and /v1/audio/speech."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from gateway.answers.generation import cut_off_seconds
from gateway.answers.speech import SpokenAnswer
from gateway.answers.unary_call import answered
from gateway.intake.body import read_json_body, read_multipart_body
from gateway.intake.forms import Form
from gateway.intake.json_guard import parse
from gateway.openai import audio_payload
from gateway.openai.model_call_schemas import SpeechRequest, TranscriptionRequest
from gateway.openapi import form_body, json_body
from gateway.parts import InferenceParts
from weft.api.common.v1 import audio_pb2, receipt_pb2
from weft.kernel.request import Operation

_FILES = frozenset({"file"})


def add_audio(app: FastAPI, parts: InferenceParts) -> None:
    """Add the routes."""
    limits = parts.config.limits

    async def transcribe(request: Request) -> Response:
        """Write down what is said in a recording."""
        return await _transcribed(request, parts, translates=False)

    async def translate(request: Request) -> Response:
        """Write down in English what is said in a recording."""
        return await _transcribed(request, parts, translates=True)

    async def speak(request: Request) -> Response:
        """Say words. The bytes of the recording come as they are made."""
        scope = request.scope
        raw = await read_json_body(scope, request.receive, parts.config)
        asked = parse(SpeechRequest, raw, max_depth=limits.max_json_depth)
        context = parts.context(scope, surface="speech", asked=asked, model=asked.model, operation=Operation.SPEECH)
        payload = audio_payload.to_speech(asked)
        speech = partial(parts.dispatcher.speak, context, payload)
        return SpokenAnswer(parts, speech, cut_off_seconds=cut_off_seconds(parts, context))

    for path, handler in (("/v1/audio/transcriptions", transcribe), ("/v1/audio/translations", translate)):
        extra = form_body(TranscriptionRequest, files=("file",))
        app.add_api_route(path, handler, methods=["POST"], tags=["openai"], openapi_extra=extra)
    app.add_api_route(
        "/v1/audio/speech",
        speak,
        methods=["POST"],
        tags=["openai"],
        response_class=StreamingResponse,
        openapi_extra=_with_recording(json_body(SpeechRequest)),
    )


def _with_recording(extra: dict[str, Any]) -> dict[str, Any]:
    """The success of a route whose answer is a recording, of whichever kind."""
    kinds = ("audio/*", "application/octet-stream")
    content = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in kinds}
    return extra | {"responses": extra["responses"] | {"200": {"description": "The recording", "content": content}}}


async def _transcribed(request: Request, parts: InferenceParts, *, translates: bool) -> Response:
    scope, limits = request.scope, parts.config.limits
    form = Form(await read_multipart_body(scope, request.receive, parts.config, max_bytes=limits.max_audio_bytes))
    asked = form.read(TranscriptionRequest, file_fields=_FILES)
    context = parts.context(
        scope, surface="transcriptions", asked=asked, model=asked.model, operation=Operation.TRANSCRIPTION
    )
    granularities = form.words("timestamp_granularities", audio_payload.GRANULARITIES)
    payload = audio_payload.to_transcription(asked, form.file("file"), granularities, translates=translates)

    def to_body(transcription: audio_pb2.Transcription, receipt: receipt_pb2.Receipt) -> bytes:
        del receipt
        return audio_payload.to_body(transcription, asked)

    return answered(
        parts,
        scope,
        context,
        lambda: parts.dispatcher.transcribe(context, payload),
        to_body,
        audio_payload.media_type_of(asked),
    )
