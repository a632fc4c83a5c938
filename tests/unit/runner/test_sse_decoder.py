"""The SSE decoder, with chunks split anywhere."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.failures import fails

from runner_svc.openai_upstream.sse import ErrorPayload, SseDecoder
from weft.kernel.errors.reasons import Reason

BOM = b"\xef\xbb\xbf"
STREAM = (
    BOM
    + b': hello\n\ndata: {"a":1}\n\nevent: x\r\ndata: two\r\ndata: lines\r\n\r\n: \n\n'
    + b"event:error\rdata: no\r\rdata:[DONE]\n\n"
)
PAYLOADS = [b'{"a":1}', b"two\nlines", b"no", b"[DONE]"]


def test_payloads_are_returned_in_order_without_comments() -> None:
    assert SseDecoder().feed(STREAM) == PAYLOADS


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.integers(0, len(STREAM))))
def test_decoder_output_is_the_same_for_any_chunking(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    decoder = SseDecoder()
    heard = [payload for a, b in pairwise(edges) for payload in decoder.feed(STREAM[a:b])]
    assert heard == PAYLOADS


@pytest.mark.parametrize(
    ("lines", "payloads"),
    [
        (b'data: {"a":1}\n\ndata: [DONE]\n\n', [b'{"a":1}', b"[DONE]"]),
        (b"data: \n\ndata:  {} \n\ndata:{}\n\n", [b"", b"{}", b"{}"]),
        (b"data: {}\ndata: {}\n\n", [b"{}\n{}"]),
        (b"data: {}\n: ping\n\ndata: {}\n\n", [b"{}", b"{}"]),
        (b"data: {}\n\n\ndata: {}\n\n", [b"{}", b"{}"]),
    ],
)
def test_usual_and_unusual_events_are_read_alike_wherever_they_are_cut(lines: bytes, payloads: list[bytes]) -> None:
    for cut in range(len(lines)):
        decoder = SseDecoder()
        assert decoder.feed(lines[:cut]) + decoder.feed(lines[cut:]) == payloads


def test_incomplete_event_yields_no_payload() -> None:
    assert SseDecoder().feed(b"data: half") == []


@pytest.mark.parametrize("pieces", [[b"data: " + b"x" * 200], [b"data: x\n"] * 40, [b"x" * 60, b"x" * 60]])
def test_event_over_the_limit_is_a_protocol_error(pieces: list[bytes]) -> None:
    decoder = SseDecoder(max_event_bytes=100)
    *first, last = pieces
    for piece in first[:10]:
        decoder.feed(piece)
    with fails(Reason.BACKEND_PROTOCOL_ERROR):
        decoder.feed(b"".join(first[10:]) + last)


def test_leading_byte_order_mark_is_skipped_and_a_later_one_is_not() -> None:
    assert SseDecoder().feed(BOM + b"data: a\n\n" + BOM + b"data: b\n\ndata: c\n\n") == [b"a", b"c"]


def test_error_events_are_distinguished_from_others() -> None:
    payloads = SseDecoder().feed(
        b"event: error\ndata: x\n\ndata: y\n\nevent: message\ndata: z\n\nevent: error\n\ndata: w\n\n"
    )
    assert payloads == [b"x", b"y", b"z", b"w"]
    assert [isinstance(payload, ErrorPayload) for payload in payloads] == [True, False, False, False]


def test_oversized_line_is_a_protocol_error_even_if_it_would_be_ignored() -> None:
    decoder = SseDecoder(max_line_bytes=100)
    decoder.feed(b":" + b"x" * 90)
    with fails(Reason.BACKEND_PROTOCOL_ERROR):
        decoder.feed(b"x" * 90 + b"\n\n")


class _Counted(bytes):
    """Bytes that count copies of themselves into new objects."""

    copied = 0

    def __radd__(self, other: Any) -> Any:
        _Counted.copied += len(self)
        if isinstance(other, bytearray):  # grows in place
            other.extend(bytes(self))
            return other
        _Counted.copied += len(other)
        return bytes(other) + bytes(self)


def test_line_arriving_byte_by_byte_is_not_copied_per_byte() -> None:
    _Counted.copied = 0
    decoder, length = SseDecoder(), 20_000
    for byte in b"data: " + b"x" * length:
        assert decoder.feed(_Counted((byte,))) == []
    (payload,) = decoder.feed(b"\n\n")
    assert len(payload) == length
    assert _Counted.copied <= 2 * length
