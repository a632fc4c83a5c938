"""What sleeps, what can be woken, and how long it is kept."""

from pathlib import Path

import pytest
from kit.refusals import refused
from kit.resources import declared
from registry_harness import (
    AGENT_ACTIVE,
    AGENT_HIBERNATING,
    AGENT_INACTIVE,
    MODEL_ACTIVE,
    MODEL_HIBERNATING,
    MODEL_INACTIVE,
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

from weft.api.registry.v1 import runner_pb2, wake_pb2
from weft.kernel.reasons import Reason

FOUR_HOURS = 4 * 3600.0
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


async def test_model_on_a_wakeable_host_hibernates_while_its_runner_is_lost(
    mesh: RunningRegistry,
) -> None:
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
    with refused(Reason.INVALID_ARGUMENT) as errors:
        await SomeRunner(mesh, models=(model,)).open()
    assert "an operator must declare this recipe with apply" in errors[0].message
    await mesh.apply(declare(model))
    await SomeRunner(mesh).open()
    assert (await mesh.model("m1")).manifest.wake.by_mesh == recipe
