"""POST /v1/images/generations, /v1/images/edits and /v1/images/variations."""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.answers.answer_builder import encode_json
from gateway.answers.unary import unary_answer
from gateway.deps import InferenceDeps
from gateway.intake.body import read_model, read_multipart_body
from gateway.intake.multipart import Form
from gateway.intake.request_model import HandledRequest, ModelName, Word
from gateway.openai.extension_fields import fill_extra
from gateway.request_facts import facts_of
from weft.api.common.v1 import chat_pb2, image_pb2, receipt_pb2, usage_pb2
from weft.dispatch.operations import IMAGE
from weft.dispatch.parameter_checks import (
    MAX_IMAGE_PROMPT_CHARS,
    MAX_IMAGES,
    MAX_SOURCE_IMAGES,
)
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation


class ImageRequest(HandledRequest):
    """A request for images."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow", frozen=True)

    model: ModelName
    prompt: str = Field(min_length=1, max_length=MAX_IMAGE_PROMPT_CHARS)
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    size: Word | None = None
    quality: Word | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    """Images are part of the answer; `url` is refused."""
    stream: bool | None = None
    """Images are sent when they are complete; true is refused."""


_FILES = frozenset({"image", "image[]", "mask"})


async def generate_images(deps: InferenceDeps, request: Request) -> Response:
    """Generates images from a prompt."""
    params = await read_model(request, ImageRequest, deps.config)
    return _made(request, deps, params, to_payload(params))


async def edit_images(deps: InferenceDeps, request: Request) -> Response:
    """Generates images from a prompt and images."""
    scope = request.scope
    form = Form(
        await read_multipart_body(scope, request.receive, deps.config, max_bytes=deps.config.limits.max_image_bytes)
    )
    params = form.read(ImageRequest, file_fields=_FILES)
    payload = to_payload(params)
    add_sources(payload, form)
    return _made(request, deps, params, payload)


async def vary_images(_deps: InferenceDeps, request: Request) -> Response:
    """Refuses the request: variations are not supported."""
    facts_of(request.scope).surface = "images"
    message = "variations of images are not supported; use /v1/images/edits with a prompt"
    raise WeftError(Reason.UNSUPPORTED_OPERATION, message)


def _made(request: Request, deps: InferenceDeps, params: ImageRequest, payload: image_pb2.ImagePayload) -> Response:
    scope = request.scope
    context = deps.context(scope, surface="images", params=params, model=params.model, operation=Operation.IMAGE)

    def to_body(made: list[image_pb2.GeneratedImage], receipt: receipt_pb2.Receipt) -> bytes:
        return image_body(made, int(deps.clock.utc_now().timestamp()), receipt.usage)

    return unary_answer(deps, scope, IMAGE, context, payload, to_body)


_IMAGE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp"})


def to_payload(request: ImageRequest) -> image_pb2.ImagePayload:
    """Returns the image payload. Raises UNSUPPORTED_OPERATION for `response_format` `url`."""
    if request.response_format == "url":
        message = "'url' is not supported: images are part of the answer; use b64_json"
        raise FieldError("response_format", message, Reason.UNSUPPORTED_OPERATION)
    if request.stream:
        raise FieldError(
            "stream", "is not supported for images: they are sent when they are complete", Reason.UNSUPPORTED_OPERATION
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
    """Add the source images of an edit. Raises INVALID_ARGUMENT naming the field."""
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


def image_body(images: Sequence[image_pb2.GeneratedImage], created: int, usage: usage_pb2.Usage) -> bytes:
    """Returns the answer as JSON. Raises BACKEND_PROTOCOL_ERROR where there are no images."""
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
    return encode_json(answer)


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
