"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import encode_json
from gateway.answers.unary import unary_answer
from gateway.deps import InferenceDeps
from gateway.intake.body import read_multipart_body
from gateway.intake.multipart import Form, Part
from gateway.intake.request_model import HandledRequest, ModelName, Word
from weft.api.common.v1 import audio_pb2, chat_pb2, receipt_pb2
from weft.dispatch.operations import TRANSCRIPTION
from weft.dispatch.parameter_checks import MAX_TRANSCRIPTION_PROMPT_CHARS
from weft.kernel.errors import FieldError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


class TranscriptionRequest(HandledRequest):
    """A request for a transcription: the fields of a form, whose `file` is the recording."""

    model: ModelName
    language: Word | None = None
    prompt: Annotated[str, Field(max_length=MAX_TRANSCRIPTION_PROMPT_CHARS)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    """The transcription is sent when it is complete; true is refused."""


_FILES = frozenset({"file"})


async def transcribe(deps: InferenceDeps, request: Request) -> Response:
    """Transcribes a recording."""
    return await _transcribed(request, deps, translates=False)


async def translate(deps: InferenceDeps, request: Request) -> Response:
    """Transcribes a recording into English."""
    return await _transcribed(request, deps, translates=True)


async def _transcribed(request: Request, deps: InferenceDeps, *, translates: bool) -> Response:
    scope, limits = request.scope, deps.config.limits
    form = Form(await read_multipart_body(scope, request.receive, deps.config, max_bytes=limits.max_audio_bytes))
    params = form.read(TranscriptionRequest, file_fields=_FILES)
    context = deps.context(
        scope, surface="transcriptions", params=params, model=params.model, operation=Operation.TRANSCRIPTION
    )
    granularities = form.values("timestamp_granularities", GRANULARITIES)
    payload = to_transcription(params, form.file("file"), granularities, translates=translates)

    def to_body(transcription: audio_pb2.Transcription, receipt: receipt_pb2.Receipt) -> bytes:
        del receipt
        return transcription_body(transcription, params)

    return unary_answer(deps, scope, TRANSCRIPTION, context, payload, to_body, media_type_of(params))


GRANULARITIES = frozenset({"word", "segment"})
TEXT = b"text/plain; charset=utf-8"
_WITH_TIMES = frozenset({"srt", "vtt", "verbose_json"})
_MEDIA_TYPES = MappingProxyType(
    {"json": b"application/json", "verbose_json": b"application/json", "vtt": b"text/vtt; charset=utf-8"}
)
_UNTYPED = frozenset({"", "text/plain", "application/octet-stream"})
_BY_SUFFIX = MappingProxyType(
    {
        "flac": "audio/flac",
        "m4a": "audio/x-m4a",
        "mp3": "audio/mpeg",
        "mp4": "audio/mp4",
        "mpeg": "audio/mpeg",
        "mpga": "audio/mpeg",
        "oga": "audio/ogg",
        "ogg": "audio/ogg",
        "wav": "audio/wav",
        "webm": "audio/webm",
    }
)


def to_transcription(
    request: TranscriptionRequest, recording: Part, granularities: Sequence[str] = (), *, translates: bool
) -> audio_pb2.TranscriptionPayload:
    """Returns the payload of a transcription. Raises UNSUPPORTED_OPERATION for what no runner offers."""
    if request.stream:
        raise FieldError("stream", "is not supported for transcriptions: leave it out", Reason.UNSUPPORTED_OPERATION)
    if "word" in granularities:
        message = "'word' is not supported: only segments have times"
        raise FieldError("timestamp_granularities", message, Reason.UNSUPPORTED_OPERATION)
    payload = audio_pb2.TranscriptionPayload(
        audio=chat_pb2.MediaPart(data=recording.data, media_type=_type_of(recording)),
        language=request.language or "",
        prompt=request.prompt or "",
        translate=translates,
        with_segments=request.response_format in _WITH_TIMES,
    )
    if request.temperature is not None:
        payload.temperature = request.temperature
    return payload


def media_type_of(request: TranscriptionRequest) -> bytes:
    """Returns the content type of the requested response format."""
    return _MEDIA_TYPES.get(request.response_format or "json", TEXT)


def transcription_body(transcription: audio_pb2.Transcription, request: TranscriptionRequest) -> bytes:
    """Returns the answer in the requested format. Raises UNSUPPORTED_OPERATION where the engine gave no timestamps."""
    match request.response_format:
        case "text":
            return f"{transcription.text}\n".encode()
        case "srt" | "vtt":
            return _captions(transcription.segments, is_vtt=request.response_format == "vtt").encode()
        case "verbose_json":
            return _verbose(transcription)
        case _:
            return encode_json({"text": transcription.text})


def _verbose(transcription: audio_pb2.Transcription) -> bytes:
    return encode_json(
        {
            "task": "transcribe",
            "language": transcription.language,
            "duration": transcription.duration_seconds,
            "text": transcription.text,
            "segments": [
                {"id": index, "start": part.start_seconds, "end": part.end_seconds, "text": part.text}
                for index, part in enumerate(transcription.segments)
            ],
        }
    )


def _captions(segments: Sequence[audio_pb2.TranscriptionSegment], *, is_vtt: bool) -> str:
    if not segments:
        message = "the model returned no times: use json or text"
        raise FieldError("response_format", message, Reason.UNSUPPORTED_OPERATION)
    mark = "." if is_vtt else ","
    blocks = [] if not is_vtt else ["WEBVTT\n"]
    for number, part in enumerate(segments, start=1):
        times = f"{_clock(part.start_seconds, mark)} --> {_clock(part.end_seconds, mark)}"
        blocks.append(f"{times}\n{part.text.strip()}\n" if is_vtt else f"{number}\n{times}\n{part.text.strip()}\n")
    return "\n".join(blocks)


def _clock(seconds: float, mark: str) -> str:
    milliseconds = round(max(0.0, seconds) * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


def _type_of(recording: Part) -> str:
    """Returns the media type of the form, else that of the file's suffix."""
    if recording.media_type not in _UNTYPED:
        return recording.media_type
    suffix = (recording.filename or "").rpartition(".")[2].lower()
    return _BY_SUFFIX.get(suffix, "application/octet-stream")
