"""A runner's life as the mesh sees it: active, inactive, revived, gone."""

import time

import pytest
from kit.refusals import refused
from registry_harness import ACTIVE, INACTIVE, RunningRegistry, SomeRunner, ready

from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)

FOUR_HOURS = 4 * 3600.0


@pytest.fixture
def registry_url(database_url: str) -> str:
    """Every database."""
    return database_url


@pytest.mark.slow("steps hours of a registry's life")
async def test_runner_is_deleted_after_four_hours_of_inactivity(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    started = time.monotonic()
    await mesh.advance(90.0 + FOUR_HOURS - 5.0)
    assert (await mesh.runner("r1")).status == INACTIVE
    await mesh.advance(5.0)
    with refused(Reason.NOT_FOUND):
        await mesh.runner("r1")
    with refused(Reason.MODEL_NOT_FOUND):
        await mesh.model("m1")
    assert time.monotonic() - started < 10.0


async def test_closing_twice_or_with_an_old_incarnation_changes_nothing(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    earlier = SomeRunner(mesh, incarnation="life-0", session_id=runner.session_id)
    await earlier.close()
    assert (await mesh.runner("r1")).status == ACTIVE
    await runner.close()
    await runner.close()
    await SomeRunner(mesh, session_id="ses-nobody-has").close()


async def test_repeated_heartbeat_counts_as_activity(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    runner.sequence -= 1
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    assert (await mesh.runner("r1")).status == ACTIVE
