"""Restarting, load stalls and slots."""

import pytest

from runner_svc.policy.load_stall import LoadSigns, LoadWatch
from runner_svc.policy.restart import RestartLimits, RestartPolicy
from runner_svc.slots import SlotTable
from runner_svc.supervise.logs import LogRing
from runner_svc.supervise.process import describe_exit
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


def test_a_death_now_and_then_is_followed_by_a_restart_at_once() -> None:
    policy = RestartPolicy()
    assert all(policy.died(now * 31.0).pause_seconds == 0 for now in range(20))


def test_the_fifth_death_in_thirty_seconds_is_a_crash_loop_with_growing_pauses() -> None:
    policy = RestartPolicy(RestartLimits(first_pause_seconds=10, max_pause_seconds=35))
    decisions = [policy.died(float(now)) for now in range(8)]
    assert [decision.crash_loop for decision in decisions] == [False] * 4 + [True] * 4
    assert [decision.pause_seconds for decision in decisions[4:]] == [10, 20, 35, 35]


def test_a_quiet_time_forgives_earlier_crash_loops() -> None:
    policy = RestartPolicy()
    for now in (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 100.0, 101.0, 102.0, 103.0):
        policy.died(now)
    assert policy.died(104.0).pause_seconds == policy.limits.first_pause_seconds


def test_loading_that_prints_or_computes_is_not_stalled() -> None:
    watch = LoadWatch(LoadSigns(0.0, 0, 0.0))
    for second in range(1, 100):
        watch = watch.observe(LoadSigns(float(second), 0, second * 0.9))
    watch = watch.observe(LoadSigns(120.0, 10, 89.1))
    assert not watch.stalled(140.0, 30.0)


def test_loading_that_only_answers_health_probes_is_stalled_after_the_limit() -> None:
    watch = LoadWatch(LoadSigns(0.0, 0, 0.0))
    for second in range(1, 30):
        watch = watch.observe(LoadSigns(float(second), 0, second * 0.001))
        assert not watch.stalled(float(second), 30.0)
    assert watch.stalled(30.0, 30.0)


def test_a_slot_is_free_again_however_its_block_ends() -> None:
    slots = SlotTable(1)
    with pytest.raises(ZeroDivisionError), slots.hold("r1"):
        raise ZeroDivisionError
    with slots.hold("r2"):
        assert slots.holders == ("r2",)
        with pytest.raises(WeftError) as refused, slots.hold("r3"):
            pass
    assert refused.value.reason is Reason.NO_SLOT_AVAILABLE
    assert not slots.holders


def test_the_log_ring_keeps_the_last_lines_within_its_bound_and_cuts_long_ones() -> None:
    ring = LogRing(max_bytes=100, max_line_bytes=20)
    for number in range(50):
        ring.feed(f"line {number}\n".encode())
    ring.feed(b"x" * 1000)
    ring.feed(b"\nlast\n")
    assert ring.last(2) == ["x" * 20, "last"]
    assert sum(map(len, ring.last(1000))) <= 100
    assert ring.total_bytes > 1000


@pytest.mark.parametrize(("code", "words"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL")])
def test_an_exit_is_described_in_words(code: int, words: str) -> None:
    assert describe_exit(code) == words
