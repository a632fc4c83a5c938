"""What the name of a model promises about its size."""

import re
from collections.abc import Mapping
from types import MappingProxyType

MAX_NAME_CHARS = 512
MAX_PARAMETERS = 10_000_000_000_000
"""That a name can claim."""
UNNAMED_BITS = 16.0
"""Per weight, where the name says nothing about it."""
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
"""Per weight: what tools/quantize/README.md of llama.cpp gives for a model of 8 billion parameters, rounded up."""

_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([mbt])(?![a-z0-9])")
_GGUF = re.compile(r"(?<![a-z0-9])(?:gguf|i?q[1-8]-[0-9a-z])")
_UNITS: Mapping[str, int] = MappingProxyType({"m": 10**6, "b": 10**9, "t": 10**12})


def weights_from_name(name: str) -> int | None:
    """Bytes of weights as a name such as "llama-70B-Q4_K_M" or "mixtral-8x7b" promises; None: it promises nothing.

    Experts count in full, though they share a part of their weights.
    """
    text = name[:MAX_NAME_CHARS].lower().replace("_", "-")
    sizes = [int(count or 1) * float(number) * _UNITS[unit] for count, number, unit in _SIZE.findall(text)]
    # "30b-a3b": the active ones are some of all.
    parameters = max((size for size in sizes if 0 < size <= MAX_PARAMETERS), default=0.0)
    return round(parameters * _bits(text) / 8) if parameters else None


def names_gguf(name: str) -> bool:
    """Whether a name says that the weights are quantized as in GGUF files."""
    return _GGUF.search(name[:MAX_NAME_CHARS].lower().replace("_", "-")) is not None


def _bits(text: str) -> float:
    found = [name for name in BITS if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9])", text)]
    return BITS[max(found, key=len)] if found else UNNAMED_BITS
