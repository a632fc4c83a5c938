"""What a public gRPC payload of scores, tokens, images or sound must look like; see `router_svc.validation`."""

from router_svc.validation import check_chat, check_count, check_number
from weft.api.common.v1 import audio_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.dispatch.parameter_checks import (
    IMAGE_FORMATS,
    MAX_DOCUMENTS,
    MAX_IMAGE_PROMPT_CHARS,
    MAX_IMAGES,
    MAX_SOURCE_IMAGES,
    MAX_SPEECH_CHARS,
    MAX_SPEED,
    MAX_TRANSCRIPTION_PROMPT_CHARS,
    MAX_WORD_CHARS,
    MIN_SPEED,
    SPEECH_FORMATS,
    check_extra,
)
from weft.dispatch.schema_guard import SchemaLimits
from weft.kernel.errors import invalid_field

MAX_TOP_N = 2**31 - 1


def check_rerank(payload: rerank_pb2.RerankPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    if not payload.query:
        raise invalid_field("payload.query", "must not be empty")
    check_count("payload.documents", len(payload.documents), 1, MAX_DOCUMENTS)
    for index, document in enumerate(payload.documents):
        if not document:
            raise invalid_field(f"payload.documents[{index}]", "must not be empty")
    if payload.HasField("top_n"):
        check_number("payload.top_n", payload.top_n, 1, MAX_TOP_N)


def check_tokenize(payload: tokenize_pb2.TokenizePayload, schemas: SchemaLimits) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    match payload.WhichOneof("kind"):
        case None:
            raise invalid_field("payload", "must have a text or a chat")
        case "chat":
            check_chat(payload.chat, schemas, "payload.chat")


def check_images(payload: image_pb2.ImagePayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    _check_text("payload.prompt", payload.prompt, MAX_IMAGE_PROMPT_CHARS)
    if payload.HasField("count"):
        check_number("payload.count", payload.count, 1, MAX_IMAGES)
    for name in ("size", "quality"):
        _check_text(f"payload.{name}", getattr(payload, name), MAX_WORD_CHARS, may_be_empty=True)
    _check_word("payload.output_format", payload.output_format, IMAGE_FORMATS)
    check_count("payload.images", len(payload.images), 0, MAX_SOURCE_IMAGES)
    if payload.HasField("mask") and not payload.images:
        raise invalid_field("payload.mask", "needs an image that it is laid over")
    check_extra(payload.extra_parameters, "payload.extra_parameters")


def check_transcription(payload: audio_pb2.TranscriptionPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    if not payload.audio.data:
        raise invalid_field("payload.audio", "must not be empty")
    _check_text("payload.language", payload.language, MAX_WORD_CHARS, may_be_empty=True)
    _check_text("payload.prompt", payload.prompt, MAX_TRANSCRIPTION_PROMPT_CHARS, may_be_empty=True)
    if payload.HasField("temperature"):
        check_number("payload.temperature", payload.temperature, 0, 1)


def check_speech(payload: audio_pb2.SpeechPayload) -> None:
    """Raises INVALID_ARGUMENT naming the field."""
    _check_text("payload.input", payload.input, MAX_SPEECH_CHARS)
    _check_text("payload.voice", payload.voice, MAX_WORD_CHARS)
    _check_word("payload.format", payload.format, SPEECH_FORMATS)
    if payload.HasField("speed"):
        check_number("payload.speed", payload.speed, MIN_SPEED, MAX_SPEED)
    _check_text("payload.instructions", payload.instructions, MAX_SPEECH_CHARS, may_be_empty=True)


def _check_text(field: str, text: str, most: int, *, may_be_empty: bool = False) -> None:
    if not text and not may_be_empty:
        raise invalid_field(field, "must not be empty")
    if len(text) > most:
        raise invalid_field(field, f"must have at most {most} characters")


def _check_word(field: str, word: str, known: tuple[str, ...]) -> None:
    if word and word not in known:
        raise invalid_field(field, f"must be one of {', '.join(known)}")
