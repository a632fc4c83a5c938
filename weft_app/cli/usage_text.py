"""The usage of a receipt in words: tokens, and the work on images and recordings."""

from weft.api.common.v1.usage_pb2 import Usage

_PIXELS, _MILLISECONDS = 1e6, 1e3


def work_parts(usage: Usage) -> list[str]:
    """Returns the work on images and recordings: "40 steps", "2.1 megapixels", "12.4 s of audio"; empty: none."""
    parts = []
    if usage.image_steps:
        parts.append(f"{usage.image_steps} {'step' if usage.image_steps == 1 else 'steps'}")
    if usage.image_pixels:
        parts.append(f"{usage.image_pixels / _PIXELS:.3g} megapixels")
    if usage.audio_milliseconds:
        parts.append(f"{usage.audio_milliseconds / _MILLISECONDS:.4g} s of audio")
    return parts


def has_tokens(usage: Usage) -> bool:
    """Whether tokens are worth a word: there are some, or there is nothing else."""
    return bool(usage.prompt_tokens or usage.completion_tokens) or not work_parts(usage)
