"""How rows end: agents before models, thousands not at once, and floods refused."""

from itertools import pairwise
from pathlib import Path

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import (
    ACTIVE,
    AGENT_ACTIVE,
    AGENT_HIBERNATING,
    AGENT_INACTIVE,
    INACTIVE,
    MODEL,
    MODEL_ACTIVE,
    MODEL_HIBERNATING,
    MODEL_INACTIVE,
    RUNNER,
    RunningRegistry,
    SomeRunner,
    an_agent,
    by_mesh,
    declare,
    in_phase,
    manifest,
    ready,
    running_registry,
)

from registry_svc.mesh.expiry import Retirements
from registry_svc.mesh.policy.heartbeat import Retirement
from weft.api.registry.v1 import runner_pb2, wake_pb2
from weft.api.registry.v1 import runner_session_service_pb2 as pb
from weft.kernel.errors.reasons import Reason
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


HIBERNATING = runner_pb2.InstanceState.PHASE_HIBERNATING

LOADING = runner_pb2.InstanceState.PHASE_LOADING


async def test_model_sleeps_and_wakes_with_its_instance_and_agents(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh, models=("m1", "m2"), agents=(an_agent("a1"),)).open()
    await mesh.apply(declared(agent=an_agent("public", pool="m1")))
    watch = await mesh.watch()
    await runner.beat(in_phase(HIBERNATING))
    changes = await watch.read_changes(4)
    assert changes[:2] == ["runner r1 active", "model m1 hibernating"]
    assert sorted(changes[2:]) == ["agent a1 hibernating", "agent public hibernating"]
    assert (await mesh.model("m2")).status == MODEL_ACTIVE
    await runner.beat(in_phase(HIBERNATING, "m1"))
    await runner.beat(in_phase(LOADING))
    assert sorted(await watch.read_changes(4)) == [
        "agent a1 active",
        "agent public active",
        "model m1 active",
        "runner r1 active",
    ]


async def test_model_on_a_wakeable_host_hibernates_while_its_runner_is_lost(mesh: RunningRegistry) -> None:
    by_runner = wake_pb2.Wake(by_runner=True)
    models = (manifest("m1", wake=by_mesh()), manifest("m2", wake=by_runner))
    runner = await SomeRunner(mesh, models=models, agents=(an_agent("a1"),)).open()
    await mesh.apply(declared(agent=an_agent("public")))
    await mesh.advance(90.0)
    assert (await mesh.model("m1")).status == MODEL_HIBERNATING
    assert (await mesh.model("m1")).HasField("inactive_time")
    assert (await mesh.model("m2")).status == MODEL_INACTIVE
    assert (await mesh.agent("public")).status == AGENT_HIBERNATING
    assert (await mesh.agent("a1")).status == AGENT_INACTIVE, "a virtual agent needs its runner too"
    await runner.beat(ready())
    assert (await mesh.model("m1")).status == MODEL_ACTIVE
    assert not (await mesh.model("m1")).HasField("inactive_time")
    assert (await mesh.agent("a1")).status == AGENT_ACTIVE


@pytest.mark.slow("steps hours of a registry's life")
async def test_wakeable_runner_is_kept_for_days_and_then_purged(tmp_path: Path) -> None:
    async with running_registry(tmp_path, hibernating_keep_seconds=86_400.0) as mesh:
        await SomeRunner(mesh, models=(manifest("m1", wake=by_mesh()),)).open()
        await SomeRunner(mesh, name="r2", models=("m2",)).open()
        await mesh.advance(90.0 + FOUR_HOURS)
        assert (await mesh.model("m1")).status == MODEL_HIBERNATING
        with refused(Reason.MODEL_NOT_FOUND):
            await mesh.model("m2")
        await mesh.advance(86_400.0 - FOUR_HOURS)
        with refused(Reason.MODEL_NOT_FOUND):
            await mesh.model("m1")


async def test_only_an_operator_can_declare_a_command_wake_recipe(mesh: RunningRegistry) -> None:
    recipe = wake_pb2.WakeRecipe(command=wake_pb2.CommandAction(argv=["/usr/bin/wake", "host"]))
    model = manifest("m1", wake=wake_pb2.Wake(by_mesh=recipe))
    runner = await SomeRunner(mesh, models=(model,)).open()
    assert "an operator must declare this recipe with apply" in runner.left_out[0]
    await mesh.apply(declare(model))
    await SomeRunner(mesh).open()
    assert (await mesh.model("m1")).manifest.wake.by_mesh == recipe


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
