"""Requests for images, transcriptions and speech as tasks: JSON with files by id or inline."""

import json
import re
from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.gateway_config import RequestLimits
from gateway.intake.multipart import Part
from gateway.intake.request_model import MAX_ID_CHARS, StrictModel
from gateway.media import RequestMedia
from gateway.media.content import checked_image
from gateway.media.request_media import decoded
from weft.api.common.v1 import audio_pb2, chat_pb2, image_pb2
from weft.dispatch.parameter_checks import MAX_SOURCE_IMAGES
from weft.durable.batches import FILE_PREFIX
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.values.media_types import audio_type_of, image_type_of
from weft.kernel.values.names import is_token
from weft_extensions.media import image_schema, speech, transcriptions
from weft_extensions.media.image_schema import ImageRequest
from weft_extensions.media.speech import SpeechRequest
from weft_extensions.media.transcriptions import TranscriptionRequest

MAX_INLINE_CHARS = 64 * 1024 * 1024
"""Maximum characters of an inline file; the request's body has a lower limit."""
InlineOrId = Annotated[str, Field(min_length=1, max_length=MAX_INLINE_CHARS)]
"""The id of a file from POST /v1/files, a data: URL, or base64."""


class FileReference(StrictModel):
    """A file in the form of OpenAI's JSON requests for edits: exactly one member."""

    file_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)] | None = None
    image_url: InlineOrId | None = None
    """A data: URL."""


class ImageEditTask(ImageRequest):
    """A request to edit images as a task."""

    image: InlineOrId | list[InlineOrId] | None = None
    """Images to edit: file ids, data: URLs or base64."""
    images: list[FileReference] | None = None
    """The same in OpenAI's JSON form."""
    mask: InlineOrId | FileReference | None = None
    """Mask: where the first image may be changed."""


class TranscriptionTask(TranscriptionRequest):
    """A request for a transcription as a task."""

    file: InlineOrId | None = None
    """Recording: a file id, a data: URL or base64."""
    timestamp_granularities: list[Literal["word", "segment"]] | None = None


class SpeechTask(SpeechRequest):
    """A request for speech as a task."""

    result_format: Literal["b64_json", "url"] | None = None
    """Extension: whether the answer has the recording in base64 or a signed URL. Absent: base64."""


_DATA_URL = re.compile(r"data:([a-z]{1,16}/[a-z0-9.+-]{1,64})(?:;[a-z0-9=-]{1,64})*;base64,", re.IGNORECASE)
_OF_EDITS = ("image", "images", "mask")
_OF_TRANSCRIPTIONS = ("file",)


def image_payload(params: ImageRequest, _limits: RequestLimits, _media: RequestMedia) -> image_pb2.ImagePayload:
    """Returns the payload of a request for images. Raises INVALID_ARGUMENT naming the field."""
    payload = image_schema.to_payload(_unstreamed(params))
    for name in _OF_EDITS:
        _drop_extra(payload, name)
    return payload


def edit_payload(params: ImageEditTask, limits: RequestLimits, media: RequestMedia) -> image_pb2.ImagePayload:
    """Returns the payload of an edit. Raises INVALID_ARGUMENT naming the field."""
    payload = image_payload(params, limits, media)
    sources = [(text, "image") for text in ([params.image] if isinstance(params.image, str) else params.image or ())]
    for index, reference in enumerate(params.images or ()):
        sources.append((_text_of(reference, f"images[{index}]"), f"images[{index}]"))
    if not sources:
        raise invalid_field("image", "must be a file")
    if len(sources) > MAX_SOURCE_IMAGES:
        raise invalid_field("image", f"must be at most {MAX_SOURCE_IMAGES} files")
    payload.images.extend(_image(text, field, media) for text, field in sources)
    if params.mask is not None:
        mask = params.mask if isinstance(params.mask, str) else _text_of(params.mask, "mask")
        payload.mask.CopyFrom(_image(mask, "mask", media))
    return payload


def transcription_payload(
    params: TranscriptionTask, _limits: RequestLimits, _media: RequestMedia, *, translates: bool
) -> audio_pb2.TranscriptionPayload:
    """Returns the payload of a transcription. Raises INVALID_ARGUMENT naming the field."""
    if params.file is None:
        raise invalid_field("file", "must be a file")
    asked = params.model_copy(update={"stream": None})
    nothing = Part(name="file", data=b"", filename="recording")
    payload = transcriptions.to_transcription(
        asked, nothing, params.timestamp_granularities or (), translates=translates
    )
    payload.audio.CopyFrom(_part(params.file, "file"))
    return payload


def speech_payload(params: SpeechTask, _limits: RequestLimits, _media: RequestMedia) -> audio_pb2.SpeechPayload:
    """Returns the payload of speech. Raises INVALID_ARGUMENT naming the field."""
    return speech.to_speech(params.model_copy(update={"stream_format": None}))


def without_files(raw: bytes) -> bytes:
    """Returns a body without inline files, which are too long to be stored with a task. File ids are kept."""
    body = json.loads(raw)
    for name in (*_OF_EDITS, *_OF_TRANSCRIPTIONS):
        if name in body:
            body[name] = _shortened(body[name])
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _shortened(value: Any) -> Any:
    """Replaces every inline file in a value of a body by an empty data: URL."""
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value if isinstance(value, str) and _is_id(value) else "data:,"


def _unstreamed(params: ImageRequest) -> ImageRequest:
    return params.model_copy(update={"stream": None, "partial_images": None, "response_format": None})


def _drop_extra(payload: image_pb2.ImagePayload, name: str) -> None:
    kept = [item for item in payload.extra_parameters.fields if item.name != name]
    if len(kept) < len(payload.extra_parameters.fields):
        payload.extra_parameters.ClearField("fields")
        payload.extra_parameters.fields.extend(kept)


def _text_of(reference: FileReference, field: str) -> str:
    found = [text for text in (reference.file_id, reference.image_url) if text is not None]
    if len(found) != 1:
        raise invalid_field(field, "must have 'file_id' or 'image_url', and not both")
    return found[0]


def _is_id(text: str) -> bool:
    return text.startswith(f"{FILE_PREFIX}-") and is_token(text, MAX_ID_CHARS)


def _image(text: str, field: str, media: RequestMedia) -> chat_pb2.MediaPart:
    """Returns an image by its id, or validated as those of a live request. Raises INVALID_ARGUMENT naming the field."""
    part = _part(text, field)
    return part if part.file_id else checked_image(part.data, field, media.config)


def _part(text: str, field: str) -> chat_pb2.MediaPart:
    """Returns a file by its id or its content. Raises INVALID_ARGUMENT naming the field."""
    if _is_id(text):
        return chat_pb2.MediaPart(file_id=text)
    try:
        data = decoded(text, field)
    except FieldError:
        raise invalid_field(
            field, "must be the id of a file, a data: URL such as data:audio/wav;base64,..., or base64"
        ) from None
    if not data:
        raise invalid_field(field, "must not be empty")
    # Engines get a file's name and type by it, and may refuse a file of unknown type.
    declared = _DATA_URL.match(text[:256])
    media_type = image_type_of(data) or audio_type_of(data) or ("" if declared is None else declared[1].lower())
    return chat_pb2.MediaPart(data=data, media_type=media_type)
