"""Validation of HTTP/1.1 message framing: pure functions over headers and chunk lines."""

from collections.abc import Sequence

from gateway.errors import EdgeError
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

DECLARED_BODY_KEY = "weft.declared_body_bytes"
"""Key in a scope's state: the minimum length of its body, as declared by the current chunk."""
MAX_CHUNK_LINE_BYTES = 256
"""Maximum length of a chunk's size line that is parsed; the rest counts as overhead of the body."""
_NAMES = frozenset({b"connection", b"content-length", b"expect", b"transfer-encoding", b"upgrade"})
_RARE = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
"""Without these, no framing is at fault."""
_CONTINUE = b"100-continue"
_UPGRADE = b"upgrade"
_OFFER = frozenset({_UPGRADE, b"http2-settings"})
"""Headers that offer another protocol, and their names in Connection."""


def framing_fault(http_version: str, headers: Sequence[tuple[bytes, bytes]]) -> WeftError | None:
    """Returns the error of framing that would hang or cannot be decoded; None: valid.

    The parser already rejects contradictory, repeated and malformed lengths, and a length with chunks.
    """
    if not [name for name, _ in headers if name in _RARE]:
        return None
    found = {name: value.strip().lower() for name, value in headers if name in _NAMES}
    coding = found.get(b"transfer-encoding")
    if coding is not None and (coding != b"chunked" or http_version == "1.0"):
        words = "the only Transfer-Encoding is chunked, in HTTP/1.1: send the body as it is"
        return WeftError(Reason.MALFORMED_REQUEST, words)
    if found.get(b"expect", _CONTINUE) != _CONTINUE:
        return EdgeError(417, Reason.MALFORMED_REQUEST, "the only supported Expect header is 100-continue")
    has_body = coding is not None or found.get(b"content-length", b"0") != b"0"
    if not has_body and found.get(b"upgrade") == b"websocket" and _UPGRADE in _tokens(found.get(b"connection", b"")):
        return no_websocket()
    return None


def no_websocket() -> EdgeError:
    """The refusal of a WebSocket. Codex asks for one first, and sends its requests over HTTP after this status."""
    words = "there are no WebSockets here: send requests over HTTP, without Upgrade, and responses by POST"
    return EdgeError(426, Reason.MALFORMED_REQUEST, words, headers=((b"upgrade", b"HTTP/1.1"),))


def without_offer(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns a request's headers without its offer of another protocol, such as `Upgrade: h2c`.

    A server may ignore an offer (RFC 9110, 7.8). Java's HttpClient and `curl --http2` send one with each request.
    """
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name == b"connection":
            rest = b", ".join(token for token in _tokens(value) if token not in _OFFER)
            if rest:
                kept.append((name, rest))
        elif name not in _OFFER:
            kept.append((name, value))
    return kept


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]


def open_chunk_bytes(received: bytes, body_bytes: int) -> int:
    """Returns the declared length of the current chunk; 0: its size line is not in `received`.

    `received` ends with the first `body_bytes` bytes of the chunk.
    """
    end = len(received) - body_bytes
    line = received[received.rfind(b"\n", 0, max(0, end - 1)) + 1 : max(0, end)]
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits, 16)
    except ValueError:
        return 0
