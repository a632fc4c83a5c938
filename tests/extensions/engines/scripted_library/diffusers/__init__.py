"""A stand-in for diffusers, with the calls that the engine makes and none of the mathematics.

A pipeline works in steps, calls back after each, and its image says what it was made with. SCRIPTED_DIFFUSERS holds
switches as JSON.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from PIL.Image import Image
from scripted_faults import misbehave_at_load

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_DIFFUSERS", "{}"))
LOGGER = logging.getLogger("diffusers.pipelines.pipeline_utils")

if SWITCHES.get("import_fails"):
    raise ImportError("libtorch_cpu.so: cannot open shared object file")

utils = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: None, set_verbosity_error=lambda: None))


class Decoder:
    def __init__(self) -> None:
        self.config = SimpleNamespace(latent_channels=4, scaling_factor=0.5, shift_factor=None, force_upcast=False)
        self.dtype = torch.float32

    def enable_tiling(self) -> None:
        sys.stderr.write("tiling\n")

    def decode(self, latents: Any, *, return_dict: bool) -> tuple[Any]:
        assert not return_dict
        if SWITCHES.get("previews_fail"):
            raise RuntimeError("no preview today")
        return (latents,)


def postprocess(latents: Any, output_type: str) -> list[Image]:
    assert output_type == "pil"
    height, width = (2 * side for side in latents.shape[-2:])
    return [Image("RGB", (width, height), {"preview": True})]


class Pipeline:
    vae_scale_factor = 2

    def __init__(
        self, unet: Any = None, vae: Any = None, tokenizer: Any = None, requires_safety_checker: bool = True
    ) -> None:
        self.components = {"unet": unet, "vae": vae, "tokenizer": tokenizer}
        self.unet, self.vae = unet, vae
        self.config = {"requires_safety_checker": requires_safety_checker, "_name_or_path": "x"}
        self.image_processor = SimpleNamespace(postprocess=postprocess)
        self.num_timesteps = 0

    @classmethod
    def from_pretrained(cls, path: str, **given: Any) -> "Pipeline":
        assert given["use_safetensors"]
        assert given["local_files_only"]
        assert not given["trust_remote_code"]
        misbehave_at_load(SWITCHES)
        if SWITCHES.get("load_needs_too_much"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        LOGGER.info("Loaded unet as UNet2DConditionModel from `unet` subfolder of %s.", path)
        time.sleep(SWITCHES.get("load_step_seconds", 0.0))
        shown = {name: str(value) for name, value in given.items()}
        sys.stderr.write(f"{cls.__name__} with {json.dumps(shown)}\n")
        channels = int(SWITCHES.get("denoiser_channels", 4))
        unet = SimpleNamespace(config=SimpleNamespace(in_channels=channels, sample_size=32))
        return cls(unet, Decoder(), "a tokenizer")

    def set_progress_bar_config(self, *, disable: bool) -> None:
        assert disable

    def to(self, device: str) -> None:
        sys.stderr.write(f"on {device}\n")

    def enable_model_cpu_offload(self) -> None:
        sys.stderr.write(f"{type(self).__name__} is offloaded\n")

    def enable_sequential_cpu_offload(self) -> None:
        sys.stderr.write("offloaded in layers\n")

    def enable_attention_slicing(self) -> None:
        sys.stderr.write("slicing\n")

    def maybe_free_model_hooks(self) -> None:
        sys.stderr.write("freed\n")

    def __call__(
        self,
        *,
        prompt: str,
        num_inference_steps: int,
        guidance_scale: float,
        generator: Any,
        callback_on_step_end: Callable[[Any, int, int, dict[str, Any]], dict[str, Any]],
        width: int | None = None,
        height: int | None = None,
        negative_prompt: str | None = None,
        image: Image | None = None,
        mask_image: Image | None = None,
        strength: float = 1.0,
        eta: float = 0.0,
    ) -> SimpleNamespace:
        if image is not None:
            width, height = image.size
        assert width
        assert height
        if width * height > SWITCHES.get("memory_pixels", 2**30):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB\nand more")
        self.num_timesteps = steps = int(num_inference_steps * strength)
        for step in range(steps):
            time.sleep(SWITCHES.get("seconds_per_step", 0.0))
            sys.stderr.write(f"step {step + 1} of {steps}\n")
            callback_on_step_end(self, step, 0, {"latents": torch.Latents((1, 4, height // 2, width // 2))})
        made = {
            "pipeline": type(self).__name__,
            "prompt": prompt,
            "negative_prompt": negative_prompt,
            "seed": generator.seed,
            "guidance": guidance_scale,
            "steps": steps,
            "eta": eta,
            "source": None if image is None else image.made | {"size": image.size},
            "mask": None if mask_image is None else mask_image.made | {"mode": mask_image.mode},
        }
        shown = Image("RGB", (width, height), made)
        return SimpleNamespace(images=[shown], nsfw_content_detected=[prompt == "unsafe"])


class StableDiffusionPipeline(Pipeline):
    pass


class StableDiffusionImg2ImgPipeline(Pipeline):
    pass


class StableDiffusionInpaintPipeline(Pipeline):
    pass


class FluxPipeline(Pipeline):
    pass


class PipelineQuantizationConfig:
    def __init__(self, quant_backend: str, quant_kwargs: dict[str, Any], components_to_quantize: list[str]) -> None:
        self._words = f"{quant_backend} {sorted(quant_kwargs)} of {components_to_quantize}"

    def __str__(self) -> str:
        return self._words
