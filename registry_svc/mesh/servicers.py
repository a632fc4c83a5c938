"""gRPC servicers of the mesh: reads and watches, runner sessions, declarations, settings."""

import heapq
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc
from typing_extensions import override

from registry_svc.config import RegistryConfig
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.declarations import Declarations, SettingsManager
from registry_svc.mesh.domain import Kind
from registry_svc.mesh.expiry import Retirements
from registry_svc.mesh.manifests import valid_batch
from registry_svc.mesh.records import to_kind
from registry_svc.mesh.requests import event_limit, events_of, page_of, page_token, valid_heartbeat, valid_opening
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.watch import Snapshot, Watcher, change_message, concerns
from registry_svc.wire_values import to_actor
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
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
    settings_service_pb2,
    settings_service_pb2_grpc,
)
from weft.kernel.errors import WeftError
from weft.kernel.names import require_name
from weft.kernel.principal import MESH_ACCESS, Access, Resource, Role
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller
from weft.kernel.timestamps import duration_of, stamp_of

Context = grpc.aio.ServicerContext[Any, Any]

T = TypeVar("T")


class Catalogue:
    """Answers at once; raises SHUTTING_DOWN while the registry does not run."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def runner(self, name: str) -> runner_pb2.Runner | None:
        """The runner of this name."""
        self._core.require_open()
        member = self._core.mesh.of_runner(name)
        return None if member is None else member.runner().runner

    def model(self, name: str) -> model_pb2.Model | None:
        """The model of this name."""
        self._core.require_open()
        return self._core.mesh.model(name)

    def agent(self, name: str) -> agent_pb2.Agent | None:
        """The agent of this name."""
        self._core.require_open()
        return self._core.mesh.agent(name)

    def route(self, name: str) -> route_pb2.Route | None:
        """The route of this name."""
        self._core.require_open()
        return self._core.mesh.routes.get(name)

    def pool(self, name: str) -> pool_pb2.Pool | None:
        """The pool of this name."""
        self._core.require_open()
        return self._core.mesh.pool(name)

    def pool_of(self, model: str) -> pool_pb2.Pool | None:
        """The pool that a model is in; None when there is no such model."""
        self._core.require_open()
        name = self._core.mesh.pools.pool_of(model)
        return None if name is None else self._core.mesh.pool(name)

    def runners_after(self, name: str, limit: int) -> list[runner_pb2.Runner]:
        """Return at most `limit` runners with names after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.runner_names(), self.runner, name, limit)

    def models_after(self, name: str, limit: int) -> list[model_pb2.Model]:
        """Return at most `limit` models with names after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.model_names(), self.model, name, limit)

    def agents_after(self, name: str, limit: int) -> list[agent_pb2.Agent]:
        """Return at most `limit` agents with names after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.agent_names(), self.agent, name, limit)

    def routes_after(self, name: str, limit: int) -> list[route_pb2.Route]:
        """Return at most `limit` routes with names after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.routes.names(), self.route, name, limit)

    def pools_after(self, name: str, limit: int) -> list[pool_pb2.Pool]:
        """Return at most `limit` pools with names after `name`, in order."""
        self._core.require_open()
        return _page(self._core.mesh.pools.names(), self.pool, name, limit)

    def watch(self) -> tuple[Snapshot, Watcher[registry_service_pb2.WatchResponse]]:
        """Return everything there is, and a watcher that receives every change after that."""
        return self._core.watch()

    def events(self, kind: Kind | None, name: str, limit: int) -> list[event_pb2.Event]:
        """The newest events of this kind and name, oldest first; None and "" mean all."""
        self._core.require_open()
        return self._core.events.newest(kind, name, limit)

    def watch_events(self) -> Watcher[event_pb2.Event]:
        """Return a watcher that receives every event from now on."""
        self._core.require_open()
        return self._core.events.subscribe()


def _page(names: Iterable[str], find: Callable[[str], T | None], after: str, limit: int) -> list[T]:
    first = heapq.nsmallest(limit, (name for name in names if name > after))
    return [found for name in first if (found := find(name)) is not None]


_ALSO_WATCHED = (Access(Resource.RUNNERS, Role.VIEW), Access(Resource.SETTINGS, Role.VIEW))


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """See RegistryService in the contract."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    @override
    async def ListModels(
        self, request: registry_service_pb2.ListModelsRequest, context: Context
    ) -> registry_service_pb2.ListModelsResponse:
        async with answering(context):
            after, size = page_of(request)
            models = self._catalogue.models_after(after, size + 1)
            return registry_service_pb2.ListModelsResponse(
                models=models[:size],
                next_page_token=_next([model.manifest.name for model in models], size),
            )

    @override
    async def GetModel(
        self, request: registry_service_pb2.GetModelRequest, context: Context
    ) -> registry_service_pb2.GetModelResponse:
        async with answering(context):
            model = self._catalogue.model(request.name)
            if model is None:
                raise WeftError(Reason.MODEL_NOT_FOUND, "no model of this name is known")
            return registry_service_pb2.GetModelResponse(model=model)

    @override
    async def GetModelMembers(
        self, request: registry_service_pb2.GetModelMembersRequest, context: Context
    ) -> registry_service_pb2.GetModelMembersResponse:
        async with answering(context):
            pool = self._catalogue.pool_of(request.name)
            if pool is None:
                raise WeftError(Reason.MODEL_NOT_FOUND, "no model of this name is known")
            return registry_service_pb2.GetModelMembersResponse(pool=pool)

    @override
    async def ListPools(
        self, request: registry_service_pb2.ListPoolsRequest, context: Context
    ) -> registry_service_pb2.ListPoolsResponse:
        async with answering(context):
            after, size = page_of(request)
            pools = self._catalogue.pools_after(after, size + 1)
            return registry_service_pb2.ListPoolsResponse(
                pools=pools[:size],
                next_page_token=_next([pool.name for pool in pools], size),
            )

    @override
    async def GetPool(
        self, request: registry_service_pb2.GetPoolRequest, context: Context
    ) -> registry_service_pb2.GetPoolResponse:
        async with answering(context):
            pool = self._catalogue.pool(request.name)
            if pool is None:
                raise WeftError(Reason.NOT_FOUND, "no pool of this name is known")
            return registry_service_pb2.GetPoolResponse(pool=pool)

    @override
    async def ListAgents(
        self, request: registry_service_pb2.ListAgentsRequest, context: Context
    ) -> registry_service_pb2.ListAgentsResponse:
        async with answering(context):
            after, size = page_of(request)
            agents = self._catalogue.agents_after(after, size + 1)
            return registry_service_pb2.ListAgentsResponse(
                agents=agents[:size],
                next_page_token=_next([agent.manifest.name for agent in agents], size),
            )

    @override
    async def GetAgent(
        self, request: registry_service_pb2.GetAgentRequest, context: Context
    ) -> registry_service_pb2.GetAgentResponse:
        async with answering(context):
            agent = self._catalogue.agent(request.name)
            if agent is None:
                raise WeftError(Reason.NOT_FOUND, "no agent of this name is known")
            return registry_service_pb2.GetAgentResponse(agent=agent)

    @override
    async def ListRoutes(
        self, request: registry_service_pb2.ListRoutesRequest, context: Context
    ) -> registry_service_pb2.ListRoutesResponse:
        async with answering(context):
            after, size = page_of(request)
            routes = self._catalogue.routes_after(after, size + 1)
            return registry_service_pb2.ListRoutesResponse(
                routes=routes[:size],
                next_page_token=_next([route.manifest.name for route in routes], size),
            )

    @override
    async def GetRoute(
        self, request: registry_service_pb2.GetRouteRequest, context: Context
    ) -> registry_service_pb2.GetRouteResponse:
        async with answering(context):
            route = self._catalogue.route(request.name)
            if route is None:
                raise WeftError(Reason.NOT_FOUND, "no route of this name is known")
            return registry_service_pb2.GetRouteResponse(route=route)

    @override
    async def ListRunners(
        self, request: registry_service_pb2.ListRunnersRequest, context: Context
    ) -> registry_service_pb2.ListRunnersResponse:
        async with answering(context):
            after, size = page_of(request)
            runners = self._catalogue.runners_after(after, size + 1)
            return registry_service_pb2.ListRunnersResponse(
                runners=runners[:size],
                next_page_token=_next([runner.name for runner in runners], size),
            )

    @override
    async def GetRunner(
        self, request: registry_service_pb2.GetRunnerRequest, context: Context
    ) -> registry_service_pb2.GetRunnerResponse:
        async with answering(context):
            runner = self._catalogue.runner(request.name)
            if runner is None:
                raise WeftError(Reason.NOT_FOUND, "no runner of this name is known")
            return registry_service_pb2.GetRunnerResponse(runner=runner)

    # A coroutine that writes ends its watcher the moment the call is cancelled; a generator would wait for the
    # garbage collector. grpc.aio takes both, the generated types know only the latter.
    @override
    async def Watch(  # type: ignore[override]
        self, request: registry_service_pb2.WatchRequest, context: Context
    ) -> None:
        async with answering(context):
            # The watch includes runners and settings, so the right to view models alone is not enough.
            for access in _ALSO_WATCHED:
                caller().require(access)
            if request.include_ticket_keys:
                caller().require(MESH_ACCESS)
            snapshot, watcher = self._catalogue.watch()
            with watcher:
                await context.write(await snapshot.message(with_keys=request.include_ticket_keys))
                async for response in watcher:
                    await context.write(change_message(response, with_keys=request.include_ticket_keys))

    @override
    async def ListEvents(
        self, request: registry_service_pb2.ListEventsRequest, context: Context
    ) -> registry_service_pb2.ListEventsResponse:
        async with answering(context):
            kind, name = events_of(request)
            events = self._catalogue.events(kind, name, event_limit(request))
            return registry_service_pb2.ListEventsResponse(events=events)

    @override
    async def WatchEvents(  # type: ignore[override]  # see Watch
        self, request: registry_service_pb2.WatchEventsRequest, context: Context
    ) -> None:
        async with answering(context):
            kind, name = events_of(request)
            with self._catalogue.watch_events() as watcher:
                # A caller that has the headers misses no event from now on.
                await context.send_initial_metadata(())
                async for event in watcher:
                    if concerns(event, kind, name):
                        await context.write(registry_service_pb2.WatchEventsResponse(event=event))


def _next(names: list[str], size: int) -> str:
    """The token of the page after `size` of these names; empty when there are no more."""
    return page_token(names[size - 1]) if len(names) > size else ""


class RunnerSessionServicer(runner_session_service_pb2_grpc.RunnerSessionServiceServicer):
    """See RunnerSessionService in the contract."""

    def __init__(self, roster: SessionManager, retirements: Retirements, core: RegistryCore) -> None:
        self._roster = roster
        self._retirements = retirements
        self._config = core.config
        self._clock = core.clock
        self._mesh_clock = core.mesh_clock

    @override
    async def OpenSession(
        self, request: runner_session_service_pb2.OpenSessionRequest, context: Context
    ) -> runner_session_service_pb2.OpenSessionResponse:
        async with answering(context):
            session, config = await self._roster.open_session(valid_opening(request, self._config)), self._config
            # A dial-out runner may have any clock: it is not a machine of the operator.
            max_offset = None if request.runner.dial_out else duration_of(config.max_clock_offset_seconds)
            return runner_session_service_pb2.OpenSessionResponse(
                session_id=session.id,
                ticket_key=session.ticket_key,
                heartbeat_interval=duration_of(config.heartbeat_interval_seconds),
                report_interval=duration_of(config.report_interval_seconds),
                mesh_time=stamp_of(self._mesh_clock.utc_now()),
                registry_time=stamp_of(self._clock.utc_now()),
                max_clock_offset=max_offset,
            )

    @override
    async def Heartbeat(
        self, request: runner_session_service_pb2.HeartbeatRequest, context: Context
    ) -> runner_session_service_pb2.HeartbeatResponse:
        async with answering(context):
            await self._roster.heartbeat(valid_heartbeat(request, self._config))
            return runner_session_service_pb2.HeartbeatResponse(
                mesh_time=stamp_of(self._mesh_clock.utc_now()), registry_time=stamp_of(self._clock.utc_now())
            )

    @override
    async def CloseSession(
        self, request: runner_session_service_pb2.CloseSessionRequest, context: Context
    ) -> runner_session_service_pb2.CloseSessionResponse:
        async with answering(context):
            await self._roster.close_session(request.session_id, request.incarnation)
            return runner_session_service_pb2.CloseSessionResponse()

    @override
    async def RetireSession(
        self, request: runner_session_service_pb2.RetireSessionRequest, context: Context
    ) -> runner_session_service_pb2.RetireSessionResponse:
        async with answering(context):
            retired = await self._retirements.retire(request.session_id, process_ended=request.process_ended)
            return runner_session_service_pb2.RetireSessionResponse(
                outcome=retired.outcome.value,  # type: ignore[arg-type]  # same numbers
                models=retired.models,
                pools=retired.pools,
            )


class DeclarationServicer(declaration_service_pb2_grpc.DeclarationServiceServicer):
    """See DeclarationService in the contract."""

    def __init__(self, declarations: Declarations, config: RegistryConfig) -> None:
        self._declarations = declarations
        self._config = config

    @override
    async def Apply(
        self, request: declaration_service_pb2.ApplyRequest, context: Context
    ) -> declaration_service_pb2.ApplyResponse:
        async with answering(context):
            results = await self._declarations.apply(valid_batch(request, self._config))
            return declaration_service_pb2.ApplyResponse(results=results)

    @override
    async def Delete(
        self, request: declaration_service_pb2.DeleteRequest, context: Context
    ) -> declaration_service_pb2.DeleteResponse:
        async with answering(context):
            kind, name = to_kind(request.kind, "kind"), require_name(request.name, "name")
            await self._declarations.delete(kind, name, force=request.force, requested_by=to_actor("weft delete"))
            return declaration_service_pb2.DeleteResponse()


class SettingsServicer(settings_service_pb2_grpc.SettingsServiceServicer):
    """See SettingsService in the contract."""

    def __init__(self, settings: SettingsManager) -> None:
        self._settings = settings

    @override
    async def GetSettings(
        self, request: settings_service_pb2.GetSettingsRequest, context: Context
    ) -> settings_service_pb2.GetSettingsResponse:
        del request
        async with answering(context):
            return settings_service_pb2.GetSettingsResponse(settings=self._settings.current())

    @override
    async def UpdateSettings(
        self, request: settings_service_pb2.UpdateSettingsRequest, context: Context
    ) -> settings_service_pb2.UpdateSettingsResponse:
        async with answering(context):
            wanted = request.allow_cloud_fallback if request.HasField("allow_cloud_fallback") else None
            changed = await self._settings.update(wanted)
            return settings_service_pb2.UpdateSettingsResponse(settings=changed)
