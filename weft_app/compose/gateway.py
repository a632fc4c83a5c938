"""How a gateway is set up and run. The only module besides `up` that imports it."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc

import gateway.service
from gateway.admin.keys_client import KeysClient
from gateway.admin.operations_client import OperationsClient
from gateway.admin.ports import AdminPorts
from gateway.admin.runner_client import RunnerDescriptions
from gateway.app import GatewayPorts
from gateway.config import (
    BatchEdgeConfig,
    ConnectionLimits,
    EdgeTls,
    GatewayConfig,
    KeepResponses,
    RateLimitConfig,
    RequestLimits,
)
from gateway.media import MediaConfig
from gateway.resources.registry_client import RegistryClient
from gateway.service import GatewayService
from weft.dispatch import Dispatcher
from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.placement import QueueSource
from weft.dispatch.reconnecting_placement import ReconnectConfig
from weft.dispatch.remote_placement import RemotePlacement
from weft.dispatch.request_records import RemoteRequests, RequestSource
from weft.dispatch.router_watch import RouterSource, RouterWatch
from weft.durable.batches import BatchPort
from weft.durable.files import FilePort
from weft.durable.remote_batches import RemoteBatches
from weft.durable.remote_files import RemoteFiles
from weft.durable.remote_responses import RemoteResponses
from weft.durable.remote_tasks import RemoteTasks
from weft.durable.responses import ResponseStore
from weft.durable.tasks import TaskPort
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.gc_tuning import settle_garbage_collector
from weft.kernel.rpc import ChannelPool, open_channel
from weft.kernel.units import parse_rate
from weft_app.compose.auth import KeyCheck, key_check, keys_required
from weft_app.compose.critical import CriticalTasks
from weft_app.compose.home import WeftHome
from weft_app.compose.schema_limits import schema_limits
from weft_app.compose.serving import Announce, registry_address, router_address
from weft_app.compose.signals import stop_requested
from weft_app.compose.tls import channel_security, edge_files
from weft_app.config.config import RateLimitsSection, WeftConfig
from weft_app.config.gateway_sections import LimitsSection


def gateway_config(config: WeftConfig) -> GatewayConfig:
    """The HTTP edge."""
    section, files = config.gateway, edge_files(config)
    return GatewayConfig(
        host=config.host,
        port=config.port,
        max_body_bytes=section.max_body_bytes,
        body_timeout_seconds=section.body_timeout_seconds,
        request_timeout_seconds=section.request_timeout_seconds,
        sse_keepalive_seconds=section.sse_keepalive_seconds,
        headers_within_seconds=section.headers_within_seconds,
        write_timeout_seconds=section.write_timeout_seconds,
        registry_timeout_seconds=section.registry_timeout_seconds,
        max_event_watches=section.max_event_watches,
        max_running_responses=section.max_running_responses,
        keep_responses=KeepResponses(section.keep_responses),
        response_store_timeout_seconds=section.response_store_timeout_seconds,
        task_timeout_seconds=section.task_timeout_seconds,
        batches=BatchEdgeConfig(**section.batches.model_dump()),
        tls=None
        if files is None
        else EdgeTls(files=files, handshake_timeout_seconds=section.tls.handshake_timeout_seconds),
        tls_terminated_elsewhere=section.tls_terminated_elsewhere,
        allowed_hosts=frozenset(name.lower() for name in section.allowed_hosts),
        auth_required=keys_required(config),
        rate_limits=_rate_limits(section.rate_limits),
        limits=request_limits(section.limits),
        connections=ConnectionLimits(**section.connections.model_dump()),
        media=MediaConfig(**section.media.model_dump()),
    )


def request_limits(section: LimitsSection) -> RequestLimits:
    """Every bound of a request; tests/unit/host/test_gateway_limits.py sees to it that none is without a name."""
    return RequestLimits(**section.model_dump(exclude={"schemas"}), schemas=schema_limits(section.schemas))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshClients:
    """What a gateway is built over."""

    dispatcher: Dispatcher
    fleet: FleetWatcher
    registry: grpc.aio.Channel
    channels: ChannelPool
    queues: QueueSource
    requests: RequestSource
    responses: ResponseStore
    tasks: TaskPort
    files: FilePort
    batches: BatchPort
    keys: KeyCheck | None
    """None: nobody needs one."""
    clock: Clock
    router: RouterSource | None = None
    """Whether there is a router; None: it is in this very process."""


def _rate_limits(section: RateLimitsSection | None) -> RateLimitConfig | None:
    if section is None:
        return None
    rates = {
        tenant: parse_rate(text, f"gateway.auth.rate_limits.tenants.{tenant}")
        for tenant, text in section.tenants.items()
    }
    return RateLimitConfig(default=parse_rate(section.default, "gateway.auth.rate_limits.default"), tenants=rates)


def build_gateway(config: WeftConfig, mesh: MeshClients) -> GatewayService:
    """A gateway over a mesh; not started yet."""
    edge = gateway_config(config)
    timeout = edge.registry_timeout_seconds
    admin = AdminPorts(
        operations=OperationsClient(mesh.registry, timeout_seconds=timeout),
        instances=RunnerDescriptions(mesh.fleet, mesh.channels, mesh.clock),
        queues=mesh.queues,
    )
    ports = GatewayPorts(
        dispatcher=mesh.dispatcher,
        fleet=mesh.fleet,
        registry=RegistryClient(mesh.registry, mesh.fleet, timeout_seconds=timeout),
        admin=admin,
        keys=mesh.keys,
        requests=mesh.requests,
        responses=mesh.responses,
        tasks=mesh.tasks,
        files=mesh.files,
        batches=mesh.batches,
        api_keys=KeysClient(mesh.registry, mesh.clock, timeout_seconds=timeout),
        router=mesh.router,
    )
    return gateway.service.build(edge, ports)


async def serve_gateway(config: WeftConfig, home: WeftHome, announce: Announce) -> None:
    """A gateway over a registry and a router elsewhere, until a signal comes."""
    stop = stop_requested()
    clock = SystemClock()
    security, keys = channel_security(config), key_check(config, clock)
    registry = open_channel(registry_address(config, home), security)
    router = open_channel(router_address(config, home), security)
    channels = ChannelPool(security=security)
    fleet = FleetWatcher(registry, clock)
    steady = ReconnectConfig(router_outage_limit_seconds=config.gateway.router_outage_limit_seconds)
    router_watch, placement = RouterWatch(router, clock), RemotePlacement(router)
    dispatcher = Dispatcher(placement, channels, clock=clock, steady=steady, fleet=fleet)
    mesh = MeshClients(
        dispatcher=dispatcher,
        fleet=fleet,
        registry=registry,
        channels=channels,
        queues=placement,
        requests=RemoteRequests(router),
        responses=RemoteResponses(router, timeout_seconds=config.gateway.response_store_timeout_seconds),
        tasks=RemoteTasks(router, timeout_seconds=config.gateway.task_timeout_seconds),
        files=RemoteFiles(router, timeout_seconds=config.gateway.batches.store_timeout_seconds),
        batches=RemoteBatches(router, timeout_seconds=config.gateway.batches.store_timeout_seconds),
        keys=keys,
        clock=clock,
        router=router_watch,
    )
    service = build_gateway(config, mesh)
    with CriticalTasks(stop):
        # Left in reverse: callers have the drain, and what serves them ends after it.
        async with AsyncExitStack() as ends:
            for channel in (router, registry, channels):
                ends.push_async_callback(channel.close)
            if keys is not None:
                ends.push_async_callback(keys.stop)
            ends.push_async_callback(fleet.stop)
            ends.push_async_callback(router_watch.stop)
            ends.push_async_callback(service.stop, config.drain_seconds)
            await fleet.start()
            await router_watch.start()
            if keys is not None:
                await keys.follow(registry)
            await service.start()
            settle_garbage_collector()
            announce(service.url)
            await stop.wait()
