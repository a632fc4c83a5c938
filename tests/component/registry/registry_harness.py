"""A real registry on a real gRPC server over a Unix socket, on a fake clock."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import grpc
from kit.refusals import refused
from kit.resources import declared, records

from registry_svc.registry_config import RegistryConfig
from registry_svc.registry_service import RegistryService, build
from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    event_pb2,
    join_token_service_pb2_grpc,
    model_pb2,
    pool_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    route_pb2,
    runner_pb2,
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
    settings_service_pb2_grpc,
    wake_pb2,
)
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.kinds import record_in
from weft.documents.left_out import left_out_item
from weft.kernel.channels.rpc import new_server, open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.services.service_lifecycle import Health
from weft_testing.fake_clock import FakeClock

if TYPE_CHECKING:
    from weft.api.registry.v1.declaration_service_pb2_grpc import DeclarationServiceAsyncStub
    from weft.api.registry.v1.join_token_service_pb2_grpc import JoinTokenServiceAsyncStub
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.api.registry.v1.runner_session_service_pb2_grpc import RunnerSessionServiceAsyncStub
    from weft.api.registry.v1.settings_service_pb2_grpc import SettingsServiceAsyncStub

WatchResponse = registry_service_pb2.WatchResponse
ACTIVE = runner_pb2.Runner.STATUS_ACTIVE
INACTIVE = runner_pb2.Runner.STATUS_INACTIVE
MODEL_ACTIVE = model_pb2.Model.STATUS_ACTIVE
MODEL_INACTIVE = model_pb2.Model.STATUS_INACTIVE
MODEL_HIBERNATING = model_pb2.Model.STATUS_HIBERNATING
PUBLIC = model_pb2.Model.KIND_PUBLIC
VIRTUAL = model_pb2.Model.KIND_VIRTUAL
AGENT_ACTIVE = agent_pb2.Agent.STATUS_ACTIVE
AGENT_INACTIVE = agent_pb2.Agent.STATUS_INACTIVE
AGENT_HIBERNATING = agent_pb2.Agent.STATUS_HIBERNATING
MODEL_FAILED = model_pb2.Model.STATUS_FAILED
MODEL_WORDS = {
    MODEL_ACTIVE: "active",
    MODEL_INACTIVE: "inactive",
    MODEL_HIBERNATING: "hibernating",
    MODEL_FAILED: "failed",
}
ROUTE_ACTIVE = route_pb2.Route.STATUS_ACTIVE
ROUTE_INACTIVE = route_pb2.Route.STATUS_INACTIVE
ROUTE_HIBERNATING = route_pb2.Route.STATUS_HIBERNATING
ROUTE_WORDS = {ROUTE_ACTIVE: "active", ROUTE_INACTIVE: "inactive", ROUTE_HIBERNATING: "hibernating"}
AGENT_WORDS = {AGENT_ACTIVE: "active", AGENT_INACTIVE: "inactive", AGENT_HIBERNATING: "hibernating"}
READ_LIMIT_SECONDS = 20.0
MODEL = "model"
AGENT = "agent"
RUNNER = "runner"
POOL = "pool"
ROUTE = "route"
ApplyResult = declaration_service_pb2.ApplyResult

LOOPS = 3
"""Loops of a registry that sleep between their rounds: the sweeper, the operations' housekeeping, the audit's head."""


@dataclass
class RunningRegistry:
    """A registry that answers, and the stubs to ask it with."""

    service: RegistryService
    clock: FakeClock
    channel: grpc.aio.Channel
    registry: "RegistryServiceAsyncStub"
    sessions: "RunnerSessionServiceAsyncStub"
    declarations: "DeclarationServiceAsyncStub"
    tokens: "JoinTokenServiceAsyncStub"
    settings: "SettingsServiceAsyncStub"

    async def advance(self, seconds: float) -> None:
        """Let time pass; the sweeper and the two loops of the operations finish each of their rounds."""
        await self.clock.advance(seconds, sleepers=LOOPS)

    async def shown(self, kind: str, name: str) -> Any:
        found = await self.registry.GetResource(registry_service_pb2.GetResourceRequest(kind=kind, name=name))
        return record_in(found.resource)

    async def listed(self, kind: str, **wanted: Any) -> list[Any]:
        request = registry_service_pb2.ListResourcesRequest(kind=kind, **wanted)
        return records((await self.registry.ListResources(request)).resources)

    async def runner(self, name: str) -> runner_pb2.Runner:
        return cast("runner_pb2.Runner", await self.shown("runner", name))

    async def model(self, name: str) -> model_pb2.Model:
        return cast("model_pb2.Model", await self.shown("model", name))

    async def agent(self, name: str) -> agent_pb2.Agent:
        return cast("agent_pb2.Agent", await self.shown("agent", name))

    async def route(self, name: str) -> route_pb2.Route:
        return cast("route_pb2.Route", await self.shown("route", name))

    async def pool(self, name: str) -> pool_pb2.Pool:
        return cast("pool_pb2.Pool", await self.shown("pool", name))

    async def apply(self, *declarations: ResourceDocument, dry_run: bool = False, adopt: bool = False) -> list[str]:
        """The outcomes in words, such as "model m1 created"."""
        request = declaration_service_pb2.ApplyRequest(declarations=declarations, dry_run=dry_run, adopt=adopt)
        response = await self.declarations.Apply(request)
        return [
            f"{result.kind} {result.name} {ApplyResult.Outcome.Name(result.outcome).removeprefix('OUTCOME_').lower()}"
            for result in response.results
        ]

    async def delete(self, kind: str, name: str, requested_by: str = "") -> None:
        request = declaration_service_pb2.DeleteRequest(kind=kind, name=name, requested_by=requested_by)
        await self.declarations.Delete(request)

    async def events(self, kind: str = "", name: str = "") -> list[str]:
        """All events in words, oldest first, such as "model m1 registered"."""
        request = registry_service_pb2.ListEventsRequest(kind=kind, name=name, limit=1000)
        return [event_in_words(event) for event in (await self.registry.ListEvents(request)).events]

    async def watch(self, *, include_ticket_keys: bool = False) -> "WatchReader":
        """A watch whose snapshot has been read."""
        request = registry_service_pb2.WatchRequest(include_ticket_keys=include_ticket_keys)
        reader = WatchReader(self.registry.Watch(request))
        reader.snapshot = await reader.read()
        return reader


class WatchReader:
    """One Watch call, read response by response."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.snapshot = WatchResponse()

    async def read(self) -> WatchResponse:
        async with asyncio.timeout(READ_LIMIT_SECONDS):
            response = await self.call.read()
        if response is grpc.aio.EOF:
            raise AssertionError(await self.call.code())
        return cast("WatchResponse", response)

    async def read_changes(self, count: int) -> list[str]:
        """The next `count` changes in words, such as "runner r1 active" or "model m1 gone"."""
        return [in_words((await self.read()).change) for _ in range(count)]


def in_words(change: registry_service_pb2.Change) -> str:
    match change.WhichOneof("kind"):
        case "runner":
            runner = change.runner.runner
            return f"runner {runner.name} {'active' if runner.status == ACTIVE else 'inactive'}"
        case "deleted_runner":
            return f"runner {change.deleted_runner} gone"
        case "settings":
            return f"settings at revision {change.settings.revision}"
        case "deleted_resource":
            return f"{change.deleted_resource.kind} {change.deleted_resource.name} gone"
        case _:
            words: dict[str, Any] = {"model": MODEL_WORDS, "agent": AGENT_WORDS, "route": ROUTE_WORDS}
            told = change.resource
            return f"{told.kind} {told.name} {words[told.kind][record_in(told).status]}"


@dataclass
class SomeRunner:
    """What a runner would send."""

    registry: RunningRegistry
    name: str = "r1"
    models: tuple[str | model_pb2.ModelManifest, ...] = ("m1",)
    agents: tuple[agent_pb2.AgentManifest, ...] = ()
    incarnation: str = "life-1"
    session_id: str = ""
    ticket_key: bytes = b""
    sequence: int = 0
    opens: int = field(default=0)
    requires_all: bool = False
    listed: tuple[str, ...] = ()
    """The models whose names come from the list of a server."""
    left_out: list[str] = field(default_factory=list)
    """What the registry left out at the last opening, as text."""

    def opening(self) -> runner_session_service_pb2.OpenSessionRequest:
        return runner_session_service_pb2.OpenSessionRequest(
            request_id=f"open-{self.name}-{self.incarnation}-{self.opens}",
            session_id=self.session_id,
            runner=runner_pb2.Runner(
                name=self.name,
                incarnation=self.incarnation,
                address=f"unix:/run/{self.name}",
                capability=runner_pb2.Capability(
                    instances=[
                        runner_pb2.InstanceState(model=name, listed=True, phase=runner_pb2.InstanceState.PHASE_READY)
                        for name in self.listed
                    ]
                ),
            ),
            models=[manifest(model) if isinstance(model, str) else model for model in self.models],
            agents=self.agents,
            requires_all=self.requires_all,
        )

    async def open(self) -> Self:
        self.opens += 1
        response = await self.registry.sessions.OpenSession(self.opening())
        self.session_id, self.ticket_key = response.session_id, response.ticket_key
        self.left_out = [left_out_item(item) for item in response.left_out]
        return self

    async def beat(self, capability: runner_pb2.Capability | None = None) -> None:
        self.sequence += 1
        await self.registry.sessions.Heartbeat(
            runner_session_service_pb2.HeartbeatRequest(
                session_id=self.session_id,
                incarnation=self.incarnation,
                sequence=self.sequence,
                capability=capability,
            )
        )

    async def close(self) -> None:
        await self.registry.sessions.CloseSession(
            runner_session_service_pb2.CloseSessionRequest(session_id=self.session_id, incarnation=self.incarnation)
        )


def manifest(
    name: str, *, pool: str = "", context_tokens: int = 4096, wake: wake_pb2.Wake | None = None, remote: bool = False
) -> model_pb2.ModelManifest:
    return model_pb2.ModelManifest(
        name=name,
        pool_name=pool,
        operations=[model_pb2.MODEL_OPERATION_CHAT],
        context_tokens=context_tokens,
        wake=wake,
        remote=remote,
    )


def an_agent(name: str, model: str = "", *, pool: str = "", prompt: str = "Be terse.") -> agent_pb2.AgentManifest:
    manifest = agent_pb2.AgentManifest(name=name, system_prompt=prompt)
    manifest.default_params.temperature = 0.2
    if pool:
        manifest.pool = pool
    else:
        manifest.model = model or "m1"
    return manifest


def an_alias(name: str, target: str = "m1", *, pattern: str = "", tenant: str = "") -> ResourceDocument:
    return declared(alias=alias_pb2.AliasManifest(name=name, target=target, pattern=pattern, tenant=tenant))


def a_route(name: str, *candidates: str) -> ResourceDocument:
    return declared(route=route_pb2.RouteManifest(name=name, candidates=candidates or ("m1",)))


def declare(model: model_pb2.ModelManifest | str, *, runner: str = "") -> ResourceDocument:
    given = manifest(model) if isinstance(model, str) else model
    return declared(model=model_pb2.ModelDeclaration(manifest=given, runner=runner))


def by_mesh() -> wake_pb2.Wake:
    """A wake plan by which routers wake the host."""
    packet = wake_pb2.WakeOnLanAction(mac_address="02:00:00:00:00:01")
    return wake_pb2.Wake(by_mesh=wake_pb2.WakeRecipe(wake_on_lan=packet))


def in_phase(phase: runner_pb2.InstanceState.Phase.ValueType, *models: str) -> runner_pb2.Capability:
    states = [runner_pb2.InstanceState(model=model, phase=phase) for model in models or ("m1",)]
    return runner_pb2.Capability(instances=states)


def event_in_words(event: event_pb2.Event) -> str:
    return f"{event.kind} {event.name} {event_pb2.EventReason.Name(event.reason).removeprefix('EVENT_REASON_').lower()}"


def ready(model: str = "m1", *, slots_used: int = 0, detail: str = "") -> runner_pb2.Capability:
    state = runner_pb2.InstanceState(
        model=model,
        phase=runner_pb2.InstanceState.PHASE_READY,
        slots_total=4,
        slots_used=slots_used,
        detail=detail,
    )
    return runner_pb2.Capability(instances=[state])


async def refusal(reason: Reason, change: Awaitable[object]) -> WeftError:
    """Returns the error of a change that is refused."""
    with refused(reason) as errors:
        await change
    return errors[0]


@asynccontextmanager
async def running_registry(
    folder: Path, *, clock: FakeClock | None = None, database_url: str = "", **settings: Any
) -> AsyncIterator[RunningRegistry]:
    """A registry on `folder`/registry.db or another database, served on a Unix socket, with health and reflection."""
    clock = clock or FakeClock()
    # Without a spread every expiry has one exact moment.
    chosen = cast("Any", {"restart_spread_seconds": 0.0, **settings})
    config = RegistryConfig(database_url=database_url or f"sqlite:///{folder}/registry.db", **chosen)
    service, server, health = build(config, clock=clock), new_server(), Health()
    service.register(server)
    health.register(server, service.service_names)
    address = f"unix:{folder}/registry.sock"
    await service.start()
    # After the start, which may be refused: gRPC keeps the socket of a server that was never started.
    server.add_insecure_port(address)
    await server.start()
    health.set_serving(service.service_names, serving=True)
    async with open_channel(address) as channel:
        registry = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(channel))
        sessions = cast(
            "RunnerSessionServiceAsyncStub", runner_session_service_pb2_grpc.RunnerSessionServiceStub(channel)
        )
        declarations = cast("DeclarationServiceAsyncStub", declaration_service_pb2_grpc.DeclarationServiceStub(channel))
        tokens = cast("JoinTokenServiceAsyncStub", join_token_service_pb2_grpc.JoinTokenServiceStub(channel))
        settings_stub = cast("SettingsServiceAsyncStub", settings_service_pb2_grpc.SettingsServiceStub(channel))
        try:
            yield RunningRegistry(service, clock, channel, registry, sessions, declarations, tokens, settings_stub)
        finally:
            await service.stop(grace_seconds=5.0)
            await server.stop(grace=None)
