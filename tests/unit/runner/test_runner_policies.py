"""Load stalls, slots, sleeping, reporting, logs and their limits."""

import random
import tracemalloc
from contextlib import ExitStack

import pytest
from kit.failures import fails

from runner_svc.instance.admission import RequestLimit, SlotTable
from runner_svc.policy.backoff import MAX_PAUSE_SECONDS, retry_pause_seconds
from runner_svc.policy.keep_alive import seconds_to_sleep
from runner_svc.supervise.logs import MAX_FOLLOWERS, MAX_LINE_BYTES, MAX_RING_BYTES, MAX_RING_LINES, LogRing
from runner_svc.supervise.process import describe_exit
from weft.kernel.errors.reasons import Reason


def test_taken_slot_is_refused_until_it_is_given_back() -> None:
    slots = SlotTable(1)
    slots.take("r1")
    with fails(Reason.NO_SLOT_AVAILABLE):
        slots.take("r2")
    assert slots.holders == ("r1",)
    slots.give_back("r1")
    slots.take("r3")
    assert slots.holders == ("r3",)


def test_log_ring_keeps_the_last_lines_within_its_bound_and_truncates_long_ones() -> None:
    ring = LogRing(max_bytes=100, max_line_bytes=20)
    for number in range(50):
        ring.feed(f"line {number}\n".encode())
    ring.feed(b"x" * 1000)
    ring.feed(b"\nlast\n")
    assert ring.last(2) == ["x" * 20, "last"]
    assert sum(map(len, ring.last(1000))) <= 100
    assert ring.total_bytes > 1000


@pytest.mark.parametrize(
    ("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-37, "signal 37")]
)
def test_exit_is_described_as_text(code: int, words: str) -> None:
    assert describe_exit(code) == words


def test_instances_of_a_runner_share_its_limit() -> None:
    limit = RequestLimit(2)
    first, second = SlotTable(2, limit), SlotTable(2, limit)
    first.take("r1")
    second.take("r2")
    with fails(Reason.NO_SLOT_AVAILABLE):
        second.take("r3")
    assert second.holders == ("r2",)
    first.give_back("r1")
    second.give_back("r2")
    first.take("r4")
    first.take("r5")
    assert first.holders == ("r4", "r5")


@pytest.mark.parametrize(
    ("signs", "after_seconds", "pause"),
    [
        ({}, None, None),
        ({}, 60.0, 10.0),
        ({}, 50.0, 0.0),
        ({}, 40.0, 0.0),
        ({"busy": True}, 50.0, 50.0),
        ({"busy": True}, 0.0, None),
        ({"stays_awake": True}, 50.0, None),
    ],
)
def test_only_sufficiently_idle_models_hibernate(
    signs: dict[str, bool], after_seconds: float | None, pause: float | None
) -> None:
    known = {"busy": False, "stays_awake": False, **signs}
    assert seconds_to_sleep(after_seconds, 50.0, **known) == pause


def test_retry_backoff_is_bounded_exponential_with_jitter() -> None:
    assert [retry_pause_seconds(failures, 1.0) for failures in (1, 2, 3)] == [0.1, 0.2, 0.4]
    assert retry_pause_seconds(10**9, 1.0) == MAX_PAUSE_SECONDS
    assert retry_pause_seconds(10**9, 0.0) == MAX_PAUSE_SECONDS / 2


async def test_follower_gets_the_last_lines_and_then_new_ones() -> None:
    ring = LogRing()
    ring.feed(b"one\ntwo\nthree\n")
    with ring.follow(2) as follower:
        assert follower.take().lines == ("two", "three")
        ring.feed(b"fo")
        ring.feed(b"ur\n")
        assert await follower.wait()
        assert follower.take().lines == ("four",)
        ring.end_followers()
        assert not await follower.wait()


async def test_follower_gets_the_lines_written_just_before_the_log_ended() -> None:
    ring = LogRing()
    with ring.follow(0) as follower:
        ring.note("engine ended with code 1")
        ring.end_followers()
        assert await follower.wait()
        assert follower.take().lines == ("engine ended with code 1",)
        assert not await follower.wait()


def test_slow_follower_loses_the_oldest_lines_and_is_told_how_many() -> None:
    ring = LogRing(max_bytes=80)
    with ring.follow(0) as slow, ring.follow(0) as quick:
        for number in range(17):
            ring.note(f"line {number:02d}")
            if number == 0:
                assert quick.take().lines == ("line 00",)
        batch = slow.take()
        assert (batch.lines[0], len(batch.lines), batch.lost_line_count) == ("line 07", 10, 7)
        assert quick.take().lost_line_count == 6
        assert slow.take().lost_line_count == 0


def test_log_has_a_bounded_number_of_followers() -> None:
    ring = LogRing()
    with ExitStack() as following:
        for _ in range(MAX_FOLLOWERS):
            following.enter_context(ring.follow(0))
        with fails(Reason.TOO_MANY_RESOURCES), ring.follow(0):
            pass
    with ring.follow(0):
        pass


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
