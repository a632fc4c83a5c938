"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import new_identity
from gateway.answers.sse_writer import StreamedAnswer
from gateway.answers.unary import cut_off_seconds, unary_answer
from gateway.deps import Inference, InferenceDeps
from gateway.intake.body import read_multipart_body
from gateway.intake.multipart import Form, Part
from gateway.intake.request_model import HandledRequest, ModelName, Word
from gateway.openai.extension_fields import unknown_fields
from gateway.request_facts import facts_of
from weft.api.common.v1 import audio_pb2, chat_pb2, receipt_pb2
from weft.dispatch.call import warned
from weft.dispatch.operation_table import TRANSCRIPTION
from weft.dispatch.parameter_checks import MAX_TRANSCRIPTION_PROMPT_CHARS
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.media_types import audio_type_of
from weft_extensions.media.transcript_stream import TranscriptStream, duration_usage, word_json

WORD, SEGMENT = "word", "segment"


class TranscriptionRequest(HandledRequest):
    """A request for a transcription. The form also has the recording as `file`."""

    model: ModelName
    language: Word | None = None
    prompt: Annotated[str, Field(max_length=MAX_TRANSCRIPTION_PROMPT_CHARS)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    """Whether text is streamed as server-sent events as it is recognized; for `json`, `text` and `verbose_json`."""
    voice_detection: bool | None = None
    """Extension: whether parts without speech are skipped. Absent: the model's setting."""
    vad: bool | None = None
    """Extension: another name of `voice_detection`, as on other servers."""


_GRANULARITIES = "timestamp_granularities"
_NOT_IN_SCHEMA = frozenset({"file", _GRANULARITIES})


async def transcribe(deps: Inference, request: Request) -> Response:
    """Transcribes a recording."""
    return await _transcribed(request, deps, translates=False)


async def translate(deps: Inference, request: Request) -> Response:
    """Transcribes a recording and translates it to English."""
    return await _transcribed(request, deps, translates=True)


async def _transcribed(request: Request, deps: InferenceDeps, *, translates: bool) -> Response:
    scope, limits = request.scope, deps.config.limits
    form = Form(await read_multipart_body(scope, request.receive, deps.config, max_bytes=limits.max_audio_bytes))
    params = form.read(TranscriptionRequest, besides=_NOT_IN_SCHEMA)
    context = deps.context(
        scope, surface="transcriptions", params=params, model=params.model, operation=Operation.TRANSCRIPTION
    )
    warnings = unknown_fields(params)
    granularities = form.values(_GRANULARITIES, GRANULARITIES)
    payload = to_transcription(params, form.file("file"), granularities, translates=translates)
    if params.stream:
        encoder = TranscriptStream(
            new_identity(deps.clock, "transcript", params.model), with_segments=payload.with_segments
        )
        facts_of(scope).was_dispatched = True
        call = deps.dispatcher.call(TRANSCRIPTION, context, payload)
        if warnings:
            call.through(warned(warnings))
        return StreamedAnswer(deps, call, encoder, cut_off_seconds=cut_off_seconds(deps, context))

    def to_body(transcription: audio_pb2.Transcription, receipt: receipt_pb2.Receipt) -> bytes:
        return transcription_body(transcription, params, receipt, granularities, translates=translates)

    media_type = media_type_of(params)
    return unary_answer(deps, scope, TRANSCRIPTION, context, payload, to_body, media_type, warnings=warnings)


GRANULARITIES = frozenset({WORD, SEGMENT})
TEXT = b"text/plain; charset=utf-8"
_CAPTIONS = frozenset({"srt", "vtt"})
_WITH_TIMES = _CAPTIONS | {"verbose_json"}
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
    """Returns the payload of a transcription. Raises INVALID_ARGUMENT for contradictory fields."""
    if request.stream and request.response_format in _CAPTIONS:
        raise invalid_field("stream", f"cannot be combined with {request.response_format}; use json or verbose_json")
    if WORD in granularities and request.response_format != "verbose_json":
        raise invalid_field("timestamp_granularities", "'word' needs the response_format verbose_json")
    if None not in (request.vad, request.voice_detection) and request.vad != request.voice_detection:
        raise invalid_field("vad", "contradicts voice_detection; omit one of them")
    payload = audio_pb2.TranscriptionPayload(
        audio=chat_pb2.MediaPart(data=recording.data, media_type=_type_of(recording)),
        language=request.language or "",
        prompt=request.prompt or "",
        translate=translates,
        with_segments=request.response_format in _WITH_TIMES,
        with_words=WORD in granularities,
    )
    if request.temperature is not None:
        payload.temperature = request.temperature
    detects_voices = request.vad if request.voice_detection is None else request.voice_detection
    if detects_voices is not None:
        payload.voice_detection = detects_voices
    return payload


def media_type_of(request: TranscriptionRequest) -> bytes:
    """Returns the content type of the requested response format."""
    return _MEDIA_TYPES.get(request.response_format or "json", TEXT)


def transcription_body(
    transcription: audio_pb2.Transcription,
    request: TranscriptionRequest,
    receipt: receipt_pb2.Receipt,
    granularities: Sequence[str] = (),
    *,
    translates: bool = False,
) -> bytes:
    """Returns the answer in the requested format. Raises UNSUPPORTED_OPERATION if the engine gave no timestamps."""
    usage = duration_usage(receipt.usage, transcription.duration_seconds)
    match request.response_format:
        case "text":
            return f"{transcription.text}\n".encode()
        case "srt" | "vtt":
            return _captions(transcription, is_vtt=request.response_format == "vtt").encode()
        case "verbose_json":
            body = _verbose(transcription, granularities, translates=translates)
        case _:
            body = {"text": transcription.text}
    return encode_json({**body, **usage})


def _verbose(
    transcription: audio_pb2.Transcription, granularities: Sequence[str], *, translates: bool
) -> dict[str, object]:
    body: dict[str, object] = {
        "task": "translate" if translates else "transcribe",
        "language": transcription.language,
        "duration": transcription.duration_seconds,
        "text": transcription.text,
    }
    if WORD in granularities:
        words = [word for part in transcription.segments for word in part.words]
        if transcription.text and not words:
            message = "'word': the model returned no times of words; leave it out"
            raise FieldError("timestamp_granularities", message, Reason.UNSUPPORTED_OPERATION)
        body["words"] = [word_json(word) for word in words]
    if SEGMENT in granularities or not granularities:
        body["segments"] = [_segment_json(index, part) for index, part in enumerate(transcription.segments)]
    return body


def _segment_json(index: int, part: audio_pb2.TranscriptionSegment) -> dict[str, object]:
    """Returns a segment with OpenAI's members; unknown ones are null, and `tokens` is empty."""

    def known(name: str) -> float | None:
        return getattr(part, name) if part.HasField(name) else None  # type: ignore[arg-type]

    return {
        "id": index,
        "seek": 0,
        "start": part.start_seconds,
        "end": part.end_seconds,
        "text": part.text,
        "tokens": [],
        "temperature": known("temperature"),
        "avg_logprob": known("mean_logprob"),
        "compression_ratio": known("compression_ratio"),
        "no_speech_prob": known("no_speech_probability"),
    }


def _captions(transcription: audio_pb2.Transcription, *, is_vtt: bool) -> str:
    segments = transcription.segments
    if transcription.text and not segments:
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
    """Returns the media type in the form, or else that of the file's suffix."""
    # Programs name any type; an MP4 may be sound or film, with several names.
    if (found := audio_type_of(recording.data)) not in {None, "audio/mp4"}:
        return found or ""
    if recording.media_type not in _UNTYPED:
        return recording.media_type
    suffix = (recording.filename or "").rpartition(".")[2].lower()
    return _BY_SUFFIX.get(suffix, "application/octet-stream")
