from itertools import pairwise
from random import Random
from typing import Any

import pytest

from runner_svc.policy.backoff import RedialLimits, RedialPolicy

ALMOST_ONE = 0.999_999
JOIN_SECONDS = 0.3
"""From a dial to a registered session, where nothing is in the way."""
HOUR = 3600.0


def useful_share(policy: RedialPolicy, slice_seconds: float, seed: int) -> float:
    """Of the time in which a link is up, by turns with as long a time down, the share with a registered session.

    In virtual time: a dial while the link is down fails at once, one while it is up registers after JOIN_SECONDS.
    """
    dice, now, useful, up = Random(seed), 0.0, 0.0, 0.0
    while now < HOUR:
        phase = now % (2 * slice_seconds)
        down_at = now - phase + slice_seconds
        if now + JOIN_SECONDS < down_at:
            useful += down_at - now - JOIN_SECONDS
            policy.ended(down_at - now - JOIN_SECONDS, down_at)
        now = max(now, down_at)
        up = HOUR / 2
        now += policy.failed(dice.random(), now)
    return useful / up


@pytest.mark.parametrize("slice_seconds", [2.0, 3.0, 5.0, 8.0, 10.0, 30.0])
def test_link_up_half_of_the_time_is_usable_for_at_least_half(slice_seconds: float) -> None:
    assert min(useful_share(RedialPolicy(0.0), slice_seconds, seed) for seed in range(10)) >= 0.5


class _NeverReset(RedialPolicy):
    def ended(self, *_arguments: Any, **_names: Any) -> None:
        pass


def test_backoff_without_reset_after_success_is_usable_for_a_sixth() -> None:
    """The control."""
    assert max(useful_share(_NeverReset(0.0), 3.0, seed) for seed in range(10)) < 1 / 6


def test_backoff_grows_with_the_time_since_the_last_success_up_to_its_limit() -> None:
    policy, now, waits = RedialPolicy(0.0), 0.0, list[float]()
    while now < HOUR:
        waits.append(policy.failed(ALMOST_ONE, now))
        now += waits[-1]
    assert [round(wait, 2) for wait in waits[:5]] == [0.5, 0.5, 0.5, 0.75, 1.12]
    assert all(later >= earlier - 0.001 for earlier, later in pairwise(waits))
    assert round(waits[-1]) == 30


@pytest.mark.parametrize("sample", [0.0, 0.1, 0.5, 0.9])
def test_backoff_is_jittered_below_its_bound(sample: float) -> None:
    assert RedialPolicy(0.0).failed(sample, now=16.0) == max(0.05, sample * 8.0)


@pytest.mark.parametrize(("stood_seconds", "wait"), [(0.4, 16.0), (0.5, 0.5), (86_400.0, 0.5)])
def test_failure_after_a_stable_session_counts_as_the_first(stood_seconds: float, wait: float) -> None:
    policy = RedialPolicy(0.0)
    policy.ended(stood_seconds, now=32.0)
    assert policy.failed(ALMOST_ONE, now=32.0) == pytest.approx(wait, abs=0.001)


@pytest.mark.parametrize(("stood_seconds", "wait"), [(9.9, 16.0), (10.0, 0.5)])
def test_replaced_session_must_have_lasted_longer_to_reset_the_backoff(stood_seconds: float, wait: float) -> None:
    """Two runners with the same session file do not take each other's place ever faster."""
    policy = RedialPolicy(0.0)
    policy.ended(stood_seconds, now=32.0, replaced=True)
    assert policy.failed(ALMOST_ONE, now=32.0) == pytest.approx(wait, abs=0.001)


def test_year_of_failures_stays_below_the_limit_without_a_tight_loop() -> None:
    policy, now = RedialPolicy(0.0, RedialLimits(max_seconds=10.0)), 0.0
    for _ in range(5000):
        wait = policy.failed(ALMOST_ONE, now)
        assert 0.05 <= wait <= 10.0
        now += wait + HOUR
