"""What a machine that joined may publish: names of its own, also while it is away, and no pool of others."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.failures import fails
from kit.refusals import refused
from registry_harness import RunningRegistry, SomeRunner, an_agent, an_alias, declare, manifest, running_registry

from registry_svc.operations.targets import RunnerDirectory, load_target
from weft.api.operations.v1.operation_pb2 import LoadModel
from weft.api.registry.v1.join_token_service_pb2 import (
    CheckJoinTokenRequest,
    CreateJoinTokenRequest,
    ListJoinTokensRequest,
    RevokeJoinTokenRequest,
)
from weft.api.registry.v1.runner_pb2 import Capability, InstanceState
from weft.api.registry.v1.runner_session_service_pb2 import OpenSessionRequest
from weft.kernel.errors.reasons import Reason

CONFIGURED = frozenset({"yaml-model", "yaml-runner"})


@dataclass
class Joined(SomeRunner):
    """A runner of a machine that joined over a relay."""

    machine: str = ""

    def opening(self) -> OpenSessionRequest:
        request = super().opening()
        request.runner.dial_out, request.runner.joined_by, request.runner.host = True, self.machine, f"{self.name}-box"
        return request


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[RunningRegistry]:
    async with running_registry(tmp_path, configured_names=CONFIGURED) as mesh:
        yield mesh


async def machine(mesh: RunningRegistry, name: str, *, name_pattern: str = "", pool: str = "") -> str:
    """The id of a machine that has exchanged a token."""
    made = await mesh.tokens.CreateJoinToken(CreateJoinTokenRequest(name_pattern=name_pattern, pool=pool))
    check = CheckJoinTokenRequest(token=made.token, machine=f"wjm_{name:0<12}_{'0' * 64}")
    return (await mesh.tokens.CheckJoinToken(check)).join_token.id


async def test_joined_model_joins_a_pool_of_others_only_by_its_token(mesh: RunningRegistry) -> None:
    await SomeRunner(mesh, name="local", models=(manifest("own-qwen", pool="qwen"), "alone")).open()
    models = (manifest("a", pool="qwen"), manifest("b", pool="alone"), manifest("c", pool="new"), "qwen", "d")
    evil = await Joined(mesh, name="evil", models=models, machine=await machine(mesh, "evil")).open()
    left = [item for item in evil.left_out if "models of others" in item]
    assert len(left) == len(evil.left_out) == 3, evil.left_out
    invited = await machine(mesh, "friend", pool="qwen")
    friend = await Joined(mesh, name="friend", models=(manifest("e", pool="qwen"), "f"), machine=invited).open()
    assert not friend.left_out
    assert await Joined(mesh, name="friend-2", models=(manifest("g", pool="new"),), machine=invited).open()
    assert [each.manifest.name for each in (await mesh.pool("qwen")).members] == ["e", "own-qwen"]


async def test_names_outside_the_pattern_of_the_token_are_refused(mesh: RunningRegistry) -> None:
    desk = await machine(mesh, "desk", name_pattern="desk-*")
    with refused(Reason.PERMISSION_DENIED) as errors:
        await Joined(mesh, name="other", machine=desk).open()
    assert "desk-*" in errors[0].message
    models = ("desk-a", "b", manifest("desk-c", pool="c"), manifest("desk-d", pool="desk-pool"))
    agents = (an_agent("desk-agent", "desk-a"), an_agent("agent-2", "desk-a"))
    runner = await Joined(mesh, name="desk-1", models=models, agents=agents, machine=desk).open()
    assert len(runner.left_out) == 3
    assert all("desk-*" in item for item in runner.left_out)


@pytest.mark.parametrize("hours", [0, 5])
async def test_names_of_a_machine_stay_its_own_while_it_is_away(mesh: RunningRegistry, hours: int) -> None:
    desk = Joined(mesh, name="desk", models=("desk-model",), machine=await machine(mesh, "desk"))
    await desk.open()
    await desk.close()
    await mesh.advance(hours * 3600.0)
    thief = await Joined(mesh, name="thief", models=("desk-model",), machine=await machine(mesh, "thief")).open()
    assert ["desk-model" in item for item in thief.left_out] == [True]
    with refused(Reason.ALREADY_EXISTS):
        await Joined(mesh, name="desk", models=(), machine=await machine(mesh, "thief2")).open()
    back = await Joined(mesh, name="desk", models=("desk-model",), incarnation="life-2", machine=desk.machine).open()
    assert not back.left_out
    assert (await mesh.model("desk-model")).runner == "desk"


async def test_names_that_a_machine_gave_up_are_free_for_others(mesh: RunningRegistry) -> None:
    desk = Joined(mesh, name="desk", models=("a", "b"), machine=await machine(mesh, "desk"))
    await desk.open()
    desk.models = ("b",)
    await desk.open()
    other = await Joined(mesh, name="other", models=("a", "b"), machine=await machine(mesh, "other")).open()
    assert ["'b'" in item or " b" in item for item in other.left_out] == [True]
    listed = (await mesh.tokens.ListJoinTokens(ListJoinTokensRequest())).join_tokens
    assert {each.id: list(each.names) for each in listed} == {
        desk.machine: ["b", "desk"],
        other.machine: ["a", "other"],
    }


async def test_names_of_the_configuration_and_of_runners_that_are_down_are_not_for_joined_machines(
    mesh: RunningRegistry,
) -> None:
    local = await SomeRunner(mesh, name="local", models=("m1",), agents=(an_agent("a1", "m1"),)).open()
    await local.close()
    await mesh.apply(declare("open"), declare("pinned", runner="eve"))
    eve = await machine(mesh, "eve")
    for name in ("yaml-runner", "local"):
        with refused(Reason.ALREADY_EXISTS):
            await Joined(mesh, name=name, models=(), machine=eve).open()
    models = ("yaml-model", "m1", "open", "pinned", "own")
    runner = await Joined(mesh, name="eve", models=models, agents=(an_agent("a1", "own"),), machine=eve).open()
    assert len(runner.left_out) == 4
    assert (await mesh.model("pinned")).runner == "eve"
    back = await SomeRunner(mesh, name="local", models=("m1",), incarnation="life-2").open()
    assert not back.left_out, "a runner of the mesh itself gets its names back"


async def test_alias_is_no_name_for_a_joined_model_or_its_pool_unless_the_token_permits_it(
    mesh: RunningRegistry,
) -> None:
    await SomeRunner(mesh, name="local", models=("m1",)).open()
    await mesh.apply(
        an_alias("user", pattern="chat"), an_alias("others", pattern="claude-*"), an_alias("rest", pattern="*")
    )
    eve = await machine(mesh, "eve")
    models = ("chat", manifest("inner", pool="chat"), "claude-opus", "chat:latest", "m1:latest", "auto", "own")
    runner = await Joined(mesh, name="eve", models=models, machine=eve).open()
    assert [item.split(": ")[0] for item in runner.left_out] == [
        *("model chat", "model inner", "model claude-opus", "model chat:latest", "model m1:latest", "model auto"),
    ]
    permitted = await machine(mesh, "frank", name_pattern="*")
    assert not (await Joined(mesh, name="frank", models=("chat",), machine=permitted).open()).left_out


async def test_revoked_machine_leaves_the_mesh_and_cannot_come_back(mesh: RunningRegistry) -> None:
    desk = await Joined(mesh, name="desk", models=("a",), machine=await machine(mesh, "desk")).open()
    await mesh.tokens.RevokeJoinToken(RevokeJoinTokenRequest(id=desk.machine))
    with refused(Reason.NOT_FOUND):
        await mesh.runner("desk")
    with refused(Reason.SESSION_UNKNOWN):
        await desk.beat()
    with refused(Reason.UNAUTHENTICATED):
        await desk.open()
    other = await Joined(mesh, name="desk", models=("a",), machine=await machine(mesh, "other")).open()
    assert not other.left_out


async def test_session_of_a_machine_goes_on_with_its_next_token(mesh: RunningRegistry) -> None:
    desk = await Joined(mesh, name="desk", models=("a",), machine=await machine(mesh, "desk")).open()
    desk.machine = await machine(mesh, "desk2")
    await desk.open()
    assert not desk.left_out
    assert (await mesh.runner("desk")).host == "desk-box"
    listed = (await mesh.tokens.ListJoinTokens(ListJoinTokensRequest())).join_tokens
    assert {each.id: list(each.names) for each in listed} == {"desk00000000": [], "desk20000000": ["a", "desk"]}


async def test_joined_machine_takes_no_operation_that_does_not_name_it(mesh: RunningRegistry) -> None:
    own = SomeRunner(mesh, name="local", models=("alone",))
    joined = Joined(mesh, name="evil", models=("evil-model",), machine=await machine(mesh, "evil"))
    directory = RunnerDirectory(mesh.service._core)
    for runner in (joined, own):
        await runner.open()
        report = Capability(adds_models=True, attaches_servers=True, attached_servers=["server"])
        report.instances.add(model=runner.models[0], phase=InstanceState.PHASE_READY, added_source="hf:a/b")
        await runner.beat(report)
        if runner is joined:
            assert not directory.adding_runners()
            assert directory.runner_of_server("server") is None
            with fails(Reason.NO_RUNNER_AVAILABLE, "--accept-models"):
                load_target(LoadModel(source="hf:a/b"), directory)
            assert load_target(LoadModel(source="hf:a/b", runner="evil"), directory).is_served
    assert directory.adding_runners() == directory.attaching_runners() == ["local"]
    assert directory.adding_runners(joined=True) == ["evil", "local"]
    assert directory.runner_of_server("server") == "local"
    assert load_target(LoadModel(source="hf:a/b"), directory).runner == "local"
