"""Single faults of real processes under leases: a load that hangs, a runner that freezes."""

import asyncio
import signal
from pathlib import Path

import pytest
from leased_world import LeasedWorld, leased_world

from registry_svc.ledger.policy.leases import LeaseState
from weft_testing.fake_backend.process import fake_backend_command
from weft_testing.shared_library import compiler

pytestmark = [
    pytest.mark.slow("starts runners and engines under leases"),
    pytest.mark.skipif(compiler() is None, reason="there is no C compiler for the fake library"),
    pytest.mark.timeout(300),
]


def leases(world: LeasedWorld) -> dict[str, tuple[int, LeaseState]]:
    host = world.host()
    found = [] if host is None else host.leases
    return {lease.purpose: (lease.fencing_number, LeaseState(lease.state)) for lease in found}


async def started(world: LeasedWorld, *runners: str) -> None:
    for name in runners:
        await world.start_runner(name)
    await world.until(lambda: all(world.core.mesh.of_runner(name) for name in runners), "the runners do not join")
    await world.until(lambda: world.host() is not None, "no runner says what it sees of its host")


async def test_hung_load_releases_its_memory_to_the_waiting_one(tmp_path: Path) -> None:
    async with leased_world(tmp_path, cards=1) as world:
        hangs = fake_backend_command(never_healthy=True)
        world.changes["r1"] = {"command": hangs, "load_stall_seconds": 3.0}
        await started(world, "r1", "r2")
        hanging = asyncio.create_task(world.wake("r1", "middle"))
        await world.until(lambda: "middle" in leases(world), "the load has no lease")
        await world.wake("r2", "large")
        await world.until(lambda: world.ready("r2", "large"), "the memory of the load that hung is not given back")
        await hanging
        assert list(leases(world)) == ["large"]
        assert len(world.engines()) == 1
        assert (world.broken, world.memory_deaths()) == ([], [])


async def test_frozen_runner_loses_its_lease_and_starts_nothing_under_it_after_resuming(tmp_path: Path) -> None:
    async with leased_world(tmp_path, cards=1) as world:
        await started(world, "r1", "r2")
        await world.wake("r1", "middle")
        await world.until(lambda: world.ready("r1", "middle"), "the first one does not load")
        number, _ = leases(world)["middle"]
        frozen = world.runners["r1"]
        frozen.send_signal(signal.SIGSTOP)
        # Its engine lives and holds its memory: nobody else gets any of it.
        await world.until(lambda: leases(world)["middle"][1] is LeaseState.ORPHANED, "its lease is kept for ever")
        assert leases(world)["middle"][0] == number
        (engine,) = world.engines()
        engine.kill()
        await world.wake("r2", "large")
        await world.until(lambda: world.ready("r2", "large"), "the memory of the frozen runner is not given back")
        frozen.send_signal(signal.SIGCONT)
        # An engine under the old lease would find no room, and die of it.
        await world.wake("r1", "middle")
        await world.until(lambda: "middle" in leases(world), "it cannot load again under a lease of its own")
        assert leases(world)["middle"][0] > number
        await world.until(lambda: world.ready("r1", "middle"), "it does not load under its new lease")
        assert (world.broken, world.memory_deaths()) == ([], [])
