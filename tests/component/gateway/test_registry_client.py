"""The registry client against a scripted registry over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_script import FixedFleet
from kit.resources import carried, manifest_in, page

from gateway.registry_client import RegistryClient
from weft.api.registry.v1 import (
    agent_pb2,
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    event_pb2,
    model_pb2,
    pool_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    route_pb2,
    runner_pb2,
    settings_pb2,
    settings_service_pb2,
    settings_service_pb2_grpc,
)
from weft.api.registry.v1.registry_service_pb2 import ListEventsRequest, WatchEventsRequest
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView, RunnerView
from weft.documents.codec import document_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import (
    Document,
    ModelDocument,
    PoolDocument,
    applied_document,
    plain,
)
from weft.documents.yaml_documents import parse_document
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering, new_server, open_channel

Answer = Callable[[Any], Any]


def model(name: str) -> model_pb2.Model:
    manifest = model_pb2.ModelManifest(name=name, pool_name="chat")
    return model_pb2.Model(
        manifest=manifest, runner="titan", status=model_pb2.Model.STATUS_ACTIVE, kind=model_pb2.Model.KIND_VIRTUAL
    )


def agent(name: str) -> agent_pb2.Agent:
    return agent_pb2.Agent(manifest=agent_pb2.AgentManifest(name=name, model="tiny"))


def pool() -> pool_pb2.Pool:
    return pool_pb2.Pool(name="chat", explicit=True, members=[model("tiny")], size=1, active_count=1)


def route(name: str) -> route_pb2.Route:
    return route_pb2.Route(manifest=route_pb2.RouteManifest(name=name, candidates=["tiny"]))


def settings(*, allowed: bool) -> settings_pb2.MeshSettings:
    return settings_pb2.MeshSettings(allow_cloud_fallback=allowed, revision=3)


def event(sequence: int) -> event_pb2.Event:
    return event_pb2.Event(
        sequence=sequence,
        kind="agent",
        name="coder",
        reason=event_pb2.EVENT_REASON_WOKE,
        message="it woke",
    )


RECORDS: dict[str, Callable[[str], Any]] = {
    "model": model,
    "agent": agent,
    "runner": lambda name: runner_pb2.Runner(name=name),
    "pool": lambda _: pool(),
    "route": route,
}
NAMES = {"model": "tiny", "agent": "coder", "runner": "titan", "pool": "chat", "route": "summaries"}
ANSWERS: dict[str, Answer] = {
    "ListResources": lambda request: page(
        [RECORDS[request.kind](NAMES[request.kind])], "more" if request.kind == "model" else ""
    ),
    "GetResource": lambda request: registry_service_pb2.GetResourceResponse(
        resource=carried(RECORDS[request.kind](request.name))
    ),
    "GetModelMembers": lambda _: registry_service_pb2.GetModelMembersResponse(pool=pool()),
    "GetSettings": lambda _: settings_service_pb2.GetSettingsResponse(settings=settings(allowed=True)),
    "UpdateSettings": lambda request: settings_service_pb2.UpdateSettingsResponse(
        settings=settings(allowed=request.allow_cloud_fallback)
    ),
    "ListEvents": lambda _: registry_service_pb2.ListEventsResponse(events=[event(1), event(2)]),
    "Delete": lambda _: declaration_service_pb2.DeleteResponse(),
}


class ScriptedServicer(
    registry_service_pb2_grpc.RegistryServiceServicer,
    declaration_service_pb2_grpc.DeclarationServiceServicer,
    settings_service_pb2_grpc.SettingsServiceServicer,
):
    """Answers by rpc name; an exception is raised as the rpc's error."""

    def __init__(self, answers: dict[str, Answer | Exception]) -> None:
        self.asked: list[Any] = []
        for name, answer in answers.items():
            setattr(self, name, self._rpc(answer))

    def _rpc(self, answer: Answer | Exception) -> Callable[[Any, Any], Any]:
        async def rpc(request: Any, context: Any) -> Any:
            self.asked.append(request)
            async with answering(context):
                if isinstance(answer, Exception):
                    raise answer
                found = answer(request)
                return await found if asyncio.iscoroutine(found) else found

        return rpc

    async def WatchEvents(  # noqa: N802 - the rpc's name
        self, request: registry_service_pb2.WatchEventsRequest, context: Any
    ) -> AsyncIterator[registry_service_pb2.WatchEventsResponse]:
        self.asked.append(request)
        async with answering(context):
            yield registry_service_pb2.WatchEventsResponse(event=event(7))
            if request.name:
                raise WeftError(Reason.WATCH_LAGGED, "read faster")


@asynccontextmanager
async def connected(
    folder: Path,
    answers: dict[str, Answer | Exception] | None = None,
    *,
    view: FleetView | None = None,
    timeout_seconds: float = 30.0,
) -> AsyncIterator[tuple[RegistryClient, ScriptedServicer]]:
    script: dict[str, Answer | Exception] = {**ANSWERS, **(answers or {})}
    servicer, server = ScriptedServicer(script), new_server()  # type: ignore[abstract]  # the script has the rest
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(servicer, server)
    declaration_service_pb2_grpc.add_DeclarationServiceServicer_to_server(servicer, server)
    settings_service_pb2_grpc.add_SettingsServiceServicer_to_server(servicer, server)
    address = f"unix:{folder / 'registry.sock'}"
    server.add_insecure_port(address)
    await server.start()
    channel = open_channel(address)
    try:
        fleet = FixedFleet(view or FleetView(revision=1))
        yield RegistryClient(channel, fleet, timeout_seconds=timeout_seconds), servicer
    finally:
        await channel.close(grace=None)
        await server.stop(grace=0.5)


@pytest.mark.parametrize(
    ("kind", "document", "name"),
    [
        (ResourceKind.MODEL, ModelDocument, "tiny"),
        (ResourceKind.AGENT, Document, "coder"),
        (ResourceKind.RUNNER, Document, "titan"),
        (ResourceKind.POOL, PoolDocument, "chat"),
        (ResourceKind.ROUTE, Document, "summaries"),
    ],
)
async def test_each_kind_is_listed_and_fetched(tmp_path: Path, kind: ResourceKind, document: type, name: str) -> None:
    async with connected(tmp_path) as (client, servicer):
        page = await client.list_page(kind, 5, "after")
        one = await client.get(kind, name)
    assert [type(entry) for entry in page.documents] == [document]
    assert (page.documents[0].name, one.name, type(one)) == (name, name, document)
    assert page.next_page_token == ("more" if kind is ResourceKind.MODEL else "")
    assert (servicer.asked[0].page_size, servicer.asked[0].page_token) == (5, "after")
    assert servicer.asked[1].name == name


async def test_model_includes_its_runtime_state(tmp_path: Path) -> None:
    instance = InstanceState(
        model="tiny",
        phase=InstanceState.PHASE_LOADING,
        slots_total=2,
        slots_used=0,
        load_progress=0.5,
        detail="reads weights",
        context_tokens=512,
    )
    titan = RunnerView(
        name="titan",
        incarnation="1",
        address="a",
        host="h",
        runtime="llama_server",
        active=True,
        draining=False,
        ticket_key=b"",
        instances={"tiny": instance},
    )
    async with connected(tmp_path, view=FleetView(1, {"titan": titan})) as (client, _):
        listed = (await client.list_page(ResourceKind.MODEL, 0, "")).documents[0]
        found = await client.get(ResourceKind.MODEL, "tiny")
        _, (member, *_) = await client.members("tiny")
    assert listed == found == member
    assert isinstance(found, ModelDocument)
    told = plain(found)["status"]["instance"]
    assert (told["phase"], told["loadProgress"], told["detail"], told["contextTokens"]) == (
        "loading",
        0.5,
        "reads weights",
        512,
    )


async def test_members_events_and_delete_are_supported(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, servicer):
        pool, _ = await client.members("tiny")
        events = await client.list_events(ListEventsRequest(kind="agent", name="coder", limit=5))
        await client.delete(ResourceKind.RUNNER, "titan", force=False)
    assert (pool.name, pool.explicit, pool.size, pool.active_count) == ("chat", True, 1, 1)
    told = [document_of(entry) for entry in events.events]
    assert [(entry["sequence"], entry["resourceKind"], entry["reason"]) for entry in told] == [
        (1, "agent", "woke"),
        (2, "agent", "woke"),
    ]
    assert (servicer.asked[1].kind, servicer.asked[1].limit) == ("agent", 5)
    assert (servicer.asked[2].kind, servicer.asked[2].name) == ("runner", "titan")


async def test_settings_are_read_and_updated(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, servicer):
        assert (await client.settings()).allow_cloud_fallback
        wanted = settings_pb2.MeshSettings(allow_cloud_fallback=False)
        assert not (await client.update_settings(wanted)).allow_cloud_fallback
    # False is a value, not its absence.
    assert servicer.asked[1].HasField("allow_cloud_fallback")


async def test_watch_yields_events_until_it_ends_with_a_reason(tmp_path: Path) -> None:
    async with connected(tmp_path) as (client, _):
        for wanted, reason in (
            (WatchEventsRequest(), Reason.SERVICE_UNAVAILABLE),
            (WatchEventsRequest(kind="agent", name="coder"), Reason.WATCH_LAGGED),
        ):
            watch = client.watch_events(wanted)
            assert (await anext(watch)).sequence == 7
            with pytest.raises(WeftError) as caught:
                await anext(watch)
            assert caught.value.reason is reason


def _applied(request: declaration_service_pb2.ApplyRequest) -> declaration_service_pb2.ApplyResponse:
    result = declaration_service_pb2.ApplyResult(
        kind="agent",
        name="coder",
        outcome=declaration_service_pb2.ApplyResult.OUTCOME_CREATED,
        after=request.declarations[0],
    )
    return declaration_service_pb2.ApplyResponse(results=[result])


async def test_apply_sends_declarations_and_returns_outcomes(tmp_path: Path) -> None:
    wanted = parse_document({"kind": "agent", "name": "coder", "model": "tiny", "defaultParams": {"temperature": 0}})
    async with connected(tmp_path, {"Apply": _applied}) as (client, servicer):
        results = await client.apply([wanted], dry_run=True, adopt=True)
    assert (servicer.asked[0].dry_run, servicer.asked[0].adopt) == (True, True)
    assert manifest_in(servicer.asked[0].declarations[0]).default_params.HasField("temperature")
    told = applied_document(results[0])
    assert (told["kind"], told["name"], told["outcome"]) == ("agent", "coder", "created")
    assert ("before" in told, told["after"]) == (False, plain(wanted))


async def test_apply_without_an_outcome_is_an_internal_error(tmp_path: Path) -> None:
    def silent(_: Any) -> declaration_service_pb2.ApplyResponse:
        return declaration_service_pb2.ApplyResponse(results=[declaration_service_pb2.ApplyResult(name="x")])

    async with connected(tmp_path, {"Apply": silent}) as (client, _):
        with pytest.raises(WeftError) as caught:
            await client.apply([], dry_run=False, adopt=False)
    assert caught.value.reason is Reason.INTERNAL


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("page_token", "pageToken"),
        ("declarations[2].model.manifest.pool_name", "documents[2].poolName"),
        ("declarations[0].model.runner", "documents[0].runner"),
        ("declarations[0].agent.name", "documents[0].name"),
        ("declarations[0].agent", "documents[0]"),
        ("declarations[0].agent.default_params.max_tokens", "documents[0].defaultParams.max_tokens"),
        ("declarations", "declarations"),
        ("name", "name"),
    ],
)
async def test_field_error_uses_the_callers_field_name(tmp_path: Path, theirs: str, ours: str) -> None:
    async with connected(tmp_path, {"GetResource": invalid_field(theirs, "is wrong")}) as (client, _):
        with pytest.raises(FieldError) as caught:
            await client.get(ResourceKind.MODEL, "x")
    assert (caught.value.field, caught.value.message) == (ours, f"{ours}: is wrong")


async def test_conflict_with_an_owner_of_another_kind_is_reported(tmp_path: Path) -> None:
    taken = WeftError(Reason.ALREADY_EXISTS, "tiny is a runner already", metadata={"owner_kind": "runner"})
    async with connected(tmp_path, {"Apply": taken}) as (client, _):
        with pytest.raises(WeftError) as caught:
            await client.apply([], dry_run=False, adopt=False)
    assert (caught.value.reason, caught.value.metadata["owner_kind"]) == (Reason.ALREADY_EXISTS, "runner")
    assert "runner" in caught.value.message


async def test_unresponsive_registry_is_a_timeout(tmp_path: Path) -> None:
    async with connected(tmp_path, {"GetResource": lambda _: asyncio.Event().wait()}, timeout_seconds=0.05) as (
        client,
        _,
    ):
        with pytest.raises(WeftError, match="did not answer within") as caught:
            await client.get(ResourceKind.MODEL, "x")
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED


async def test_unreachable_registry_is_unavailable(tmp_path: Path) -> None:
    channel = open_channel(f"unix:{tmp_path}/nobody.sock")
    client = RegistryClient(channel, FixedFleet.of(), timeout_seconds=30)
    with pytest.raises(WeftError, match="registry cannot be reached") as caught:
        await client.get(ResourceKind.MODEL, "x")
    assert caught.value.reason is Reason.SERVICE_UNAVAILABLE
    with pytest.raises(WeftError) as watched:
        await anext(client.watch_events(WatchEventsRequest()))
    assert watched.value.reason is Reason.SERVICE_UNAVAILABLE
    await channel.close(grace=None)


async def test_older_registry_lacks_the_method(tmp_path: Path) -> None:
    class OlderServicer(registry_service_pb2_grpc.RegistryServiceServicer):
        async def GetResource(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: N802
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    server = new_server()
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(OlderServicer(), server)  # type: ignore[abstract]
    address = f"unix:{tmp_path / 'registry.sock'}"
    server.add_insecure_port(address)
    await server.start()
    channel = open_channel(address)
    with pytest.raises(WeftError) as caught:
        await RegistryClient(channel, FixedFleet.of(), timeout_seconds=30).get(ResourceKind.AGENT, "x")
    await channel.close(grace=None)
    await server.stop(grace=0)
    assert caught.value.reason is Reason.UNSUPPORTED_OPERATION
