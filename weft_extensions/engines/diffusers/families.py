"""Families of pipelines: their classes and parameters. Data only, without imports of a library.

The server program imports this in an environment without weft's other dependencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Mode(StrEnum):
    """The input that images are generated from."""

    TEXT = "text_to_image"
    IMAGE = "image_to_image"
    INPAINTING = "inpainting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of pipelines."""

    name: str
    title: str
    """Display name."""
    class_prefix: str
    """Start of the names of its classes in diffusers."""
    denoiser: str = "transformer"
    """The component that runs the steps."""
    steps: int = 28
    guidance: float
    strength: Mapping[Mode, float] = field(default_factory=lambda: {Mode.IMAGE: 0.8, Mode.INPAINTING: 1.0})
    """How much of a source image is changed; a default, like `steps` and `guidance`."""
    side_pixels: int = 1024
    """Width and height if neither the request nor the model's files specify a size."""
    size_multiple: int = 16
    """Width and height must be multiples of it."""
    takes_negative_prompt: bool = True
    packs_latents: bool = False
    """Whether its latents are a sequence of patches."""
    accelerator_dtype: str = "bfloat16"
    """Type of the weights on an accelerator."""
    quantized: frozenset[str]
    """Components that `quantization` affects."""
    options: frozenset[str] = frozenset()
    """Additional request parameters with the library's names."""

    @property
    def classes(self) -> Mapping[Mode, str]:
        """The class of diffusers for each mode."""
        suffixes = {Mode.TEXT: "Pipeline", Mode.IMAGE: "Img2ImgPipeline", Mode.INPAINTING: "InpaintPipeline"}
        return {mode: self.class_prefix + suffix for mode, suffix in suffixes.items()}


_FAMILIES = (
    Family(
        name="sd",
        title="Stable Diffusion",
        class_prefix="StableDiffusion",
        denoiser="unet",
        steps=30,
        guidance=7.5,
        side_pixels=512,
        size_multiple=8,
        accelerator_dtype="float16",
        quantized=frozenset({"unet"}),
        # Without clip_skip: diffusers 0.42 uses a part of the encoder that transformers 5 has removed.
        options=frozenset({"eta", "guidance_rescale"}),
    ),
    Family(
        name="sdxl",
        title="Stable Diffusion XL",
        class_prefix="StableDiffusionXL",
        denoiser="unet",
        steps=30,
        guidance=5.0,
        # With 1.0 the library ignores the source image, even where the mask preserves it.
        strength=MappingProxyType({Mode.IMAGE: 0.6, Mode.INPAINTING: 0.99}),
        size_multiple=8,
        accelerator_dtype="float16",
        quantized=frozenset({"unet"}),
        options=frozenset({"clip_skip", "eta", "guidance_rescale"}),
    ),
    Family(
        name="sd3",
        title="Stable Diffusion 3",
        class_prefix="StableDiffusion3",
        guidance=4.5,
        quantized=frozenset({"transformer", "text_encoder_3"}),
        options=frozenset({"clip_skip", "max_sequence_length"}),
    ),
    Family(
        name="flux",
        title="FLUX",
        class_prefix="Flux",
        guidance=3.5,
        takes_negative_prompt=False,
        packs_latents=True,
        quantized=frozenset({"transformer", "text_encoder_2"}),
        options=frozenset({"max_sequence_length"}),
    ),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _FAMILIES})
PIPELINE_CLASSES: Mapping[str, tuple[Family, Mode]] = MappingProxyType(
    {class_name: (family, mode) for family in _FAMILIES for mode, class_name in family.classes.items()}
)
"""Pipeline classes that a folder may name, with their family and mode."""
