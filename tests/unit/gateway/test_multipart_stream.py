"""A form that is parsed as a stream gives the same parts as one that is parsed as a whole."""

from collections.abc import AsyncGenerator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.gateway_config import RequestLimits
from gateway.intake.multipart import HEADERS_END, MAX_VALUE_BYTES, MultipartStream, Part, malformed, part_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

LIMITS = RequestLimits(max_parts=3, max_part_header_bytes=100)
NAMED = b'Content-Disposition: form-data; name="a"'
FILE = NAMED + b'; filename="b/c"\r\nContent-Type: Text/Plain; charset=x'
TOKENS = (
    b"--edge",
    b"--edge\r\n",
    b"--edge--",
    b"\r\n",
    b"\r\n\r\n",
    b"\r",
    b"-",
    b"x",
    NAMED,
    FILE,
    b"--edge\r\n" + NAMED + b"\r\n\r\n",
    b"x" * 98,
)


def parts_of(raw: bytes, boundary: bytes, limits: RequestLimits) -> list[Part]:
    """Returns the parts of a whole form: a second, plainer parser to compare with."""
    delimiter = b"\r\n--" + boundary
    if not raw.startswith(delimiter[2:]):
        raise malformed("the body does not begin with its boundary")
    parts: list[Part] = []
    place = len(delimiter) - 2
    while not raw.startswith(b"--", place):
        if len(parts) == limits.max_parts:
            raise WeftError(Reason.REQUEST_TOO_LARGE, f"the body has more than {limits.max_parts} parts")
        if not raw.startswith(b"\r\n", place):
            raise malformed("a boundary is not at the end of its line")
        # From the line's end: a part without headers has nothing before the empty line.
        head_end = raw.find(HEADERS_END, place, place + limits.max_part_header_bytes + len(HEADERS_END))
        if head_end < 0:
            is_too_long = len(raw) - place > limits.max_part_header_bytes
            raise WeftError(Reason.REQUEST_TOO_LARGE, "headers") if is_too_long else malformed("within headers")
        data_begin = head_end + len(HEADERS_END)
        # The line end before the data may be that of the delimiter, where there is no data.
        data_end = raw.find(delimiter, data_begin - 2)
        if data_end < 0:
            raise malformed("the body ends in the middle of a part")
        parts.append(part_of(raw[place + 2 : head_end], raw[data_begin : max(data_begin, data_end)]))
        place = data_end + len(delimiter)
    return parts


async def pieces_of(body: bytes, cuts: Sequence[int]) -> AsyncGenerator[bytes]:
    start = 0
    for cut in sorted({min(cut, len(body)) for cut in cuts}):
        yield body[start:cut]
        start = cut
    yield body[start:]


async def streamed(body: bytes, cuts: Sequence[int] = ()) -> list[Part]:
    return await MultipartStream(pieces_of(body, cuts), b"edge", LIMITS).parts()


async def outcome(body: bytes, cuts: Sequence[int]) -> list[Part] | Reason:
    try:
        return await streamed(body, cuts)
    except WeftError as error:
        return error.reason


def expected(body: bytes) -> list[Part] | Reason:
    try:
        return parts_of(body, b"edge", LIMITS)
    except WeftError as error:
        return error.reason


@given(
    tokens=st.lists(st.sampled_from(TOKENS), max_size=14),
    begins=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=12),
)
async def test_streamed_form_equals_the_whole_form(tokens: list[bytes], begins: bool, cuts: list[int]) -> None:
    body = (b"--edge\r\n" + NAMED + b"\r\n\r\n" if begins else b"") + b"".join(tokens)
    assert await outcome(body, cuts) == expected(body)


async def test_form_split_into_single_bytes_equals_the_whole_form() -> None:
    body = b"--edge\r\n" + FILE + b"\r\n\r\nx\r\n--edg\r\n\r\n--edge\r\n" + NAMED + b"\r\n\r\n\r\n--edge--\r\nrest"
    found = await streamed(body, range(len(body)))
    assert found == parts_of(body, b"edge", LIMITS)
    assert [(part.filename, part.data) for part in found] == [("c", b"x\r\n--edg\r\n"), (None, b"")]


async def test_unread_rest_of_a_part_is_discarded() -> None:
    body = b"--edge\r\n" + NAMED + b"\r\n\r\n" + b"x" * 100 + b"\r\n--edge\r\n" + FILE + b"\r\n\r\ny\r\n--edge--"
    stream = MultipartStream(pieces_of(body, [70]), b"edge", LIMITS)
    assert await stream.next_part() is not None
    second = await stream.next_part()
    assert second is not None
    assert (second.filename, await stream.value()) == ("c", b"y")
    assert await stream.next_part() is None


async def test_value_length_is_limited() -> None:
    for size in (MAX_VALUE_BYTES, MAX_VALUE_BYTES + 1):
        body = b"--edge\r\n" + NAMED + b"\r\n\r\n" + b"x" * size + b"\r\n--edge--"
        stream = MultipartStream(pieces_of(body, []), b"edge", LIMITS)
        await stream.next_part()
        if size == MAX_VALUE_BYTES:
            assert len(await stream.value()) == size
        else:
            with pytest.raises(WeftError, match="a field of the form is longer"):
                await stream.value()
