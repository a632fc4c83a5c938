"""Estimates a model's accelerator memory from the best available source. Pure.

The sources, best first: measurements of earlier loads of the same file, the configuration, the file's header, the file
size, the model's name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.kernel.models.load_parameters import LoadValue

KIBIBYTE = 1024
MEBIBYTE = 1024 * KIBIBYTE
GIBIBYTE = 1024 * MEBIBYTE
CONTEXT_STEP = 256
"""llama.cpp rounds the context of a slot up to a multiple of this."""
MAX_CONTEXT_TOKENS = 16_777_216
LEARNED_MARGIN = 1.05
"""Factor on a measurement: repeated loads of a file differ by less, due to buffer rounding."""
EMBEDDING_TOKENS = 2048
"""Minimum length of a text that a model can embed, if its context allows."""
EMBEDDING_COMPUTE_BYTES = GIBIBYTE
"""Maximum size of compute buffers for embedding longer texts."""
_COMPUTE_NUMBER_BYTES = 4
_EMBEDDINGS_IN_FLIGHT = 8
CACHE_TYPE_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "f16": 2.0,
        "bf16": 2.0,
        "f32": 4.0,
        "q8_0": 34 / 32,
        "q5_1": 24 / 32,
        "q5_0": 22 / 32,
        "q4_1": 20 / 32,
        "q4_0": 18 / 32,
    }
)
"""Bytes per number in the cache: ggml's bytes per block divided by values per block. Verified on SmolLM2: 8,192 tokens
took 180.00 MiB as f16 and 95.62 MiB as q8_0."""


class EstimateSource(StrEnum):
    """The source of an estimate, best first."""

    LEARNED = "learned"
    MANIFEST = "manifest"
    HEADER = "header"
    FILE_SIZE = "file_size"
    NAME = "name"


class FileKind(StrEnum):
    """File format of the weights."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"


SIZE_FACTORS: Mapping[FileKind, float] = MappingProxyType({FileKind.GGUF: 1.1, FileKind.SAFETENSORS: 1.3})
"""Memory per byte of the file if only its size is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a model, from its file header."""

    weight_bytes: int
    keys_per_token: int
    """Number of key values per token over all layers. An upper bound, since sliding windows are not subtracted."""
    values_per_token: int
    layers: int
    heads: int = 0
    embedding_length: int = 0
    vocabulary: int = 0


_ANY_SHAPE = ModelShape(weight_bytes=0, keys_per_token=0, values_per_token=0, layers=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """The load settings that determine a model's memory."""

    context_tokens: int
    """Context of one slot."""
    slots: int = 1
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    """Keys of CACHE_TYPE_BYTES; others count as f32."""
    ubatch_tokens: int = 512
    flash_attention: bool = True
    gpu_layers: int = -1
    """Layers on accelerators; -1: all."""
    embeds: bool = False
    """Whether a text to embed is computed in one batch, see `tokens_at_once`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHabits:
    """An engine's default memory use. The field defaults are those of llama.cpp's server."""

    flash_attention: bool = True
    """Whether flash attention is on by default; llama.cpp's "auto" enables it if the model supports it."""
    computes_whole_batches: bool = False
    """Whether whole batches are computed together instead of micro-batches."""
    embeds: bool = False
    """Whether a text to embed is computed in one batch, so that micro-batches default to the context length."""


def settings_for(
    context_tokens: int, slots: int, parameters: "Mapping[str, LoadValue]", habits: EngineHabits | None = None
) -> MemorySettings:
    """Returns the memory settings of a load: the configuration overridden by its validated parameters."""
    habits = habits or EngineHabits()
    default = MemorySettings(context_tokens=context_tokens, slots=slots)
    attention = parameters.get("flash_attention")
    batch = int(parameters.get("batch_tokens", default.ubatch_tokens))
    at_once = batch if habits.computes_whole_batches else min(batch, default.ubatch_tokens)
    return MemorySettings(
        context_tokens=int(parameters.get("context_tokens", context_tokens)),
        slots=int(parameters.get("slots", slots)),
        cache_type_k=str(parameters.get("cache_type_k", default.cache_type_k)),
        cache_type_v=str(parameters.get("cache_type_v", default.cache_type_v)),
        ubatch_tokens=int(parameters.get("ubatch_tokens", at_once)),
        flash_attention=habits.flash_attention if attention is None else attention != "off",
        gpu_layers=int(parameters.get("gpu_layers", default.gpu_layers)),
        embeds=habits.embeds and parameters.keys().isdisjoint(("batch_tokens", "ubatch_tokens")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """What is known about a model before its load."""

    name: str = ""
    learned_bytes: Sequence[int] = ()
    """Measured memory of the last loads of this file with these settings."""
    manifest_bytes: int | None = None
    shape: ModelShape | None = None
    file_bytes: int = 0
    """0: unknown."""
    file_kind: FileKind | None = None
    projector_bytes: int = 0
    """Size of the image and audio encoder's file, which is always fully on a device."""
    adapter_bytes: int = 0
    """Size of its adapters, which are always fully on the device."""
    draft: "KnownModel | None" = None
    """The draft model for speculative decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A part of an estimate and its size."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The estimated memory of a model, its source, and its parts."""

    bytes: int
    source: EstimateSource
    parts: tuple[MemoryPart, ...] = ()


def estimate_memory(model: KnownModel, settings: MemorySettings) -> MemoryEstimate | None:
    """Returns the estimate from the best available source; None: there is none.

    Measurements and the configuration include projector, adapters and draft model; for the other sources, which cover
    only the weights, these are added.
    """
    if model.learned_bytes:
        measured = max(model.learned_bytes)
        margin = _whole_mebibytes(measured * LEARNED_MARGIN) - measured
        return _estimate(EstimateSource.LEARNED, measured=measured, margin=margin)
    if model.manifest_bytes is not None:
        return _estimate(EstimateSource.MANIFEST, declared=model.manifest_bytes)
    found = _estimate_weights(model, settings)
    if found is None:
        return None
    beside = companion_parts(model, settings)
    return replace(found, bytes=found.bytes + sum(part.bytes for part in beside), parts=(*found.parts, *beside))


def companion_parts(model: KnownModel, settings: MemorySettings) -> tuple[MemoryPart, ...]:
    """Returns the memory of projector, adapters and draft model; empty if no layer is on a device.

    The draft model has a separate cache for the same context, with the engine's default types.
    """
    if not settings.gpu_layers:
        return ()
    parts = [MemoryPart(name="projector", bytes=model.projector_bytes)] if model.projector_bytes else []
    if model.adapter_bytes:
        parts.append(MemoryPart(name="adapters", bytes=model.adapter_bytes))
    if model.draft is not None:
        own = replace(settings, cache_type_k="f16", cache_type_v="f16", gpu_layers=-1)
        draft = estimate_memory(model.draft, own)
        if draft is not None:
            parts.append(MemoryPart(name="draft", bytes=draft.bytes))
    return tuple(parts)


def _estimate_weights(model: KnownModel, settings: MemorySettings) -> MemoryEstimate | None:
    if model.shape is not None or not settings.gpu_layers:
        return estimate_shape(model.shape or _ANY_SHAPE, settings)
    if model.file_bytes > 0:
        factor = SIZE_FACTORS[model.file_kind or FileKind.SAFETENSORS]
        overhead = _whole_mebibytes(model.file_bytes * factor) - model.file_bytes
        return _estimate(EstimateSource.FILE_SIZE, file=model.file_bytes, overhead=overhead)
    weights = weights_from_name(model.name)
    if weights is None:
        return None
    # A name is no more precise than a size.
    kind = FileKind.GGUF if names_gguf(model.name) else FileKind.SAFETENSORS
    overhead = _whole_mebibytes(weights * SIZE_FACTORS[kind]) - weights
    return _estimate(EstimateSource.NAME, weights=weights, overhead=overhead)


def estimate_shape(shape: ModelShape, settings: MemorySettings) -> MemoryEstimate:
    """Estimates weights, the cache for the full context of every slot, and compute buffers.

    All are 0 if no layer is on a device, because the engine then computes elsewhere.
    """
    share = _share_on_devices(shape, settings)
    return _estimate(
        EstimateSource.HEADER,
        weights=round(shape.weight_bytes * share),
        context=round(context_bytes(shape, settings) * share),
        compute=compute_bytes(shape, settings) if settings.gpu_layers else 0,
    )


def context_bytes(shape: ModelShape, settings: MemorySettings) -> int:
    """Returns the size of the key-value cache of all slots, over all devices and the host."""
    tokens = settings.slots * _rounded_context(settings.context_tokens)
    per_token = shape.keys_per_token * _cache_bytes(settings.cache_type_k)
    per_token += shape.values_per_token * _cache_bytes(settings.cache_type_v)
    return round(tokens * per_token)


def compute_bytes(shape: ModelShape, settings: MemorySettings) -> int:
    """Returns an upper bound of the size of the compute buffers.

    Per token of a batch: four bytes per vocabulary word (with embeddings the server computes all logits) or, without
    flash attention, per score against the context in every head; the mask over the context; and some intermediate
    vectors. Measured on SmolLM2-135M with 8,192 tokens in one slot (llama.cpp of November 2026): 105.1 MiB (this
    returns 121), 166.4 MiB without flash attention (169), and 26.3 MiB for batches of 128 (30). CUDA's memory per
    process is not included: the margin of each device covers it.
    """
    return tokens_at_once(shape, settings) * _compute_bytes_per_token(shape, settings)


def tokens_at_once(shape: ModelShape | None, settings: MemorySettings) -> int:
    """Returns the number of tokens computed in one batch, llama.cpp's physical batch. `shape` None: unknown.

    A text to embed must fit in it, as pooling needs all of its tokens: it is as long as the context if its compute
    buffers need at most EMBEDDING_COMPUTE_BYTES, otherwise EMBEDDING_TOKENS. A model that is only partly on
    accelerators keeps the default batch, because each further layer there matters more.
    """
    is_split = shape is not None and 0 < _share_on_devices(shape, settings) < 1
    if not settings.embeds or is_split:
        return settings.ubatch_tokens
    affordable = 0 if shape is None else EMBEDDING_COMPUTE_BYTES // _compute_bytes_per_token(shape, settings)
    longest = min(_rounded_context(settings.context_tokens), max(EMBEDDING_TOKENS, affordable))
    return max(settings.ubatch_tokens, longest)


def _compute_bytes_per_token(shape: ModelShape, settings: MemorySettings) -> int:
    context = _rounded_context(settings.context_tokens)
    widest = shape.vocabulary
    if not settings.flash_attention:
        widest = max(widest, shape.heads * context)
    return (widest + context + _EMBEDDINGS_IN_FLIGHT * shape.embedding_length) * _COMPUTE_NUMBER_BYTES


def largest_context(model: KnownModel, settings: MemorySettings, budget_bytes: int) -> int:
    """Returns the largest context of one slot that fits a budget, in steps of CONTEXT_STEP; 0: none fits.

    The model must have a shape.
    """
    low, high = 0, MAX_CONTEXT_TOKENS // CONTEXT_STEP
    while low < high:
        middle = (low + high + 1) // 2
        longer = replace(settings, context_tokens=middle * CONTEXT_STEP)
        beside = sum(part.bytes for part in companion_parts(model, longer))
        if estimate_shape(model.shape or _ANY_SHAPE, longer).bytes + beside <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low * CONTEXT_STEP


def _share_on_devices(shape: ModelShape, settings: MemorySettings) -> float:
    """Returns the share of layers on accelerators; input and output count as one more layer."""
    if settings.gpu_layers < 0:
        return 1.0
    return min(1.0, settings.gpu_layers / (shape.layers + 1))


def _rounded_context(tokens: int) -> int:
    return -(-tokens // CONTEXT_STEP) * CONTEXT_STEP


def _cache_bytes(name: str) -> float:
    return CACHE_TYPE_BYTES.get(name, CACHE_TYPE_BYTES["f32"])


def _whole_mebibytes(size: float) -> int:
    return -(-round(size) // MEBIBYTE) * MEBIBYTE


def _estimate(source: EstimateSource, **parts: int) -> MemoryEstimate:
    return MemoryEstimate(
        bytes=sum(parts.values()),
        source=source,
        parts=tuple(MemoryPart(name=name, bytes=size) for name, size in parts.items()),
    )


MAX_NAME_CHARS = 512
MAX_PARAMETERS = 10_000_000_000_000
"""Largest number of parameters that is accepted from a name."""
UNNAMED_BITS = 16.0
"""Bits per weight if the name does not state them."""
BITS: Mapping[str, float] = MappingProxyType(
    {
        "f32": 32.0,
        "f16": 16.0,
        "fp16": 16.0,
        "bf16": 16.0,
        "fp8": 8.0,
        "int8": 8.0,
        "q8-0": 8.5,
        "q6-k": 6.6,
        "q5-1": 6.0,
        "q5-0": 5.6,
        "q5-k-m": 5.8,
        "q5-k-s": 5.6,
        "q4-1": 5.2,
        "q4-0": 4.7,
        "q4-k-m": 5.0,
        "q4-k-s": 4.7,
        "q3-k-l": 4.4,
        "q3-k-m": 4.1,
        "q3-k-s": 3.7,
        "q2-k": 3.2,
        "iq4-nl": 4.7,
        "iq4-xs": 4.5,
        "iq3-m": 3.8,
        "iq3-xxs": 3.3,
        "iq2-m": 3.0,
        "iq1-m": 2.2,
        "mxfp4": 4.3,
        "int4": 4.5,
        "awq": 4.5,
        "gptq": 4.5,
    }
)
"""Bits per weight, from tools/quantize/README.md of llama.cpp for a model of 8 billion parameters, rounded up."""

_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([mbt])(?![a-z0-9])")
_GGUF = re.compile(r"(?<![a-z0-9])(?:gguf|i?q[1-8]-[0-9a-z])")
_UNITS: Mapping[str, int] = MappingProxyType({"m": 10**6, "b": 10**9, "t": 10**12})


def weights_from_name(name: str) -> int | None:
    """Returns the size of weights from a name such as "llama-70B-Q4_K_M" or "mixtral-8x7b"; None: it states none.

    Experts count in full, although they share some weights.
    """
    text = name[:MAX_NAME_CHARS].lower().replace("_", "-")
    sizes = [int(count or 1) * float(number) * _UNITS[unit] for count, number, unit in _SIZE.findall(text)]
    # In "30b-a3b", the active parameters (3b) are part of the total.
    parameters = max((size for size in sizes if 0 < size <= MAX_PARAMETERS), default=0.0)
    return round(parameters * _bits(text) / 8) if parameters else None


def names_gguf(name: str) -> bool:
    """Whether a name includes a GGUF quantization."""
    return _GGUF.search(name[:MAX_NAME_CHARS].lower().replace("_", "-")) is not None


def _bits(text: str) -> float:
    found = [name for name in BITS if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", text)]
    return BITS[max(found, key=len)] if found else UNNAMED_BITS
