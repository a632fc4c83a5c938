"""Random scenarios with every rule checked: three seeds, and two thousand by night."""

import pytest
from kit.random_scenario import FEWEST_REQUESTS, check_seed

SEEDS, SEEDS_AT_A_TIME = 2000, 100
_STATISTICS = pytest.mark.nightly("statistics of the simulator")
_BATCHES = [
    range(5, 8),
    *(
        pytest.param(range(first, first + SEEDS_AT_A_TIME), marks=_STATISTICS)
        for first in range(0, SEEDS, SEEDS_AT_A_TIME)
    ),
]


@pytest.mark.parametrize("seeds", _BATCHES, ids=str)
def test_random_scenarios_violate_no_invariant(seeds: range) -> None:
    arrived = sum(check_seed(seed).arrived for seed in seeds)
    # A run without requests breaks no rule either.
    assert arrived >= FEWEST_REQUESTS * len(seeds) / 2
