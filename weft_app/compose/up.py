"""`weft up`: registry, router and gateway on one event loop, each runner a child process, one home."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gateway.gateway_service
import registry_svc.registry_service
import router_svc.router_service
from gateway.gateway_service import GatewayService
from gateway.http.server import free_address
from registry_svc.registry_metrics import add_registry_metrics
from registry_svc.registry_service import RegistryService
from router_svc.registry_session import RouterAnnouncement
from router_svc.router_metrics import RouterMetrics
from router_svc.router_service import RouterService
from weft import __version__
from weft.api.operations.v1 import configuration_service_pb2 as pb
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.end_reporter import EndReporter
from weft.dispatch.fleet import (
    ExpectingFleet,
    FleetWatcher,
)
from weft.durable.requests import RequestClient
from weft.durable.store_calls import TIMEOUT_SECONDS as STORE_TIMEOUT_SECONDS
from weft.extension import enabled_extensions
from weft.kernel.channels.rpc import ChannelPool, open_channel
from weft.kernel.errors.error_tree import WeftError, renaming_fields
from weft.kernel.errors.reasons import Reason
from weft.kernel.machine.memory_tuning import settle_memory
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.services.service_lifecycle import Service, start_task, stop_tasks
from weft.kernel.telemetry.tracing import NO_TRACING, ServiceName, Tracing
from weft.kernel.time.clock import SystemClock
from weft.link.carried_calls import CallStreams
from weft_app.compose.certificate_expiry import CertificateExpiry
from weft_app.compose.configuration import ConfigurationSource, ReadConfiguration, write_snapshot
from weft_app.compose.configuration_service import ConfigurationService
from weft_app.compose.discovered_here import DiscoveredHere
from weft_app.compose.dump import left_behind
from weft_app.compose.durable_services import RouterStores, router_stores
from weft_app.compose.edge_certificate import own_edge_certificate, renew_edge_certificate, with_edge_certificate
from weft_app.compose.engine_reports import Engine, engine_reports, reported
from weft_app.compose.gateway import gateway_ports
from weft_app.compose.gateway_tools import GatewayTools
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import RUNNING, STARTING, WeftHome
from weft_app.compose.join_listeners import join_listeners
from weft_app.compose.machine import local_url, network_urls
from weft_app.compose.mdns_announcer import AnnouncementState, Announcer, announcer_of
from weft_app.compose.mesh_runners import MeshRunners
from weft_app.compose.model_starts import ModelStarts, ShowProgress, Stage
from weft_app.compose.process_metrics import metrics_page, metrics_services
from weft_app.compose.process_service import ProcessService
from weft_app.compose.reload import MeshReload
from weft_app.compose.runner_pages import RunnerPages
from weft_app.compose.runner_processes import left_behind_notes, retire_others
from weft_app.compose.security import KeyCheck, channel_security, is_on_loopback, key_check, keys_required
from weft_app.compose.service_configs import gateway_config, gateway_config_behind_edge, registry_config, router_config
from weft_app.compose.startable import expected_mesh, require_environments, require_startable
from weft_app.compose.tracing import close_tracing, tracing_of
from weft_app.config.config import WeftConfig
from weft_app.config.runners import with_engines
from weft_app.edge.binary import envoy_binary

if TYPE_CHECKING:
    from weft.api.gateway.v1.model_catalog_pb2 import ModelCatalog
    from weft.api.registry.v1.lease_service_pb2 import HostMemory
    from weft_app.compose.authority import EdgeCertificate
    from weft_app.compose.relay import RelayEndpoint
    from weft_app.edge.process import EdgeProxy

PROCESSES = ("mesh", "registry", "router", "gateway")
"""Names of the process of `weft up`."""
SNAPSHOT_NAME = "config.yaml"
"""File with the configuration in force, for the runners: an edited weft.yaml is not in force yet."""


class UpHost:
    """A mesh on one home. Life cycle: start, stop; a start that fails or is cancelled cleans up."""

    def __init__(
        self,
        source: ConfigurationSource,
        read: ReadConfiguration,
        home: WeftHome,
        *,
        notify: Callable[[str], None] = lambda _: None,
        is_discovered: bool = False,
    ) -> None:
        """`read` is the configuration from `source`, which a reload reads again.

        `notify` gets a sentence when a runner's process exits unexpectedly or the runner is no longer configured.
        `is_discovered`: whether the runners are those of `keep_discovered`.
        """
        self._clock = SystemClock()
        self._monitor = HealthMonitor((), self._clock)
        self._source = source
        self._read = read
        self._config = read.config
        self._notify = notify
        self._home = home
        self._runners = read.runners
        self._children = MeshRunners(home, home.run / SNAPSHOT_NAME, self._clock, notify, is_discovered=is_discovered)
        self._registry: RegistryService | None = None
        self._waiting_for_central: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()
        self._model_starts: ModelStarts | None = None
        """The models that start, once the services run."""
        self._tracing: Tracing = NO_TRACING
        self._reloads: MeshReload | None = None
        self._is_up = False
        self.configuration = ConfigurationService(self._reload)
        self._page = metrics_page(self._config)
        self._expiry = CertificateExpiry(self._config)
        self._on_ready: list[Callable[[], None]] = []
        """Called once every configured model has loaded or failed."""
        self._started_at = ""
        """When its services started to listen; empty: not yet."""
        self.url = ""
        """Base URL of the HTTP edge for this machine, once started."""
        self.network_urls: tuple[str, ...] = ()
        """Base URLs for other machines, the likeliest one first; empty on loopback."""
        self.certificate: EdgeCertificate | None = None
        """The certificate that the edge has issued itself, once started; None: it uses none or another one."""
        self.notices = list(read.removed)
        """Notices for operators about stored data, once started."""
        self.grpc_address = ""
        self.grpc_port_address = ""
        """The TCP address of gRPC, once started; empty: none."""
        self.relay: RelayEndpoint | None = None
        """The relay's address, once started; None: no relay."""
        self.joins: list[tuple[str, str]] = []
        """The listeners of extensions by which programs join, once started: the label and the line of each."""
        self._announcer: Announcer | None = None
        self._proxy: EdgeProxy | None = None
        """The Envoy in front of the gateway, once started; None: no proxy."""

    @property
    def config_files(self) -> tuple[Path, ...]:
        """The files of the configuration; empty: there is no weft.yaml."""
        return self._read.files

    @property
    def asks_for_keys(self) -> bool:
        """Whether HTTP callers need a key."""
        return keys_required(self._config)

    @property
    def has_workbench(self) -> bool:
        """Whether the gateway serves the workbench, its web page."""
        return self._config.gateway.workbench.enabled

    @property
    def is_insecure(self) -> bool:
        """Whether other machines reach the mesh over plain HTTP without a TLS proxy in front."""
        gateway = self._config.gateway
        return bool(self.network_urls) and gateway.insecure and not gateway.tls_terminated_elsewhere

    @property
    def models(self) -> list[str]:
        """The configured models, then those of followed servers, once started."""
        return [model.name for runner in self._runners for model in runner.published_models] + self._listed_models

    @property
    def example_model(self) -> tuple[str, str]:
        """A model to try, preferably for chat, and the command for a model that does not chat, else an empty text."""
        configured = [(model.name, model.tried_by) for runner in self._runners for model in runner.published_models]
        models = [*configured, *((name, "") for name in self._listed_models)]
        unusable = set[str]() if self._model_starts is None else self._model_starts.unusable
        models = [each for each in models if each[0] not in unusable] or models
        return min(models, key=lambda each: bool(each[1]), default=("<model>", ""))

    @property
    def announcement(self) -> AnnouncementState | None:
        """The state of the announcement on the local network, once started; None: it is disabled."""
        return None if self._announcer is None else self._announcer.state

    @property
    def stage_count(self) -> int:
        """The number of stages of a start: the services, and each model."""
        following = sum(runner.follows_server for runner in self._runners)
        return 1 + len(reported(self._engines)) + len(self.models) + following

    @property
    def _listed_models(self) -> list[str]:
        """The models of followed servers that were available at the start."""
        return [] if self._model_starts is None else self._model_starts.listed

    @property
    def _engines(self) -> list[Engine]:
        runners = with_engines(self._runners, self._config.extensions.disabled)
        return [(runner.engine, runner.command) for runner in runners]

    async def start(self, show: ShowProgress) -> None:
        """Starts everything and returns once every model is ready or has failed for now.

        Raises LOAD_STALLED if no model can be served, or if one cannot and the configuration requires all.
        """
        try:
            require_startable(self._config, self._home)
            require_environments(with_engines(self._runners, self._config.extensions.disabled), self._home)
            show(Stage(name="services", detail="starting registry, router and gateway"))
            self.notices += left_behind_notes(self._home, {runner.name for runner in self._runners}).values()
            self.notices += left_behind(self._config, self._home)
            fleet = await self._start_services()
            self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
            # Models may load for minutes, and commands need the addresses meanwhile.
            self._home.announce(self._facts())
            show(Stage(name="services", detail=f"listening at {self.url}", done=True))
            for text, advice in await asyncio.to_thread(self._engine_reports):
                detail = f"{text}; {advice}" if advice else text
                show(Stage(name="engine", detail=detail, done=True, is_warning=bool(advice)))
            write_snapshot(self._home.run / SNAPSHOT_NAME, self._read.document)
            for runner in self._runners:
                await self._children.start(runner)
            assert self._registry is not None, "the services run"
            self._waiting_for_central = start_task(self._start_central(self._registry), name="central-models")
            self._model_starts = ModelStarts(
                self._runners,
                self._children,
                self._registry,
                self._home,
                self._clock,
                requires_all=self._config.require_all_models,
            )
            await self._model_starts.until_ready(fleet, show)
            for expect_no_more in self._on_ready:
                expect_no_more()
            await self._announce()
            settle_memory()
            self._is_up = True
            self._home.announce(self._facts())
        except BaseException:
            self._home.withdraw()
            await self.stop()
            raise

    def _engine_reports(self) -> list[tuple[str, str]]:
        return list(engine_reports(self._engines, self._home.environments))

    async def stop(self) -> None:
        """Drains and stops everything, the HTTP edge first. Idempotent."""
        await self._monitor.note_stopping()
        await self._stack.aclose()

    def kill_runners(self) -> None:
        """Kills the runners without draining them; their backends die with them."""
        self._children.kill_all()

    async def _announce(self) -> None:
        """Announces the mesh on the local network, if enabled. A failure does not fail the start."""
        if self._config.announce.enabled and self.relay is not None:
            self._announcer = announcer_of(self._config, self.relay, self._clock)
            self._stack.push_async_callback(self._announcer.stop)
            await self._announcer.start()

    async def _start_grpc(self, keys: KeyCheck | None) -> tuple[RouterService, RouterStores]:
        """Starts registry, router and relay on one gRPC server."""
        host = GrpcHost(guard=None if keys is None else keys.interceptor())
        self.grpc_address = self._children.registry_address = host.bind(self._home.address("weft"))
        if self._config.grpc_port is not None:
            with renaming_fields(lambda _: "grpc_port"):
                self.grpc_port_address = host.bind(f"127.0.0.1:{self._config.grpc_port}")
        self._tracing = tracing_of(os.environ)
        # Closed last, because requests may run until then.
        self._stack.push_async_callback(close_tracing, self._tracing)
        address = self.grpc_address
        config = router_config(self._config, address, address)
        router = router_svc.router_service.build(
            config,
            tracing=self._tracing,
            observer=RouterMetrics(self._page),
            extensions=enabled_extensions(self._config.extensions.disabled),
        )
        router.expect(expected_mesh(self._runners))
        self._on_ready.append(router.expect_no_more)
        registry = self._registry = registry_svc.registry_service.build(
            registry_config(self._config, self._home), tracing=self._tracing
        )
        if keys is not None:
            keys.use(lambda: registry.key_ring)
        self._stack.push_async_callback(host.stop, self._config.drain_seconds)
        add_registry_metrics(registry.figures, self._page)
        stores = router_stores(self._config, self._home, router, address, self._page)
        database, leading = stores.database, stores.leading(router, self._clock)
        listeners = join_listeners(self._config, self._home, router)
        # While the registry cannot write, the other services continue with what they know.
        for check in (
            *(replace(check, is_essential=False) for check in registry.health_checks()),
            *router.health_checks(),
            *leading.health_checks(),
            *self._expiry.health_checks(),
        ):
            self._monitor.add(check)
        process = ProcessService(
            self._monitor,
            schemas=(registry, database),
            watching=registry.watching.listed,
        )
        announcement = RouterAnnouncement(
            config.name, address, lambda: open_channel(address), self._clock, shares_database=database.is_shared
        )
        services = [registry, router, leading, announcement, listeners, self.configuration, process]
        await host.start(services, self._monitor)
        self.relay = None if listeners.relay is None else listeners.relay.endpoint
        self.joins = listeners.added
        self.notices += listeners.notices
        self.notices += registry.removed
        self.notices += self._expiry.warnings(datetime.now(UTC))
        if database.notice:
            self.notices.append(f"{database.notice}; {database.remedy}")
        return router, stores

    async def _start_services(self) -> FleetWatcher:
        keys = key_check(self._config, self._clock)
        router, stores = await self._start_grpc(keys)
        channel, channels = open_channel(self.grpc_address), ChannelPool(security=channel_security(self._config))
        fleet = FleetWatcher(channel, self._clock, service="gateway")
        self._stack.push_async_callback(channel.close)
        self._stack.push_async_callback(channels.close)
        self._stack.push_async_callback(fleet.stop)
        await fleet.start()
        await fleet.wait_ready()
        # Retires runners of earlier starts that are no longer configured.
        names = [runner.name for runner in self._runners]
        for sentence in await retire_others(self._home, names, channel, stores.tasks.names_waited_for):
            self._notify(sentence)

        expected = expected_mesh(self._runners)
        self._on_ready.append(expected.clear)
        expecting = ExpectingFleet(fleet, expected)
        ends = EndReporter(router.placement, self._clock)
        dispatcher = Dispatcher(
            router.placement,
            CallStreams(channels),
            clock=self._clock,
            fleet=expecting,
            tracing=self._tracing,
            service=ServiceName.GATEWAY,
        )
        dispatcher.report_ends_to(ends)
        dispatcher.observers = router.observers
        tools = GatewayTools(lambda: self._config.runners or ())
        self._stack.push_async_callback(tools.stop)
        ports = gateway_ports(
            self._config,
            self._home,
            dispatcher,
            fleet,
            channel,
            channels,
            router=router.placement,
            # Its database may need longer to fail than a channel does.
            requests=RequestClient(router.requests, STORE_TIMEOUT_SECONDS),
            processes=dict.fromkeys(PROCESSES, channel),
            clock=self._clock,
            tools=tools,
            names=router,
            discovery=DiscoveredHere(lambda: self._config, self._home, self._clock),
            catalog=self._catalog,
        )
        ports = replace(
            ports,
            responses=stores.responses.store,
            usage=stores.usage.store,
            tasks=stores.tasks.tasks,
            files=stores.batches.files,
            batches=stores.batches.batches,
            keys=keys,
            tracing=self._tracing,
            health=self._monitor,
            ends=ends,
        )
        config = with_edge_certificate(self._config, self._home)
        edge = gateway.gateway_service.build(
            gateway_config_behind_edge(config), ports, metrics=self._page, socket_path=self._home.http_socket()
        )
        assert self._registry is not None, "the services have started"
        self._reloads = MeshReload(
            source=self._source,
            current=self._read,
            changed=self._note_reload,
            home=self._home,
            config_file=self._home.run / SNAPSHOT_NAME,
            runners=self._children,
            registry=channel,
            names=self._registry,
            fleet=fleet,
            router=router,
            edge=edge,
            expected=expected,
            names_waited_for=stores.tasks.names_waited_for,
            clock=self._clock,
        )
        for figures in metrics_services(config, self._page, "mesh", self._monitor, keys):
            self._stack.push_async_callback(figures.stop, 0.0)
            await figures.start()
        RunnerPages(self._page, self._home.metrics_socket, lambda: self._children.pids, self._clock)
        self._stack.push_async_callback(self._stop_runners)
        self._stack.push_async_callback(self._stop_work, edge, stores.tasks)
        await edge.start()
        self._note_addresses(await self._start_proxy(config, edge))
        return fleet

    async def _start_proxy(self, config: WeftConfig, edge: GatewayService) -> str:
        """Starts the proxy in front of the gateway, if configured; returns the public URL.

        `config` has the certificate of the edge. Raises as a gateway does if the public address is not available.
        """
        if config.edge.proxy == "none":
            return edge.url
        # Imported here: not needed without a proxy.
        from weft_app.edge.plan import EdgePlan, Endpoint  # noqa: PLC0415
        from weft_app.edge.process import EdgeProxy  # noqa: PLC0415

        binary, exposure = envoy_binary(config.edge), gateway_config(config).exposure()
        host, port = await free_address(exposure, "--port")
        gateways = (Endpoint(host="127.0.0.1", port=edge.port),)
        proxy = self._proxy = EdgeProxy(
            EdgePlan(listen=Endpoint(host=host, port=port), gateways=gateways, limits=config.edge),
            binary,
            self._home.run,
            self._clock,
            tls=None if exposure.tls is None else exposure.tls.files,
            ended=self._notify,
            restarted=self._note_restart,
        )
        await proxy.start()
        self._monitor.add(proxy.health_check())
        # The mesh must not be announced before the state of its edge is known; the next regular check may be late.
        await self._monitor.check()
        return proxy.url

    def _note_restart(self) -> None:
        if self._started_at:
            self._home.announce(self._facts())

    def _note_addresses(self, url: str) -> None:
        """Sets the public URLs and the certificate of the gateway; starts to renew a self-signed certificate."""
        config = self._config
        self.url = local_url(url)
        self.network_urls = () if is_on_loopback(config.host) else network_urls(url)
        own = self.certificate = own_edge_certificate(config, self._home)
        if own is not None:
            renewal = start_task(renew_edge_certificate(lambda: self._config, own, self._clock), name="edge-renewal")
            self._stack.push_async_callback(stop_tasks, [renewal])

    async def _stop_work(self, edge: Service, engine: Service) -> None:
        """Drains callers and tasks concurrently, before the runners stop.

        If a task is returned while its runner still works, only time is lost.
        """
        await asyncio.gather(self._stop_edge(edge), engine.stop(self._config.drain_seconds))

    async def _stop_edge(self, edge: Service) -> None:
        """Closes the public port, drains the gateway, and ends its proxy, if any, last."""
        proxy, grace = self._proxy, self._config.drain_seconds
        drained = self._clock.monotonic()
        try:
            if proxy is not None:
                await proxy.drain()
                drained = self._clock.monotonic()
            await edge.stop(grace)
        finally:
            if proxy is not None:
                await proxy.stop(grace - (self._clock.monotonic() - drained))

    async def _start_central(self, registry: RegistryService) -> None:
        """Starts the runner of central models once there is a central model or a secret for one."""
        await registry.until_central_models()
        await self._children.start_central()

    async def _stop_runners(self) -> None:
        if self._waiting_for_central is not None:
            await stop_tasks([self._waiting_for_central])
        await self._children.stop_all(self._config.drain_seconds)

    async def _catalog(self, text: str, source: str, hosts: "Sequence[HostMemory]") -> "ModelCatalog":
        # Imported here: a start needs no client of the hub.
        from weft_app.compose.model_catalog import mesh_catalog  # noqa: PLC0415

        return await mesh_catalog(text, source, hosts, self._config, self._home)

    async def _reload(self, dry_run: bool) -> pb.ReloadConfigurationResponse:
        if self._reloads is None or not self._is_up:
            raise WeftError(Reason.SERVICE_UNAVAILABLE, "the mesh is starting; try again once it is up")
        return await self._reloads.reload(dry_run)

    def _note_reload(self, read: ReadConfiguration) -> None:
        self._read, self._config, self._runners = read, read.config, read.runners
        self._home.announce(self._facts())

    def _facts(self) -> dict[str, Any]:
        return {
            "state": RUNNING if self._is_up else STARTING,
            "url": self.url,
            "networkUrls": self.network_urls,
            "asksForKeys": self.asks_for_keys,
            "caFile": "" if self.certificate is None else str(self.certificate.authority_file),
            "grpc": self.grpc_address,
            "grpcPort": self.grpc_port_address,
            "config": [str(file) for file in self.config_files],
            "models": self.models,
            "pids": {"host": os.getpid(), "runners": self._children.pids}
            | ({} if self._proxy is None else {"edge": self._proxy.pid}),
            "version": __version__,
            "startTime": self._started_at,
        }
