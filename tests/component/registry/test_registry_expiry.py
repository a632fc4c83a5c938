"""How rows end: agents before models, thousands not at once, and floods refused."""

from itertools import pairwise
from pathlib import Path

import pytest
from registry_harness import (
    ACTIVE,
    INACTIVE,
    RunningRegistry,
    SomeRunner,
    an_agent,
    running_registry,
)

from weft_testing.fake_clock import FakeClock

FOUR_HOURS = 4 * 3600.0


@pytest.mark.slow("steps hours of a registry's life")
async def test_agents_are_deleted_before_the_models_they_reference_across_runners(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, name="z", models=("m1",)).open()
    await SomeRunner(mesh, name="a", models=("m2",), agents=(an_agent("a1", "m1"), an_agent("a2", "m2"))).open()
    await mesh.advance(90.0)
    watch = await mesh.watch()
    await mesh.advance(FOUR_HOURS)
    changes = await watch.read_changes(6)
    assert sorted(changes[:2]) == ["agent a1 gone", "agent a2 gone"]
    assert sorted(changes[2:4]) == ["model m1 gone", "model m2 gone"]
    assert sorted(changes[4:]) == ["runner a gone", "runner z gone"]


@pytest.mark.slow("kills or restarts a service")
async def test_silent_runners_do_not_expire_immediately_after_a_restart(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, clock=clock) as before:
        for number in range(60):
            await SomeRunner(before, name=f"r{number}", models=()).open()
    await clock.advance(FOUR_HOURS)
    async with running_registry(tmp_path, clock=clock, restart_spread_seconds=30.0) as after:
        await after.advance(85.0)
        active = [await count_active(after)]
        for _ in range(7):
            await after.advance(5.0)
            active.append(await count_active(after))
    assert (active[0], active[-1]) == (60, 0)
    steps = [earlier - later for earlier, later in pairwise(active)]
    assert max(steps) < 30
    assert sum(step > 0 for step in steps) >= 5


async def count_active(mesh: RunningRegistry) -> int:
    return sum(runner.status == ACTIVE for runner in await mesh.listed("runner", page_size=1000))


async def test_runners_show_since_when_they_are_lost_and_how_they_are_reached(mesh: RunningRegistry) -> None:
    request = SomeRunner(mesh).opening()
    request.runner.dial_out = True
    request.runner.capability.max_requests = 3
    await mesh.sessions.OpenSession(request)
    shown = await mesh.runner("r1")
    assert (shown.dial_out, shown.capability.max_requests, shown.HasField("inactive_time")) == (True, 3, False)
    await mesh.advance(90.0)
    gone_at = (await mesh.runner("r1")).inactive_time
    assert gone_at.ToDatetime() == mesh.clock.utc_now().replace(tzinfo=None)
    await mesh.advance(600.0)
    assert (await mesh.runner("r1")).inactive_time == gone_at
    assert (await mesh.runner("r1")).status == INACTIVE
