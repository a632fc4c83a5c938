"""Whatever order loads, unloads, wakes, requests, deaths, drains and stops come in, what a life promises holds.

WEFT_TEST_LIVES=5000 runs the long version.
"""

import os
from typing import Any

import pytest
from life_stress import RandomBackend, broken_seeds

from runner_svc.waiting import SharedOutcome

LIVES = int(os.environ.get("WEFT_TEST_LIVES", "60"))


@pytest.mark.timeout(600)
async def test_a_life_keeps_its_promises_whatever_happens_to_it_in_whatever_order() -> None:
    assert await broken_seeds(range(LIVES)) == {}


async def test_the_check_finds_answers_that_are_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: SharedOutcome, error: Any = None) -> None:
        del self, error

    monkeypatch.setattr(SharedOutcome, "settle", settle)
    found = await broken_seeds(range(10))
    assert any("nobody answered" in line for lines in found.values() for line in lines)


async def test_the_check_finds_a_backend_that_is_used_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(self: RandomBackend) -> None:
        self.ready = False

    monkeypatch.setattr(RandomBackend, "stop", stop)
    found = await broken_seeds(range(10))
    assert any("two processes at once" in words for words in found.values())
