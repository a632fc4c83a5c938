"""A runner that its owner takes out of the mesh is forgotten at once, or when it is gone and its memory is free."""

from pathlib import Path

import pytest
from registry_harness import (
    MODEL,
    RUNNER,
    RunningRegistry,
    SomeRunner,
    declare,
    ready,
    running_registry,
)

from registry_svc.mesh.expiry import Retirements
from registry_svc.mesh.policy.heartbeat import Retirement
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft_testing.fake_clock import FakeClock

Outcome = pb.RetireSessionResponse


async def _retire(mesh: RunningRegistry, session_id: str, *, ended: bool = False) -> pb.RetireSessionResponse:
    request = pb.RetireSessionRequest(session_id=session_id, process_ended=ended)
    return await mesh.sessions.RetireSession(request)


async def _names(mesh: RunningRegistry) -> tuple[list[str], list[str], list[str]]:
    """Runners, models and pools."""
    runners, models, pools = [await mesh.listed(kind) for kind in ("runner", "model", "pool")]
    return [one.name for one in runners], [one.manifest.name for one in models], [one.name for one in pools]


async def test_closed_runner_is_deleted_with_its_models_and_pools_and_others_remain(mesh: RunningRegistry) -> None:
    gone = await SomeRunner(mesh, models=("m1", "m2")).open()
    await SomeRunner(mesh, name="r2", models=("m3",)).open()
    await gone.close()
    answer = await _retire(mesh, gone.session_id)
    assert answer.outcome == Outcome.OUTCOME_RETIRED
    assert list(answer.models) == ["m1", "m2"]
    assert list(answer.pools) == ["m1", "m2"]
    assert await _names(mesh) == (["r2"], ["m3"], ["m3"])
    assert (await mesh.events(RUNNER, "r1"))[-1] == "runner r1 withdrawn"
    assert (await mesh.events(MODEL, "m1"))[-1] == "model m1 withdrawn"


async def test_declared_resources_remain(mesh: RunningRegistry) -> None:
    gone = await SomeRunner(mesh, models=("m1", "m2")).open()
    await mesh.apply(declare("m1"), adopt=True)
    await gone.close()
    answer = await _retire(mesh, gone.session_id)
    assert list(answer.models) == ["m2"]
    assert await _names(mesh) == ([], ["m1"], ["m1"])


async def test_active_runner_is_not_retired_until_it_closed(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await runner.beat(ready())
    assert (await _retire(mesh, runner.session_id, ended=True)).outcome == Outcome.OUTCOME_LIVES
    await mesh.advance(5.0)
    assert (await mesh.runner("r1")).name == "r1"
    await runner.close()
    await mesh.advance(5.0)
    assert await _names(mesh) == ([], [], [])


async def test_reopened_session_cancels_the_retirement(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh).open()
    await _retire(mesh, runner.session_id)
    again = await SomeRunner(mesh, incarnation="life-2", session_id=runner.session_id).open()
    await mesh.advance(5.0)
    await again.close()
    await mesh.advance(5.0)
    assert (await mesh.runner("r1")).name == "r1", "inactive, as any other that has closed"


async def test_owner_can_retire_a_runner_after_a_kill(tmp_path: Path) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, clock=clock) as before:
        runner = await SomeRunner(before).open()
        await runner.beat(ready())
    async with running_registry(tmp_path, clock=clock) as after:
        assert (await _retire(after, runner.session_id)).outcome == Outcome.OUTCOME_LIVES, "nobody knows yet"
        assert (await _retire(after, runner.session_id, ended=True)).outcome == Outcome.OUTCOME_RETIRED
        assert await _names(after) == ([], [], [])
    async with running_registry(tmp_path, clock=clock) as later:
        assert await _names(later) == ([], [], []), "it is durable"
        assert (await _retire(later, runner.session_id)).outcome == Outcome.OUTCOME_UNKNOWN


@pytest.mark.parametrize("is_closed", [True, False])
async def test_runner_with_leased_memory_is_inactive_and_deleted_once_it_is_free(
    tmp_path: Path, *, is_closed: bool
) -> None:
    clock, leases = FakeClock(), {"r1": 1}
    async with running_registry(tmp_path, clock=clock) as before:
        runner = await SomeRunner(before).open()
        if is_closed:
            await runner.close()
    async with running_registry(tmp_path, clock=clock) as after:
        retirements = Retirements(after.service._core, leases.__getitem__)
        outcome = (await retirements.retire(runner.session_id, process_ended=True)).outcome
        assert Retirement(outcome) is Retirement.HOLDS_MEMORY
        await retirements.sweep()
        assert (await after.runner("r1")).status == 2, "inactive"
        leases["r1"] = 0
        await retirements.sweep()
        assert await _names(after) == ([], [], [])
