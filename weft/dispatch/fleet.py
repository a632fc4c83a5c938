"""The read model of the mesh: every runner and model, kept current by the registry's Watch.

Routers and gateways hold one each and go on serving from it while the registry is away.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import grpc
import structlog

from weft.api.registry.v1 import model_pb2, registry_service_pb2, registry_service_pb2_grpc, runner_pb2
from weft.kernel.clock import Clock
from weft.kernel.request import Operation
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    from weft.api.registry.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub

log = structlog.get_logger("weft.fleet")

FIRST_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 5.0


class Phase(Enum):
    """Where an instance is in its life; see `registry.v1.InstanceState.Phase`."""

    IDLE = runner_pb2.InstanceState.PHASE_IDLE
    LOADING = runner_pb2.InstanceState.PHASE_LOADING
    READY = runner_pb2.InstanceState.PHASE_READY
    DRAINING = runner_pb2.InstanceState.PHASE_DRAINING
    STOPPING = runner_pb2.InstanceState.PHASE_STOPPING
    CRASH_LOOP = runner_pb2.InstanceState.PHASE_CRASH_LOOP
    FAILED = runner_pb2.InstanceState.PHASE_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One model on one runner, as the runner last reported it."""

    model: str
    phase: Phase
    slots_total: int
    slots_used: int
    load_progress: float | None
    detail: str


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
    instances: Mapping[str, InstanceView]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model as the mesh knows it."""

    name: str
    pool: str
    """The effective pool: the declared one, or the model's own name."""
    runner: str
    operations: frozenset[Operation]
    remote: bool
    active: bool
    context_tokens: int
    created_at_seconds: int
    """Unix time of its first publication."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Everything, at one revision."""

    revision: int = 0
    runners: Mapping[str, RunnerView] = field(default_factory=dict)
    models: Mapping[str, ModelView] = field(default_factory=dict)

    def pool_members(self, model_or_pool: str) -> list[ModelView]:
        """The models that answer for a name: those of the pool so called, or the one model so called."""
        members = [model for model in self.models.values() if model.pool == model_or_pool]
        if members:
            return members
        single = self.models.get(model_or_pool)
        return [] if single is None else [single]


FleetListener = Callable[[FleetView], None]


class FleetWatcher:
    """Follows the registry's Watch and tells listeners each new FleetView; reconnects for as long as it runs."""

    def __init__(self, registry: grpc.aio.Channel, clock: Clock, *, include_ticket_keys: bool = False) -> None:
        self._stub = cast("RegistryServiceAsyncStub", registry_service_pb2_grpc.RegistryServiceStub(registry))
        self._clock = clock
        self._include_ticket_keys = include_ticket_keys
        self._view = FleetView()
        self._listeners: list[FleetListener] = []
        self._task: asyncio.Task[None] | None = None
        self._first_snapshot = asyncio.Event()

    @property
    def view(self) -> FleetView:
        """The newest view; empty before the first snapshot."""
        return self._view

    def subscribe(self, listener: FleetListener) -> None:
        """Call `listener` with every new view, from the event loop."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Begin to follow. Returns at once; `wait_ready` waits for the first snapshot."""
        self._task = start_task(self._follow(), name="fleet-watcher")

    async def wait_ready(self) -> None:
        """Return once the first snapshot has arrived."""
        await self._first_snapshot.wait()

    async def stop(self) -> None:
        """Stop following; the last view stays readable."""
        if self._task is not None:
            await stop_tasks([self._task])
            self._task = None

    async def _follow(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            revision = self._view.revision
            try:
                await self._follow_once()
            except grpc.aio.AioRpcError as error:
                log.warning("registry watch lost, serving from the last known state", code=error.code().name)
            except Exception:
                # A watcher that ended would leave its service with an ever older view, and nobody would know.
                log.exception("registry watch failed unexpectedly, watching again")
            moved = self._view.revision != revision
            pause = FIRST_RETRY_SECONDS if moved else min(pause * 2, MAX_RETRY_SECONDS)
            await self._clock.sleep(pause)

    async def _follow_once(self) -> None:
        request = registry_service_pb2.WatchRequest(include_ticket_keys=self._include_ticket_keys)
        async for response in self._stub.Watch(request):
            self._view = apply_watch(self._view, response)
            self._first_snapshot.set()
            for listener in self._listeners:
                listener(self._view)


def apply_watch(view: FleetView, response: registry_service_pb2.WatchResponse) -> FleetView:
    """The view after one response of Watch. Pure; a snapshot replaces everything."""
    if response.WhichOneof("kind") == "snapshot":
        return FleetView(
            response.revision,
            MappingProxyType({watched.runner.name: _runner(watched) for watched in response.snapshot.runners}),
            MappingProxyType({model.manifest.name: _model(model) for model in response.snapshot.models}),
        )
    runners, models = dict(view.runners), dict(view.models)
    change = response.change
    match change.WhichOneof("kind"):
        case "runner":
            runners[change.runner.runner.name] = _runner(change.runner)
        case "model":
            models[change.model.manifest.name] = _model(change.model)
        case "deleted_runner":
            runners.pop(change.deleted_runner, None)
        case "deleted_model":
            models.pop(change.deleted_model, None)
    return FleetView(response.revision, MappingProxyType(runners), MappingProxyType(models))


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
    )


def _instance(state: runner_pb2.InstanceState) -> InstanceView:
    known = state.phase in runner_pb2.InstanceState.Phase.values() and state.phase != 0
    return InstanceView(
        model=state.model,
        phase=Phase(state.phase) if known else Phase.FAILED,
        slots_total=state.slots_total,
        slots_used=state.slots_used,
        load_progress=state.load_progress if state.HasField("load_progress") else None,
        detail=state.detail,
    )


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
    )
