"""Placeholders in the command line and environment of a server program. Pure.

`{port}` is replaced by the port, and so on. Double braces are an escape: `{{port}}` becomes the text `{port}`. Other
braces, such as those in JSON, are unchanged.
"""

import re
from collections.abc import Collection, Iterable, Mapping

PORT = "port"
# After a dollar sign it is a variable of the runner's environment.
_PLACEHOLDER = re.compile(r"(?<!\$)(?:\{\{([a-z_]+)\}\}|\{([a-z_]+)\})")


def check_placeholders(text: str, names: Collection[str]) -> str:
    """Returns the text. Raises ValueError naming a placeholder that is not in `names`."""
    for name in _names_in(text):
        if name not in names:
            known = ", ".join(f"{{{each}}}" for each in names)
            text_of_it = f"{{{{{name}}}}}"
            raise ValueError(
                f"has the unknown placeholder {{{name}}}; there are {known}, and {text_of_it} for the text"
            )
    return text


def placeholders_of(texts: Iterable[str]) -> frozenset[str]:
    """Returns the names of the placeholders in these texts."""
    return frozenset(name for text in texts for name in _names_in(text))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Returns the text with its placeholders replaced; those without a value are unchanged."""

    def value(found: re.Match[str]) -> str:
        if found[1]:
            return f"{{{found[1]}}}"
        return values.get(found[2], found[0])

    return _PLACEHOLDER.sub(value, text)


def _names_in(text: str) -> list[str]:
    return [found[2] for found in _PLACEHOLDER.finditer(text) if found[2]]
