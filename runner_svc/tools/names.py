"""The names by which a model calls tools: OpenAI's function names are narrower than ours."""

import re
from collections.abc import Collection, Iterable

MAX_WIRE_NAME_LENGTH = 64
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_-]")


def wire_names(names: Iterable[str], taken: Collection[str] = ()) -> dict[str, str]:
    """A function name for each name, by name: `files.read` becomes `files_read`, or `files_read_2` where that is taken.

    The same names in the same order always get the same function names, so that a prompt cache stays of use.
    """
    given: dict[str, str] = {}
    used = set(taken)
    for name in names:
        if name not in given:
            given[name] = _unused(_NOT_ALLOWED.sub("_", name) or "tool", used)
            used.add(given[name])
    return given


def _unused(plain: str, used: Collection[str]) -> str:
    wire, number = plain[:MAX_WIRE_NAME_LENGTH], 1
    while wire in used:
        number += 1
        suffix = f"_{number}"
        wire = plain[: MAX_WIRE_NAME_LENGTH - len(suffix)] + suffix
    return wire
