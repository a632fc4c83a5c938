"""`weft up`: registry, router and gateway on one event loop, each runner a child process, one home."""

import asyncio
import ipaddress
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc

import registry_svc.service
import router_svc.service
from gateway.http.tls import server_context
from registry_svc.service import RegistryService
from router_svc.durable.tasks.service import TaskService
from router_svc.service import RouterService
from runner_svc.settings import RunnerSettings
from weft.api.registry.v1 import agent_pb2
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import (
    ExpectedMesh,
    ExpectingFleet,
    FleetView,
    FleetWatcher,
    ModelView,
    expected_model,
)
from weft.durable.batches import BatchPort, FilePort
from weft.durable.responses import ResponseStore
from weft.durable.tasks import TaskPort
from weft.kernel.clock import SystemClock
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.gc_tuning import settle_garbage_collector
from weft.kernel.names import CENTRAL_RUNNER
from weft.kernel.reasons import MODEL_NOT_LISTED, PULLING, WAITING_FOR_PULL, Reason
from weft.kernel.request import journal_mode_of
from weft.kernel.rpc import ChannelPool, open_channel
from weft.kernel.service import Service, start_task, stop_tasks
from weft_app.compose.demo import configured_runners
from weft_app.compose.durable_services import durable_services, response_service, router_database
from weft_app.compose.engine_environments import require_environments
from weft_app.compose.gateway import MeshClients, build_gateway, gateway_config
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome
from weft_app.compose.published_agents import published_agents
from weft_app.compose.registry import registry_config
from weft_app.compose.relay import RelayEndpoint, relay_listeners
from weft_app.compose.router import router_config
from weft_app.compose.runner_processes import RunnerChild, StartedRunners, retirement_notes
from weft_app.compose.security import KeyCheck, channel_security, key_check, keys_required
from weft_app.config.config import WeftConfig
from weft_app.config.runners import with_replicas

MODEL_CHECK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a start, for progress output."""

    name: str
    """The step, such as "services" or "smollm2-135m"."""
    detail: str
    done: bool = False
    is_warning: bool = False
    """Whether it ended with the warning in `detail`."""
    progress: float | None = None
    """Share that is done, 0 to 1; None: unknown."""

    @property
    def text(self) -> str:
        """The step in words, such as "qwen: pulling on laptop (40 %)"."""
        share = "" if self.progress is None else f" ({round(self.progress * 100)} %)"
        return f"{self.name}: {self.detail}{share}"


ShowProgress = Callable[[Stage], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSide:
    """The router's side of a mesh that a gateway in the same process is built over."""

    router: RouterService
    engine: TaskService
    """The engine that runs tasks."""
    responses: ResponseStore
    tasks: TaskPort
    files: FilePort
    batches: BatchPort
    names_waited_for: Callable[[], Awaitable[Collection[str]]]
    """The names of models and pools for which tasks wait."""


class UpHost:
    """A whole mesh on one home. Life cycle: start, stop; a start that fails or is cancelled leaves nothing behind."""

    def __init__(
        self,
        config: WeftConfig,
        home: WeftHome,
        config_path: Path | None,
        *,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`notify` gets a sentence when a runner's process ended by itself, or the runner left the configuration."""
        self._config = config
        self._notify = notify
        self._home = home
        self._config_path = config_path
        self._runners = configured_runners(config)
        self._children: list[RunnerChild] = []
        self._registry: RegistryService | None = None
        self._waiting_for_central: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self._on_ready: list[Callable[[], None]] = []
        """Called once every configured model is ready."""
        self._clock = SystemClock()
        self.url = ""
        """Base URL of the HTTP edge, once it is started."""
        self.notice = ""
        """A notice for operators about stored data, once started; empty: none."""
        self.grpc_address = ""
        self.grpc_port_address = ""
        """The TCP address of gRPC, once started; empty: none."""
        self.relay: RelayEndpoint | None = None
        """The relay's address, once started; None: no relay."""

    @property
    def asks_for_keys(self) -> bool:
        """Whether callers over HTTP need a key."""
        return keys_required(self._config)

    @property
    def models(self) -> list[str]:
        """The models it is configured to serve, first one first."""
        return [model.name for runner in self._runners for model in runner.published_models]

    @property
    def stage_count(self) -> int:
        """The number of stages that a start shows: the services, and each model."""
        return 1 + len(self.models)

    async def start(self, show: ShowProgress) -> None:
        """Starts everything and returns once every model is ready. Raises LOAD_STALLED when one cannot become ready."""
        try:
            require_startable(self._config, self._home)
            require_environments(self._runners, self._home)
            show(Stage(name="services", detail="starting registry, router and gateway"))
            fleet = await self._start_services()
            show(Stage(name="services", detail=f"listening at {self.url}", done=True))
            await self._start_runners()
            assert self._registry is not None, "the services run"
            self._waiting_for_central = start_task(self._start_central(self._registry), name="central-models")
            await self._until_models_are_ready(fleet, show)
            for expect_no_more in self._on_ready:
                expect_no_more()
            settle_garbage_collector()
            self._home.announce(self._facts())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Drains and stops everything, the HTTP edge first. Idempotent."""
        await self._stack.aclose()

    def kill_runners(self) -> None:
        """Kills the runners without a drain; their backends die with them."""
        for child in self._children:
            child.kill()

    async def _start_grpc(self, keys: KeyCheck | None) -> "RouterSide":
        """Starts registry, router and relay on one gRPC server."""
        host = GrpcHost(guard=None if keys is None else keys.interceptor())
        self.grpc_address = host.bind(self._home.address("weft"))
        if self._config.grpc_port is not None:
            self.grpc_port_address = host.bind(f"127.0.0.1:{self._config.grpc_port}")
        router = router_svc.service.build(router_config(self._config, self.grpc_address, self.grpc_address))
        router.expect(expected_mesh(self._runners))
        self._on_ready.append(router.expect_no_more)
        registry = self._registry = registry_svc.service.build(registry_config(self._config, self._home))
        if keys is not None:
            keys.use(lambda: registry.key_ring)
        self._stack.push_async_callback(host.stop, self._config.drain_seconds)
        database = router_database(self._config, self._home)
        responses, durable = response_service(self._config, database), durable_services(self._config, database, router)
        listeners = relay_listeners(self._config.relay, self._home, router.relay)
        await host.start([registry, router, responses, *durable.in_order(), *listeners])
        self.relay = listeners[0].endpoint if listeners else None
        if database.notice:
            self.notice = f"{database.notice}; {database.remedy}"
        return RouterSide(
            router=router,
            engine=durable.tasks,
            responses=responses.store,
            tasks=durable.tasks.tasks,
            files=durable.batches.files,
            batches=durable.batches.batches,
            names_waited_for=durable.tasks.names_waited_for,
        )

    async def _start_services(self) -> FleetWatcher:
        keys = key_check(self._config, self._clock)
        side = await self._start_grpc(keys)
        router = side.router
        channel, channels = open_channel(self.grpc_address), ChannelPool(security=channel_security(self._config))
        fleet = FleetWatcher(channel, self._clock)
        self._stack.push_async_callback(channel.close)
        self._stack.push_async_callback(channels.close)
        self._stack.push_async_callback(fleet.stop)
        await fleet.start()
        await fleet.wait_ready()
        await self._retire_runners(channel, side)

        expected = expected_mesh(self._runners)
        self._on_ready.append(expected.clear)
        expecting = ExpectingFleet(fleet, expected)
        dispatcher = Dispatcher(router.placement, channels, clock=self._clock, fleet=expecting)
        mesh = MeshClients(
            dispatcher=dispatcher,
            fleet=fleet,
            registry=channel,
            channels=channels,
            queues=router.placement,
            requests=router.requests,
            responses=side.responses,
            tasks=side.tasks,
            files=side.files,
            batches=side.batches,
            keys=keys,
            clock=self._clock,
            names=router,
            released_tasks=lambda: side.engine.released,
        )
        edge = build_gateway(self._config, mesh)
        self._stack.push_async_callback(self._stop_runners)
        self._stack.push_async_callback(self._stop_work, edge, side.engine)
        await edge.start()
        self.url = edge.url
        return fleet

    async def _retire_runners(self, registry: grpc.aio.Channel, side: RouterSide) -> None:
        """Retires the runners of an earlier start on this home that the configuration no longer names."""
        names = [runner.name for runner in self._runners]
        retired = await StartedRunners(self._home).retire_others(names, registry)
        if retired:
            waited_for = await side.names_waited_for()
            for sentence in retirement_notes(retired, waited_for):
                self._notify(sentence)

    async def _start_runners(self) -> None:
        for runner in self._runners:
            arguments = ["serve", "runner", "--runner", runner.name, "--home", str(self._home.root)]
            arguments += ["--registry", self.grpc_address]
            if not runner.models:
                arguments.append("--no-demo")
            if runner.http_port is not None:
                arguments += ["--http-port", str(runner.http_port)]
            if self._config_path is not None:
                arguments += ["--config", str(self._config_path)]
            output = self._home.logs / f"runner-{runner.name}.out"
            child = RunnerChild(runner.name, arguments, output, self._clock, notify=self._notify)
            self._children.append(child)
            await child.start()

    async def _stop_work(self, edge: Service, engine: Service) -> None:
        """Drains callers and tasks at the same time, before the runners stop.

        A task that is returned while its runner still works loses only time.
        """
        drain = self._config.drain_seconds
        await asyncio.gather(edge.stop(drain), engine.stop(drain))

    async def _start_central(self, registry: RegistryService) -> None:
        """Starts the runner of central models once there is one, or a secret for one."""
        await registry.until_central_models()
        arguments = ["serve", "central", "--home", str(self._home.root), "--registry", self.grpc_address]
        if self._config_path is not None:
            arguments += ["--config", str(self._config_path)]
        output = self._home.logs / f"runner-{CENTRAL_RUNNER}.out"
        child = RunnerChild(CENTRAL_RUNNER, arguments, output, self._clock, notify=self._notify)
        self._children.append(child)
        await child.start()

    async def _stop_runners(self) -> None:
        if self._waiting_for_central is not None:
            await stop_tasks([self._waiting_for_central])
        await asyncio.gather(*(child.stop(self._config.drain_seconds) for child in self._children))

    async def _until_models_are_ready(self, fleet: FleetWatcher, show: ShowProgress) -> None:
        waiting = {model.name: runner.name for runner in self._runners for model in runner.published_models}
        pulled: dict[str, Stage] = {}
        for model, runner in waiting.items():
            show(Stage(name=model, detail=f"loading on {runner}"))
        empty = {runner.name for runner in self._runners if not runner.models}
        while waiting or empty:
            view = fleet.view
            empty = {name for name in empty if name not in view.runners or not view.runners[name].active}
            for model, runner in list(waiting.items()):
                settled = self._settled(fleet.view, model, runner)
                if settled is None:
                    pulling = pulling_stage(fleet.view, model, runner)
                    if pulling is not None and pulled.get(model) != pulling:
                        pulled[model] = pulling
                        show(pulling)
                else:
                    del waiting[model]
                    is_warning = settled.startswith(MODEL_NOT_LISTED)
                    show(Stage(name=model, detail=settled, done=True, is_warning=is_warning))
            self._require_willing_runners()
            await self._clock.sleep(MODEL_CHECK_SECONDS)

    def _require_willing_runners(self) -> None:
        """Raises LOAD_STALLED when a runner repeatedly refuses to start."""
        for child in self._children:
            if child.refusal:
                raise WeftError(Reason.LOAD_STALLED, f"runner {child.name} does not start: {child.refusal}")

    def _settled(self, view: FleetView, model: str, runner_name: str) -> str | None:
        """Returns the state of a model once it admits requests, asleep or not; None before. Raises LOAD_STALLED."""
        runner = view.runners.get(runner_name)
        instance = runner.instances.get(model) if runner is not None and runner.active else None
        if instance is None:
            return None
        if instance.detail.startswith(MODEL_NOT_LISTED):
            return instance.detail  # its server is probed again and again; the other models are usable
        if instance.phase in (InstanceState.PHASE_CRASH_LOOP, InstanceState.PHASE_FAILED):
            raise WeftError(
                Reason.LOAD_STALLED,
                f"{model} does not start on {runner_name}: {instance.detail}; "
                f"see {self._home.logs / f'runner-{runner_name}.log'}",
            )
        if instance.phase == InstanceState.PHASE_HIBERNATING:
            # The detail names a lack of memory, where the model could not be loaded for that.
            return f"asleep on {runner_name}" + (f": {instance.detail}" if instance.detail else "")
        return f"ready on {runner_name}" if instance.phase == InstanceState.PHASE_READY else None

    def _facts(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "grpc": self.grpc_address,
            "grpcPort": self.grpc_port_address,
            "models": self.models,
            "pids": {"host": os.getpid(), "runners": {child.name: child.pid for child in self._children}},
            "startTime": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def pulling_stage(view: FleetView, model: str, runner_name: str) -> Stage | None:
    """Returns the stage of a model whose files are pulled; None: they are not, or it is not known."""
    runner = view.runners.get(runner_name)
    instance = runner.instances.get(model) if runner is not None and runner.active else None
    if instance is None or not instance.detail.startswith((PULLING, WAITING_FOR_PULL)):
        return None
    share = instance.load_progress if instance.HasField("load_progress") else None
    return Stage(name=model, detail=f"{instance.detail} on {runner_name}", progress=share)


def expected_mesh(runners: Iterable[RunnerSettings]) -> ExpectedMesh:
    """Returns the models and agents that these runners will publish. Raises INVALID_ARGUMENT naming the field."""
    runners = tuple(runners)
    models = [model for runner in runners for model in _models(runner)]
    manifests = [manifest for runner in runners for manifest in published_agents(runner)]
    return ExpectedMesh(models, [agent_pb2.Agent(manifest=manifest) for manifest in manifests])


def _models(runner: RunnerSettings) -> Iterator[ModelView]:
    for model in with_replicas(runner, runner.published_models):
        journal = journal_mode_of(model.journal)
        yield expected_model(model.name, model.pool or "", runner.name, journal)
        for adapter in model.served_adapters:
            yield expected_model(adapter.name, adapter.pool or "", runner.name, journal)


def require_startable(config: WeftConfig, home: WeftHome) -> None:
    """Checks a configuration as a start does, without starting. Raises INVALID_ARGUMENT naming the invalid setting."""
    gateway = gateway_config(config)
    exposure = gateway.exposure()
    server_context(exposure)
    if not _is_loopback(exposure.host):
        exposure.require_protection()
    router_config(config, home.address("weft"))
    registry_config(config, home)


def _is_loopback(host: str) -> bool:
    """Whether a host resolves to a loopback address, as the listener checks it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        raise invalid_field("host", f"'{host}' is not an address of this machine") from None
    return ipaddress.ip_address(found[0][4][0]).is_loopback
