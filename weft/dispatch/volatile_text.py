"""Text that clients put into the system prompt and that differs with every request, so that no prefix is cached. Pure.

It is for the client's own provider and means nothing to a model. That provider gets it; other engines do not.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VolatileText:
    """A kind of such text."""

    name: str
    """What it is, for warnings."""
    mark: str
    """A text that is in all of it: most prompts are not searched further."""
    pattern: re.Pattern[str]


VOLATILE_TEXTS: Sequence[VolatileText] = (
    VolatileText(
        # Claude Code's first system block: `x-anthropic-billing-header: cc_version=2.1.37; cch=a1b2c;`.
        "Anthropic's billing header",
        "x-anthropic-billing-header:",
        re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE),
    ),
)


def steady_text(text: str) -> tuple[str, str]:
    """Returns the text of a system prompt without what changes, and what was left out; empty: nothing was."""
    for kind in VOLATILE_TEXTS:
        if kind.mark in text:
            steady, count = kind.pattern.subn("", text)
            if count:
                return steady, kind.name
    return text, ""
