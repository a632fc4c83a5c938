"""The content codings of HTTP, decoded step by step so that no body exceeds its limit."""

import sys
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_PARTS = 10_000
"""Members of a gzip body, or frames of a zstd body. Writers of parallel compressors make one per 64 KiB and more."""
ZSTD_WINDOW_BITS = 23
"""A zstd body needs at most this window, 8 MiB, which every decoder of HTTP must have (RFC 9659)."""
_ANY_WINDOW_BITS = 32 + zlib.MAX_WBITS
"""zlib's number for either header."""


class _Part(Protocol):
    """The decoder of one gzip member or zstd frame."""

    @property
    def eof(self) -> bool:
        """Whether its end was read."""

    @property
    def needs_input(self) -> bool:
        """Whether it has decoded all that it got."""

    @property
    def unused_data(self) -> bytes:
        """What it got after its end."""

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Returns at most `max_length` decoded bytes."""


class _Inflated:
    """The decoder of a gzip member, or of a zlib stream (`deflate`)."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_ANY_WINDOW_BITS)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        # A full answer may leave input unread, or output unwritten.
        self.needs_input = len(found) < max_length
        return found


def _zstd_frame() -> _Part:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_BITS})


_PARTS: Mapping[str, Callable[[], _Part]] = MappingProxyType(
    {"gzip": _Inflated, "x-gzip": _Inflated, "deflate": _Inflated, "zstd": _zstd_frame}
)
CODINGS = frozenset(_PARTS)
"""The names of the codings that can be decoded."""


class BodyDecoder:
    """Decodes one compressed body."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._part = _PARTS[coding]()
        self._parts = 1
        self._is_empty = True

    @property
    def has_more(self) -> bool:
        """Whether `decode` can return more without further data."""
        return bool(self._part.unused_data) if self._part.eof else not self._part.needs_input

    def decode(self, data: bytes, max_bytes: int) -> bytes:
        """Returns the next decoded bytes, at most `max_bytes`. Raises MALFORMED_REQUEST.

        `data` is what arrived since, empty while `has_more`.
        """
        if self._part.eof:
            data = self._part.unused_data + data
            if data:
                self._parts += 1
                self._part = _PARTS[self._coding]()
        if not data and not self.has_more:
            return b""
        self._is_empty = False
        if self._parts > MAX_PARTS:
            raise self._invalid(f"has more than {MAX_PARTS} parts")
        try:
            return self._part.decompress(data, max_bytes)
        except (zlib.error, zstd.ZstdError):
            raise self._invalid("cannot be decoded") from None

    def require_end(self) -> None:
        """Raises MALFORMED_REQUEST for a body that was cut off."""
        if not self._part.eof and not self._is_empty:
            raise self._invalid("is incomplete")

    def _invalid(self, what: str) -> WeftError:
        return WeftError(Reason.MALFORMED_REQUEST, f"the body's Content-Encoding is {self._coding}, but it {what}")
