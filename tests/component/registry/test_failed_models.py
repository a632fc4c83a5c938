"""Models that their runner cannot serve: they counted as active, and their pools as ready."""

import pytest
from kit.resources import declared
from registry_harness import (
    AGENT_ACTIVE,
    AGENT_INACTIVE,
    MODEL_ACTIVE,
    MODEL_FAILED,
    RunningRegistry,
    SomeRunner,
    an_agent,
    in_phase,
    manifest,
    ready,
)

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.resources import pool_document

FAILED, CRASH_LOOP = InstanceState.PHASE_FAILED, InstanceState.PHASE_CRASH_LOOP


@pytest.mark.parametrize("phase", [FAILED, CRASH_LOOP])
async def test_unservable_model_and_its_dependents_are_failed_until_it_recovers(
    mesh: RunningRegistry, phase: InstanceState.Phase.ValueType
) -> None:
    runner = await SomeRunner(mesh, models=("m1",)).open()
    await mesh.apply(declared(agent=an_agent("public", pool="m1")))
    await runner.beat(ready())
    watch = await mesh.watch()
    await runner.beat(in_phase(phase))
    changes = await watch.read_changes(3)
    assert changes == ["runner r1 active", "model m1 failed", "agent public inactive"]
    assert (await mesh.model("m1")).status == MODEL_FAILED
    assert (await mesh.agent("public")).status == AGENT_INACTIVE
    pool = await mesh.pool("m1")
    assert (pool.size, pool.active_count) == (1, 0)
    (condition,) = pool_document(pool).conditions
    assert (condition.status, condition.reason) == ("False", "Failed")
    assert condition.message == "none of 1 members is active; failed: m1"
    await runner.beat(in_phase(InstanceState.PHASE_LOADING))
    assert (await mesh.model("m1")).status == MODEL_ACTIVE
    assert (await mesh.agent("public")).status == AGENT_ACTIVE
    assert (await mesh.pool("m1")).active_count == 1


async def test_pool_is_active_while_one_member_is_servable(mesh: RunningRegistry) -> None:
    runner = await SomeRunner(mesh, models=(manifest("m1", pool="p"), manifest("m2", pool="p"))).open()
    await runner.beat(in_phase(FAILED, "m2"))
    pool = await mesh.pool("p")
    assert (pool.size, pool.active_count) == (2, 1)
    assert {each.manifest.name: each.status for each in pool.members} == {"m1": MODEL_ACTIVE, "m2": MODEL_FAILED}
