"""Random scenarios, a thousand seeds, every rule checked. Two files, so that they run side by side.

`make test` takes the first hundred seeds of the other one.
"""

import pytest
from kit.random_scenario import FEWEST_REQUESTS, check_seed

FIRST_SEED, SEEDS, SEEDS_AT_A_TIME = 1000, 1000, 100
_FIRSTS = range(FIRST_SEED, FIRST_SEED + SEEDS, SEEDS_AT_A_TIME)


@pytest.mark.nightly("statistics of the simulator")
@pytest.mark.parametrize("first", _FIRSTS)
def test_more_random_scenarios_violate_no_invariant(first: int) -> None:
    arrived = sum(check_seed(seed).arrived for seed in range(first, first + SEEDS_AT_A_TIME))
    # A run without requests breaks no rule either.
    assert arrived >= FEWEST_REQUESTS * SEEDS_AT_A_TIME / 2
