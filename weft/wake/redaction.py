"""What must not be told, taken out of words that somebody else wrote. Pure."""

import re
from collections.abc import Iterable

HIDDEN = "[hidden]"
MIN_SECRET_CHARS = 3
"""Shorter words are no secrets, and hiding them would make any sentence unreadable."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>)\]]+")


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without URLs and without the `secrets`; where they stood it says HIDDEN."""
    text = _URL.sub(HIDDEN, text)
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text
