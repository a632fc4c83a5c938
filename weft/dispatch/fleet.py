"""The read model of the mesh: runners, models, agents, routes, aliases and workflows from the registry's Watch."""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import grpc
from google.protobuf.message import Message
from typing_extensions import override

from weft import __version__
from weft.api.registry.v1 import (
    agent_pb2,
    alias_pb2,
    model_pb2,
    registry_service_pb2,
    registry_service_pb2_grpc,
    route_pb2,
    router_pb2,
    runner_pb2,
    settings_pb2,
    tenant_pb2,
    trial_pb2,
    wake_pb2,
    workflow_pb2,
)
from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.kernel.channels.rpc import calling
from weft.kernel.channels.stream_follower import StreamFollower
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import Capabilities, reported_over, skills_of
from weft.kernel.requests.placement_request import label_set
from weft.kernel.requests.request_values import JournalMode, Operation, Skill, journal_in
from weft.kernel.services.health import WELL, HealthCheck, Observation, degraded, down
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock
from weft.kernel.time.timestamps import seconds_of
from weft.kernel.values.names import AGENT_PREFIX, ROUTE_PREFIX, WORKFLOW_PREFIX

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from weft.dispatch.remote_router import RouterSource

T = TypeVar("T")
M = TypeVar("M", bound=Message)
_PHASES = frozenset(runner_pb2.InstanceState.Phase.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerView:
    """A runner as the mesh knows it."""

    name: str
    incarnation: str
    address: str
    host: str
    runtime: str
    active: bool
    draining: bool
    ticket_key: bytes
    instances: Mapping[str, runner_pb2.InstanceState]
    """Its models as last reported, by name; read-only. A phase unknown to this version is FAILED."""
    max_requests: int = 0
    """Maximum concurrent requests over all its models; 0: limited only by its slots."""
    tool_names: frozenset[str] = frozenset()
    """The mesh's tools that it offers."""
    labels: frozenset[str] = frozenset()
    """Its labels, as KEY=VALUE."""
    clock_offset_seconds: float = 0.0
    """How far its clock is ahead of the mesh's; negative: behind; 0: no significant offset."""
    clock_refused: bool = False
    """Whether it gets no requests because its clock is off by more than allowed."""
    left_out: Sequence[runner_pb2.LeftOut] = ()
    """What it has and the mesh does not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model as the mesh knows it."""

    name: str
    pool: str
    """The effective pool: the declared one, or the model's name."""
    runner: str
    """Empty: no runner serves it yet."""
    operations: frozenset[Operation]
    remote: bool
    active: bool
    context_tokens: int
    created_at_seconds: int
    """Unix time of its first publication."""
    hibernating: bool = False
    """Whether it is inactive but a request wakes it."""
    failed: bool = False
    """Whether it is inactive because its connected runner cannot serve it; the router decides what requests get."""
    wake: wake_pb2.Wake | None = field(default=None, repr=False)
    """How to wake it; None: it never hibernates. Read-only."""
    skills: frozenset[Skill] | None = None
    """All its declared skills; None: none are declared. See `capabilities_in`."""
    digest: str = ""
    """Digest of its file, "sha256:<64 hex digits>"; empty: unknown."""
    expected: bool = False
    """Whether its runner is still starting; for a model in weft.yaml, only its configuration is known then."""
    journal: JournalMode = JournalMode.UNSET
    """Whether its requests are durable tasks."""
    id: str = ""
    """Its id; empty: unknown."""
    labels: frozenset[str] = frozenset()
    """Its labels, as KEY=VALUE."""
    price: model_pb2.ModelPrice | None = None
    """What its provider charges; None: unknown. Read-only."""

    @property
    def reachable(self) -> bool:
        """Whether requests for it can be placed: its runner is connected or can be woken."""
        return self.active or self.hibernating or self.failed


class FleetSource(Protocol):
    """The source of the current FleetView; see `FleetWatcher`."""

    @property
    def view(self) -> "FleetView":
        """The newest view; revision 0 before the first snapshot."""
        ...


UNKNOWN_TARGET = "unknown"
"""Label for all names that the mesh does not know."""


@dataclass(frozen=True)
class FleetView:
    """The mesh at one revision. Agents, routes, workflows and settings are messages that are never changed."""

    revision: int = 0
    runners: Mapping[str, RunnerView] = field(default_factory=dict)
    models: Mapping[str, ModelView] = field(default_factory=dict)
    agents: Mapping[str, agent_pb2.Agent] = field(default_factory=dict)
    routes: Mapping[str, route_pb2.Route] = field(default_factory=dict)
    settings: settings_pb2.MeshSettings = field(default_factory=settings_pb2.MeshSettings)
    """Default: nothing is allowed until the registry has answered."""
    aliases: Mapping[str, alias_pb2.Alias] = field(default_factory=dict)
    workflows: Mapping[str, workflow_pb2.RegisteredWorkflow] = field(default_factory=dict)
    routers: Mapping[str, router_pb2.Router] = field(default_factory=dict)
    """Registered routers by name."""
    tenants: Mapping[str, tenant_pb2.Tenant] = field(default_factory=dict)
    """Declared or configured tenants by name."""
    trials: Mapping[str, trial_pb2.Trial] = field(default_factory=dict)
    """Declared trials by name."""

    @cached_property
    def targets(self) -> frozenset[str]:
        """Returns every valid request target, including those of inactive runners."""
        models = (name for model in self.models.values() for name in (model.name, model.pool))
        prefixed = ((AGENT_PREFIX, self.agents), (ROUTE_PREFIX, self.routes), (WORKFLOW_PREFIX, self.workflows))
        return frozenset((*models, *(prefix + name for prefix, names in prefixed for name in names)))

    def label(self, name: str) -> str:
        """Returns `name` if it is a target, otherwise `unknown`: metric labels never come from callers."""
        return name if name in self.targets else UNKNOWN_TARGET

    def is_added(self, model: str) -> bool:
        """Whether a model was added by its source, so that deleting it ends its engine."""
        found = self.models.get(model)
        runner = None if found is None else self.runners.get(found.runner)
        instance = None if runner is None else runner.instances.get(model)
        return instance is not None and bool(instance.added_source)

    def pool_members(self, model_or_pool: str) -> list[ModelView]:
        """Returns the models that serve a name: those of the pool with this name, or of the model's pool.

        A model without a declared pool is in the pool of its own name, and so joins a declared pool with that name.
        """
        members = [model for model in self.models.values() if model.pool == model_or_pool]
        named = self.models.get(model_or_pool)
        if members or named is None:
            return members
        return [model for model in self.models.values() if model.pool == named.pool]


def instance_in(view: FleetView, model: ModelView) -> runner_pb2.InstanceState | None:
    """Returns a model's state as its runner reports it; None: unknown."""
    runner = view.runners.get(model.runner)
    return None if runner is None else runner.instances.get(model.name)


def capabilities_in(view: FleetView, model: ModelView) -> Capabilities:
    """Returns a model's abilities: its declaration combined with its runner's report."""
    return reported_over(model.skills or frozenset(), instance_in(view, model))


def context_in(view: FleetView, *models: ModelView) -> int:
    """Returns the smallest context of the models, in tokens; 0: unknown.

    The context that a runner reports takes precedence over the declared one, because an attached server states its
    context only once it is reached.
    """
    contexts = (getattr(instance_in(view, model), "context_tokens", 0) or model.context_tokens for model in models)
    return min(filter(None, contexts), default=0)


def base_in(view: FleetView, model: ModelView) -> str:
    """Returns the base model of an adapter as its runner reports it; empty: not an adapter, or unknown."""
    instance = instance_in(view, model)
    return "" if instance is None else instance.base_model


def file_in(view: FleetView, model: ModelView) -> model_pb2.ModelFile:
    """Returns what a model's files say about themselves, as its runner reports it; empty: unknown. Read-only."""
    instance = instance_in(view, model)
    return model_pb2.ModelFile() if instance is None else instance.model_file


def apply_watch(view: FleetView, response: registry_service_pb2.WatchResponse) -> FleetView:
    """Returns the view after a response of Watch. Pure; a snapshot replaces everything."""
    if response.WhichOneof("kind") != "snapshot":
        return replace(view, revision=response.revision, **_changed(view, response.change))
    snapshot = response.snapshot
    parts: dict[str, dict[str, Any]] = {folding.part: {} for folding in _FOLDINGS.values()}
    for resource in snapshot.resources:
        folding = _FOLDINGS.get(resource.kind)
        if folding is not None:
            parts[folding.part][resource.name] = folding.folded(resource)
    return FleetView(
        revision=response.revision,
        runners=MappingProxyType({watched.runner.name: _runner(watched) for watched in snapshot.runners}),
        settings=_kept(snapshot.settings),
        routers=MappingProxyType({router.name: _kept(router) for router in snapshot.routers}),
        **{part: MappingProxyType(found) for part, found in parts.items()},
    )


def _changed(view: FleetView, change: registry_service_pb2.Change) -> dict[str, Any]:
    """Returns the parts of a view that a change replaces; empty for a change unknown to this version."""
    word = change.WhichOneof("kind") or ""
    value: Any = getattr(change, word) if word else None
    match word:
        case "settings":
            return {"settings": _kept(value)}
        case "runner":
            return {"runners": _with(view.runners, value.runner.name, _runner(value))}
        case "router":
            return {"routers": _with(view.routers, value.name, _kept(value))}
        case "deleted_runner" | "deleted_router":
            part = f"{word.removeprefix('deleted_')}s"
            return {part: _without(getattr(view, part), value)}
    folding = _FOLDINGS.get(value.kind) if word in ("resource", "deleted_resource") else None
    if folding is None:
        return {}
    known = getattr(view, folding.part)
    changed = _with(known, value.name, folding.folded(value)) if word == "resource" else _without(known, value.name)
    return {folding.part: changed}


def _with(part: Mapping[str, T], name: str, value: T) -> Mapping[str, T]:
    return MappingProxyType({**part, name: value})


def _without(part: Mapping[str, T], name: str) -> Mapping[str, T]:
    return MappingProxyType({known: value for known, value in part.items() if known != name})


def _runner(watched: registry_service_pb2.WatchedRunner) -> RunnerView:
    runner = watched.runner
    instances = {state.model: _instance(state) for state in runner.capability.instances}
    return RunnerView(
        name=runner.name,
        incarnation=runner.incarnation,
        address=runner.address,
        host=runner.host,
        runtime=runner.runtime,
        active=runner.status == runner_pb2.Runner.STATUS_ACTIVE,
        draining=runner.capability.draining,
        ticket_key=watched.ticket_key,
        instances=MappingProxyType(instances),
        max_requests=runner.capability.max_requests,
        tool_names=frozenset(runner.capability.tool_names),
        labels=label_set(runner.capability.labels),
        clock_offset_seconds=seconds_of(runner.capability.clock_offset),
        clock_refused=runner.capability.clock_refused,
        left_out=tuple(runner.capability.left_out),
    )


def _instance(state: runner_pb2.InstanceState) -> runner_pb2.InstanceState:
    if state.phase != runner_pb2.InstanceState.PHASE_UNSPECIFIED and state.phase in _PHASES:
        return state
    failed = runner_pb2.InstanceState()
    failed.CopyFrom(state)
    failed.phase = runner_pb2.InstanceState.PHASE_FAILED
    return failed


def _model(model: model_pb2.Model) -> ModelView:
    manifest = model.manifest
    return ModelView(
        name=manifest.name,
        pool=manifest.pool_name or manifest.name,
        runner=model.runner,
        operations=frozenset(operation for operation in Operation if operation.value in manifest.operations),
        remote=manifest.remote,
        active=model.status == model_pb2.Model.STATUS_ACTIVE,
        context_tokens=manifest.context_tokens,
        created_at_seconds=model.create_time.seconds,
        hibernating=model.status == model_pb2.Model.STATUS_HIBERNATING,
        failed=model.status == model_pb2.Model.STATUS_FAILED,
        wake=manifest.wake if manifest.HasField("wake") else None,
        # Skills unknown to this version are dropped, but still count as a declaration.
        skills=skills_of(manifest.skills) if manifest.skills else None,
        journal=journal_in(manifest.journal),
        digest=manifest.digest,
        # Its runner runs in the mesh itself and starts with the first such model.
        expected=not model.runner and manifest.HasField("provider"),
        id=model.id,
        labels=label_set(manifest.tags.labels),
        price=_kept(manifest.price) if manifest.HasField("price") else None,
    )


def _agent(agent: agent_pb2.Agent) -> agent_pb2.Agent:
    """Returns an agent without its last heartbeat, which changes without being sent."""
    agent.ClearField("last_heartbeat_time")
    return agent


def _kept(message: M) -> M:
    """Returns a copy: a part of a message would keep the whole message in memory, such as a snapshot."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


@dataclass(frozen=True, slots=True)
class _Folding:
    """Converts resources of one kind to entries of a view."""

    part: str
    record: type[Message]
    fold: Callable[[Any], Any] = lambda message: message

    def folded(self, resource: ResourceDocument) -> Any:
        message = self.record()
        resource.content.Unpack(message)
        return self.fold(message)


_FOLDINGS: Mapping[str, _Folding] = MappingProxyType(
    {
        "model": _Folding("models", model_pb2.Model, _model),
        "agent": _Folding("agents", agent_pb2.Agent, _agent),
        "route": _Folding("routes", route_pb2.Route),
        "alias": _Folding("aliases", alias_pb2.Alias),
        "workflow": _Folding("workflows", workflow_pb2.RegisteredWorkflow),
        "tenant": _Folding("tenants", tenant_pb2.Tenant),
        "trial": _Folding("trials", trial_pb2.Trial),
    }
)


log = get_logger("weft.fleet")

FleetListener = Callable[[FleetView], None]


async def read_fleet(registry: grpc.aio.Channel) -> FleetView:
    """Returns the current view of the mesh, without following its changes. Raises the registry's errors."""
    stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(registry))
    view, watch = FleetView(), stub.Watch(registry_service_pb2.WatchRequest())
    with calling(Reason.SERVICE_UNAVAILABLE):
        async for snapshot in watch:
            view = apply_watch(view, snapshot)
            break
    watch.cancel()
    return view


class FleetWatcher(StreamFollower):
    """Follows the registry's Watch and passes each new FleetView to listeners."""

    loop_name = "fleet-watcher"
    log = log
    lost_words = "registry watch lost, serving from the last known state"

    def __init__(
        self, registry: grpc.aio.Channel, clock: Clock, *, include_ticket_keys: bool = False, service: str = ""
    ) -> None:
        """`service`: the name under which the registry lists this watcher; empty: not listed."""
        super().__init__(clock)
        self._service = service
        self._stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(registry))
        self._include_ticket_keys = include_ticket_keys
        self._view = FleetView()
        self._listeners: list[FleetListener] = []

    @property
    def view(self) -> FleetView:
        """The newest view; empty before the first snapshot."""
        return self._view

    def subscribe(self, listener: FleetListener) -> None:
        """Calls `listener` with every new view from the event loop."""
        self._listeners.append(listener)

    @override
    async def _follow(self) -> None:
        request = registry_service_pb2.WatchRequest(
            include_ticket_keys=self._include_ticket_keys,
            service=self._service,
            host=socket.gethostname() if self._service else "",
            version=__version__ if self._service else "",
        )
        async for response in self._stub.Watch(request):
            self._view = apply_watch(self._view, response)
            self._note_received()
            for listener in self._listeners:
                listener(self._view)


def expected_model(name: str, pool: str, runner: str, journal: JournalMode = JournalMode.UNSET) -> ModelView:
    """Returns a model of which only the configuration is known; it counts as having every ability."""
    return ModelView(
        name=name,
        pool=pool or name,
        runner=runner,
        operations=frozenset(Operation),
        remote=False,
        active=False,
        context_tokens=0,
        created_at_seconds=0,
        expected=True,
        journal=journal,
    )


class ExpectedMesh:
    """Models and agents that are shown until their runners have registered, or until the expectation ends.

    Each reader of the mesh has its own, since entries arrive at readers at different times.
    """

    def __init__(self, models: Iterable[ModelView] = (), agents: Iterable[agent_pb2.Agent] = ()) -> None:
        self.models = {model.name: model for model in models}
        self.agents = {agent.manifest.name: agent for agent in agents}

    def add(self, other: "ExpectedMesh") -> None:
        """Also expects the entries of another one."""
        self.models |= other.models
        self.agents |= other.agents

    def drop(self, other: "ExpectedMesh") -> None:
        """Stops expecting the entries of another one."""
        for name in other.models:
            self.models.pop(name, None)
        for name in other.agents:
            self.agents.pop(name, None)

    def clear(self) -> None:
        """Ends the expectation: missing models become unknown."""
        self.models.clear()
        self.agents.clear()

    def shown(self, view: FleetView) -> FleetView:
        """Returns `view` with the expected entries that have not arrived yet. An entry that arrived is dropped."""
        if not (self.models or self.agents) or view.revision == 0:
            return view
        for name in [name for name in self.models if _has_come(view, view.models.get(name))]:
            del self.models[name]
        for name in [name for name in self.agents if _answers(view.agents.get(name))]:
            del self.agents[name]
        return replace(
            view, models=_with_expected(view.models, self.models), agents=_with_expected(view.agents, self.agents)
        )


class ExpectingFleet(FleetSource):
    """A FleetSource that also shows expected entries."""

    def __init__(self, fleet: FleetSource, expected: ExpectedMesh) -> None:
        self._fleet = fleet
        self._expected = expected

    @property
    @override
    def view(self) -> FleetView:
        return self._expected.shown(self._fleet.view)


def _has_come(view: FleetView, model: ModelView | None) -> bool:
    """Whether a model and its runner have both arrived; they arrive as separate changes."""
    if model is None or not model.reachable:
        return False
    runner = view.runners.get(model.runner)
    return runner is not None and runner.active


def _answers(agent: agent_pb2.Agent | None) -> bool:
    return agent is not None and not agent.HasField("inactive_time")


def _with_expected(known: Mapping[str, T], expected: Mapping[str, T]) -> Mapping[str, T]:
    return MappingProxyType({**known, **expected}) if expected else known


MAX_VIEW_AGE_SECONDS = 30.0
"""Age from which routers and gateways that have lost the registry are degraded; they continue with their last view."""


def probe_fleet(fleet: FleetWatcher | None) -> Observation:
    """Returns the state of a service's view of the fleet; None: it has not connected to the registry yet.

    An outdated view is still used: calls fail for runners that are gone.
    """
    if fleet is None or fleet.view.revision == 0:
        return down("no_fleet_view", "the registry has not answered yet, so that no model or runner is known")
    lost = fleet.lost_seconds
    if lost <= MAX_VIEW_AGE_SECONDS:
        return WELL
    return degraded("old_fleet_view", f"the registry has not answered for {lost:.0f} s; the last view is used")


def fleet_check(fleet: FleetWatcher) -> HealthCheck:
    """Returns the health check of a service's view of the fleet."""
    return HealthCheck(name="fleet_view", probe=lambda: probe_fleet(fleet))


def router_check(router: "RouterSource") -> HealthCheck:
    """Returns the health check that a router answers."""
    away = down("no_router", "no router answers")
    return HealthCheck(name="router", probe=lambda: WELL if router.is_reachable else away)
