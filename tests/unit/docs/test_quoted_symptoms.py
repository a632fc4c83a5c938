"""What docs/trouble.md quotes is what weft prints."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
_QUOTED = re.compile(r"^\| [^|`]*`(?P<text>[^`]+)`[^|]* \|", re.MULTILINE)
_VARYING = re.compile(r"\d[\d.]*|[~/][\w./-]*|[()]")
"""Numbers, addresses and folders."""


def _fixed_words(quoted: str) -> str:
    """The longest part of a message that is the same each time."""
    return max(_VARYING.split(quoted), key=len).strip()


def _is_printed(words: str) -> bool:
    files = (
        file
        for package in ("weft", "weft_app", "weft_extensions", "gateway")
        for file in (ROOT / package).rglob("*.py")
    )
    return any(words in file.read_text("utf-8") for file in files)


def test_quoted_symptoms_are_weft_messages() -> None:
    quoted = [found["text"] for found in _QUOTED.finditer((ROOT / "docs" / "trouble.md").read_text("utf-8"))]
    assert len(quoted) >= 4
    assert [text for text in quoted if not _is_printed(_fixed_words(text))] == []


def test_message_that_weft_does_not_print_is_detected() -> None:
    """The control."""
    assert _fixed_words("no such thing runs on ~/.weft, 3 times") == "no such thing runs on"
    assert not _is_printed(_fixed_words("no such thing runs on ~/.weft, 3 times"))
