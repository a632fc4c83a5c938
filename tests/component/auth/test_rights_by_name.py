"""Scopes that are limited to names, over gRPC: what the registry lets their keys see, declare and delete."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.keys import as_key, ring
from kit.resources import declared
from registry_stage import registry_channel

from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    registry_service_pb2,
    registry_service_pb2_grpc,
)
from weft.api.registry.v1.agent_pb2 import AgentManifest
from weft.api.registry.v1.alias_pb2 import AliasManifest
from weft.api.registry.v1.model_pb2 import MODEL_OPERATION_CHAT, ModelDeclaration, ModelManifest
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.api.registry.v1.route_pb2 import RouteManifest
from weft.api.registry.v1.tags_pb2 import Tags
from weft.api.runner.v1.runner_service_pb2 import FlushCacheRequest
from weft.documents.kinds import record_in
from weft.kernel.channels.rpc import error_from_call
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

HOLDERS = {
    "everything00": ("models:edit", "operations:create", "inference:create"),
    "team00000000": ("models/team-*:edit", "inference/shared:create"),
    "reader000000": ("models/team-a:view",),
    "worker000000": ("operations/team-*:create",),
    "nobody000000": ("telemetry:view",),
}
LoadModel, UnloadModel, FlushCache = operation_pb2.LoadModel, operation_pb2.UnloadModel, operation_pb2.FlushCache
RemoveModel, SOURCE = operation_pb2.RemoveModel, "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M"
ALL = FlushCacheRequest.SCOPE_ALL
PB = registry_service_pb2
MODEL, AGENT = "model", "agent"
ROUTE, RUNNER = "route", "runner"


class Caller:
    """Calls of one key on a registry. Refusals are WeftErrors."""

    def __init__(self, channel: grpc.aio.Channel, key_id: str) -> None:
        self.metadata = as_key(key_id)
        self.reads: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        self.declarations: Any = declaration_service_pb2_grpc.DeclarationServiceStub(channel)
        self.operations: Any = operation_service_pb2_grpc.OperationServiceStub(channel)

    async def call(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, metadata=self.metadata, timeout=10)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, Reason.INTERNAL) from error

    async def listed(self, kind: str, **wanted: Any) -> list[str]:
        request = PB.ListResourcesRequest(kind=kind, **wanted)
        return [each.name for each in (await self.call(self.reads.ListResources, request)).resources]

    async def apply(self, *declarations: ResourceDocument) -> Any:
        request = declaration_service_pb2.ApplyRequest(declarations=declarations)
        return (await self.call(self.declarations.Apply, request)).results

    async def delete(self, kind: Any, name: str, *, force: bool = False) -> None:
        request = declaration_service_pb2.DeleteRequest(kind=kind, name=name, force=force)
        await self.call(self.declarations.Delete, request)


def a_model(name: str, pool: str = "", owner: str = "") -> ResourceDocument:
    manifest = ModelManifest(name=name, pool_name=pool, operations=[MODEL_OPERATION_CHAT])
    if owner:
        manifest.tags.CopyFrom(Tags(owner=owner))
    return declared(model=ModelDeclaration(manifest=manifest))


def an_agent(name: str, model: str) -> ResourceDocument:
    return declared(agent=AgentManifest(name=name, model=model))


def an_alias(name: str, pattern: str) -> ResourceDocument:
    return declared(alias=AliasManifest(name=name, pattern=pattern, target="shared"))


def a_route(name: str, *candidates: str) -> ResourceDocument:
    return declared(route=RouteManifest(name=name, candidates=candidates))


@asynccontextmanager
async def registry(folder: Path) -> AsyncIterator[Callable[[str], Caller]]:
    """A registry that asks for keys, with models of several teams; gives the caller of a key."""
    async with registry_channel(folder, ring(HOLDERS)) as channel:
        await Caller(channel, "everything00").apply(
            a_model("team-a", pool="team-pool"),
            a_model("team-b", pool="team-pool"),
            a_model("other", pool="team-pool"),
            a_model("shared"),
            an_agent("team-coder", "team-a"),
            an_agent("boss", "other"),
            a_route("team-route", "team-a"),
            a_route("road", "other"),
        )
        yield lambda key_id: Caller(channel, key_id)


@asynccontextmanager
async def refused(*words: str) -> AsyncIterator[None]:
    with pytest.raises(WeftError) as found:
        yield
    assert found.value.reason is Reason.PERMISSION_DENIED
    for word in words:
        assert word in found.value.message


async def test_lists_and_page_tokens_reveal_only_names_visible_to_the_key(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        for key, models, agents, routes, pools in (
            ("everything00", "other shared team-a team-b", "boss team-coder", 2, "shared team-pool"),
            ("team00000000", "team-a team-b", "team-coder", 1, "team-pool"),
            ("reader000000", "team-a", "", 0, ""),
        ):
            caller = of(key)
            found, token = list[Any](), ""
            while not found or token:
                wanted = PB.ListResourcesRequest(kind="model", page_size=1, page_token=token)
                page = await caller.call(caller.reads.ListResources, wanted)
                found += page.resources
                token = page.next_page_token
            assert [each.name for each in found] == models.split()
            assert await caller.listed("agent") == agents.split()
            assert len(await caller.listed("route")) == routes
            assert await caller.listed("pool") == pools.split()
        async with refused("models:view"):
            await of("nobody000000").call(of("nobody000000").reads.ListResources, PB.ListResourcesRequest(kind="model"))


async def test_service_lists_for_a_caller_are_filtered_by_the_callers_names(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        whole, limited = of("everything00"), of("reader000000")
        for caller, names in ((whole, ["team-a", "team-b"]), (limited, ["team-a"])):
            assert await caller.listed("model", names=["team-*", "none"]) == names
        with pytest.raises(WeftError) as too_many:
            await whole.call(whole.reads.ListResources, PB.ListResourcesRequest(kind="model", names=["a"] * 65))
        assert too_many.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(("kind", "scope"), [("runner", "runners:view"), ("tenant", "settings:view")])
async def test_kinds_without_name_limits_need_their_own_scope(tmp_path: Path, kind: str, scope: str) -> None:
    async with registry(tmp_path) as of:
        team = of("team00000000")
        for rpc, request in (
            ("ListResources", PB.ListResourcesRequest(kind=kind)),
            ("GetResource", PB.GetResourceRequest(kind=kind, name="team-r")),
        ):
            async with refused(scope):
                await team.call(getattr(team.reads, rpc), request)


@pytest.mark.parametrize(
    ("kind", "name", "mine"),
    [
        ("model", "other", "team-a"),
        ("model", "not-there", "team-b"),
        ("members", "shared", "team-a"),
        ("pool", "shared", "team-pool"),
        ("agent", "boss", "team-coder"),
        ("route", "road", "team-route"),
    ],
)
async def test_forbidden_name_is_rejected_whether_or_not_it_exists(
    tmp_path: Path, kind: str, name: str, mine: str
) -> None:
    async with registry(tmp_path) as of:
        team = of("team00000000")

        async def read(name: str) -> Any:
            if kind == "members":
                return await team.call(team.reads.GetModelMembers, PB.GetModelMembersRequest(name=name))
            return await team.call(team.reads.GetResource, PB.GetResourceRequest(kind=kind, name=name))

        async with refused(f"models/{name}:view"):
            await read(name)
        assert (await read(mine)).ByteSize()


async def test_pool_hides_members_outside_the_keys_scopes(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        for key, members in (("everything00", ["other", "team-a", "team-b"]), ("team00000000", ["team-a", "team-b"])):
            caller = of(key)
            wanted = PB.GetResourceRequest(kind="pool", name="team-pool")
            for pool in (
                record_in((await caller.call(caller.reads.GetResource, wanted)).resource),
                (await caller.call(caller.reads.GetModelMembers, PB.GetModelMembersRequest(name="team-a"))).pool,
            ):
                assert [model.manifest.name for model in pool.members] == members
                assert (pool.size, pool.explicit) == (len(members), True)


@pytest.mark.parametrize(
    ("declaration", "missing"),
    [
        (a_model("mine"), "models/mine:edit"),
        (a_model("other"), "models/other:edit"),
        (a_model("team-c", pool="prod"), "models/prod:edit"),
        (an_agent("mine", "team-a"), "models/mine:edit"),
        (an_agent("team-spy", "other"), "inference/other:create"),
        (a_route("road", "team-a"), "models/road:edit"),
        (a_route("team-way", "team-a", "other"), "inference/other:create"),
    ],
)
async def test_key_declares_and_references_only_its_own_names_and_a_rejected_batch_is_not_applied(
    tmp_path: Path, declaration: ResourceDocument, missing: str
) -> None:
    async with registry(tmp_path) as of:
        team = of("team00000000")
        async with refused(missing):
            await team.apply(a_model("team-new"), declaration)
        with pytest.raises(WeftError) as found:
            await team.call(team.reads.GetResource, PB.GetResourceRequest(kind="model", name="team-new"))
        assert found.value.reason is Reason.MODEL_NOT_FOUND
        await of("everything00").apply(a_model("team-new"), declaration)


async def test_key_declares_and_deletes_within_its_scopes_and_owns_what_it_creates(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        team = of("team00000000")
        results = await team.apply(
            a_model("team-c", pool="team-pool"), an_agent("team-two", "shared"), a_route("team-way", "team-c", "shared")
        )
        assert [result.outcome for result in results] == [1, 1, 1]
        wanted = PB.GetResourceRequest(kind="model", name="team-c")
        made = record_in((await team.call(team.reads.GetResource, wanted)).resource)
        assert made.manifest.tags.owner == "key:team00000000"
        for owner in ("key:everything00", "somebody"):
            async with refused("owner"):
                await team.apply(a_model("team-d", owner=owner))
        async with refused("owner"):
            await team.apply(a_model("team-a", owner="key:team00000000"))
        await of("everything00").apply(a_model("team-c", owner="somebody"))
        for kind, name in ((ROUTE, "team-way"), (AGENT, "team-two"), (MODEL, "team-c")):
            await team.delete(kind, name)
        others = ((MODEL, "other"), (AGENT, "boss"), (ROUTE, "road"), (MODEL, "not-there"), (RUNNER, "team-r"))
        for kind, name in others:
            async with refused("runners:edit" if kind == RUNNER else "models"):
                await team.delete(kind, name)
        async with refused("the key lacks the scope models:edit"):
            await of("reader000000").delete(MODEL, "team-a")


@pytest.mark.parametrize(
    ("present", "wanted", "missing"),
    [
        (an_alias("team-x", "prod-*"), an_alias("team-x", "team-x"), "models/prod-*:edit"),
        (a_model("team-x", pool="prod"), a_model("team-x"), "models/prod:edit"),
    ],
)
async def test_key_does_not_end_that_a_resource_answers_for_other_names(
    tmp_path: Path, present: ResourceDocument, wanted: ResourceDocument, missing: str
) -> None:
    async with registry(tmp_path) as of:
        await of("everything00").apply(present)
        team = of("team00000000")
        async with refused(missing):
            await team.apply(wanted)
        async with refused(missing):
            await team.delete(present.kind, present.name)
        # The negative control: it may, once the resource answers for its own names only.
        await of("everything00").apply(wanted)
        await team.apply(wanted)
        await team.delete(present.kind, present.name)


async def test_keep_alive_of_a_route_needs_the_scope_for_operations(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        route = RouteManifest(name="team-way", candidates=["shared"])
        await of("team00000000").apply(declared(route=route))
        route.keep_alive.seconds = 0
        async with refused("operations/shared:create"):
            await of("team00000000").apply(declared(route=route))
        await of("everything00").apply(declared(route=route))


async def test_refusal_names_no_resource_that_the_key_may_not_see(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        await of("everything00").apply(a_model("team-c"), an_agent("hidden", "team-c"), an_alias("secret", "team-y"))
        team = of("team00000000")
        for refusal in (team.delete(MODEL, "team-c"), team.apply(an_alias("team-z", "team-y"))):
            with pytest.raises(WeftError) as found:
                await refusal
            assert found.value.reason in (Reason.RESOURCE_IN_USE, Reason.ALREADY_EXISTS)
            assert "(hidden)" in found.value.message
            assert not {"hidden", "secret"} & set(found.value.metadata.values())


async def test_delete_that_unloads_needs_the_scope_for_operations(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        await of("everything00").apply(a_model("team-c"))
        async with refused("operations/team-c:create"):
            await of("team00000000").delete(MODEL, "team-c", force=True)
        await of("everything00").delete(MODEL, "team-c", force=True)


@pytest.mark.parametrize(
    ("action", "missing"),
    [
        (operation_pb2.OperationAction(load_model=LoadModel(model="other")), "operations/other:create"),
        (operation_pb2.OperationAction(load_model=LoadModel(model="team-a", evict_model="x")), "operations/x:create"),
        (operation_pb2.OperationAction(unload_model=UnloadModel(model="other")), "operations/other:create"),
        (operation_pb2.OperationAction(flush_cache=FlushCache(scope=ALL)), "operations:create"),
        (operation_pb2.OperationAction(remove_model=RemoveModel(model="other")), "operations/other:create"),
        (operation_pb2.OperationAction(load_model=LoadModel(model="team-x", source=SOURCE)), "operations:create"),
        (operation_pb2.OperationAction(pull_model=operation_pb2.PullModel(source=SOURCE)), "operations:create"),
    ],
)
async def test_operations_on_other_models_are_rejected_by_name(
    tmp_path: Path, action: operation_pb2.OperationAction, missing: str
) -> None:
    async with registry(tmp_path) as of:
        worker = of("worker000000")

        async def ask(request_id: str, action: operation_pb2.OperationAction) -> None:
            request = operation_service_pb2.CreateOperationRequest(request_id=request_id, action=action)
            await worker.call(worker.operations.CreateOperation, request)

        async with refused(missing):
            await ask("one", action)
        # The negative control: a load of its own model is accepted.
        await ask("two", operation_pb2.OperationAction(load_model=LoadModel(model="team-a")))


async def test_mesh_watch_needs_scopes_without_name_limits(tmp_path: Path) -> None:
    async with registry(tmp_path) as of:
        team = of("team00000000")
        call = team.reads.Watch(PB.WatchRequest(), metadata=team.metadata, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as found:
            await call.read()
        assert found.value.code() is grpc.StatusCode.PERMISSION_DENIED
