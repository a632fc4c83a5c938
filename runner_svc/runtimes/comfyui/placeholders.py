"""The placeholders in the command line of ComfyUI. Pure."""

import re
from collections.abc import Iterable, Mapping

PORT = "port"
FOLDERS = ("input", "output", "temp")
NAMES = (PORT, *FOLDERS)
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)\}")


def check_placeholders(text: str) -> str:
    """Returns the text. Raises ValueError naming an unknown placeholder and the known ones."""
    for name in _PLACEHOLDER.findall(text):
        if name not in NAMES:
            known = ", ".join(f"{{{each}}}" for each in NAMES)
            raise ValueError(f"has the unknown placeholder {{{name}}}; there are {known}")
    return text


def placeholders_of(texts: Iterable[str]) -> frozenset[str]:
    """Returns the names of the placeholders in these texts."""
    return frozenset(name for text in texts for name in _PLACEHOLDER.findall(text))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Returns the text with its placeholders replaced."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), text)
