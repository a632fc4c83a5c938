"""Aliases: declared, checked, published, kept, and in the way of what they lead to."""

import json
from pathlib import Path

import pytest
from kit.resources import declared, records
from registry_harness import (
    RunningRegistry,
    SomeRunner,
    a_route,
    an_agent,
    an_alias,
    declare,
    refusal,
    running_registry,
)

from registry_svc.registry_config import AliasSetting, RegistryConfig
from weft.api.common.v1 import workflow_pb2 as workflows
from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.workflow_pb2 import RegisteredWorkflow, WorkflowManifest
from weft.kernel.errors.reasons import Reason
from weft.kernel.settings.setting_annotations import SettingError
from weft.kernel.values.names import ascii_name

ALIAS = "alias"


async def aliases(mesh: RunningRegistry) -> dict[str, Alias]:
    return {each.manifest.name: each for each in await mesh.listed("alias")}


async def test_alias_survives_a_restart_and_redeclaring_it_changes_nothing(tmp_path: Path) -> None:
    async with running_registry(tmp_path) as mesh:
        await SomeRunner(mesh, models=("m1",)).open()
        assert await mesh.apply(an_alias("claude", pattern="claude-*", tenant="a")) == ["alias claude created"]
        assert await mesh.apply(an_alias("gpt-4o")) == ["alias gpt-4o created"]
        assert await mesh.apply(an_alias("gpt-4o")) == ["alias gpt-4o unchanged"]
        before = await aliases(mesh)
    async with running_registry(tmp_path) as mesh:
        assert await aliases(mesh) == before
        told = (await mesh.watch()).snapshot.snapshot.resources
        assert records(told, "alias") == list(before.values())
    assert before["claude"].manifest == AliasManifest(name="claude", pattern="claude-*", target="m1", tenant="a")
    assert before["gpt-4o"].manifest.pattern == "gpt-4o", "its own name"
    assert before["gpt-4o"].source == Alias.SOURCE_DECLARED


async def test_alias_target_must_exist_or_be_in_the_same_call_and_cannot_be_an_alias(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1",)).open()
    await mesh.apply(a_route("way"), declared(agent=an_agent("coder")), an_alias("one"))
    for target in ("m1", "route/way", "agent/coder"):
        await mesh.apply(an_alias("any", target))
    for target in ("one", "nothing", "route/one", "agent/m1", "way"):
        error = await refusal(Reason.MODEL_NOT_FOUND, mesh.apply(an_alias("bad", target)))
        assert "never another alias" in error.message
    assert await mesh.apply(a_route("new"), an_alias("with-it", "route/new")) == [
        "route new created",
        "alias with-it created",
    ]


async def test_two_aliases_for_the_same_pattern_of_one_tenant_are_rejected(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, models=("m1",)).open()
    await mesh.apply(an_alias("one", pattern="gpt-*"), an_alias("other", pattern="gpt-*", tenant="a"))
    for batch in ((an_alias("two", pattern="gpt-*"),), (an_alias("x", pattern="y"), an_alias("z", pattern="y"))):
        await refusal(Reason.ALREADY_EXISTS, mesh.apply(*batch))
    assert set(await aliases(mesh)) == {"one", "other"}


async def test_configured_aliases_have_lower_precedence_than_declared_ones(tmp_path: Path) -> None:
    given = (
        AliasSetting(name="gpt", pattern="gpt-*", target="m1"),
        AliasSetting(name="later", target="nicht-über"),
    )
    async with running_registry(tmp_path, aliases=given) as mesh:
        await SomeRunner(mesh, models=("m1", "m2")).open()
        assert (await aliases(mesh))["later"].manifest.target == ascii_name("nicht-über")
        assert (await aliases(mesh))["gpt"].source == Alias.SOURCE_CONFIGURED
        await refusal(Reason.RESOURCE_IN_USE, mesh.delete(ALIAS, "gpt"))
        await mesh.apply(an_alias("mine", "m2", pattern="gpt-*"))
        assert set(await aliases(mesh)) == {"later", "mine"}, "the declared one is for the same names"
        await mesh.delete(ALIAS, "mine")
        assert set(await aliases(mesh)) == {"gpt", "later"}
    async with running_registry(tmp_path) as mesh:
        assert await aliases(mesh) == {}, "what the file no longer has is gone"


async def test_preset_of_a_configured_or_declared_alias_is_known_to_the_mesh(tmp_path: Path) -> None:
    given = AliasSetting(name="calm", target="m1", forced_params={"temperature": 0.2}, removed_params=("top_p",))
    async with running_registry(tmp_path, aliases=(given,)) as mesh:
        await SomeRunner(mesh, models=("m1",)).open()
        wild = AliasManifest(name="wild", target="m1")
        wild.default_params.reasoning_effort = "low"
        await mesh.apply(declared(alias=wild))
        found = await aliases(mesh)
    assert found["calm"].manifest.forced_params.temperature == 0.2
    assert list(found["calm"].manifest.removed_params) == ["top_p"]
    assert not found["calm"].manifest.HasField("default_params")
    assert found["wild"].manifest.default_params.reasoning_effort == "low"


def test_configured_aliases_are_validated_like_declared_ones() -> None:
    with pytest.raises(SettingError, match="another name"):
        AliasSetting(name="x", target="x")
    with pytest.raises(SettingError, match="0 to 2") as caught:
        AliasSetting(name="x", target="m", forced_params={"temperature": 3})
    assert caught.value.field == "forced_params.temperature"
    with pytest.raises(SettingError, match="must be one of max_tokens"):
        AliasSetting(name="x", target="m", removed_params=("stream",))
    twice = (AliasSetting(name="a", pattern="p", target="m"), AliasSetting(name="b", pattern="p", target="m"))
    with pytest.raises(SettingError, match="its own pattern"):
        RegistryConfig(database_url="sqlite:///x.db", aliases=twice)


GRAPH = {
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a hill", "clip": ["4", 1]}},
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "tiny.safetensors"}},
}


def a_workflow(name: str = "turbo", model: str = "m1", *, text: str = "") -> ResourceDocument:
    prompt = workflows.WorkflowInput(
        name="prompt",
        type=workflows.WORKFLOW_INPUT_TYPE_TEXT,
        node="6",
        input="text",
        source=workflows.WORKFLOW_SOURCE_PROMPT,
    )
    workflow = workflows.Workflow(graph=text or json.dumps(GRAPH), inputs=[prompt], outputs=["6"])
    return declared(workflow=WorkflowManifest(name=name, model=model, workflow=workflow))


async def test_workflow_is_created_unchanged_and_configured(mesh: RunningRegistry) -> None:
    assert await mesh.apply(declare("m1"), a_workflow()) == ["model m1 created", "workflow turbo created"]
    # Equal but for spaces in its graph.
    assert await mesh.apply(a_workflow(text=json.dumps(GRAPH, indent=2))) == ["workflow turbo unchanged"]
    other = json.dumps(GRAPH | {"7": {"class_type": "X", "inputs": {}}})
    assert await mesh.apply(a_workflow(text=other)) == ["workflow turbo configured"]
    (found,) = await mesh.listed("workflow")
    assert set(json.loads(found.manifest.workflow.graph)) == {"4", "6", "7"}
    assert found.status == RegisteredWorkflow.STATUS_INACTIVE
