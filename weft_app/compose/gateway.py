"""Configuration and serving of a gateway."""

import asyncio
import os
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import grpc

import gateway.gateway_service
from gateway.admin.admin_operations import AdminPorts, CatalogSource, DiscoverySource, look_nowhere, no_catalog
from gateway.admin.instances import EngineLogClient, RunnerDescriptions
from gateway.admin.process_client import ProcessesClient
from gateway.endpoints import kinds_with, off_paths
from gateway.gateway_config import REGISTRY_TIMEOUT_SECONDS
from gateway.operation_client import OperationsClient
from gateway.ports import GatewayPorts
from gateway.registry_client import RegistryClient, RegistryService
from gateway.result_links import KEY_BYTES
from gateway.server_tools.tool import ToolCalls
from gateway.watch.queues import queues_by_name
from gateway.watch.resources import resource_sources
from gateway.watch.sources import event_source, figures_of_mesh, memory_source, operation_source, requests_of_tenant
from registry_svc.store.owner_file import create_owner_file, read_owner_file
from weft.api.registry.v1.capture_service_pb2_grpc import CaptureServiceStub
from weft.api.registry.v1.join_token_service_pb2_grpc import JoinTokenServiceStub
from weft.api.registry.v1.key_service_pb2_grpc import KeyServiceStub
from weft.api.registry.v1.secret_service_pb2_grpc import SecretServiceStub
from weft.api.registry.v1.trial_service_pb2_grpc import TrialServiceStub
from weft.dispatch.captured import CaptureSender
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.end_reporter import EndReporter
from weft.dispatch.fleet import FleetSource, FleetWatcher, fleet_check, router_check
from weft.dispatch.leader_placement import LeaderPlacement
from weft.dispatch.placement import RouterPort
from weft.dispatch.quoter import Quoter
from weft.durable.batches import BatchClient, FileClient
from weft.durable.ended_requests import ObserverParts, ended_requests
from weft.durable.journal_policy import JournalPolicy
from weft.durable.requests import RequestClient
from weft.durable.responses import ResponseClient
from weft.durable.tasks import TaskClient
from weft.durable.usage import UsageClient
from weft.extension import enabled_extensions
from weft.kernel.channels.rpc import ChannelPool, open_channel
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.machine.memory_tuning import settle_memory
from weft.kernel.services.health import HealthSource
from weft.kernel.services.health_monitor import HealthMonitor
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.tracing import ServiceName
from weft.kernel.time.clock import Clock, SystemClock
from weft.link.carried_calls import CallStreams
from weft_app.compose.certificate_expiry import CertificateExpiry
from weft_app.compose.edge_certificate import with_edge_certificate
from weft_app.compose.gateway_tools import GatewayTools
from weft_app.compose.grpc_host import GrpcHost
from weft_app.compose.home import WeftHome
from weft_app.compose.invitation import join_command
from weft_app.compose.journal import journal_rules
from weft_app.compose.process_metrics import metrics_page, metrics_services
from weft_app.compose.process_service import ProcessService
from weft_app.compose.security import channel_security, key_check
from weft_app.compose.service_configs import gateway_config, remote_rules
from weft_app.compose.serving import Announce, registry_address, router_address
from weft_app.compose.shutdown import CriticalTasks, stop_requested, until
from weft_app.compose.tracing import close_tracing, tracing_of
from weft_app.config.config import WeftConfig

log = get_logger("weft_app.compose")

REGISTRY_WAIT_SECONDS = 5.0
"""How long a starting gateway waits for the registry before it opens its port anyway, so that probes get answers."""
WATCH_QUEUE_SECONDS = 1.0
"""Polling interval of the router's queues while a stream of `/api/v1/watch` reads them."""


RESULT_KEY_SETTING = "gateway.results.key_file"


def result_key(config: WeftConfig, home: WeftHome) -> bytes:
    """Returns the key that signs result URLs, generated if there is none.

    Raises INVALID_ARGUMENT if others may read its file, its length is wrong, or it cannot be read or written.
    """
    named = config.gateway.results.key_file
    path = home.state / "results.key" if named is None else named.expanduser()
    key = read_owner_file(path, RESULT_KEY_SETTING, max_bytes=KEY_BYTES)
    if key is None:
        key = create_owner_file(path, secrets.token_bytes(KEY_BYTES), RESULT_KEY_SETTING)
    if len(key) != KEY_BYTES:
        raise invalid_field(RESULT_KEY_SETTING, f"{path} must hold {KEY_BYTES} bytes; delete it to make another")
    return key


def gateway_ports(  # noqa: PLR0913 - what a mesh in this process and one elsewhere have differently
    config: WeftConfig,
    home: WeftHome,
    dispatcher: Dispatcher,
    fleet: FleetWatcher,
    registry: grpc.aio.Channel,
    channels: ChannelPool,
    *,
    router: RouterPort,
    requests: RequestClient,
    processes: Mapping[str, grpc.aio.Channel],
    clock: Clock,
    tools: ToolCalls,
    names: FleetSource | None = None,
    discovery: DiscoverySource = look_nowhere,
    catalog: CatalogSource = no_catalog,
) -> GatewayPorts:
    """Returns a gateway's ports to a registry and a scheduler; the caller adds the stores, keys and health.

    `home` locates this machine's relay. `processes` has a channel to each process by service name; `mesh` is `weft up`.
    `names` is the mesh including expected models and defaults to `fleet`.
    """
    timeout = REGISTRY_TIMEOUT_SECONDS
    operations = OperationsClient(registry, timeout_seconds=timeout)
    resources = RegistryClient(registry, fleet, timeout_seconds=timeout)
    extensions = enabled_extensions(config.extensions.disabled)
    return GatewayPorts(
        dispatcher=dispatcher,
        fleet=fleet,
        registry=resources,
        watched=(
            *resource_sources(resources, kinds_with(extensions)),
            event_source(resources),
            requests_of_tenant(requests),
            figures_of_mesh(requests),
            queues_by_name(router, clock, WATCH_QUEUE_SECONDS),
            operation_source(operations),
            memory_source(operations),
        ),
        admin=AdminPorts(
            operations=operations,
            instances=RunnerDescriptions(fleet, channels, clock),
            queues=router,
            engine_logs=EngineLogClient(fleet, channels),
            processes=ProcessesClient(processes, fleet, channels),
            discovery=discovery,
            catalog=catalog,
        ),
        requests=requests,
        prompt_counts=dispatcher.prompt_counts,
        quotes=Quoter(router, names or fleet, dispatcher.prompt_counts),
        result_key=result_key(config, home),
        api_keys=RegistryService(KeyServiceStub(registry), timeout_seconds=timeout),
        join_tokens=RegistryService(JoinTokenServiceStub(registry), timeout_seconds=timeout),
        join_command=partial(join_command, home),
        secrets=RegistryService(SecretServiceStub(registry), timeout_seconds=timeout),
        captures=RegistryService(CaptureServiceStub(registry), timeout_seconds=timeout),
        trials=RegistryService(TrialServiceStub(registry), timeout_seconds=timeout),
        journal=JournalPolicy(names or fleet, journal_rules(config.router)),
        extensions=enabled_extensions(config.extensions.disabled),
        off_paths=off_paths(config.extensions.disabled),
        remote_rules=remote_rules(config.router),
        tool_calls=tools,
    )


class RemoteMesh:
    """The clients of a gateway with registry and routers in other processes."""

    def __init__(self, config: WeftConfig, home: WeftHome) -> None:
        self._config = config
        self._home = home
        self.clock = SystemClock()
        self.security, self.keys = channel_security(config), key_check(config, self.clock)
        self.registry = open_channel(registry_address(config, home), self.security)
        router = router_address(config, home)
        self.router = open_channel(router, self.security)
        self.itself = open_channel(home.address("gateway"))
        self.channels = ChannelPool(security=self.security)
        self.fleet = FleetWatcher(self.registry, self.clock, service="gateway")
        self.routers = LeaderPlacement(self.router, router, self.clock, self.security)
        self.ends = EndReporter(self.routers, self.clock)
        self.captures = CaptureSender(lambda: self.registry)
        tasks = TaskClient(self.routers.channel)
        parts = ObserverParts(tasks=lambda: tasks, view=lambda: self.fleet.view, clock=self.clock)
        self.ended_requests = ended_requests(enabled_extensions(config.extensions.disabled), parts)
        self.tracing = tracing_of(os.environ)
        self.tools = GatewayTools(lambda: config.runners or ())

    def ports(self, health: HealthSource) -> GatewayPorts:
        """Returns the gateway's ports. `health` is that of its process."""
        routers = self.routers
        dispatcher = Dispatcher(
            routers,
            CallStreams(self.channels),
            clock=self.clock,
            fleet=self.fleet,
            tracing=self.tracing,
            service=ServiceName.GATEWAY,
        )
        dispatcher.report_ends_to(self.ends)
        dispatcher.observers = (self.captures, *self.ended_requests)
        services = {"mesh": self.registry, "registry": self.registry, "router": routers.channel, "gateway": self.itself}
        ports = gateway_ports(
            self._config,
            self._home,
            dispatcher,
            self.fleet,
            self.registry,
            self.channels,
            router=routers,
            requests=RequestClient(routers.channel),
            processes=services,
            clock=self.clock,
            tools=self.tools,
        )
        return replace(
            ports,
            responses=ResponseClient(routers.channel),
            usage=UsageClient(routers.channel),
            tasks=TaskClient(routers.channel),
            files=FileClient(routers.channel),
            batches=BatchClient(routers.channel),
            keys=self.keys,
            router=routers,
            tracing=self.tracing,
            health=health,
            ends=self.ends,
        )

    async def start(self) -> None:
        """Starts following routers, the fleet and keys."""
        self.fleet.subscribe(self.routers.update_view)
        self.routers.start()
        await self.fleet.start()
        if self.keys is not None:
            await self.keys.follow(self.registry)

    async def wait_ready(self) -> None:
        """Waits for the first models and keys of the registry, at most REGISTRY_WAIT_SECONDS.

        A proxy that has not yet noticed a restart sends requests as soon as the port is open; without keys they fail.
        """
        try:
            async with asyncio.timeout(REGISTRY_WAIT_SECONDS):
                await self.fleet.wait_ready()
                if self.keys is not None:
                    await self.keys.wait_ready()
        except TimeoutError:
            log.warning("registry sends no models or keys, serving without them", seconds=REGISTRY_WAIT_SECONDS)

    async def stop(self) -> None:
        """Stops following and closes all channels, even if one of them fails."""
        async with AsyncExitStack() as ends:
            ends.push_async_callback(close_tracing, self.tracing)
            for channel in (self.itself, self.router, self.registry, self.channels):
                ends.push_async_callback(channel.close)
            if self.keys is not None:
                ends.push_async_callback(self.keys.stop)
            ends.push_async_callback(self.fleet.stop)
            ends.push_async_callback(self.captures.stop)
            for each in self.ended_requests:
                ends.push_async_callback(each.stop)
            ends.push_async_callback(self.tools.stop)
            ends.push_async_callback(self.routers.close)


async def serve_gateway(config: WeftConfig, home: WeftHome, announce: Announce) -> None:
    """Serves a gateway over a registry and a router in other processes, until a signal arrives."""
    stop = stop_requested()
    remote, page = RemoteMesh(config, home), metrics_page(config)
    page.add_spans(remote.tracing)
    checks = [router_check(remote.routers), fleet_check(remote.fleet), *CertificateExpiry(config).health_checks()]
    monitor = HealthMonitor(checks, remote.clock)
    config = with_edge_certificate(config, home)
    figures = metrics_services(config, page, "gateway", monitor, remote.keys)
    edge = gateway_config(config)
    service = gateway.gateway_service.build(edge, remote.ports(monitor), metrics=page, socket_path=home.http_socket())
    # Serves the gateway's health and this machine's commands.
    own = GrpcHost(guard=None if remote.keys is None else remote.keys.interceptor())
    own.bind(home.address("gateway"))
    process = ProcessService(monitor)
    with CriticalTasks(stop):
        # Closed in reverse order: drains callers before the clients that serve them are closed.
        async with AsyncExitStack() as ends:
            ends.push_async_callback(remote.stop)
            for each in figures:
                ends.push_async_callback(each.stop, config.drain_seconds)
            ends.push_async_callback(own.stop, config.drain_seconds)
            ends.push_async_callback(service.stop, config.drain_seconds)
            ends.push_async_callback(monitor.note_stopping)
            await remote.start()
            await until(stop, remote.wait_ready())
            await service.start()
            for each in figures:
                await each.start()
            await own.start([process], monitor)
            settle_memory()
            announce(service.url)
            await stop.wait()
