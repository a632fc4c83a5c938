"""What a registry that was away still knows, and who owns its file."""

from pathlib import Path

import pytest
from kit.refusals import refused
from registry_harness import ACTIVE, INACTIVE, SomeRunner, manifest, ready, running_registry
from typing_extensions import override

from weft.api.registry.v1 import wake_pb2
from weft.api.registry.v1.runner_session_service_pb2 import OpenSessionRequest
from weft.kernel.errors.reasons import Reason
from weft_testing.fake_clock import FakeClock

pytest_plugins = ("database_fixtures",)

FOUR_HOURS = 4 * 3600.0


@pytest.fixture
def registry_url(database_url: str) -> str:
    """Every database."""
    return database_url


async def test_restarted_registry_keeps_sessions_runners_models_and_keys(tmp_path: Path, registry_url: str) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as before:
        runner = await SomeRunner(before, models=("m1", "m2")).open()
        model = await before.model("m2")
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as after:
        assert await after.model("m2") == model
        watch = await after.watch(include_ticket_keys=True)
        assert watch.snapshot.snapshot.runners[0].ticket_key == runner.ticket_key
        runner.registry = after
        await runner.beat(ready())
        assert (await after.runner("r1")).status == ACTIVE


@pytest.mark.parametrize("dial_out", [True, False])
async def test_recipe_that_an_earlier_release_stored_for_a_joined_machine_is_not_run(
    tmp_path: Path, registry_url: str, dial_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Laptop(SomeRunner):
        @override
        def opening(self) -> OpenSessionRequest:
            request = super().opening()
            request.runner.dial_out = dial_out
            return request

    clock = FakeClock()
    recipe = wake_pb2.WakeRecipe(http=wake_pb2.HttpAction(url="http://10.0.0.7/wake"))
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as before:
        with monkeypatch.context() as earlier:
            earlier.setattr("registry_svc.mesh.requests.drop_recipe", lambda _: [])
            await Laptop(before, models=(manifest("m1", wake=wake_pb2.Wake(by_mesh=recipe)),)).open()
        assert (await before.model("m1")).manifest.wake.HasField("by_mesh")
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as after:
        assert (await after.model("m1")).manifest.wake.HasField("by_mesh") is not dial_out


async def test_registry_downtime_expires_no_runner(tmp_path: Path, registry_url: str) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as before:
        runner = await SomeRunner(before).open()
        await (await SomeRunner(before, name="closed", models=()).open()).close()
    await clock.advance(FOUR_HOURS * 2)
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as after:
        await after.advance(85.0)
        assert (await after.runner("r1")).status == ACTIVE
        assert (await after.runner("closed")).status == INACTIVE
        runner.registry = after
        await runner.beat()
        await after.advance(85.0)
        assert (await after.runner("r1")).status == ACTIVE


@pytest.mark.slow("kills or restarts a service")
async def test_inactive_time_before_a_restart_counts(tmp_path: Path, registry_url: str) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as before:
        await SomeRunner(before).open()
        await before.advance(90.0 + FOUR_HOURS / 2)
    async with running_registry(tmp_path, database_url=registry_url, clock=clock) as after:
        await after.advance(FOUR_HOURS / 2 - 5.0)
        assert (await after.runner("r1")).status == INACTIVE
        await after.advance(5.0)
        with refused(Reason.NOT_FOUND):
            await after.runner("r1")


async def test_session_is_adopted_across_a_restart_of_both_sides(tmp_path: Path, registry_url: str) -> None:
    async with running_registry(tmp_path, database_url=registry_url) as before:
        first = await SomeRunner(before).open()
    async with running_registry(tmp_path, database_url=registry_url) as after:
        second = await SomeRunner(after, incarnation="life-2", session_id=first.session_id).open()
        assert second.session_id == first.session_id
        with refused(Reason.ALREADY_EXISTS):
            await SomeRunner(after, incarnation="life-x").open()
