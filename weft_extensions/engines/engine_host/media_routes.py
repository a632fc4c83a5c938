"""Routes for images, recordings and speech: OpenAI's, but always answered with a stream of events.

In addition to OpenAI's events and fields, `work_progress` reports progress, segments have statistics, and the last
events have llama.cpp's `timings`.
"""

import base64
import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weft_extensions.engines.engine_host.http_server import Caller, Engine, FieldRefusedError, Route

MAX_SIDE_PIXELS = 16_384
MAX_RANDOM_SEED = 2**53
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_OWN_SIZES = frozenset({"", "auto"})
_BOOLEANS = {"true": True, "false": False}
_IMAGE_FIELDS = frozenset({
    *("prompt", "n", "size", "quality", "output_format", "negative_prompt", "num_inference_steps", "guidance_scale"),
    *("seed", "strength", "response_format", "stream", "partial_images", "model", "image", "image[]", "mask"),
})  # fmt: skip
"""Fields of an image request; all others are parameters of the library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionRequest:
    """A transcription request."""

    recording: bytes = field(repr=False)
    language: str = ""
    """ISO 639-1; empty: detect the language."""
    prompt: str = ""
    """Text that guides the style or precedes the recording."""
    temperature: float | None = None
    """None: the engine's default."""
    translate: bool = False
    """Whether to translate to English."""
    with_words: bool = False
    """Whether to include the times of words."""
    voice_detection: bool | None = None
    """Whether to skip parts without a voice; None: as configured for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """A request for images, generated one after the other; image n (from 0) has the seed `seed` + n."""

    prompt: str
    seed: int
    negative_prompt: str = ""
    width: int | None = None
    """In pixels; None: the model's default, or the size of the source image."""
    height: int | None = None
    count: int = 1
    steps: int | None = None
    """None: as configured for the model; the same for the next two."""
    guidance: float | None = None
    strength: float | None = None
    """How much of the source image is changed, 0 to 1."""
    images: Sequence[bytes] = field(default=(), repr=False)
    """Source images; none: text only."""
    mask: bytes = field(default=b"", repr=False)
    """Mask of the first source image; empty: all of it may change."""
    partial_images: int = 0
    output_format: str = "png"
    """`png`, `jpeg` or `webp`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Additional parameters with the library's names."""


class TranscriptionEngine(Engine):
    """An engine that transcribes recordings."""

    @property
    def routes(self) -> Mapping[str, Route]:
        """See Engine.routes."""
        return {
            "/v1/audio/transcriptions": Route(lambda body, caller: self.transcribe(transcription_of(body), caller)),
            "/v1/audio/translations": Route(
                lambda body, caller: self.transcribe(transcription_of(body, translate=True), caller)
            ),
        }

    @abstractmethod
    def transcribe(self, request: TranscriptionRequest, caller: Caller) -> None:
        """Sends the segments of a recording, and the end."""


class ImageEngine(Engine):
    """An engine that generates images."""

    @property
    def routes(self) -> Mapping[str, Route]:
        """See Engine.routes."""
        make = Route(lambda body, caller: self.make(images_of(body), caller))
        return {"/v1/images/generations": make, "/v1/images/edits": make}

    @abstractmethod
    def make(self, request: ImageRequest, caller: Caller) -> None:
        """Sends images and their previews."""


def transcription_of(body: Mapping[str, Any], *, translate: bool = False) -> TranscriptionRequest:
    """Converts a form to a request."""
    return TranscriptionRequest(
        recording=body["file"],
        language=body.get("language", ""),
        prompt=body.get("prompt", ""),
        temperature=_number(body, "temperature"),
        translate=translate,
        with_words="word" in body.get("timestamp_granularities[]", ()),
        voice_detection=_BOOLEANS.get(body.get("voice_detection", "")),
    )


def images_of(body: Mapping[str, Any]) -> ImageRequest:
    """Converts a body to a request; the default seed is random. Raises RefusedError."""
    width, height = image_size(body.get("size", ""))
    return ImageRequest(
        prompt=body["prompt"],
        seed=secrets.randbelow(MAX_RANDOM_SEED) if body.get("seed") is None else int(body["seed"]),
        negative_prompt=body.get("negative_prompt", ""),
        width=width,
        height=height,
        count=int(body.get("n", 1)),
        steps=None if body.get("num_inference_steps") is None else int(body["num_inference_steps"]),
        guidance=_number(body, "guidance_scale"),
        strength=_number(body, "strength"),
        images=body.get("image[]") or ([body["image"]] if "image" in body else []),
        mask=body.get("mask", b""),
        partial_images=int(body.get("partial_images", 0)),
        output_format=body.get("output_format") or "png",
        options={name: _plain(value) for name, value in body.items() if name not in _IMAGE_FIELDS},
    )


def image_size(size: str) -> tuple[int | None, int | None]:
    """Parses a size such as "1024x768" to width and height; None: the model's default. Raises RefusedError."""
    if size in _OWN_SIZES:
        return None, None
    found = _SIZE.fullmatch(size)
    if found is None or max(int(found[1]), int(found[2])) > MAX_SIDE_PIXELS:
        message = f"must be WIDTHxHEIGHT in pixels, such as 512x512, each at most {MAX_SIDE_PIXELS}"
        raise FieldRefusedError("size", message)
    return int(found[1]), int(found[2])


def _number(body: Mapping[str, Any], name: str) -> float | None:
    return None if body.get(name) is None else float(body[name])


def _plain(value: Any) -> Any:
    """Parses a form value as JSON if possible."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def send_progress(caller: Caller, done: float, total: float, stage: str = "") -> None:
    """Sends the progress of the work; total 0: unknown. `stage`: description of the current step."""
    caller.send({"type": "work_progress", "work_progress": {"done": done, "total": total, "stage": stage}})


def send_preview(caller: Caller, index: int, partial_index: int, data: bytes) -> None:
    """Sends a preview of an image."""
    place = {"image_index": index, "partial_image_index": partial_index}
    caller.send({"type": "image_generation.partial_image", "b64_json": _text(data), **place})


def send_image(caller: Caller, index: int, data: bytes, seed: int, usage: dict[str, int], seconds: float) -> None:
    """Sends an image with its seed, usage and work time."""
    facts = {"image_index": index, "seed": seed, "usage": usage, "timings": timings(seconds)}
    caller.send({"type": "image_generation.completed", "b64_json": _text(data), **facts})


def send_sound(caller: Caller, data: bytes, media_type: str) -> None:
    """Sends a piece of a recording."""
    caller.send({"type": "speech.audio.delta", "audio": _text(data), "media_type": media_type})


def timings(seconds: float, tokens: int = 0) -> dict[str, float]:
    """Returns work time and number of generated tokens with llama.cpp's names."""
    return {"predicted_n": tokens, "predicted_ms": seconds * 1e3}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
