"""Engines and runners that are killed at random on a host with two devices: the ledger stays true, no process is left.

WEFT_TEST_KILLS=500 runs the long version.
"""

import asyncio
import os
import random
from pathlib import Path

import pytest
from leased_world import CARD_BYTES, GIB, MODELS, POLL_SECONDS, WAIT_SECONDS, LeasedWorld, leased_world

from weft.kernel.services.service_lifecycle import stop_tasks
from weft_testing.shared_library import compiler

KILLS = int(os.environ.get("WEFT_TEST_KILLS", "12"))
SEED = 7
PAUSES = (0.0, 0.2, 1.0, 2.5)
"""Seconds: an engine loads for about one."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler for the fake library")


async def _cycle(world: LeasedWorld, dice: random.Random, asking: list["asyncio.Task[None]"]) -> None:
    """Some callers want models, then something is killed."""
    for _ in range(dice.randrange(1, 4)):
        runner = dice.choice(sorted(MODELS))
        asking.append(asyncio.create_task(world.wake(runner, dice.choice(sorted(MODELS[runner])))))
    await asyncio.sleep(dice.choice(PAUSES))
    if dice.random() < 0.75:
        await world.kill_engine(dice)
    else:
        name = dice.choice(sorted(MODELS))
        await world.kill_runner(name)
        await asyncio.sleep(dice.choice(PAUSES))
        await world.start_runner(name)
    world.check()


async def _have(world: LeasedWorld, runner: str, model: str) -> None:
    """Ask for a model until it is there: its runner may just be starting again."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not world.ready(runner, model):
            await world.wake(runner, model)
            await asyncio.sleep(POLL_SECONDS)


async def _begin(world: LeasedWorld) -> None:
    for name in MODELS:
        await world.start_runner(name)
    await world.until(lambda: all(world.core.mesh.of_runner(name) for name in MODELS), "the runners do not join")
    await world.until(lambda: world.host() is not None, "no runner says what it sees of its host")


@pytest.mark.nightly("a storm of processes")
@pytest.mark.timeout(1200)
async def test_random_kills_never_double_book_memory_or_leave_leases_or_engines(tmp_path: Path) -> None:
    dice, asking = random.Random(SEED), list["asyncio.Task[None]"]()
    async with leased_world(tmp_path) as world:
        await _begin(world)
        watching = asyncio.create_task(world.watch_for_ever())
        for _ in range(KILLS):
            await _cycle(world, dice, asking)
        await stop_tasks(asking)
        # In calm weather everything can be had again, the model that needs both cards as well.
        for runner, model in (("r1", "small"), ("r2", "large"), ("r1", "wide")):
            await _have(world, runner, model)
        assert world.most_held > CARD_BYTES // 2, "hardly any memory was taken"
        for name in MODELS:
            await world.stop_runner(name)
        await stop_tasks([watching])
        await world.until(lambda: not world.engines(), "engines are left")
        assert sum(world.cards.held_bytes()) == 0
        assert world.broken == []
        assert world.memory_deaths() == []
        host = world.host()
        await world.until(lambda: not _leases(world), f"leases are left: {host}")


@pytest.mark.nightly("the control of the storm")
@pytest.mark.timeout(300)
async def test_check_detects_engines_that_use_unbooked_memory(tmp_path: Path) -> None:
    async with leased_world(tmp_path, greed=2.5, cards=1) as world:
        await _begin(world)
        for runner, model in (("r1", "small"), ("r2", "little"), ("r2", "medium")):
            await world.wake(runner, model)
        assert world.memory_deaths() != []


@pytest.mark.slow("starts runners and engines under leases")
@pytest.mark.timeout(300)
async def test_idle_model_yields_to_a_requested_one_under_separate_leases(
    tmp_path: Path,
) -> None:
    async with leased_world(tmp_path, cards=1) as world:
        await _begin(world)
        await world.wake("r1", "middle")
        await world.until(lambda: world.ready("r1", "middle"), "the first one does not load")
        first = _leases(world)
        await world.wake("r2", "large")
        await world.until(lambda: world.ready("r2", "large"), "the second one is not made room for")
        await world.until(lambda: not world.ready("r1", "middle"), "the first one did not give way")
        second = _leases(world)
        assert [sorted(leases) for leases in (first, second)] == [["middle"], ["large"]]
        assert second["large"] > first["middle"], "fencing numbers grow"
        assert world.cards.held_bytes()[0] < 7 * GIB
        assert world.memory_deaths() == []


@pytest.mark.slow("starts runners and engines under leases")
@pytest.mark.timeout(300)
async def test_long_registry_outage_keeps_every_lease_and_ends_no_engine(
    tmp_path: Path,
) -> None:
    async with leased_world(tmp_path, cards=1) as world:
        # Longer than a registry takes to start again on a busy machine.
        world.changes["r2"] = {"memory_wait_seconds": WAIT_SECONDS}
        await _begin(world)
        await _have(world, "r1", "middle")
        leases, engines = _leases(world), [engine.pid for engine in world.engines()]
        await world.registry.stop()
        waiting = asyncio.create_task(world.wake("r2", "little"))
        await asyncio.sleep(4.0)
        assert [engine.pid for engine in world.engines()] == engines, "a registry that is away takes nothing away"
        await world.registry.start()
        await world.until(lambda: world.ready("r1", "middle"), "the model was lost")
        await world.until(lambda: world.ready("r2", "little"), "who waited for the registry got nothing")
        await waiting
        assert _leases(world)["middle"] == leases["middle"]
        assert engines[0] in [engine.pid for engine in world.engines()]
        assert world.broken == []


def _leases(world: LeasedWorld) -> dict[str, int]:
    """Fencing numbers by purpose."""
    host = world.host()
    return {each.purpose: each.fencing_number for each in host.leases} if host else {}
