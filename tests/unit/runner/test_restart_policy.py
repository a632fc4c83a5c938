"""The restart policy of backends."""

from runner_svc.policy.backoff import RestartHistory, RestartLimits


def _pauses(times: list[float], limits: RestartLimits) -> list[float]:
    history, pauses = RestartHistory(), []
    for now in times:
        history, pause = history.after_death(now, limits)
        pauses.append(pause)
    assert history.total == len(times)
    return pauses


def test_occasional_crash_is_followed_by_an_immediate_restart() -> None:
    assert _pauses([number * 31.0 for number in range(20)], RestartLimits()) == [0.0] * 20


def test_fifth_crash_in_thirty_seconds_is_a_crash_loop_with_growing_backoff() -> None:
    limits = RestartLimits(first_pause_seconds=10, max_pause_seconds=35)
    assert _pauses([float(now) for now in range(8)], limits) == [0, 0, 0, 0, 10, 20, 35, 35]


def test_quiet_period_resets_earlier_crash_loops() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 100.0, 101.0, 102.0, 103.0, 104.0]
    assert _pauses(times, RestartLimits())[-5:] == [0, 0, 0, 0, 10]


def test_backoff_grows_to_its_maximum_beyond_the_window() -> None:
    """A backend that dies at once after each pause was never healthy."""
    history, now, pauses = RestartHistory(), 0.0, []
    for _ in range(12):
        history, pause = history.after_death(now, RestartLimits())
        now += pause
        pauses.append(pause)
    assert pauses == [0, 0, 0, 0, 10, 20, 40, 80, 160, 300, 300, 300]


def test_repeatable_crash_backs_off_immediately() -> None:
    limits = RestartLimits()
    history, first = RestartHistory().after_death(0.0, limits, must_pause=True)
    _, second = history.after_death(first, limits, must_pause=True)
    assert (first, second) == (10.0, 20.0)
