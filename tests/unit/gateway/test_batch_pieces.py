"""Chunks of a file on their way to the store, and the lines of a file, for any split of its bytes."""

from collections.abc import AsyncGenerator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batches.chunks import HOLD_SECONDS, in_chunks
from gateway.batches.creation import RawLine, raw_lines


async def each(pieces: Iterable[bytes]) -> AsyncGenerator[bytes]:
    for piece in pieces:
        yield piece


@given(pieces=st.lists(st.binary(max_size=9), max_size=9), size=st.integers(1, 5))
async def test_chunks_have_one_size_and_lose_no_bytes(pieces: list[bytes], size: int) -> None:
    found = [piece async for piece in in_chunks(each(pieces), size)]
    assert b"".join(found) == b"".join(pieces)
    assert all(len(piece) == size for piece in found[:-1])
    assert all(1 <= len(piece) <= size for piece in found[-1:])


async def test_slow_bytes_are_not_held_back_for_a_full_chunk() -> None:
    time = 0.0
    told: list[tuple[float, bytes]] = []

    async def slow() -> AsyncGenerator[bytes]:
        nonlocal time
        for letter in (b"a", b"b", b"c", b"d", b"e"):
            yield letter
            time += HOLD_SECONDS / 2

    async for piece in in_chunks(slow(), 100, now=lambda: time):
        told.append((time / HOLD_SECONDS, piece))  # noqa: PERF401 - the time is that of the moment
    assert told == [(1.0, b"abc"), (2.0, b"de")]


def reference(text: bytes, most: int) -> list[RawLine]:
    lines = []
    for number, line in enumerate(text.split(b"\n"), start=1):
        if len(line) > most:
            lines.append(RawLine(number, None))
        elif line.strip():
            lines.append(RawLine(number, line.strip()))
    return lines


@given(pieces=st.lists(st.text("ab \r\n", max_size=8).map(str.encode), max_size=8), most=st.integers(1, 6))
async def test_lines_are_the_same_for_any_chunking(pieces: list[bytes], most: int) -> None:
    found = [line async for line in raw_lines(each(pieces), most)]
    assert found == reference(b"".join(pieces), most)


@pytest.mark.parametrize("cut", range(5))
async def test_leading_byte_order_mark_is_not_part_of_the_first_line(cut: int) -> None:
    text = b"\xef\xbb\xbf{}\n\xef\xbb\xbf{}"
    found = [line async for line in raw_lines(each([text[:cut], text[cut:]]), 100)]
    assert found == [RawLine(1, b"{}"), RawLine(2, b"\xef\xbb\xbf{}")]
