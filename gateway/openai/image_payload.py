"""Images both ways."""

import base64
from collections.abc import Sequence

import msgspec

from gateway.intake.forms import Form
from gateway.openai.extension_fields import fill_extra
from gateway.openai.model_call_schemas import ImageRequest
from weft.api.common.v1 import chat_pb2, image_pb2, usage_pb2
from weft.dispatch.parameter_checks import MAX_SOURCE_IMAGES
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason

_encode = msgspec.json.Encoder().encode
_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp"})


def to_payload(request: ImageRequest) -> image_pb2.ImagePayload:
    """What the mesh is asked. Raises UNSUPPORTED_OPERATION for addresses instead of images."""
    if request.response_format == "url":
        message = "'url' is not offered: images come in the answer; use b64_json"
        raise FieldError("response_format", message, Reason.UNSUPPORTED_OPERATION)
    if request.stream:
        raise FieldError(
            "stream", "is not offered for images: they come when they are done", Reason.UNSUPPORTED_OPERATION
        )
    payload = image_pb2.ImagePayload(
        prompt=request.prompt,
        size=request.size or "",
        quality=request.quality or "",
        output_format=request.output_format or "",
    )
    if request.n is not None:
        payload.count = request.n
    fill_extra(payload.extra_parameters, request.model_extra or {})
    return payload


def add_sources(payload: image_pb2.ImagePayload, form: Form) -> None:
    """The images that are worked from. Raises INVALID_ARGUMENT naming the field."""
    images = [*form.files("image"), *form.files("image[]")]
    if not images:
        raise invalid_field("image", "must be a file")
    if len(images) > MAX_SOURCE_IMAGES:
        raise invalid_field("image", f"must be at most {MAX_SOURCE_IMAGES} files")
    for image in images:
        payload.images.append(_media(image.data, image.media_type, "image"))
    masks = form.files("mask")
    if len(masks) > 1:
        raise invalid_field("mask", "must be one file")
    for mask in masks:
        payload.mask.CopyFrom(_media(mask.data, mask.media_type, "mask"))


def to_body(images: Sequence[image_pb2.GeneratedImage], created: int, usage: usage_pb2.Usage) -> bytes:
    """The answer as JSON. Raises BACKEND_PROTOCOL_ERROR for none."""
    if not images or not all(image.image.data for image in images):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model returned no image")
    tokens = usage.prompt_tokens + usage.completion_tokens
    answer: dict[str, object] = {"created": created, "data": [_entry(image) for image in images]}
    if tokens:
        answer["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": tokens,
        }
    return _encode(answer)


def _entry(image: image_pb2.GeneratedImage) -> dict[str, object]:
    entry: dict[str, object] = {"b64_json": base64.b64encode(image.image.data).decode("ascii")}
    if image.revised_prompt:
        entry["revised_prompt"] = image.revised_prompt
    return entry


def _media(data: bytes, media_type: str, field: str) -> chat_pb2.MediaPart:
    if not data:
        raise invalid_field(field, "must not be empty")
    if media_type not in _IMAGE_TYPES:
        raise invalid_field(field, f"must be one of {', '.join(sorted(_IMAGE_TYPES))}")
    return chat_pb2.MediaPart(data=data, media_type=media_type)
