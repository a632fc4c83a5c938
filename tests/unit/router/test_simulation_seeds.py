"""Random scenarios, a thousand seeds, every rule checked. Two files, so that they run side by side."""

import pytest

from router_svc.simulation.random_scenario import FEWEST_REQUESTS, check_seed

FIRST_SEED, SEEDS, SEEDS_AT_A_TIME = 0, 1000, 100
_FIRSTS = range(FIRST_SEED, FIRST_SEED + SEEDS, SEEDS_AT_A_TIME)
_BATCHES = [_FIRSTS[0], *(pytest.param(first, marks=pytest.mark.heavy) for first in _FIRSTS[1:])]


@pytest.mark.parametrize("first", _BATCHES)
def test_no_rule_is_broken(first: int) -> None:
    arrived = sum(check_seed(seed).arrived for seed in range(first, first + SEEDS_AT_A_TIME))
    # A run without requests breaks no rule either.
    assert arrived >= FEWEST_REQUESTS * SEEDS_AT_A_TIME / 2
