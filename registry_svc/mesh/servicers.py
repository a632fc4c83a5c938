"""gRPC servicers of the mesh: reads and watches, runner sessions, declarations, settings."""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from typing_extensions import override

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.declarations import Declarations, SettingsManager
from registry_svc.mesh.expiry import Retirements
from registry_svc.mesh.mesh_state import Mesh
from registry_svc.mesh.policy.declarations import Author
from registry_svc.mesh.records import to_kind
from registry_svc.mesh.requests import (
    event_limit,
    events_of,
    page_of,
    valid_batch,
)
from registry_svc.mesh.sessions import SessionManager
from registry_svc.mesh.watch import change_message, concerns
from registry_svc.wire_values import page_token, require_at_most, to_actor
from weft.api.operations.v1 import process_service_pb2
from weft.api.registry.v1 import declaration_service_pb2 as declaration_pb
from weft.api.registry.v1 import (
    declaration_service_pb2_grpc,
    pool_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    runner_pb2,
    runner_session_service_pb2_grpc,
    settings_service_pb2_grpc,
)
from weft.api.registry.v1 import registry_service_pb2 as pb
from weft.api.registry.v1 import runner_session_service_pb2 as session_pb
from weft.api.registry.v1 import settings_service_pb2 as settings_pb
from weft.api.registry.v1.journal_pb2 import JournalMode
from weft.api.registry.v1.registry_service_pb2 import ListResourcesRequest
from weft.documents.kinds import KINDS, name_in, packed
from weft.documents.resource_kinds import ResourceKind
from weft.documents.rights import (
    hide_names,
    require_declarable,
    require_deletable,
    view_of,
    visible_names,
    visible_pool,
)
from weft.documents.selectors import parse_selector, selects
from weft.kernel.access.principal import (
    EDIT_MODELS,
    MESH_ACCESS,
    VIEW_MODELS,
    Access,
    Resource,
    Role,
)
from weft.kernel.access.rpc_auth import caller
from weft.kernel.channels.rpc import AnsweringServicer
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.time.timestamps import duration_of, stamp_of
from weft.kernel.values.names import is_model_name, require_name_of_model
from weft.kernel.values.unknown_names import unknown_name

MAX_LISTED = 1_000
MAX_WORD_CHARS = 255
_SERVICES = frozenset({"router", "gateway"})


class WatchingProcesses:
    """The processes with an open watch."""

    def __init__(self) -> None:
        self._open: dict[int, process_service_pb2.WatchingProcess] = {}

    @contextmanager
    def watching(self, request: registry_service_pb2.WatchRequest) -> Iterator[None]:
        """Lists the watcher during the block, if it has sent its service."""
        if request.service not in _SERVICES or len(self._open) >= MAX_LISTED:
            yield
            return
        process = process_service_pb2.WatchingProcess(
            service=request.service, host=_word(request.host), version=_word(request.version)
        )
        self._open[id(process)] = process
        try:
            yield
        finally:
            del self._open[id(process)]

    def listed(self) -> Sequence[process_service_pb2.WatchingProcess]:
        """Returns the processes, sorted by service, host and version."""
        return sorted(self._open.values(), key=lambda each: (each.service, each.host, each.version))


def _word(text: str) -> str:
    """Returns a caller's text, bounded and without control characters."""
    return "".join(character for character in text[:MAX_WORD_CHARS] if character.isprintable())


T = TypeVar("T")


def _runner(mesh: Mesh, name: str) -> runner_pb2.Runner | None:
    state = mesh.of_runner(name)
    return None if state is None else state.runner().runner


def _visible_pool(mesh: Mesh, name: str) -> pool_pb2.Pool | None:
    pool = mesh.pool(name)
    return None if pool is None else visible_pool(caller(), pool)


_SHOWN: Mapping[ResourceKind, Callable[[Mesh, str], Any]] = MappingProxyType(
    {
        ResourceKind.MODEL: Mesh.model,
        ResourceKind.AGENT: Mesh.agent,
        ResourceKind.RUNNER: _runner,
        ResourceKind.POOL: _visible_pool,
        ResourceKind.ROUTE: lambda mesh, name: mesh.routes.get(name),
        ResourceKind.WORKFLOW: Mesh.shown_workflow,
    }
)
"""Returns a resource for display, by kind, for kinds with a status that depends on other resources."""
Context = grpc.aio.ServicerContext[Any, Any]

MAX_LISTED_PATTERNS = 64
"""Maximum number of names in a list request."""


class Catalogue:
    """The readers' view of the mesh. Raises SHUTTING_DOWN unless the registry is running."""

    def __init__(self, core: RegistryCore) -> None:
        self._core = core

    def get(self, kind: ResourceKind, name: str) -> Any:
        """Returns a resource, such as an Alias. Raises NOT_FOUND or MODEL_NOT_FOUND."""
        return self._known(kind, name, self.find(kind, name))

    def page(self, kind: ResourceKind, request: ListResourcesRequest) -> tuple[list[Message], str]:
        """Returns a page of resources that the caller may see, sorted by name, and the token of the next page.

        The token is empty after the last page. Raises INVALID_ARGUMENT naming the field.
        """
        after, size = page_of(request)
        require_at_most(request.names, "names", MAX_LISTED_PATTERNS)
        selector = parse_selector(request.labels, "labels")
        self._core.require_open()
        is_limited = KINDS[kind].by_name and not caller().may(VIEW_MODELS)
        names = [
            name
            for name in self._core.mesh.names_of(kind)
            if name > after and is_wanted(name, request.names) and not (is_limited and not _may_see(name))
        ]
        heapq.heapify(names)
        found: list[Any] = []
        while names:
            each = self.find(kind, heapq.heappop(names))
            if each is None or (selector and not selects(selector, each.manifest.tags)):
                continue
            if len(found) == size:
                return found, page_token(name_in(found[-1]))
            found.append(each)
        return found, ""

    def find(self, kind: ResourceKind, name: str) -> Any:
        """Returns a resource, such as an Alias, or None."""
        self._core.require_open()
        make = _SHOWN.get(kind)
        return self._core.mesh.documents[kind].shown.get(name) if make is None else make(self._core.mesh, name)

    def _known(self, kind: ResourceKind, name: str, found: T | None) -> T:
        if found is None:
            names = visible_names(caller(), self._core.mesh.names_of(kind))
            raise unknown_name(kind.value, name if is_model_name(name) else "", names)
        return found

    def pool_of(self, model: str) -> pool_pb2.Pool:
        """Returns the pool of a model. Raises MODEL_NOT_FOUND."""
        self._core.require_open()
        name = self._core.mesh.pools.pool_of(model)
        pool = None if name is None else self._core.mesh.pool(name)
        return visible_pool(caller(), self._known(ResourceKind.MODEL, model, pool))


def is_wanted(name: str, wanted: Sequence[str]) -> bool:
    """Whether a name matches the patterns of a request; no patterns match all."""
    return not wanted or any(Access(Resource.MODELS, Role.VIEW, pattern).includes(name) for pattern in wanted)


def _may_see(name: str) -> bool:
    return caller().may_name(VIEW_MODELS, name)


_ALSO_WATCHED = (Access(Resource.RUNNERS, Role.VIEW), Access(Resource.SETTINGS, Role.VIEW))


class RegistryServicer(AnsweringServicer, registry_service_pb2_grpc.RegistryServiceServicer):
    """See RegistryService in the contract."""

    def __init__(self, core: RegistryCore, watching: WatchingProcesses) -> None:
        self._core = core
        self._catalogue = Catalogue(core)
        self._watching = watching

    @override
    async def ListResources(self, request: ListResourcesRequest, context: Context) -> pb.ListResourcesResponse:
        kind = to_kind(request.kind, "kind")
        if request.labels and not KINDS[kind].has_labels:
            raise invalid_field("labels", f"{kind.plural} have no labels")
        if KINDS[kind].by_name:
            caller().require_some(view_of(kind))
        else:
            caller().require(view_of(kind))
        found, token = self._catalogue.page(kind, request)
        resources = [packed(kind, each) for each in found]
        return pb.ListResourcesResponse(resources=resources, next_page_token=token)

    @override
    async def GetResource(self, request: pb.GetResourceRequest, context: Context) -> pb.GetResourceResponse:
        kind, name = to_kind(request.kind, "kind"), self._core.name_of(request.name)
        if KINDS[kind].by_name:
            caller().require_name(view_of(kind), name)
        else:
            caller().require(view_of(kind))
        found = packed(kind, self._catalogue.get(kind, name))
        return pb.GetResourceResponse(resource=found)

    @override
    async def GetModelMembers(self, request: pb.GetModelMembersRequest, context: Context) -> pb.GetModelMembersResponse:
        name = self._core.name_of(request.name)
        caller().require_name(VIEW_MODELS, name)
        return pb.GetModelMembersResponse(pool=self._catalogue.pool_of(name))

    # A coroutine closes its watcher as soon as the call is cancelled; a generator would wait for the garbage collector.
    # grpc.aio supports both, the generated types only the latter.
    @override
    async def Watch(  # type: ignore[override]
        self, request: pb.WatchRequest, context: Context
    ) -> None:
        # The watch includes runners and settings, so access to models is not enough.
        for access in _ALSO_WATCHED:
            caller().require(access)
        if request.include_ticket_keys:
            caller().require(MESH_ACCESS)
        snapshot, watcher = self._core.watch()
        with watcher, self._watching.watching(request):
            await context.write(await snapshot.message(with_keys=request.include_ticket_keys))
            async for response in watcher:
                await context.write(change_message(response, with_keys=request.include_ticket_keys))

    @override
    async def ListEvents(self, request: pb.ListEventsRequest, context: Context) -> pb.ListEventsResponse:
        kind, name = events_of(request)
        limit = event_limit(request)
        self._core.require_open()
        events = self._core.events.newest(kind, self._core.name_of(name), limit)
        return pb.ListEventsResponse(events=events)

    @override
    async def WatchEvents(  # type: ignore[override]  # see Watch
        self, request: pb.WatchEventsRequest, context: Context
    ) -> None:
        kind, name = events_of(request)
        name = self._core.name_of(name)
        self._core.require_open()
        with self._core.events.subscribe() as watcher:
            # Once a caller has the headers, it misses no event.
            await context.send_initial_metadata(())
            async for event in watcher:
                if concerns(event, kind, name):
                    await context.write(pb.WatchEventsResponse(event=event))


class RunnerSessionServicer(AnsweringServicer, runner_session_service_pb2_grpc.RunnerSessionServiceServicer):
    """See RunnerSessionService in the contract."""

    def __init__(self, roster: SessionManager, retirements: Retirements, core: RegistryCore) -> None:
        self._roster = roster
        self._retirements = retirements
        self._config = core.config
        self._clock = core.clock
        self._mesh_clock = core.mesh_clock

    @override
    async def OpenSession(
        self, request: session_pb.OpenSessionRequest, context: Context
    ) -> session_pb.OpenSessionResponse:
        session, config = await self._roster.open_session(request), self._config
        # A dial-out runner may have any clock, since the operator does not control its machine.
        max_offset = None if request.runner.dial_out else duration_of(config.max_clock_offset_seconds)
        return session_pb.OpenSessionResponse(
            session_id=session.id,
            ticket_key=session.ticket_key,
            heartbeat_interval=duration_of(config.heartbeat_interval_seconds),
            report_interval=duration_of(config.report_interval_seconds),
            mesh_time=stamp_of(self._mesh_clock.utc_now()),
            registry_time=stamp_of(self._clock.utc_now()),
            max_clock_offset=max_offset,
            left_out=self._roster.left_out(session),
            host=self._roster.host(session),
        )

    @override
    async def Heartbeat(self, request: session_pb.HeartbeatRequest, context: Context) -> session_pb.HeartbeatResponse:
        await self._roster.heartbeat(request)
        return session_pb.HeartbeatResponse(
            mesh_time=stamp_of(self._mesh_clock.utc_now()), registry_time=stamp_of(self._clock.utc_now())
        )

    @override
    async def CloseSession(
        self, request: session_pb.CloseSessionRequest, context: Context
    ) -> session_pb.CloseSessionResponse:
        await self._roster.close_session(request.session_id, request.incarnation)
        return session_pb.CloseSessionResponse()

    @override
    async def RetireSession(
        self, request: session_pb.RetireSessionRequest, context: Context
    ) -> session_pb.RetireSessionResponse:
        return await self._retirements.retire(request.session_id, process_ended=request.process_ended)


def author_of(request: declaration_pb.ApplyRequest) -> Author:
    """Returns the author: the caller, or the one that it specifies if it may act for others."""
    known = caller()
    if known.names_tenants:
        return Author(name=request.requested_by, own_only=request.own_only)
    return Author(name=known.name, own_only=not known.may(EDIT_MODELS))


@contextmanager
def _hiding_names() -> Iterator[None]:
    try:
        yield
    except WeftError as error:
        hide_names(error, caller())
        raise


class DeclarationServicer(AnsweringServicer, declaration_service_pb2_grpc.DeclarationServiceServicer):
    """See DeclarationService in the contract."""

    def __init__(self, declarations: Declarations, core: RegistryCore) -> None:
        self._declarations = declarations
        self._core = core

    @override
    async def Apply(self, request: declaration_pb.ApplyRequest, context: Context) -> declaration_pb.ApplyResponse:
        batch = valid_batch(request, self._core.config)
        self._declarations.name_targets(batch.documents)
        require_declarable(caller(), batch.documents, self._core.mesh.stands_for)
        with _hiding_names():
            results = await self._declarations.apply(batch, author_of(request))
        return declaration_pb.ApplyResponse(results=results)

    @override
    async def Delete(self, request: declaration_pb.DeleteRequest, context: Context) -> declaration_pb.DeleteResponse:
        kind = to_kind(request.kind, "kind")
        name = self._core.name_of(require_name_of_model(request.name, "name"))
        unloads = request.force or (kind is ResourceKind.MODEL and self._declarations.is_added(name))
        require_deletable(caller(), kind, name, self._core.mesh.stands_for, unloads=unloads)
        with _hiding_names():
            actor = to_actor(request.requested_by)
            await self._declarations.delete(kind, name, force=request.force, requested_by=actor)
        return declaration_pb.DeleteResponse()


class SettingsServicer(AnsweringServicer, settings_service_pb2_grpc.SettingsServiceServicer):
    """See SettingsService in the contract."""

    def __init__(self, settings: SettingsManager) -> None:
        self._settings = settings

    @override
    async def GetSettings(
        self, request: settings_pb.GetSettingsRequest, context: Context
    ) -> settings_pb.GetSettingsResponse:
        del request
        return settings_pb.GetSettingsResponse(settings=self._settings.current())

    @override
    async def UpdateSettings(
        self, request: settings_pb.UpdateSettingsRequest, context: Context
    ) -> settings_pb.UpdateSettingsResponse:
        wanted = request.allow_cloud_fallback if request.HasField("allow_cloud_fallback") else None
        if request.journal not in JournalMode.values():
            raise invalid_field("journal", "must be a known mode")
        changed = await self._settings.update(wanted, request.journal)
        return settings_pb.UpdateSettingsResponse(settings=changed)
