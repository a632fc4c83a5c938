"""The memory of a process's output is bounded."""

import random
import tracemalloc

import pytest

from runner_svc.supervise.logs import MAX_LINE_BYTES, MAX_RING_BYTES, MAX_RING_LINES, LogRing


def test_flood_of_empty_lines_is_bounded_too() -> None:
    ring = LogRing()
    for _ in range(10):
        ring.feed(b"\n" * 10_000)
    assert len(ring.last(100_000)) <= MAX_RING_LINES < 100_000
    assert ring.total_bytes == 100_000


@pytest.mark.parametrize("character", ["x", "ü", "\N{OWL}"])
def test_limit_is_in_bytes_for_any_alphabet(character: str) -> None:
    ring = LogRing(max_bytes=1000)
    for _ in range(100):
        ring.feed(f"{character * 20}\n".encode())
    assert 900 < sum(len(line.encode()) + 1 for line in ring.last(1000)) <= 1000


def test_unterminated_line_is_truncated_and_the_next_one_is_complete() -> None:
    ring = LogRing()
    for _ in range(100):
        ring.feed(b"x" * 10_000)
    assert ring.last(1) == []
    ring.feed(b"\nnext\n")
    assert ring.last(2) == ["x" * MAX_LINE_BYTES, "next"]


def test_binary_noise_is_kept_as_text_within_the_bound() -> None:
    noise = random.Random(1).randbytes(4 * MAX_RING_BYTES)
    ring = LogRing()
    tracemalloc.start()
    for start in range(0, len(noise), 65536):
        ring.feed(noise[start : start + 65536])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(len(line.encode()) for line in ring.last(1_000_000)) <= MAX_RING_BYTES
    assert held < 8 * MAX_RING_BYTES


def test_unterminated_last_line_of_a_stream_is_not_joined_to_the_next_start() -> None:
    ring = LogRing()
    ring.feed(b"out of mem")
    assert [ring.end_line(), ring.end_line()] == [["out of mem"], []]
    ring.feed(b"hello\n")
    assert ring.last(3) == ["out of mem", "hello"]
