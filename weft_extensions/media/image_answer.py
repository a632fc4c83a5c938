"""Answers with images: one document, or the events of OpenAI's image streams."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from typing_extensions import override

from gateway.answers.answer_builder import AnswerBuilder, AnswerIdentity
from gateway.answers.sse import StreamEncoder
from gateway.media.content import size_of
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2, receipt_pb2, usage_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.media_types import image_type_of
from weft_extensions.media.image_schema import AUTO, ImageRequest

Link = Callable[[str], str]
"""Returns the URL of an image by the id of its file."""
_DONE = b"data: [DONE]\n\n"
_NO_TOKENS = usage_pb2.Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """The fields of a request that the answer repeats."""

    count: int
    """Number of requested images."""
    size: str
    quality: str
    background: str
    output_format: str
    """All four fields: `auto` if the request does not set them."""


def facts_of_request(request: ImageRequest) -> ImageFacts:
    """Returns the fields of a request that the answer repeats."""
    return ImageFacts(
        count=request.n or 1,
        size=request.size or AUTO,
        quality=request.quality or AUTO,
        background=request.background or AUTO,
        output_format=request.output_format or AUTO,
    )


class ImagesAnswer(AnswerBuilder):
    """Builds one document with all images."""

    def __init__(self, identity: AnswerIdentity, facts: ImageFacts, link: Link | None = None) -> None:
        """`link` returns the URL of an image that is stored in a file; None: no image is."""
        super().__init__(identity, choice_count=0)
        self._facts = facts
        self._link = link
        self._images: list[image_pb2.GeneratedImage] = []

    @override
    def add(self, frame: list[event_pb2.InferenceEvent]) -> None:
        super().add(frame)
        self._images += [event.image for event in frame if event.HasField("image")]

    @override
    def body(self) -> bytes:
        """Returns the answer as JSON. Raises BACKEND_PROTOCOL_ERROR if it has no images or no end."""
        self._ended()
        images = sorted(self._images, key=lambda image: image.index)
        document = images_document(images, self._identity.created, self.usage, self._facts, self._link)
        if self.warnings:
            document["warnings"] = self.warnings
        return encode_json(document)

    @override
    def _add_delta(self, delta: event_pb2.Delta) -> None:
        """Answers with images have no text."""

    @override
    def _forget(self) -> None:
        self._images.clear()


def images_document(
    images: Sequence[image_pb2.GeneratedImage],
    created: int,
    usage: usage_pb2.Usage,
    facts: ImageFacts,
    link: Link | None = None,
) -> dict[str, object]:
    """Returns images as one document. Raises BACKEND_PROTOCOL_ERROR if there are none."""
    if not images or not all(image.image.data or image.image.file_id for image in images):
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model returned no image")
    document: dict[str, object] = {"created": created, "data": [_entry(image, link) for image in images]}
    document["size"] = _size(images[0].image) or facts.size
    document["output_format"] = _format(images[0].image)
    document |= {
        name: value for name, value in (("quality", facts.quality), ("background", facts.background)) if value != AUTO
    }
    if counts := _usage(usage):
        document["usage"] = counts
    return document


class ImageStream(StreamEncoder):
    """Encodes images and their previews as OpenAI's events, followed by `[DONE]`.

    The usage is only known at the end: the last image waits for it, and earlier ones have zeros.
    """

    content_kinds = frozenset({"partial_image", "image"})

    def __init__(self, identity: AnswerIdentity, facts: ImageFacts, prefix: str) -> None:
        """`prefix`: of the event types, such as "image_generation"."""
        super().__init__(identity, choice_count=0)
        self._facts = facts
        self._prefix = prefix
        self._sent = 0
        self._last: image_pb2.GeneratedImage | None = None

    @override
    def _encode_content(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        if event.HasField("partial_image"):
            partial = event.partial_image
            facts = {**self._common(partial.image), "partial_image_index": partial.partial_index}
            out.append(self._event("partial_image", {**facts, "image_index": partial.index}))
        elif self._sent + 1 < self._facts.count:
            self._complete_image(event.image, _NO_TOKENS, out)
        else:
            self._flush(_NO_TOKENS, out)
            self._last = event.image

    @override
    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        """Answers with images have no text."""

    @override
    def _encode_end(self, receipt: receipt_pb2.Receipt, out: list[bytes]) -> None:
        self._complete(receipt, out)
        self._flush(self.usage, out)
        if not self._sent:
            raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model returned no image")
        out += (self._receipt_comment(receipt), _DONE)
        self.is_done = True

    def _flush(self, usage: usage_pb2.Usage, out: list[bytes]) -> None:
        if self._last is not None:
            image, self._last = self._last, None
            self._complete_image(image, usage, out)

    def _complete_image(self, image: image_pb2.GeneratedImage, usage: usage_pb2.Usage, out: list[bytes]) -> None:
        self._sent += 1
        facts = {**self._common(image.image), "image_index": image.index, "usage": _usage(usage) or _counts(usage)}
        if image.HasField("seed"):
            facts["seed"] = image.seed
        if image.revised_prompt:
            facts["revised_prompt"] = image.revised_prompt
        out.append(self._event("completed", facts))

    def _common(self, part: chat_pb2.MediaPart) -> dict[str, object]:
        return {
            "b64_json": base64.b64encode(part.data).decode("ascii"),
            "created_at": self._identity.created,
            "size": _size(part) or self._facts.size,
            "quality": self._facts.quality,
            "background": self._facts.background,
            "output_format": _format(part),
        }

    def _event(self, kind: str, fields: dict[str, object]) -> bytes:
        name = f"{self._prefix}.{kind}"
        return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json({"type": name, **fields}))


def _entry(image: image_pb2.GeneratedImage, link: Link | None) -> dict[str, object]:
    if image.image.file_id and link is not None:
        entry: dict[str, object] = {"url": link(image.image.file_id)}
    else:
        entry = {"b64_json": base64.b64encode(image.image.data).decode("ascii")}
    if image.revised_prompt:
        entry["revised_prompt"] = image.revised_prompt
    if image.HasField("seed"):
        entry["seed"] = image.seed
    return entry


def _usage(usage: usage_pb2.Usage) -> dict[str, object]:
    """Returns the usage as JSON values; empty: unknown."""
    known = usage.prompt_tokens or usage.completion_tokens or usage.image_steps or usage.image_pixels
    return _counts(usage) if known else {}


def _counts(usage: usage_pb2.Usage) -> dict[str, object]:
    counts: dict[str, object] = {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens_details": {"text_tokens": usage.prompt_tokens, "image_tokens": 0},
    }
    if usage.image_steps:
        counts["image_steps"] = usage.image_steps
    if usage.image_pixels:
        counts["image_pixels"] = usage.image_pixels
    return counts


def _size(part: chat_pb2.MediaPart) -> str:
    """Returns the size in an image's header; empty: unknown."""
    media_type = image_type_of(part.data)
    size = None if media_type is None else size_of(part.data, media_type, 1)
    return "" if size is None else f"{size.width}x{size.height}"


def _format(part: chat_pb2.MediaPart) -> str:
    return (image_type_of(part.data) or part.media_type or "image/png").partition("/")[2]
