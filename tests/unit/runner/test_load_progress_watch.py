"""Stall detection of loads whose work is late or in bursts."""

from collections.abc import Callable

from runner_svc.policy.progress import LoadSample, LoadStallDetector

LIMIT = 300.0


def _stalled_at(cpu_seconds: Callable[[float], float], until: int) -> float | None:
    watch = LoadStallDetector(LoadSample(0.0, 0, 0.0))
    for half_second in range(2 * until):
        now = half_second / 2
        watch.observe(LoadSample(now, 0, cpu_seconds(now)))
        if watch.stalled(now, LIMIT):
            return now
    return None


def test_work_starting_shortly_before_the_limit_prevents_a_stall() -> None:
    """A wait for a slow disk, followed by the conversion of weights."""
    assert _stalled_at(lambda now: max(0.0, now - 290.0), 900) is None


def test_short_burst_of_work_is_not_progress() -> None:
    assert _stalled_at(lambda now: 0.5 if now > 200 else 0.0, 900) == LIMIT


def test_work_once_a_minute_is_progress() -> None:
    assert _stalled_at(lambda now: 4.0 * (now // 60), 3600) is None


def test_load_stalls_one_limit_after_work_ended() -> None:
    assert _stalled_at(lambda now: min(now, 100.0), 900) == 100.0 + LIMIT
