"""The invariants of a lifecycle hold for loads, unloads, wakes, requests, deaths, drains and stops in any order.

WEFT_TEST_LIVES=5000 lengthens the nightly version.
"""

import os

import pytest
from life_stress import broken_seeds

LIVES = int(os.environ.get("WEFT_TEST_LIVES", "60"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lives", [4, pytest.param(LIVES, marks=pytest.mark.nightly("lives 60 lives"))])
async def test_random_lifecycles_violate_no_invariant(lives: int) -> None:
    assert await broken_seeds(range(lives)) == {}
