"""Events out of bytes, however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner_svc.backends.sse import SseDecoder
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

STREAM = b': hello\n\ndata: {"a":1}\n\nevent: x\r\ndata: two\r\ndata: lines\r\n\r\n: \n\ndata:[DONE]\n\n'
PAYLOADS = [b'{"a":1}', b"two\nlines", b"[DONE]"]


def test_payloads_come_out_in_order_and_comments_do_not() -> None:
    assert SseDecoder().feed(STREAM) == PAYLOADS


@settings(deadline=None)  # a busy machine is not a failure
@given(st.lists(st.integers(0, len(STREAM))))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    decoder = SseDecoder()
    heard = [payload for a, b in pairwise(edges) for payload in decoder.feed(STREAM[a:b])]
    assert heard == PAYLOADS


def test_an_unfinished_event_says_nothing() -> None:
    assert SseDecoder().feed(b"data: half") == []


@pytest.mark.parametrize("pieces", [[b"data: " + b"x" * 200], [b"data: x\n"] * 40, [b"x" * 60, b"x" * 60]])
def test_an_event_over_the_limit_is_a_protocol_error(pieces: list[bytes]) -> None:
    decoder = SseDecoder(max_event_bytes=100)
    *first, last = pieces
    for piece in first[:10]:
        decoder.feed(piece)
    with pytest.raises(WeftError) as refused:
        decoder.feed(b"".join(first[10:]) + last)
    assert refused.value.reason is Reason.BACKEND_PROTOCOL_ERROR
