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


async def test_an_opened_session_publishes_runner_and_models(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1", "m2")).open()
    runner = await mesh.runner("r1")
    assert (runner.status, runner.incarnation, runner.address) == (ACTIVE, "life-1", "unix:/run/r1")
    assert runner.last_heartbeat_time.ToDatetime() == mesh.clock.utc_now().replace(tzinfo=None)
    model = await mesh.model("m2")
    assert (model.runner, model.status, model.manifest.context_tokens) == ("r1", MODEL_ACTIVE, 4096)


async def test_the_runner_is_told_when_heartbeats_and_reports_are_due(mesh: RunningRegistry) -> None:
    response = await mesh.sessions.OpenSession(SomeRunner(mesh).opening())
    assert (response.heartbeat_interval.seconds, response.report_interval.seconds) == (30, 5)
    assert len(response.ticket_key) == 32


async def test_a_silent_runner_is_inactive_at_90_seconds_and_not_before(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh).open()
    await mesh.advance(85.0)
    assert (await mesh.runner("r1")).status == ACTIVE
    await mesh.advance(5.0)
    assert (await mesh.runner("r1")).status == INACTIVE
    assert (await mesh.model("m1")).status == MODEL_INACTIVE


@pytest.mark.slow("steps hours of a registry's life")
async def test_four_hours_of_inactivity_delete_a_runner_within_a_few_real_seconds(mesh: RunningRegistry) -> None:
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


async def test_a_heartbeat_revives_a_silent_runner_with_its_models(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await mesh.advance(3600.0)
    await runner.beat()
    assert (await mesh.runner("r1")).status == ACTIVE
    assert (await mesh.model("m1")).status == MODEL_ACTIVE


async def test_closing_makes_runner_and_models_inactive_at_once(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.close()
    assert (await mesh.runner("r1")).status == INACTIVE
    assert (await mesh.model("m1")).status == MODEL_INACTIVE


async def test_closing_twice_or_with_an_old_incarnation_changes_nothing(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    earlier = SomeRunner(mesh, incarnation="life-0", session_id=runner.session_id)
    await earlier.close()
    assert (await mesh.runner("r1")).status == ACTIVE
    await runner.close()
    await runner.close()
    await SomeRunner(mesh, session_id="ses-nobody-has").close()


async def test_a_closed_runner_is_deleted_after_four_hours_too(mesh: RunningRegistry) -> None:
    await (await SomeRunner(mesh).open()).close()
    await mesh.advance(FOUR_HOURS)
    with refused(Reason.NOT_FOUND):
        await mesh.runner("r1")


async def test_the_last_capability_report_is_what_the_runner_shows(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(slots_used=3))
    await runner.beat()
    (instance,) = (await mesh.runner("r1")).capability.instances
    assert (instance.model, instance.slots_used, instance.HasField("load_progress")) == ("m1", 3, False)


async def test_the_same_heartbeat_again_is_acknowledged(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    runner.sequence -= 1
    await runner.beat(ready(slots_used=1))
    await mesh.advance(60.0)
    assert (await mesh.runner("r1")).status == ACTIVE


async def test_a_heartbeat_of_an_unknown_session_is_told_so(mesh: RunningRegistry) -> None:
    with refused(Reason.SESSION_UNKNOWN):
        await SomeRunner(mesh, session_id="ses-nobody-has").beat()


@pytest.mark.slow("steps hours of a registry's life")
async def test_a_heartbeat_of_a_deleted_session_is_unknown_and_a_new_session_can_be_opened(
    mesh: RunningRegistry,
) -> None:
    runner = await SomeRunner(mesh).open()
    old_id = runner.session_id
    await mesh.advance(90.0 + FOUR_HOURS)
    with refused(Reason.SESSION_UNKNOWN):
        await runner.beat()
    await runner.open()
    assert runner.session_id != old_id
