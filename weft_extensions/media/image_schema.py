"""The HTTP schema of requests for images, and its translation into a payload."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import override

from gateway.gateway_config import MediaConfig
from gateway.intake.multipart import Form, Part
from gateway.intake.request_model import EXTENSION_PREFIX, HandledRequest, ModelName, StrictModel, Word
from gateway.media import RequestMedia
from gateway.media.content import checked_image
from gateway.openai.extension_fields import fill_extra
from weft.api.common.v1 import chat_pb2, image_pb2
from weft.dispatch.parameter_checks import (
    MAX_GUIDANCE,
    MAX_IMAGE_PROMPT_CHARS,
    MAX_IMAGE_SEED,
    MAX_IMAGE_STEPS,
    MAX_IMAGES,
    MAX_PARTIAL_IMAGES,
    MAX_SOURCE_IMAGES,
)
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason

AUTO = "auto"
"""The value of fields that leave the choice to the model."""
MAX_SIDE_PIXELS = 16_384
_SIZE = re.compile(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}")
_COMPRESSED = frozenset({"jpeg", "webp"})
FILES = frozenset({"image", "image[]", "mask"})
"""Fields of a form that are files."""
SOURCE_TYPES = frozenset({"image/png", "image/jpeg", "image/webp"})

Steps = Annotated[int, Field(ge=1, le=MAX_IMAGE_STEPS)] | None
Guidance = Annotated[float, Field(ge=0, le=MAX_GUIDANCE)] | None


class ImageRequest(HandledRequest):
    """A request for images."""

    model: ModelName
    prompt: str = Field(min_length=1, max_length=MAX_IMAGE_PROMPT_CHARS)
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    size: Word | None = None
    """WIDTHxHEIGHT in pixels, or `auto`."""
    quality: Word | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    """Percentage, for `jpeg` and `webp`."""
    background: Literal["transparent", "opaque", "auto"] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    """Whether the answer contains the images (`b64_json`) or signed URLs that expire (`url`)."""
    stream: bool | None = None
    """Whether images and their previews are streamed as server-sent events."""
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    """With `stream`: number of previews per image."""
    negative_prompt: Annotated[str, Field(max_length=MAX_IMAGE_PROMPT_CHARS)] | None = None
    """Extension: what the images should not show."""
    steps: Steps = None
    """Extension: denoising steps per image."""
    num_inference_steps: Steps = None
    """Another name of `steps`."""
    guidance: Guidance = None
    """Extension: how closely the image follows the prompt."""
    guidance_scale: Guidance = None
    """Another name of `guidance`."""
    seed: Annotated[int, Field(ge=0, le=MAX_IMAGE_SEED)] | None = None
    """Extension: seed of the first image; each further image uses the next number."""
    strength: Annotated[float, Field(ge=0, le=1)] | None = None
    """Extension: how much the source image is changed."""

    @override
    def uses(self, name: str) -> bool:
        # Unknown fields are passed to the engine.
        return not name.startswith(EXTENSION_PREFIX)


class ImageReference(StrictModel):
    """A source image."""

    image_url: str | None = None
    """A data: URL, or an https: URL if the gateway may fetch from its host."""
    file_id: str | None = None
    """Refused: uploaded files are only inputs of tasks and batches."""


class ImageEditRequest(ImageRequest):
    """A request to edit images, as JSON."""

    images: Annotated[list[ImageReference], Field(min_length=1, max_length=MAX_SOURCE_IMAGES)]
    mask: ImageReference | None = None
    """Mask: where the first image may be changed."""


def to_payload(request: ImageRequest) -> image_pb2.ImagePayload:
    """Returns the image payload, without its source images.

    Raises INVALID_ARGUMENT naming the wrong field.
    """
    _require_consistent(request)
    payload = image_pb2.ImagePayload(
        prompt=request.prompt,
        size=_size(request.size),
        quality="" if request.quality == AUTO else request.quality or "",
        output_format=request.output_format or "",
        negative_prompt=request.negative_prompt or "",
        partial_images=request.partial_images or 0,
    )
    chosen = {
        "count": request.n,
        "steps": _one_of(request, "steps", "num_inference_steps"),
        "guidance": _one_of(request, "guidance", "guidance_scale"),
        "seed": request.seed,
        "strength": request.strength,
    }
    for name, value in chosen.items():
        if value is not None:
            setattr(payload, name, value)
    fill_extra(payload.extra_parameters, _extra(request))
    return payload


def _require_consistent(request: ImageRequest) -> None:
    if request.partial_images and not request.stream:
        raise invalid_field("partial_images", "needs 'stream': true")
    if request.output_compression is not None and request.output_format not in _COMPRESSED:
        raise invalid_field("output_compression", "needs 'output_format' jpeg or webp")
    if request.background == "transparent" and request.output_format == "jpeg":
        raise invalid_field("background", "cannot be 'transparent' with 'output_format' jpeg")


def _size(size: str | None) -> str:
    if size is None or size == AUTO:
        return ""
    if not _SIZE.fullmatch(size) or max(map(int, size.split("x"))) > MAX_SIDE_PIXELS:
        raise invalid_field("size", f"must be auto, or WIDTHxHEIGHT such as 512x512, each at most {MAX_SIDE_PIXELS}")
    return size


def _one_of(request: ImageRequest, name: str, other: str) -> object:
    """Returns the value of a field with two names. Raises INVALID_ARGUMENT if they differ."""
    value, same = getattr(request, name), getattr(request, other)
    if value is not None and same is not None and value != same:
        raise invalid_field(other, f"is another name of {name!r}, which is {value}")
    return same if value is None else value


def _extra(request: ImageRequest) -> Mapping[str, object]:
    extra: dict[str, object] = dict(request.model_extra or {})
    if request.output_compression is not None:
        extra["output_compression"] = request.output_compression
    if request.background not in (None, AUTO):
        extra["background"] = request.background
    return extra


def add_references(payload: image_pb2.ImagePayload, request: ImageEditRequest, media: RequestMedia) -> None:
    """Adds the source images of an edit in JSON; collects URLs in `media`.

    Raises INVALID_ARGUMENT or REQUEST_TOO_LARGE naming the field.
    """
    for index, reference in enumerate(request.images):
        payload.images.append(_referenced(reference, f"images[{index}]", media))
    if request.mask is not None:
        payload.mask.CopyFrom(_referenced(request.mask, "mask", media))


def _referenced(reference: ImageReference, field: str, media: RequestMedia) -> chat_pb2.MediaPart:
    if reference.file_id is not None:
        message = "files of this API are inputs of tasks and batches; send the image as a data: URL in image_url"
        raise FieldError(f"{field}.file_id", message, Reason.UNSUPPORTED_OPERATION)
    if reference.image_url is None:
        raise invalid_field(f"{field}.image_url", "is required")
    return media.image(reference.image_url, f"{field}.image_url")


def add_files(payload: image_pb2.ImagePayload, form: Form, config: MediaConfig) -> None:
    """Adds the source images of an edit in a form. Raises INVALID_ARGUMENT naming the field."""
    images = [*form.files("image"), *form.files("image[]")]
    if not images:
        raise invalid_field("image", "must be a file")
    if len(images) > MAX_SOURCE_IMAGES:
        raise invalid_field("image", f"must be at most {MAX_SOURCE_IMAGES} files")
    payload.images.extend(_uploaded(images, "image", config))
    masks = form.files("mask")
    if len(masks) > 1:
        raise invalid_field("mask", "must be one file")
    for mask in _uploaded(masks, "mask", config):
        payload.mask.CopyFrom(mask)


def _uploaded(files: Sequence[Part], field: str, config: MediaConfig) -> list[chat_pb2.MediaPart]:
    found = []
    for file in files:
        if not file.data:
            raise invalid_field(field, "must not be empty")
        image = checked_image(file.data, field, config)
        if image.media_type not in SOURCE_TYPES:
            raise invalid_field(field, f"must be a PNG, JPEG or WebP image; its content is {image.media_type}")
        found.append(image)
    return found
