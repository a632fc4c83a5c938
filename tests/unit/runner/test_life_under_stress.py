"""The invariants of a lifecycle hold for loads, unloads, wakes, requests, deaths, drains and stops in any order.

WEFT_TEST_LIVES=5000 lengthens the nightly version.
"""

import asyncio
import os
from typing import Any

import pytest
from life_stress import RandomBackend, broken_seeds

from runner_svc.memory.model_memory import ModelMemory
from runner_svc.waiting import SharedOutcome

LIVES = int(os.environ.get("WEFT_TEST_LIVES", "60"))
CONTROL_LIVES = range(3)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lives", [4, pytest.param(LIVES, marks=pytest.mark.nightly("lives 60 lives"))])
async def test_random_lifecycles_violate_no_invariant(lives: int) -> None:
    assert await broken_seeds(range(lives)) == {}


async def test_check_detects_undelivered_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(self: SharedOutcome, error: Any = None) -> None:
        del self, error

    monkeypatch.setattr(SharedOutcome, "settle", settle)
    found = await broken_seeds(CONTROL_LIVES)
    assert any("nobody answered" in line for lines in found.values() for line in lines)


async def test_check_detects_a_backend_used_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop(self: RandomBackend) -> None:
        self.ready = False

    monkeypatch.setattr(RandomBackend, "stop", stop)
    found = await broken_seeds(CONTROL_LIVES)
    assert any("two processes at once" in words for words in found.values())


async def test_check_detects_an_unreleased_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_up(self: ModelMemory) -> None:
        self.grant = None

    monkeypatch.setattr(ModelMemory, "give_up", give_up)
    found = await broken_seeds(CONTROL_LIVES)
    assert any("it sleeps with a lease" in words or "left: a lease" in words for words in found.values())


async def test_check_detects_a_lease_released_under_a_running_process(monkeypatch: pytest.MonkeyPatch) -> None:
    take = ModelMemory.take

    async def take_and_give_up(self: ModelMemory, plan: Any, on_waiting: Any) -> Any:
        order = await take(self, plan, on_waiting)
        asyncio.get_running_loop().call_later(0.0, self.give_up)
        return order

    monkeypatch.setattr(ModelMemory, "take", take_and_give_up)
    found = await broken_seeds(CONTROL_LIVES)
    assert any("a lease was given up under a process" in words for words in found.values())
