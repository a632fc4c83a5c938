"""What the headers of an HTTP response say about a file: its version, and the part that follows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import httpx2

_WHOLE = 200


class FileVersion(msgspec.Struct, frozen=True):
    """The version of a file, as the first response for its content announced it."""

    etag: str = ""
    modified: str = ""
    total: int | None = None
    """Size of the whole file; None: not announced."""

    @property
    def validator(self) -> str:
        """The value for If-Range; empty: parts of two responses may be of two files."""
        return self.modified if not self.etag or self.etag.startswith("W/") else self.etag

    def continues(self, earlier: "FileVersion") -> bool:
        """Whether a response with this version belongs to the same file as `earlier`. A part may omit its date."""
        if earlier.etag != self.etag or (self.total is not None and earlier.total not in (None, self.total)):
            return False
        return earlier.validator != earlier.modified or self.modified in ("", earlier.modified)


def is_part(response: "httpx2.Response") -> bool:
    """Whether a response is not the whole file."""
    return response.status_code != _WHOLE or "content-range" in response.headers


def number_of(text: str | None) -> int | None:
    """Returns a whole number of at most 18 digits; None for any other text."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 19 else None


@dataclass(frozen=True, slots=True)
class Span:
    """A Content-Range. None: not stated, or not a number."""

    begin: int | None
    end: int | None
    """The last byte."""
    total: int | None


def content_range(text: str) -> Span:
    """Returns the parts of a text such as "bytes 5-9/10" or "bytes */10"."""
    unit, _, rest = text.partition(" ")
    span, _, total = rest.partition("/")
    begin, _, end = span.partition("-")
    is_bytes = unit == "bytes"
    return Span(number_of(begin) if is_bytes else None, number_of(end) if is_bytes else None, number_of(total))
