"""POST /v1/audio/speech and GET /v1/audio/voices."""

import base64
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope
from typing_extensions import override

from gateway.answers.answer_builder import warning_json
from gateway.answers.binary import BinaryAnswer, Headers
from gateway.answers.sse import receipt_comment
from gateway.answers.sse_writer import SseResponse, SseWriter, failure_event
from gateway.answers.unary import cut_off_seconds, json_response, warning_headers
from gateway.deps import Inference, InferenceDeps
from gateway.http.disconnect import WhileConnected
from gateway.intake.body import body_of
from gateway.intake.headers import shows_receipt
from gateway.intake.request_model import HandledRequest, ModelName, Word
from gateway.openai.extension_fields import unknown_fields
from gateway.openai.models import asked_entry, not_available, visible_entry
from gateway.request_facts import facts_of
from weft.api.common.v1 import audio_pb2, receipt_pb2, warning_pb2
from weft.dispatch.agents import name_asked_for
from weft.dispatch.call import Call
from weft.dispatch.fleet import FleetView, ModelView, capabilities_in
from weft.dispatch.operation_table import SPEECH, SpeechPiece
from weft.dispatch.parameter_checks import MAX_SPEECH_CHARS, MAX_SPEED, MIN_SPEED
from weft.kernel.access.principal import VIEW_MODELS, Principal
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json

MAX_VOICES = 4096
"""Maximum voices in one list, over all models."""


class SpeechRequest(HandledRequest):
    """A request for speech."""

    model: ModelName
    input: str = Field(min_length=1, max_length=MAX_SPEECH_CHARS)
    voice: Word | None = None
    """Name of the voice. Default: the model's default voice."""
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] | None = None
    speed: Annotated[float, Field(ge=MIN_SPEED, le=MAX_SPEED)] | None = None
    instructions: Annotated[str, Field(max_length=MAX_SPEECH_CHARS)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    """Whether the recording is streamed as bytes (`audio`) or as events with base64 pieces (`sse`)."""


async def speak(
    deps: Inference, request: Request, params: Annotated[SpeechRequest, body_of(SpeechRequest)]
) -> Response:
    """Generates speech. Streams the recording as bytes or server-sent events."""
    scope = request.scope
    context = deps.context(scope, surface="speech", params=params, model=params.model, operation=Operation.SPEECH)
    call = deps.dispatcher.call(SPEECH, context, to_speech(params))
    facts_of(scope).was_dispatched = True
    cut_off, warnings = cut_off_seconds(deps, context), unknown_fields(params)
    if params.stream_format == "sse":
        return SpokenEvents(deps, call, warnings, cut_off_seconds=cut_off)
    speech = _SpokenBytes(deps, scope, call, warnings)
    return BinaryAnswer(
        speech.chunks(),
        speech.headers,
        kind="recording",
        write_timeout_seconds=deps.config.write_timeout_seconds,
        cut_off_seconds=cut_off,
    )


async def list_voices(deps: Inference, request: Request) -> Response:
    """Lists the known voices of all speech models, or with the query parameter `model` of one."""
    facts = facts_of(request.scope)
    facts.surface = "voices"
    view, principal = deps.fleet.view, facts.principal
    name = request.query_params.get("model", "")
    models = _asked_for(deps, request, name) if name else _all_that_speak(view, principal)
    voices = [
        {"id": voice, "name": voice, "model": model.name}
        for model in models
        for voice in capabilities_in(view, model).voices
    ]
    return json_response({"voices": voices[:MAX_VOICES]})


def _asked_for(deps: InferenceDeps, request: Request, name: str) -> list[ModelView]:
    """Returns the models that a name reaches and the caller may see. Raises MODEL_NOT_FOUND, PERMISSION_DENIED."""
    principal, view = facts_of(request.scope).principal, deps.fleet.view
    asked = deps.asked(request.scope, name)
    principal.require_name(VIEW_MODELS, name_asked_for(asked.model))
    entry = asked_entry(view, asked)
    if entry is None:
        raise not_available(view, name)
    return [view.models[member] for member in visible_entry(entry, principal)["meta"]["members"]]


def _all_that_speak(view: FleetView, principal: Principal) -> Iterable[ModelView]:
    return (
        model
        for name, model in sorted(view.models.items())
        if model.reachable and Operation.SPEECH in model.operations and principal.may_name(VIEW_MODELS, name)
    )


class _SpokenBytes:
    """Generated speech as bytes, with the media type of its first chunk."""

    def __init__(
        self, deps: InferenceDeps, scope: Scope, speech: Call[SpeechPiece], warnings: Sequence[warning_pb2.Warning]
    ) -> None:
        self._warnings = warnings
        self._deps = deps
        self._scope = scope
        self._speech = speech
        self._media_type = ""

    def headers(self) -> Headers:
        """Returns the response headers, which are known after the first chunk."""
        media_type = self._media_type.encode("latin-1", "replace") or b"application/octet-stream"
        return [(b"content-type", media_type), *warning_headers(self._warnings)]

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yields the recording. Raises BACKEND_PROTOCOL_ERROR if it is empty."""
        is_empty = True
        async with aclosing(self._speech.chunks()) as pieces:
            async for piece in pieces:
                if is_empty:
                    self._media_type = piece.media_type
                is_empty = False
                yield piece.data
        if is_empty:
            raise _empty_recording()
        if self._speech.receipt is not None:
            self._deps.metrics.tokens_used(facts_of(self._scope), self._speech.receipt.usage)


class SpokenEvents(SseResponse):
    """Sends generated speech as OpenAI's server-sent events: pieces in base64, then the end with the usage."""

    def __init__(
        self,
        deps: InferenceDeps,
        speech: Call[SpeechPiece],
        warnings: Sequence[warning_pb2.Warning],
        *,
        cut_off_seconds: float,
    ) -> None:
        super().__init__(deps)
        self._warnings = warnings
        self._speech = speech
        self._cut_off_seconds = cut_off_seconds

    @override
    async def _pump(self, scope: Scope, receive: Receive, writer: SseWriter) -> None:
        is_empty = True
        with_receipt = shows_receipt(scope, self._deps.config)
        with WhileConnected(scope, receive, cut_off_seconds=self._cut_off_seconds) as block:
            block.run_beside(writer.keep_up(block))
            async with aclosing(self._speech.chunks()) as pieces:
                async for piece in pieces:
                    is_empty = False
                    await writer.write(delta_event(piece.data))
            if is_empty:
                raise _empty_recording()
            # A disconnect loses nothing now, and a finished answer must not count as cancelled.
            block.dismiss_guards()
            receipt = self._speech.receipt or receipt_pb2.Receipt()
            self._deps.metrics.tokens_used(facts_of(scope), receipt.usage)
            comment = receipt_comment(receipt) if with_receipt else b""
            await writer.finish(comment + done_event(receipt, self._warnings))

    @override
    def _last_event(self, error: WeftError, request_id: str) -> bytes:
        return failure_event(error, request_id)


def delta_event(data: bytes) -> bytes:
    """Returns a piece of a recording as an event."""
    audio = base64.b64encode(data).decode()
    return b"data: %b\n\n" % encode_json({"type": "speech.audio.delta", "audio": audio})


def done_event(receipt: receipt_pb2.Receipt, warnings: Sequence[warning_pb2.Warning] = ()) -> bytes:
    """Returns the last event, with the usage of a receipt and its warnings after the gateway's `warnings`."""
    usage = receipt.usage
    document: dict[str, object] = {
        "type": "speech.audio.done",
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "seconds": usage.audio_milliseconds / 1000,
        },
    }
    if found := [*warnings, *receipt.warnings]:
        document["warnings"] = [warning_json(each) for each in found]
    return b"data: %b\n\n" % encode_json(document)


def _empty_recording() -> WeftError:
    return WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model sent an empty recording")


def to_speech(request: SpeechRequest) -> audio_pb2.SpeechPayload:
    """Returns the speech payload."""
    payload = audio_pb2.SpeechPayload(
        input=request.input,
        voice=request.voice or "",
        format=request.response_format or "",
        instructions=request.instructions or "",
    )
    if request.speed is not None:
        payload.speed = request.speed
    return payload
