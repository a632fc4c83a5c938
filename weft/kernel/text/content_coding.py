"""Incremental decoding of HTTP content codings, so that no decoded body exceeds its limit."""

import sys
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_PARTS = 10_000
"""Maximum gzip members or zstd frames of a body. Parallel compressors write one per 64 KiB or more."""
ZSTD_WINDOW_BITS = 23
"""Largest zstd window, 8 MiB: the limit for HTTP (RFC 9659)."""
_ANY_WINDOW_BITS = 32 + zlib.MAX_WBITS
"""Makes zlib detect a gzip or zlib header."""


class _Inflated:
    """The decoder of a gzip member, or of a zlib stream (`deflate`), with the interface of a zstd frame's."""

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
        # A full buffer may leave input unread, or output unwritten.
        self.needs_input = len(found) < max_length
        return found


_Part = _Inflated | zstd.ZstdDecompressor


def _zstd_frame() -> zstd.ZstdDecompressor:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_BITS})


_PARTS: Mapping[str, Callable[[], _Part]] = MappingProxyType(
    {"gzip": _Inflated, "x-gzip": _Inflated, "deflate": _Inflated, "zstd": _zstd_frame}
)
CODINGS = frozenset(_PARTS)


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

        `data` is the next input; pass b"" while `has_more`.
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
        """Raises MALFORMED_REQUEST if the body is truncated."""
        if not self._part.eof and not self._is_empty:
            raise self._invalid("is incomplete")

    def _invalid(self, what: str) -> WeftError:
        return WeftError(Reason.MALFORMED_REQUEST, f"the body's Content-Encoding is {self._coding}, but it {what}")
