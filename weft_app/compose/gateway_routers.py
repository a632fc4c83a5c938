"""The routers of the mesh as a gateway reaches them."""

from typing import TYPE_CHECKING

import grpc
from typing_extensions import override

from weft.dispatch.fleet import FleetWatcher
from weft.dispatch.leader_placement import LeaderPlacement
from weft.dispatch.remote_router import RemotePlacement, RemoteRequests, RouterSource, RouterWatch
from weft.dispatch.router_links import RouterLinks
from weft.kernel.chosen_channel import PickedChannel
from weft.kernel.clock import Clock
from weft.kernel.tls_channel import ChannelSecurity

if TYPE_CHECKING:
    from weft.dispatch.placement import RouterPort


class GatewayRouters(RouterSource):
    """The router that leads of all that the registry knows, and the configured one while it knows none."""

    def __init__(
        self, configured: grpc.aio.Channel, fleet: FleetWatcher, clock: Clock, security: ChannelSecurity | None = None
    ) -> None:
        """`configured`: the channel to the router of the settings, which the caller closes."""
        self._configured = configured
        self._watch = RouterWatch(configured, clock)
        self._links = RouterLinks(clock, security)
        self._fleet = fleet
        self.channel: grpc.aio.Channel = PickedChannel(self._pick)
        """The channel to the router that leads."""
        self.queues = RemotePlacement(self.channel)
        self.requests = RemoteRequests(self.channel)
        self.placement: RouterPort = LeaderPlacement(fleet, self._links, RemotePlacement(self.channel))

    @property
    @override
    def is_there(self) -> bool:
        return self._links.is_there if self._fleet.view.routers else self._watch.is_there

    async def start(self) -> None:
        """Begin to follow the mesh's routers. Returns immediately."""
        self._fleet.subscribe(self._links.update_view)
        await self._watch.start()

    async def stop(self) -> None:
        """Close the connections. Safe to call twice, or when never started."""
        await self._watch.stop()
        await self._links.close()

    def _pick(self) -> grpc.aio.Channel:
        leader = self._links.leader
        return self._configured if leader is None else leader.channel
