"""A runner's life as the mesh sees it: active, inactive, revived, gone."""

import time

import pytest
from registry_harness import (
    ACTIVE,
    INACTIVE,
    MODEL_ACTIVE,
    MODEL_INACTIVE,
    RunningRegistry,
    SomeRunner,
    ready,
    refused,
)

from weft.kernel.reasons import Reason

pytest_plugins = ("database_fixtures",)

FOUR_HOURS = 4 * 3600.0


@pytest.fixture
def registry_url(database_url: str) -> str:
    """Every database."""
    return database_url


async def test_opened_session_publishes_runner_and_models(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1", "m2")).open()
    runner = await mesh.runner("r1")
    assert (runner.status, runner.incarnation, runner.address) == (ACTIVE, "life-1", "unix:/run/r1")
    assert runner.last_heartbeat_time.ToDatetime() == mesh.clock.utc_now().replace(tzinfo=None)
    model = await mesh.model("m2")
    assert (model.runner, model.status, model.manifest.context_tokens) == ("r1", MODEL_ACTIVE, 4096)


async def test_runner_receives_heartbeat_and_report_intervals(mesh: RunningRegistry) -> None:
    response = await mesh.sessions.OpenSession(SomeRunner(mesh).opening())
    assert (response.heartbeat_interval.seconds, response.report_interval.seconds) == (30, 5)
    assert len(response.ticket_key) == 32


async def test_silent_runner_becomes_inactive_after_exactly_90_seconds(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    await mesh.advance(85.0)
    assert (await mesh.runner("r1")).status == ACTIVE
    await mesh.advance(5.0)
    assert (await mesh.runner("r1")).status == INACTIVE
    assert (await mesh.model("m1")).status == MODEL_INACTIVE


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


async def test_heartbeat_revives_a_silent_runner_with_its_models(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await mesh.advance(3600.0)
    await runner.beat()
    assert (await mesh.runner("r1")).status == ACTIVE
    assert (await mesh.model("m1")).status == MODEL_ACTIVE


async def test_closing_twice_or_with_an_old_incarnation_changes_nothing(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    earlier = SomeRunner(mesh, incarnation="life-0", session_id=runner.session_id)
    await earlier.close()
    assert (await mesh.runner("r1")).status == ACTIVE
    await runner.close()
    await runner.close()
    await SomeRunner(mesh, session_id="ses-nobody-has").close()


async def test_runner_shows_its_last_capability_report(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(slots_used=3))
    await runner.beat()
    (instance,) = (await mesh.runner("r1")).capability.instances
    assert (instance.model, instance.slots_used, instance.HasField("load_progress")) == ("m1", 3, False)


async def test_repeated_heartbeat_counts_as_activity(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    runner.sequence -= 1
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    assert (await mesh.runner("r1")).status == ACTIVE


async def test_heartbeat_of_an_unknown_session_is_rejected(mesh: RunningRegistry) -> None:
    with refused(Reason.SESSION_UNKNOWN):
        await SomeRunner(mesh, session_id="ses-nobody-has").beat()
