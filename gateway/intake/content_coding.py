"""The content codings of request bodies: gzip and zstd."""

from collections.abc import Iterable

from gateway.errors import EdgeError
from weft.kernel.content_coding import BodyDecoder
from weft.kernel.reasons import Reason

_CODINGS = frozenset({"gzip", "x-gzip", "zstd"})
_ACCEPTED = b"gzip, zstd"


def decoder_of(headers: Iterable[tuple[bytes, bytes]]) -> BodyDecoder | None:
    """Returns the decoder of a body; None: it is not compressed. Raises an EdgeError 415 for any other coding."""
    named = b",".join(value for name, value in headers if name == b"content-encoding")
    codings = [coding for coding in named.decode("latin-1").lower().replace(" ", "").split(",") if coding]
    codings = [coding for coding in codings if coding != "identity"]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _CODINGS:
        raise EdgeError(
            415,
            Reason.MALFORMED_REQUEST,
            "the Content-Encoding must be gzip or zstd, once: compress the body with one of them, or send it as it is",
            headers=((b"accept-encoding", _ACCEPTED),),
        )
    return BodyDecoder(codings[0])


def decoded(coded: bytes, decoder: BodyDecoder, max_bytes: int) -> bytes:
    """Returns up to `max_bytes` + 1 bytes of a complete body: more than `max_bytes` is too large."""
    parts = [decoder.decode(coded, max_bytes + 1)]
    size = len(parts[0])
    while decoder.has_more and size <= max_bytes:
        parts.append(decoder.decode(b"", max_bytes + 1 - size))
        size += len(parts[-1])
    if not decoder.has_more:
        decoder.require_end()
    return b"".join(parts)
