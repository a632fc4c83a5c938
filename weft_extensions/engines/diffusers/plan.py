"""The plan of an image: a request checked against the loaded pipeline."""

import argparse
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from weft_extensions.engines.diffusers.families import Mode
from weft_extensions.engines.diffusers.pictures import FORMATS, LOSSLESS_QUALITY, PictureFiles
from weft_extensions.engines.diffusers.pipelines import Pipelines
from weft_extensions.engines.engine_host.http_server import FieldRefusedError
from weft_extensions.engines.engine_host.media_routes import ImageRequest

SEEDS = 2**63
COMPRESSION = "output_compression"
"""Request parameter for the quality of JPEG and WebP, with OpenAI's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked request."""

    mode: Mode
    pipeline: Any
    width: int
    height: int
    count: int
    steps: int
    arguments: Mapping[str, Any]
    """Arguments of the pipeline for every image."""
    quality: int | None


class Planner:
    """Creates the plans for a loaded model."""

    def __init__(self, pipelines: Pipelines, files: PictureFiles, settings: argparse.Namespace) -> None:
        self._pipelines = pipelines
        self._files = files
        self._settings = settings

    def plan(self, request: ImageRequest) -> Plan:
        """Checks a request and reads its images. Raises RefusedError naming the field."""
        family = self._pipelines.family
        mode = _mode(request)
        if request.output_format not in FORMATS:
            raise FieldRefusedError("output_format", f"must be one of: {', '.join(FORMATS)}")
        pipeline = self._pipelines.of(mode)
        if request.negative_prompt and not family.takes_negative_prompt:
            raise FieldRefusedError("negative_prompt", f"{family.title} does not support it; omit it")
        steps = self._steps(request)
        source, mask = self._media(request)
        width, height = self._size(request, source)
        arguments: dict[str, Any] = {"prompt": request.prompt, "num_inference_steps": steps}
        guidance = request.guidance if request.guidance is not None else self._settings.guidance
        arguments["guidance_scale"] = family.guidance if guidance is None else guidance
        if request.negative_prompt:
            arguments["negative_prompt"] = request.negative_prompt
        taken = inspect.signature(pipeline.__call__).parameters
        arguments |= {name: value for name, value in (("width", width), ("height", height)) if name in taken}
        counted = steps
        if source is not None:
            strength = self._strength(request, mode)
            counted = _changing_steps(steps, strength)
            arguments |= {"image": self._files.resized(source, width, height), "strength": strength}
        elif request.strength is not None:
            raise FieldRefusedError("strength", "needs a source image; omit it, or send one")
        if mask is not None:
            arguments["mask_image"] = self._files.resized(mask, width, height)
        options = dict(request.options)
        quality = options.pop(COMPRESSION, None)
        return Plan(
            mode=mode,
            pipeline=pipeline,
            width=width,
            height=height,
            count=request.count,
            steps=counted,
            arguments=MappingProxyType(arguments | self._options(options, taken, mode)),
            quality=None if quality is None else min(int(quality), LOSSLESS_QUALITY),
        )

    def _steps(self, request: ImageRequest) -> int:
        most = self._settings.max_steps
        steps = request.steps or self._settings.steps or min(self._pipelines.family.steps, most)
        if not 1 <= steps <= most:
            raise FieldRefusedError("steps", f"must be 1 to {most} for this model")
        return steps

    def _strength(self, request: ImageRequest, mode: Mode) -> float:
        strength = request.strength if request.strength is not None else self._settings.strength
        return self._pipelines.family.strength[mode] if strength is None else strength

    def _media(self, request: ImageRequest) -> tuple[Any, Any]:
        """Returns the source image and its mask; None: there is none."""
        if not request.images:
            return None, None
        source = self._files.read_source(request.images[0], "images[0]")
        if not request.mask:
            return source, None
        mask = self._files.read_mask(request.mask, "mask")
        if mask.size != source.size:
            size, other = (f"{width}x{height}" for width, height in (source.size, mask.size))
            raise FieldRefusedError("mask", f"must have the size of the image, {size}, but has {other}")
        return source, mask

    def _size(self, request: ImageRequest, source: Any) -> tuple[int, int]:
        """Returns width and height: as requested, else the source image's on the grid, else the default."""
        multiple = self._settings.size_multiple or self._pipelines.family.size_multiple
        most = self._settings.max_pixels
        if request.width is None or request.height is None:
            if source is None:
                side = self._pipelines.side_pixels
                return side, side
            return _on_grid(source.size, multiple, most)
        width, height = request.width, request.height
        if width % multiple or height % multiple:
            near = "x".join(str(max(multiple, round(side / multiple) * multiple)) for side in (width, height))
            raise FieldRefusedError(
                "size", f"width and height must be multiples of {multiple} for this model, such as {near}"
            )
        if width * height > most:
            raise FieldRefusedError(
                "size", f"must have at most {most} pixels for this model; {width}x{height} has more"
            )
        return width, height

    def _options(self, options: dict[str, Any], taken: Mapping[str, Any], mode: Mode) -> dict[str, Any]:
        for name in options:
            if name not in self._pipelines.family.options or name not in taken:
                words = mode.value.replace("_", " ")
                raise FieldRefusedError(
                    name, f"{self._pipelines.family.title} does not support it for {words}; omit it"
                )
        return options


def _mode(request: ImageRequest) -> Mode:
    if not request.images:
        if request.mask:
            raise FieldRefusedError("mask", "needs a source image; omit it, or send one")
        return Mode.TEXT
    if len(request.images) > 1:
        raise FieldRefusedError(
            "images", f"must be one: diffusers works from one image, and the request has {len(request.images)}"
        )
    return Mode.INPAINTING if request.mask else Mode.IMAGE


def _changing_steps(steps: int, strength: float) -> int:
    """Returns how many steps change the source image. Raises RefusedError if none does."""
    if not 0 < strength <= 1:
        raise FieldRefusedError("strength", "must be greater than 0 and at most 1")
    changing = min(int(steps * strength), steps)
    if changing < 1:
        raise FieldRefusedError(
            "strength", f"of {steps} steps, {strength:g} leaves none; ask for more steps or a higher strength"
        )
    return changing


def _on_grid(size: tuple[int, int], multiple: int, most: int) -> tuple[int, int]:
    """Scales down the size of a source image to the grid and the limit."""
    width, height = size
    share = min(1.0, (most / (width * height)) ** 0.5)
    return (
        max(multiple, int(width * share) // multiple * multiple),
        max(multiple, int(height * share) // multiple * multiple),
    )
