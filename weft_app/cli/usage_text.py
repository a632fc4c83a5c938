"""The usage of a receipt in words: tokens, and the work on images and recordings."""

from collections.abc import Mapping
from typing import Any

_PIXELS, _MILLISECONDS = 1e6, 1e3


def work_parts(usage: Mapping[str, Any]) -> list[str]:
    """Returns the work on images and recordings: "40 steps", "2.1 megapixels", "12.4 s of audio"; empty: none."""
    parts = []
    if steps := usage.get("imageSteps"):
        parts.append(f"{steps} {'step' if steps == 1 else 'steps'}")
    if pixels := usage.get("imagePixels"):
        parts.append(f"{pixels / _PIXELS:.3g} megapixels")
    if milliseconds := usage.get("audioMilliseconds"):
        parts.append(f"{milliseconds / _MILLISECONDS:.4g} s of audio")
    return parts


def has_tokens(usage: Mapping[str, Any]) -> bool:
    """Whether tokens are worth a word: there are some, or there is nothing else."""
    return bool(usage.get("promptTokens") or usage.get("completionTokens")) or not work_parts(usage)
