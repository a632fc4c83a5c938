"""What agents ask for, from a runner and from an operator to everyone who watches, and over a restart."""

from pathlib import Path

import pytest
from kit.resources import declared
from registry_harness import RunningRegistry, SomeRunner, an_agent, running_registry

from weft.api.common.v1 import agent_behaviour_pb2
from weft.api.registry.v1 import agent_pb2
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import observed_document, to_declaration
from weft.documents.yaml_documents import read_documents, to_yaml
from weft_testing.fake_clock import FakeClock

pytest_plugins = ("database_fixtures",)


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
    text = to_yaml([observed_document(ResourceKind.AGENT, await mesh.agent("coder"))])
    (read,) = read_documents(text, "agents.yaml")
    assert await mesh.apply(to_declaration(read.document)) == ["agent coder unchanged"]


async def test_restarted_registry_still_knows_agent_behavior(tmp_path: Path, database_url: str) -> None:
    clock = FakeClock()
    async with running_registry(tmp_path, database_url=database_url, clock=clock) as before:
        await SomeRunner(before, agents=(asking("published"),)).open()
        await before.apply(declared(agent=asking("declared", repetition_policy=3)))
        known = [await before.agent(name) for name in ("published", "declared")]
    async with running_registry(tmp_path, database_url=database_url, clock=clock) as after:
        assert [await after.agent(name) for name in ("published", "declared")] == known
    assert [agent.manifest for agent in known] == [asking("published"), asking("declared", repetition_policy=3)]
