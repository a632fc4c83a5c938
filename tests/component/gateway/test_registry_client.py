"""The registry client against a scripted registry over gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_script import FixedFleet
from kit.resources import carried, page

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
from weft.api.registry.v1.registry_service_pb2 import WatchEventsRequest
from weft.dispatch.fleet import FleetView
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import WeftError
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


async def test_apply_without_an_outcome_is_an_internal_error(tmp_path: Path) -> None:
    def silent(_: Any) -> declaration_service_pb2.ApplyResponse:
        return declaration_service_pb2.ApplyResponse(results=[declaration_service_pb2.ApplyResult(name="x")])

    async with connected(tmp_path, {"Apply": silent}) as (client, _):
        with pytest.raises(WeftError) as caught:
            await client.apply([], dry_run=False, adopt=False)
    assert caught.value.reason is Reason.INTERNAL


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
