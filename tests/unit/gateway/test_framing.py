"""The framing of a request: unsupported framing is refused from its head, or from the line before a chunk."""

import pytest

from gateway.http.framing import framing_fault, open_chunk_bytes, without_offer


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", {}),
        ("1.1", {b"transfer-encoding": b"chunked"}),
        ("1.1", {b"transfer-encoding": b" Chunked"}),
        ("1.0", {b"content-length": b"9"}),
        ("1.1", {b"expect": b"100-Continue", b"content-length": b"9"}),
        ("1.1", {b"connection": b"Upgrade, HTTP2-Settings", b"upgrade": b"h2c"}),
        ("1.1", {b"connection": b"upgrade", b"upgrade": b"h2c", b"content-length": b"0"}),
        ("1.1", {b"connection": b"upgrade", b"upgrade": b"h2c", b"content-length": b"2"}),
        ("1.1", {b"connection": b"upgrade", b"upgrade": b"TLS/1.0, h2c", b"transfer-encoding": b"chunked"}),
        ("1.1", {b"connection": b"upgrade", b"upgrade": b"websocket", b"content-length": b"2"}),
        ("1.1", {b"upgrade": b"websocket"}),
    ],
)
def test_valid_framing_has_no_fault(version: str, headers: dict[bytes, bytes]) -> None:
    assert framing_fault(version, list(headers.items())) is None


@pytest.mark.parametrize(
    ("version", "headers", "words"),
    [
        ("1.1", {b"transfer-encoding": b"gzip, chunked"}, "Transfer-Encoding"),
        ("1.1", {b"transfer-encoding": b""}, "Transfer-Encoding"),
        ("1.0", {b"transfer-encoding": b"chunked"}, "Transfer-Encoding"),
        ("1.1", {b"expect": b"102-processing"}, "Expect header"),
        ("1.1", {b"connection": b"keep-alive, Upgrade", b"upgrade": b"websocket"}, "Upgrade"),
    ],
)
def test_impossible_framing_has_a_fault(version: str, headers: dict[bytes, bytes], words: str) -> None:
    fault = framing_fault(version, list(headers.items()))
    assert fault is not None
    assert words in fault.message


@pytest.mark.parametrize(
    ("received", "body_bytes", "length"),
    [
        (b"ff\r\n", 0, 255),
        (b"ff\r\nabc", 3, 255),
        (b"1\r\n{\r\nA0;name=value\r\n12", 2, 160),
        (b"a\r\n\n\n\n", 3, 10),
        (b"\r\n0f\r\nx", 1, 15),
        (b"cut;of\r\nx", 1, 0),
        (b"abc", 3, 0),
        (b"abc", 9, 0),
        (b"", 0, 0),
    ],
)
def test_length_of_the_current_chunk_is_read_from_the_line_before_it(
    received: bytes, body_bytes: int, length: int
) -> None:
    assert open_chunk_bytes(received, body_bytes) == length


def test_upgrade_offer_is_removed_and_the_rest_is_kept() -> None:
    headers = [
        (b"host", b"a"),
        (b"connection", b"Upgrade, HTTP2-Settings, close"),
        (b"upgrade", b"h2c"),
        (b"http2-settings", b"AAEA"),
        (b"connection", b"upgrade"),
        (b"content-length", b"2"),
    ]
    assert without_offer(headers) == [(b"host", b"a"), (b"connection", b"close"), (b"content-length", b"2")]
