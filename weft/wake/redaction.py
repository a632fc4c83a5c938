"""Redaction of URLs and secrets in the output of other programs."""

import re
from collections.abc import Iterable

HIDDEN = "[hidden]"
MIN_SECRET_CHARS = 3
"""Minimum length of a secret, since redacting shorter words would make any text unreadable."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>)\]]+")


def redacted(text: str, secrets: Iterable[str] = ()) -> str:
    """Returns `text` with URLs and `secrets` replaced by HIDDEN."""
    text = _URL.sub(HIDDEN, text)
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= MIN_SECRET_CHARS:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return text
