"""gRPC servicers of the mesh: reads and watches, runner sessions, declarations, settings."""

import heapq
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
from typing_extensions import override

from registry_svc.config import RegistryConfig
from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.declarations import Declarations, SettingsManager
from registry_svc.mesh.expiry import Retirements
from registry_svc.mesh.manifests import valid_batch
from registry_svc.mesh.mesh_state import Mesh
from registry_svc.mesh.policy.ownership import Author
from registry_svc.mesh.profile_state import shown_profile
from registry_svc.mesh.records import to_kind
from registry_svc.mesh.requests import (
    NamedPageRequest,
    PageRequest,
    event_limit,
    events_of,
    page_of,
    page_token,
    valid_heartbeat,
    valid_opening,
)
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.watch import Snapshot, Watcher, change_message, concerns
from registry_svc.mesh.watching import WatchingProcesses
from registry_svc.wire_values import require_at_most, to_actor
from weft.api.registry.v1 import (
    agent_pb2,
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    event_pb2,
    model_pb2,
    pool_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    runner_session_service_pb2,
    runner_session_service_pb2_grpc,
    settings_service_pb2,
    settings_service_pb2_grpc,
)
from weft.api.registry.v1.journal_pb2 import JournalMode
from weft.documents.kinds.declared import DECLARED_KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.documents.rights import names_secret, require_declarable, visible_names, visible_pool
from weft.documents.selectors import parse_selector, selects
from weft.kernel.errors import invalid_field
from weft.kernel.names import is_model_name, require_name_of_model
from weft.kernel.principal import (
    EDIT_MODELS,
    MESH_ACCESS,
    USE_SECRETS,
    VIEW_MODELS,
    Access,
    Resource,
    Role,
)
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller
from weft.kernel.timestamps import duration_of, stamp_of
from weft.kernel.unknown_names import unknown_name

Context = grpc.aio.ServicerContext[Any, Any]

MAX_LISTED_PATTERNS = 64
"""Most names that a request for a list is limited to."""
M = TypeVar("M")
T = TypeVar("T")


class Listing(Generic[M]):
    """The resources of one kind: one by name, and pages in the order of their names."""

    def __init__(
        self,
        core: RegistryCore,
        kind: ResourceKind,
        find: Callable[[Mesh, str], M | None],
    ) -> None:
        self._core = core
        self._kind = kind
        self._find = find

    def find(self, name: str) -> M | None:
        """The resource of this name; raises SHUTTING_DOWN while the registry does not run."""
        self._core.require_open()
        return self._find(self._core.mesh, name)

    def get(self, name: str) -> M:
        """The resource of this name; raises an error for an unknown one, and as `find`."""
        return self.known(name, self.find(name))

    def known(self, name: str, found: T | None) -> T:
        """What was found by the name of such a resource; raises the error for an unknown one."""
        if found is None:
            names = visible_names(caller(), self._core.mesh.names_of(self._kind))
            raise unknown_name(self._kind.value, name if is_model_name(name) else "", names)
        return found

    def page(self, request: PageRequest) -> tuple[list[M], str]:
        """A page and the token of the next one, empty after the last; raises INVALID_ARGUMENT, and as `find`."""
        after, size = page_of(request)
        self._core.require_open()
        mesh = self._core.mesh
        names = heapq.nsmallest(size + 1, (name for name in mesh.names_of(self._kind) if name > after))
        found = [each for name in names[:size] if (each := self._find(mesh, name)) is not None]
        return found, page_token(names[size - 1]) if len(names) > size else ""

    def selected_page(self, request: NamedPageRequest, is_wanted: Callable[[M], bool]) -> tuple[list[M], str]:
        """A page of those that are wanted and that the caller may see; as `page`.

        It ends with the last one that it holds: its token names nothing else.
        """
        after, size = page_of(request)
        require_at_most(request.names, "names", MAX_LISTED_PATTERNS)
        self._core.require_open()
        mesh = self._core.mesh
        found: list[tuple[str, M]] = []
        names = (name for name in mesh.names_of(self._kind) if name > after and is_shown(name, request.names))
        for name in sorted(names):
            each = self._find(mesh, name)
            if each is None or not is_wanted(each):
                continue
            if len(found) == size:
                return [one for _, one in found], page_token(found[-1][0])
            found.append((name, each))
        return [one for _, one in found], ""


def _runner(mesh: Mesh, name: str) -> runner_pb2.Runner | None:
    state = mesh.of_runner(name)
    return None if state is None else state.runner().runner


class Catalogue:
    """All that readers see of the mesh, one listing for each kind; raises SHUTTING_DOWN while it does not run."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core
        self.models = Listing(core, ResourceKind.MODEL, Mesh.model)
        self.pools = Listing(core, ResourceKind.POOL, Mesh.pool)
        self.agents = Listing(core, ResourceKind.AGENT, Mesh.agent)
        self.runners = Listing(core, ResourceKind.RUNNER, _runner)
        self._shown: dict[ResourceKind, Callable[[Mesh, str], Any]] = {
            ResourceKind.ROUTE: lambda mesh, name: mesh.routes.get(name),
            ResourceKind.PROFILE: shown_profile,
            ResourceKind.WORKFLOW: Mesh.shown_workflow,
        }

    def documents(self, kind: ResourceKind) -> Listing[Any]:
        """Returns the documents of a kind that operators declare and runners do not publish."""
        return Listing(self._core, kind, self._shown.get(kind, lambda mesh, name: mesh.documents[kind].shown.get(name)))

    def name_of(self, name_or_id: str) -> str:
        """The name of the model, the agent or the route with this id; any other text as it is."""
        return self._core.name_of(name_or_id)

    def pool_of(self, model: str) -> pool_pb2.Pool:
        """The pool that a model is in; raises MODEL_NOT_FOUND when there is no such model."""
        self._core.require_open()
        name = self._core.mesh.pools.pool_of(model)
        pool = None if name is None else self._core.mesh.pool(name)
        return self.models.known(model, pool)

    def watch(self) -> tuple[Snapshot, Watcher[registry_service_pb2.WatchResponse]]:
        """Return everything there is, and a watcher that receives every change after that."""
        return self._core.watch()

    def events(self, kind: ResourceKind | None, name: str, limit: int) -> list[event_pb2.Event]:
        """The newest events of this kind and name, oldest first; None and "" mean all."""
        self._core.require_open()
        return self._core.events.newest(kind, name, limit)

    def watch_events(self) -> Watcher[event_pb2.Event]:
        """Return a watcher that receives every event from now on."""
        self._core.require_open()
        return self._core.events.subscribe()


def is_shown(name: str, wanted: Sequence[str]) -> bool:
    """Whether a resource is in a list: the caller may see it, and it is among the names that the request wants."""
    is_wanted = not wanted or any(Access(Resource.MODELS, Role.VIEW, pattern).includes(name) for pattern in wanted)
    return is_wanted and caller().may_name(VIEW_MODELS, name)


def _named_page(listing: Listing[M], request: NamedPageRequest) -> tuple[list[M], str]:
    """Return a page of those that the caller may see."""
    if not request.names and caller().may(VIEW_MODELS):
        return listing.page(request)
    return listing.selected_page(request, lambda _: True)


L = TypeVar("L", model_pb2.Model, agent_pb2.Agent)


def _labelled_page(
    listing: Listing[L], request: registry_service_pb2.ListModelsRequest | registry_service_pb2.ListAgentsRequest
) -> tuple[list[L], str]:
    """Return a page of those with the labels of the request; raises INVALID_ARGUMENT naming the field."""
    selector = parse_selector(request.labels, "labels")
    if not selector:
        return _named_page(listing, request)
    return listing.selected_page(request, lambda each: selects(selector, each.manifest.tags))


_ALSO_WATCHED = (Access(Resource.RUNNERS, Role.VIEW), Access(Resource.SETTINGS, Role.VIEW))


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """See RegistryService in the contract."""

    def __init__(self, catalogue: Catalogue, watching: WatchingProcesses) -> None:
        self._catalogue = catalogue
        self._watching = watching

    def _visible(self, name_or_id: str) -> str:
        """Return a name that the caller may see; raises PERMISSION_DENIED naming the scope that is missing."""
        name = self._catalogue.name_of(name_or_id)
        caller().require_name(VIEW_MODELS, name)
        return name

    @override
    async def ListModels(
        self, request: registry_service_pb2.ListModelsRequest, context: Context
    ) -> registry_service_pb2.ListModelsResponse:
        async with answering(context):
            models, token = _labelled_page(self._catalogue.models, request)
            return registry_service_pb2.ListModelsResponse(models=models, next_page_token=token)

    @override
    async def GetModel(
        self, request: registry_service_pb2.GetModelRequest, context: Context
    ) -> registry_service_pb2.GetModelResponse:
        async with answering(context):
            return registry_service_pb2.GetModelResponse(model=self._catalogue.models.get(self._visible(request.name)))

    @override
    async def GetModelMembers(
        self, request: registry_service_pb2.GetModelMembersRequest, context: Context
    ) -> registry_service_pb2.GetModelMembersResponse:
        async with answering(context):
            return registry_service_pb2.GetModelMembersResponse(
                pool=visible_pool(caller(), self._catalogue.pool_of(self._visible(request.name)))
            )

    @override
    async def ListPools(
        self, request: registry_service_pb2.ListPoolsRequest, context: Context
    ) -> registry_service_pb2.ListPoolsResponse:
        async with answering(context):
            pools, token = _named_page(self._catalogue.pools, request)
            shown = [visible_pool(caller(), pool) for pool in pools]
            return registry_service_pb2.ListPoolsResponse(pools=shown, next_page_token=token)

    @override
    async def GetPool(
        self, request: registry_service_pb2.GetPoolRequest, context: Context
    ) -> registry_service_pb2.GetPoolResponse:
        async with answering(context):
            return registry_service_pb2.GetPoolResponse(
                pool=visible_pool(caller(), self._catalogue.pools.get(self._visible(request.name)))
            )

    @override
    async def ListAgents(
        self, request: registry_service_pb2.ListAgentsRequest, context: Context
    ) -> registry_service_pb2.ListAgentsResponse:
        async with answering(context):
            agents, token = _labelled_page(self._catalogue.agents, request)
            return registry_service_pb2.ListAgentsResponse(agents=agents, next_page_token=token)

    @override
    async def GetAgent(
        self, request: registry_service_pb2.GetAgentRequest, context: Context
    ) -> registry_service_pb2.GetAgentResponse:
        async with answering(context):
            return registry_service_pb2.GetAgentResponse(agent=self._catalogue.agents.get(self._visible(request.name)))

    @override
    async def ListRoutes(
        self, request: registry_service_pb2.ListRoutesRequest, context: Context
    ) -> registry_service_pb2.ListRoutesResponse:
        async with answering(context):
            routes, token = _named_page(self._catalogue.documents(ResourceKind.ROUTE), request)
            return registry_service_pb2.ListRoutesResponse(routes=routes, next_page_token=token)

    @override
    async def GetRoute(
        self, request: registry_service_pb2.GetRouteRequest, context: Context
    ) -> registry_service_pb2.GetRouteResponse:
        async with answering(context):
            return registry_service_pb2.GetRouteResponse(
                route=self._catalogue.documents(ResourceKind.ROUTE).get(self._visible(request.name))
            )

    @override
    async def ListAliases(
        self, request: registry_service_pb2.ListAliasesRequest, context: Context
    ) -> registry_service_pb2.ListAliasesResponse:
        async with answering(context):
            aliases, token = _named_page(self._catalogue.documents(ResourceKind.ALIAS), request)
            return registry_service_pb2.ListAliasesResponse(aliases=aliases, next_page_token=token)

    @override
    async def GetAlias(
        self, request: registry_service_pb2.GetAliasRequest, context: Context
    ) -> registry_service_pb2.GetAliasResponse:
        async with answering(context):
            found = self._catalogue.documents(ResourceKind.ALIAS).get(self._visible(request.name))
            return registry_service_pb2.GetAliasResponse(alias=found)

    @override
    async def ListProfiles(
        self, request: registry_service_pb2.ListProfilesRequest, context: Context
    ) -> registry_service_pb2.ListProfilesResponse:
        async with answering(context):
            profiles, token = _named_page(self._catalogue.documents(ResourceKind.PROFILE), request)
            return registry_service_pb2.ListProfilesResponse(profiles=profiles, next_page_token=token)

    @override
    async def GetProfile(
        self, request: registry_service_pb2.GetProfileRequest, context: Context
    ) -> registry_service_pb2.GetProfileResponse:
        async with answering(context):
            found = self._catalogue.documents(ResourceKind.PROFILE).get(request.name)
            return registry_service_pb2.GetProfileResponse(profile=found)

    @override
    async def ListWorkflows(
        self, request: registry_service_pb2.ListWorkflowsRequest, context: Context
    ) -> registry_service_pb2.ListWorkflowsResponse:
        async with answering(context):
            workflows, token = _named_page(self._catalogue.documents(ResourceKind.WORKFLOW), request)
            return registry_service_pb2.ListWorkflowsResponse(workflows=workflows, next_page_token=token)

    @override
    async def GetWorkflow(
        self, request: registry_service_pb2.GetWorkflowRequest, context: Context
    ) -> registry_service_pb2.GetWorkflowResponse:
        async with answering(context):
            found = self._catalogue.documents(ResourceKind.WORKFLOW).get(self._visible(request.name))
            return registry_service_pb2.GetWorkflowResponse(workflow=found)

    @override
    async def ListTenants(
        self, request: registry_service_pb2.ListTenantsRequest, context: Context
    ) -> registry_service_pb2.ListTenantsResponse:
        async with answering(context):
            tenants, token = self._catalogue.documents(ResourceKind.TENANT).selected_page(request, lambda _: True)
            return registry_service_pb2.ListTenantsResponse(tenants=tenants, next_page_token=token)

    @override
    async def GetTenant(
        self, request: registry_service_pb2.GetTenantRequest, context: Context
    ) -> registry_service_pb2.GetTenantResponse:
        async with answering(context):
            return registry_service_pb2.GetTenantResponse(
                tenant=self._catalogue.documents(ResourceKind.TENANT).get(request.name)
            )

    @override
    async def ListRunners(
        self, request: registry_service_pb2.ListRunnersRequest, context: Context
    ) -> registry_service_pb2.ListRunnersResponse:
        async with answering(context):
            runners, token = self._catalogue.runners.page(request)
            return registry_service_pb2.ListRunnersResponse(runners=runners, next_page_token=token)

    @override
    async def GetRunner(
        self, request: registry_service_pb2.GetRunnerRequest, context: Context
    ) -> registry_service_pb2.GetRunnerResponse:
        async with answering(context):
            return registry_service_pb2.GetRunnerResponse(runner=self._catalogue.runners.get(request.name))

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
            with watcher, self._watching.watching(request):
                await context.write(await snapshot.message(with_keys=request.include_ticket_keys))
                async for response in watcher:
                    await context.write(change_message(response, with_keys=request.include_ticket_keys))

    @override
    async def ListEvents(
        self, request: registry_service_pb2.ListEventsRequest, context: Context
    ) -> registry_service_pb2.ListEventsResponse:
        async with answering(context):
            kind, name = events_of(request)
            events = self._catalogue.events(kind, self._catalogue.name_of(name), event_limit(request))
            return registry_service_pb2.ListEventsResponse(events=events)

    @override
    async def WatchEvents(  # type: ignore[override]  # see Watch
        self, request: registry_service_pb2.WatchEventsRequest, context: Context
    ) -> None:
        async with answering(context):
            kind, name = events_of(request)
            name = self._catalogue.name_of(name)
            with self._catalogue.watch_events() as watcher:
                # A caller that has the headers misses no event from now on.
                await context.send_initial_metadata(())
                async for event in watcher:
                    if concerns(event, kind, name):
                        await context.write(registry_service_pb2.WatchEventsResponse(event=event))


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


def author_of(request: declaration_service_pb2.ApplyRequest) -> Author:
    """Return who declares: the caller, or for one that may act for others whom it names."""
    known = caller()
    if known.names_tenants:
        return Author(name=request.requested_by, own_only=request.own_only)
    return Author(name=known.name, own_only=not known.may(EDIT_MODELS))


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
            batch = valid_batch(request, self._config)
            self._declarations.name_targets(batch)
            if names_secret(batch.declarations):
                # Otherwise whoever may declare models could have any secret sent anywhere.
                caller().require(USE_SECRETS)
            require_declarable(caller(), batch.declarations)
            results = await self._declarations.apply(batch, author_of(request))
            return declaration_service_pb2.ApplyResponse(results=results)

    @override
    async def Delete(
        self, request: declaration_service_pb2.DeleteRequest, context: Context
    ) -> declaration_service_pb2.DeleteResponse:
        async with answering(context):
            kind = to_kind(request.kind, "kind")
            name = self._declarations.name_of(require_name_of_model(request.name, "name"))
            if kind in DECLARED_KINDS and DECLARED_KINDS[kind].resource is not Resource.MODELS:
                caller().require(Access(DECLARED_KINDS[kind].resource, Role.EDIT))
            elif kind in DECLARED_KINDS and DECLARED_KINDS[kind].by_name:
                caller().require_name(EDIT_MODELS, name)
            else:
                caller().require(EDIT_MODELS)
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
            if request.journal not in JournalMode.values():
                raise invalid_field("journal", "must be a known mode")
            changed = await self._settings.update(wanted, request.journal)
            return settings_service_pb2.UpdateSettingsResponse(settings=changed)
