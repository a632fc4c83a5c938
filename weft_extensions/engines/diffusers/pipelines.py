"""The loaded pipelines of a model: the configured one, and those for other modes, which share its components."""

import argparse
import gc
import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from runner_svc.model_files.pipeline_folder import PipelineFolder, PipelineFolderError, read_pipeline_folder
from weft_extensions.engines.diffusers.families import PIPELINE_CLASSES, Family, Mode
from weft_extensions.engines.engine_host.http_server import (
    FAILED,
    OUT_OF_MEMORY,
    UNSUPPORTED,
    FieldRefusedError,
    RefusedError,
)

AUTO = "auto"
NONE = "none"
CPU = "cpu"
ACCELERATOR = "cuda"
MODEL_OFFLOAD = "model"
SEQUENTIAL_OFFLOAD = "sequential"
_LOADED = "Loaded "
_PIPELINE_LOGGER = "diffusers.pipelines.pipeline_utils"
_QUANTIZATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bitsandbytes_4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "bitsandbytes_8bit": {"load_in_8bit": True},
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placement:
    """Device, precision and offloading of the components."""

    device: str
    dtype: str
    device_map: str
    cpu_offload: str
    quantization: str


def read_folder(options: argparse.Namespace) -> tuple[PipelineFolder, Family, Mode]:
    """Returns the properties of the model's folder before anything is loaded. Raises RefusedError."""
    try:
        folder = read_pipeline_folder(options.model, options.variant)
    except (PipelineFolderError, OSError) as error:
        raise RefusedError(str(error)) from None
    known = PIPELINE_CLASSES.get(folder.class_name)
    if known is None:
        names = ", ".join(sorted(PIPELINE_CLASSES))
        raise RefusedError(f"pipelines of the class {folder.class_name} are not supported, only {names}")
    family, mode = known
    return folder, family, mode


class Pipelines:
    """The pipelines of a model. One request at a time uses them."""

    def __init__(
        self, torch: Any, diffusers: Any, options: argparse.Namespace, report: Callable[[float], None]
    ) -> None:
        """Loads the model; `report` receives the loaded share of its weights, 0 to 1. Raises RefusedError."""
        folder, self.family, self._mode = read_folder(options)
        self._torch, self._diffusers, self._options = torch, diffusers, options
        self._placement = _placement(torch, options, self.family)
        self._first = self._latest = self._loaded(folder, report)
        self._by_mode = {self._mode: self._first}

    @property
    def description(self) -> str:
        """Description of what was loaded where."""
        place = self._placement
        extra = [word for word in (place.device_map, place.cpu_offload, place.quantization) if word != NONE]
        return f"{self.family.title} on {place.device} as {place.dtype}{''.join(f', {word}' for word in extra)}"

    @property
    def modes(self) -> frozenset[Mode]:
        """The supported modes."""
        match self._mode:
            case Mode.TEXT:
                return frozenset(Mode)
            case Mode.IMAGE:  # a refiner lacks some text encoders
                return frozenset({Mode.IMAGE, Mode.INPAINTING})
            case Mode.INPAINTING:
                denoiser = getattr(self._first, self.family.denoiser)
                # A denoiser trained for inpainting also receives the mask and the source.
                is_trained = denoiser.config.in_channels != self._first.vae.config.latent_channels
                is_special = self.family.denoiser == "unet" and is_trained
                return frozenset({Mode.INPAINTING}) if is_special else frozenset(Mode)

    @property
    def side_pixels(self) -> int:
        """Width and height if a request names no size."""
        pipeline = self._latest
        sample = getattr(pipeline, "default_sample_size", None)
        if sample is None:
            sample = getattr(getattr(pipeline, self.family.denoiser).config, "sample_size", None)
        return sample * pipeline.vae_scale_factor if isinstance(sample, int) else self.family.side_pixels

    def of(self, mode: Mode) -> Any:
        """Returns the pipeline for a mode. Raises RefusedError if the model does not support it."""
        if mode not in self.modes:
            words = ", ".join(sorted(one.value.replace("_", " ") for one in self.modes))
            named = mode.value.replace("_", " ")
            raise RefusedError(f"this model is for {words} only, not for {named}", UNSUPPORTED)
        pipeline = self._by_mode.get(mode)
        if pipeline is None:
            pipeline = self._by_mode[mode] = self._sibling(mode)
        if pipeline is not self._latest:
            if self._placement.cpu_offload == MODEL_OFFLOAD:
                # The components have the offload hooks of the pipeline used before.
                pipeline.enable_model_cpu_offload()
            self._latest = pipeline
        return pipeline

    def generator(self, seed: int) -> Any:
        """Returns a random generator on the processor, so that a seed has the same result on every device."""
        return self._torch.Generator(CPU).manual_seed(seed)

    def preview(self, pipeline: Any, latents: Any, width: int, height: int) -> Any:
        """Returns an approximate image of the latents. It costs as much as decoding a small image."""
        vae = pipeline.vae
        if self.family.packs_latents:
            latents = pipeline._unpack_latents(latents, height, width, pipeline.vae_scale_factor)  # noqa: SLF001 - no public API
        sides = latents.shape[-2:]
        share = min(1.0, max(1, self._options.preview_side_pixels // pipeline.vae_scale_factor) / max(sides))
        size = tuple(max(1, round(side * share)) for side in sides)
        latents = self._torch.nn.functional.interpolate(latents.float(), size=size, mode="bilinear")
        # Whether the decoder exceeds the range of 16-bit floats.
        overflows = bool(getattr(vae.config, "force_upcast", False)) and str(vae.dtype) == "torch.float16"
        restore = vae.dtype if overflows else None
        if restore is not None:
            vae.to(latents.dtype)
        try:
            latents = latents.to(vae.dtype) / vae.config.scaling_factor
            latents = latents + (getattr(vae.config, "shift_factor", None) or 0.0)
            decoded = vae.decode(latents, return_dict=False)[0]
        finally:
            if restore is not None:
                vae.to(restore)
        return pipeline.image_processor.postprocess(decoded, output_type="pil")[0]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error means that memory ran out."""
        if isinstance(error, MemoryError | self._torch.OutOfMemoryError):
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)

    def release(self) -> None:
        """Frees what an aborted request has left behind."""
        maybe_free = getattr(self._latest, "maybe_free_model_hooks", None)
        if maybe_free is not None and self._placement.cpu_offload == MODEL_OFFLOAD:
            maybe_free()
        gc.collect()
        if self._placement.device == ACCELERATOR:
            self._torch.cuda.empty_cache()

    def _loaded(self, folder: PipelineFolder, report: Callable[[float], None]) -> Any:
        place, options = self._placement, self._options
        given: dict[str, Any] = dict.fromkeys(folder.absent)
        if options.no_safety_checker and "safety_checker" in folder.components | folder.absent:
            given |= {"safety_checker": None, "requires_safety_checker": False}
        if folder.variant:
            given["variant"] = folder.variant
        if place.quantization != NONE:
            given["quantization_config"] = self._quantization(folder)
        if place.device_map != NONE:
            given["device_map"] = place.device_map
        elif place.quantization != NONE and place.cpu_offload == NONE:
            given["device_map"] = place.device
        watch = _LoadWatch(folder, report)
        try:
            with watch:
                pipeline = getattr(self._diffusers, folder.class_name).from_pretrained(
                    str(options.model),
                    dtype=getattr(self._torch, place.dtype),
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    **given,
                )
            self._prepare(pipeline)
            if "device_map" not in given and place.cpu_offload == NONE:
                pipeline.to(place.device)
            self._offload(pipeline)
        except Exception as error:
            raise self._load_failure(error) from error
        return pipeline

    def _load_failure(self, error: Exception) -> RefusedError:
        if self.is_out_of_memory(error):
            advice = "use cpu_offload, a quantization, a smaller dtype, or device_map: balanced over several devices"
            return RefusedError(f"the model does not fit into the memory of the device; {advice}", OUT_OF_MEMORY)
        return RefusedError(f"diffusers cannot load it: {type(error).__name__}: {error}", FAILED)

    def _prepare(self, pipeline: Any) -> None:
        pipeline.set_progress_bar_config(disable=True)
        if self._options.vae_tiling:
            pipeline.vae.enable_tiling()
        if self._options.attention_slicing:
            pipeline.enable_attention_slicing()

    def _offload(self, pipeline: Any) -> None:
        if self._placement.cpu_offload == MODEL_OFFLOAD:
            pipeline.enable_model_cpu_offload()
        elif self._placement.cpu_offload == SEQUENTIAL_OFFLOAD:
            pipeline.enable_sequential_cpu_offload()

    def _quantization(self, folder: PipelineFolder) -> Any:
        name = self._placement.quantization
        settings = dict(_QUANTIZATIONS[name])
        if "load_in_4bit" in settings:
            settings["bnb_4bit_compute_dtype"] = getattr(self._torch, self._placement.dtype)
        return self._diffusers.PipelineQuantizationConfig(
            quant_backend=name,
            quant_kwargs=settings,
            components_to_quantize=sorted(self.family.quantized & folder.components),
        )

    def _sibling(self, mode: Mode) -> Any:
        """Creates a pipeline of another class from the same components, without loading or converting any."""
        first, made = self._first, getattr(self._diffusers, self.family.classes[mode])
        taken = inspect.signature(made.__init__).parameters
        settings = {**first.config, **first.components}
        pipeline = made(**{name: value for name, value in settings.items() if name in taken})
        if (places := getattr(first, "hf_device_map", None)) is not None:
            pipeline.hf_device_map = places
        self._prepare(pipeline)
        return pipeline


class _LoadWatch(logging.Handler):
    """Reports the loaded share of the weights, based on the library's log lines about components."""

    def __init__(self, folder: PipelineFolder, report: Callable[[float], None]) -> None:
        super().__init__(logging.INFO)
        self._sizes, self._total, self._report = dict(folder.sizes), max(1, folder.weight_bytes), report
        self._done = 0
        self._logger = logging.getLogger(_PIPELINE_LOGGER)

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler.emit."""
        text = record.getMessage()
        if text.startswith(_LOADED):
            self._done += self._sizes.pop(text.removeprefix(_LOADED).partition(" ")[0], 0)
            self._report(self._done / self._total)
        elif record.levelno >= logging.WARNING:
            sys.stderr.write(f"{text}\n")

    def __enter__(self) -> None:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        self._logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.level, self._logger.propagate = self._before


def _placement(torch: Any, options: argparse.Namespace, family: Family) -> _Placement:
    """Returns the placement of a model. Raises RefusedError if the accelerator is missing."""
    has_accelerator = bool(torch.cuda.is_available())
    if options.device == ACCELERATOR and not has_accelerator:
        message = "there is no CUDA device that PyTorch can use; use cpu, or install the variant cuda"
        raise FieldRefusedError("device", message)
    if options.device == CPU or not has_accelerator:
        # Offloading and quantization only concern accelerator memory.
        dtype = "float32" if options.dtype == AUTO else options.dtype
        return _Placement(device=CPU, dtype=dtype, device_map=NONE, cpu_offload=NONE, quantization=NONE)
    return _Placement(
        device=ACCELERATOR,
        dtype=family.accelerator_dtype if options.dtype == AUTO else options.dtype,
        device_map=options.device_map,
        cpu_offload=options.cpu_offload,
        quantization=options.quantization,
    )
