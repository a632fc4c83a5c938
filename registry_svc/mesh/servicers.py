"""What the mesh knows, and how it changes."""

# ruff: noqa: N802 - the methods are called as in the contract

from collections import OrderedDict
from typing import Any

import grpc

from registry_svc.mesh.catalogue import Catalogue
from registry_svc.mesh.changes import Revised
from registry_svc.mesh.events import concerns
from registry_svc.mesh.messages import (
    agent_message,
    change_message,
    event_message,
    model_message,
    pool_message,
    route_message,
    runner_message,
    snapshot_message,
)
from registry_svc.mesh.requests import event_limit, events_of, page_of, page_token
from weft.api.registry.v1 import registry_service_pb2, registry_service_pb2_grpc
from weft.kernel.errors import WeftError
from weft.kernel.principal import MESH_ACCESS, Access, Resource, Role
from weft.kernel.reasons import Reason
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

MAX_CONVERTED_CHANGES = 1_024
_ALSO_WATCHED = (Access(Resource.RUNNERS, Role.VIEW), Access(Resource.SETTINGS, Role.VIEW))

Context = grpc.aio.ServicerContext[Any, Any]


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """See RegistryService in the contract."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._changes = ChangeMessages()

    async def ListModels(
        self, request: registry_service_pb2.ListModelsRequest, context: Context
    ) -> registry_service_pb2.ListModelsResponse:
        """See the contract."""
        async with answering(context):
            after, size = page_of(request)
            models = self._catalogue.models_after(after, size + 1)
            return registry_service_pb2.ListModelsResponse(
                models=[model_message(model) for model in models[:size]],
                next_page_token=_next([model.manifest.name for model in models], size),
            )

    async def GetModel(
        self, request: registry_service_pb2.GetModelRequest, context: Context
    ) -> registry_service_pb2.GetModelResponse:
        """See the contract."""
        async with answering(context):
            model = self._catalogue.model(request.name)
            if model is None:
                raise WeftError(Reason.MODEL_NOT_FOUND, "no model of this name is known")
            return registry_service_pb2.GetModelResponse(model=model_message(model))

    async def GetModelMembers(
        self, request: registry_service_pb2.GetModelMembersRequest, context: Context
    ) -> registry_service_pb2.GetModelMembersResponse:
        """See the contract."""
        async with answering(context):
            pool = self._catalogue.pool_of(request.name)
            if pool is None:
                raise WeftError(Reason.MODEL_NOT_FOUND, "no model of this name is known")
            return registry_service_pb2.GetModelMembersResponse(pool=pool_message(pool))

    async def ListPools(
        self, request: registry_service_pb2.ListPoolsRequest, context: Context
    ) -> registry_service_pb2.ListPoolsResponse:
        """See the contract."""
        async with answering(context):
            after, size = page_of(request)
            pools = self._catalogue.pools_after(after, size + 1)
            return registry_service_pb2.ListPoolsResponse(
                pools=[pool_message(pool) for pool in pools[:size]],
                next_page_token=_next([pool.name for pool in pools], size),
            )

    async def GetPool(
        self, request: registry_service_pb2.GetPoolRequest, context: Context
    ) -> registry_service_pb2.GetPoolResponse:
        """See the contract."""
        async with answering(context):
            pool = self._catalogue.pool(request.name)
            if pool is None:
                raise WeftError(Reason.NOT_FOUND, "no pool of this name is known")
            return registry_service_pb2.GetPoolResponse(pool=pool_message(pool))

    async def ListAgents(
        self, request: registry_service_pb2.ListAgentsRequest, context: Context
    ) -> registry_service_pb2.ListAgentsResponse:
        """See the contract."""
        async with answering(context):
            after, size = page_of(request)
            agents = self._catalogue.agents_after(after, size + 1)
            return registry_service_pb2.ListAgentsResponse(
                agents=[agent_message(agent) for agent in agents[:size]],
                next_page_token=_next([agent.manifest.name for agent in agents], size),
            )

    async def GetAgent(
        self, request: registry_service_pb2.GetAgentRequest, context: Context
    ) -> registry_service_pb2.GetAgentResponse:
        """See the contract."""
        async with answering(context):
            agent = self._catalogue.agent(request.name)
            if agent is None:
                raise WeftError(Reason.NOT_FOUND, "no agent of this name is known")
            return registry_service_pb2.GetAgentResponse(agent=agent_message(agent))

    async def ListRoutes(
        self, request: registry_service_pb2.ListRoutesRequest, context: Context
    ) -> registry_service_pb2.ListRoutesResponse:
        """See the contract."""
        async with answering(context):
            after, size = page_of(request)
            routes = self._catalogue.routes_after(after, size + 1)
            return registry_service_pb2.ListRoutesResponse(
                routes=[route_message(route) for route in routes[:size]],
                next_page_token=_next([route.manifest.name for route in routes], size),
            )

    async def GetRoute(
        self, request: registry_service_pb2.GetRouteRequest, context: Context
    ) -> registry_service_pb2.GetRouteResponse:
        """See the contract."""
        async with answering(context):
            route = self._catalogue.route(request.name)
            if route is None:
                raise WeftError(Reason.NOT_FOUND, "no route of this name is known")
            return registry_service_pb2.GetRouteResponse(route=route_message(route))

    async def ListRunners(
        self, request: registry_service_pb2.ListRunnersRequest, context: Context
    ) -> registry_service_pb2.ListRunnersResponse:
        """See the contract."""
        async with answering(context):
            after, size = page_of(request)
            runners = self._catalogue.runners_after(after, size + 1)
            return registry_service_pb2.ListRunnersResponse(
                runners=[runner_message(runner) for runner in runners[:size]],
                next_page_token=_next([runner.profile.name for runner in runners], size),
            )

    async def GetRunner(
        self, request: registry_service_pb2.GetRunnerRequest, context: Context
    ) -> registry_service_pb2.GetRunnerResponse:
        """See the contract."""
        async with answering(context):
            runner = self._catalogue.runner(request.name)
            if runner is None:
                raise WeftError(Reason.NOT_FOUND, "no runner of this name is known")
            return registry_service_pb2.GetRunnerResponse(runner=runner_message(runner))

    # A coroutine that writes ends its watcher the moment the call is cancelled; a generator would wait for the
    # garbage collector. grpc.aio takes both, the generated types know only the latter.
    async def Watch(  # type: ignore[override]
        self, request: registry_service_pb2.WatchRequest, context: Context
    ) -> None:
        """See the contract."""
        async with answering(context):
            # It tells of them too; with its rule alone, who may see models would see these as well.
            for access in _ALSO_WATCHED:
                caller().require(access)
            if request.include_ticket_keys:
                caller().require(MESH_ACCESS)
            snapshot, watcher = self._catalogue.watch()
            with watcher:
                await context.write(await snapshot_message(snapshot, with_keys=request.include_ticket_keys))
                async for revised in watcher:
                    await context.write(self._changes.message(revised, with_keys=request.include_ticket_keys))

    async def ListEvents(
        self, request: registry_service_pb2.ListEventsRequest, context: Context
    ) -> registry_service_pb2.ListEventsResponse:
        """See the contract."""
        async with answering(context):
            kind, name = events_of(request)
            events = self._catalogue.events(kind, name, event_limit(request))
            return registry_service_pb2.ListEventsResponse(events=[event_message(event) for event in events])

    async def WatchEvents(  # type: ignore[override]  # see Watch
        self, request: registry_service_pb2.WatchEventsRequest, context: Context
    ) -> None:
        """See the contract."""
        async with answering(context):
            kind, name = events_of(request)
            with self._catalogue.watch_events() as watcher:
                # A caller that has the headers knows that it misses nothing from now on.
                await context.send_initial_metadata(())
                async for event in watcher:
                    if concerns(event, kind, name):
                        await context.write(registry_service_pb2.WatchEventsResponse(event=event_message(event)))


class ChangeMessages:
    """The newest changes as messages, so that one that many watch is converted once."""

    def __init__(self) -> None:
        self._messages: OrderedDict[tuple[int, bool], registry_service_pb2.WatchResponse] = OrderedDict()

    def message(self, revised: Revised, *, with_keys: bool) -> registry_service_pb2.WatchResponse:
        """The message of a change; only ever read."""
        key = (revised.revision, with_keys)
        message = self._messages.get(key)
        if message is None:
            message = self._messages[key] = change_message(revised, with_keys=with_keys)
            if len(self._messages) > MAX_CONVERTED_CHANGES:
                self._messages.popitem(last=False)
        return message


def _next(names: list[str], size: int) -> str:
    """The token of the page after `size` of these names; empty when there are no more."""
    return page_token(names[size - 1]) if len(names) > size else ""
