"""Pools as they follow from the models, and the agents that point to them."""

import pytest
from kit.refusals import refused
from kit.resources import declared, records
from registry_harness import (
    AGENT_ACTIVE,
    AGENT_INACTIVE,
    MODEL,
    MODEL_ACTIVE,
    MODEL_FAILED,
    RunningRegistry,
    SomeRunner,
    an_agent,
    declare,
    in_phase,
    manifest,
    ready,
)

from weft.api.common.v1 import agent_behaviour_pb2
from weft.api.registry.v1 import agent_pb2, registry_service_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import declared as without_defaults
from weft.documents.resources import observed_document, pool_document, to_declaration
from weft.documents.yaml_documents import read_documents, yaml_text
from weft.kernel.errors.reasons import Reason


async def members(mesh: RunningRegistry, model: str) -> list[str]:
    response = await mesh.registry.GetModelMembers(registry_service_pb2.GetModelMembersRequest(name=model))
    return [member.manifest.name for member in response.pool.members]


async def test_solo_model_named_like_a_pool_joins_it(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("qwen",)).open()
    pool = await mesh.pool("qwen")
    assert (pool.explicit, pool.size, pool.active_count) == (False, 1, 1)
    second = await SomeRunner(mesh, name="r2", models=(manifest("alice", pool="qwen"), "solo")).open()
    pool = await mesh.pool("qwen")
    assert (pool.explicit, pool.size, pool.active_count) == (True, 2, 2)
    assert await members(mesh, "qwen") == await members(mesh, "alice") == ["alice", "qwen"]
    await second.close()
    pool = await mesh.pool("qwen")
    assert (pool.size, pool.active_count) == (2, 1)
    assert [member.status for member in pool.members] == [2, 1]


async def test_pools_are_listed_in_pages(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", pool="p2"), manifest("m2", pool="p2"), "p1", "p3")).open()
    first = await mesh.registry.ListResources(ListResources(kind="pool", page_size=2))
    second = await mesh.registry.ListResources(
        ListResources(kind="pool", page_size=2, page_token=first.next_page_token)
    )
    assert [each.name for each in (*first.resources, *second.resources)] == ["p1", "p2", "p3"]
    assert second.next_page_token == ""


async def test_pool_without_members_does_not_exist(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=(manifest("m1", pool="p1"),)).open()
    with refused(Reason.NOT_FOUND):
        await mesh.pool("m1")
    with refused(Reason.MODEL_NOT_FOUND):
        await members(mesh, "p1")
    await mesh.delete(MODEL, "m1")
    with refused(Reason.NOT_FOUND):
        await mesh.pool("p1")


async def test_agent_without_its_model_is_left_out_and_the_others_are_published(mesh: RunningRegistry) -> None:
    watch = await mesh.watch()
    runner = await SomeRunner(mesh, agents=(an_agent("a1"), an_agent("a2", "nowhere"))).open()
    assert len(runner.left_out) == 1
    assert runner.left_out[0].startswith("agent a2: ")
    assert "nowhere" in runner.left_out[0]
    with refused(Reason.NOT_FOUND):
        await mesh.agent("a2")
    assert await watch.read_changes(3) == ["runner r1 active", "model m1 active", "agent a1 active"]
    agent = await mesh.agent("a1")
    assert (agent.kind, agent.runner, agent.status) == (2, "r1", AGENT_ACTIVE)
    assert agent.manifest == an_agent("a1")
    assert records((await mesh.watch()).snapshot.snapshot.resources, "agent")[0] == agent


async def test_agent_can_reference_models_of_others_but_none_removed_with_its_session(mesh: RunningRegistry) -> None:
    await mesh.apply(declare("public"))
    runner = await SomeRunner(mesh, agents=(an_agent("a1", "public"), an_agent("a2", pool="m1"))).open()
    again = SomeRunner(mesh, incarnation="life-2", session_id=runner.session_id, models=("m2",))
    again.agents = (an_agent("a2", "m1"),)
    watch = await mesh.watch()
    assert (await again.open()).left_out[0].startswith("agent a2: ")
    assert await watch.read_changes(5) == [
        "agent a1 gone",
        "agent a2 gone",
        "model m1 gone",
        "runner r1 active",
        "model m2 active",
    ]
    again.agents = (an_agent("a2", pool="m1"),)
    assert (await again.open()).left_out[0].startswith("agent a2: ")
    again.agents = (an_agent("a2", "m2"),)
    assert (await again.open()).left_out == []
    assert (await mesh.agent("a2")).manifest.model == "m2"


async def test_model_that_moves_to_another_pool_takes_its_agents_along(mesh: RunningRegistry) -> None:
    await mesh.apply(declare(manifest("m1", pool="p1")), declared(agent=an_agent("a1", "m1")))
    await SomeRunner(mesh, name="r2", models=(manifest("m2", pool="p2"),)).open()
    assert (await mesh.agent("a1")).status == AGENT_INACTIVE
    watch = await mesh.watch()
    await mesh.apply(declare(manifest("m1", pool="p2")))
    assert await watch.read_changes(2) == ["model m1 inactive", "agent a1 active"]


ListResources = registry_service_pb2.ListResourcesRequest

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


def asking(name: str = "coder", /, **behaviour: object) -> agent_pb2.AgentManifest:
    manifest = an_agent(name)
    wanted = {"tools": ["files.read"], "signals": ["NEEDS_EXTERNAL_INFO"], "platform_prompt": True, **behaviour}
    manifest.behaviour.CopyFrom(agent_behaviour_pb2.AgentBehaviour(**wanted))  # type: ignore[arg-type]
    return manifest


@pytest.mark.parametrize("behaviour", [{}, {"tools": [], "repetition_policy": 1}, {"parse_text_tool_calls": False}])
async def test_document_of_any_agent_can_be_applied_without_a_change(
    mesh: RunningRegistry, behaviour: dict[str, object]
) -> None:
    await SomeRunner(mesh, agents=(asking(**behaviour),)).open()
    text = yaml_text(without_defaults(observed_document(ResourceKind.AGENT, await mesh.agent("coder"))))
    (read,) = read_documents(text, "agents.yaml")
    assert await mesh.apply(to_declaration(read.document)) == ["agent coder unchanged"]
