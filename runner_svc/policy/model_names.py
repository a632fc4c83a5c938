"""Whether the model that a server names in its answer is the one it was asked for. Pure.

Servers name their models in many ways: with the folder or the provider before it, the ending of the file, a tag, a date
or a quantization behind it. None of that makes it another model.
"""

import re

MAX_NAME_CHARS = 80
"""Of a name in a warning."""
_FOLDERS = re.compile(r"[/\\]")
_BOUNDARIES = re.compile(r"[-:@_]")
_SAYS_NO_MORE = re.compile(
    r"\d{2}|\d{4}|\d{6}|\d{8}|latest|free|gguf|mlx|gptq|awq|i?q\d\w*|[kmsl]|x[sl]|x?xs|b?f16|fp(4|8|16)|int[48]|[48]bit|0|1"
)
"""A part of a date, a tag that is no size, or a quantization."""


def is_another_model(asked: str, answered: str) -> bool:
    """Whether `answered` cannot be another way to write `asked`."""
    left, right = plain_name(asked), plain_name(answered)
    if not left or not right or left == right:
        return False
    shorter, longer = sorted((left, right), key=len)
    rest = longer.removeprefix(shorter)
    if rest == longer or not _BOUNDARIES.match(rest):
        return True
    return not all(_SAYS_NO_MORE.fullmatch(part) for part in _BOUNDARIES.split(rest[1:]))


def plain_name(name: str) -> str:
    """A model's name without folders, provider and the ending of its file, in lower case; fit to be shown."""
    last = _FOLDERS.split(name.rstrip("/\\"))[-1].casefold().removesuffix(".gguf")
    return "".join(sign for sign in last if sign.isprintable())[:MAX_NAME_CHARS]
