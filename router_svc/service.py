"""The router as a service: the scheduling loop, fed by the registry's Watch, behind two gRPC services."""

import grpc

from router_svc.config import RouterConfig
from router_svc.inference_servicer import InferenceServicer
from router_svc.loop import SchedulingLoop
from router_svc.placement import LocalPlacement
from router_svc.placement_servicer import PlacementServicer
from weft.api.router.v1 import (
    inference_service_pb2,
    inference_service_pb2_grpc,
    placement_service_pb2,
    placement_service_pb2_grpc,
)
from weft.dispatch.dispatcher import Dispatcher
from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.port import PlacementPort
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.rpc import ChannelPool, open_channel


def build(config: RouterConfig, *, clock: Clock | None = None) -> "RouterService":
    """A router that is not started yet."""
    return RouterService(config, clock or SystemClock())


class RouterService:
    """See weft.kernel.service.Service."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._loop = SchedulingLoop(config.limits, clock, config.ticket_lifetime_seconds)
        self._placement = LocalPlacement(self._loop)
        self._channels = ChannelPool()
        self._registry: grpc.aio.Channel | None = None
        self._fleet: FleetWatcher | None = None

    @property
    def placement(self) -> PlacementPort:
        """The placement port for dispatchers in this very process."""
        return self._placement

    @property
    def load(self) -> tuple[int, int]:
        """How many requests wait and how many run."""
        return self._loop.waiting, self._loop.running

    @property
    def service_names(self) -> tuple[str, ...]:
        """See Service.service_names."""
        return (
            inference_service_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
            placement_service_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name,
        )

    def register(self, server: grpc.aio.Server) -> None:
        """See Service.register."""
        dispatcher = Dispatcher(self._placement, self._channels, clock=self._clock)
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(dispatcher, self._config.default_timeout_seconds), server
        )
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(PlacementServicer(self._placement), server)

    async def start(self) -> None:
        """See Service.start. Requests are placed from the registry's first snapshot on."""
        self._registry = open_channel(self._config.registry_address)
        self._fleet = FleetWatcher(self._registry, self._clock, include_ticket_keys=True)
        self._fleet.subscribe(self._loop.update_view)
        await self._fleet.start()

    async def stop(self, grace_seconds: float) -> None:  # noqa: ARG002 - granted streams do not depend on the router
        """See Service.stop. Requests that wait are told, and placed again by their dispatchers elsewhere."""
        self._loop.close()
        if self._fleet is not None:
            await self._fleet.stop()
            self._fleet = None
        if self._registry is not None:
            await self._registry.close(grace=None)
            self._registry = None
        await self._channels.close()
