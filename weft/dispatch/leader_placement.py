"""Placement by whichever router of the mesh leads: the one that reports itself healthy."""

import asyncio
from collections.abc import Sequence

import grpc
from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.router_pb2 import Router
from weft.api.router.v1.quote_pb2 import Quote
from weft.dispatch.fleet import FleetView
from weft.dispatch.placement import RouterPort
from weft.dispatch.remote_router import CHECK_INTERVAL_SECONDS, NO_ROUTER, RemotePlace, RemoteRouter, RouterSource
from weft.kernel.channels.chosen_channel import PickedChannel
from weft.kernel.channels.rpc import open_channel
from weft.kernel.channels.tls_channel import ChannelSecurity
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest, PoolQueue
from weft.kernel.services.service_lifecycle import start_task
from weft.kernel.time.clock import Clock

SEARCH_INTERVAL_SECONDS = 0.1
"""Delay between health checks of a router while no leader is known."""
_CONFIGURED = ""
"""Link to the configured router; the names of registered ones are not empty."""


class LeaderPlacement(RouterPort, RouterSource):
    """A RouterPort over the routers of the newest view that places requests at the leader.

    A request whose router is lost while it waits fails with NO_ROUTER_AVAILABLE; `ReconnectingPlacement` then places it
    again.
    """

    def __init__(
        self, configured: grpc.aio.Channel, address: str, clock: Clock, security: ChannelSecurity | None = None
    ) -> None:
        """`configured`: a channel to the router at `address`, used while none has registered. The caller closes it."""
        self._configured = configured
        self._address = address
        self._clock = clock
        self._security = security
        self._closing: set[asyncio.Task[None]] = set()
        self._led = asyncio.Event()
        self._links = {_CONFIGURED: self._configured_link()}
        self.leader: RemoteRouter | None = self._links[_CONFIGURED]
        """The leading router, or the configured one while none has registered; None: none is known to lead.

        If two claim to lead, the one that started last: the other one was frozen and will step down.
        """
        self.channel: grpc.aio.Channel = PickedChannel(
            lambda: configured if self.leader is None else self.leader.channel
        )
        """For the other services of the leader."""

    @property
    @override
    def is_reachable(self) -> bool:
        return self.leader is not None and self.leader.is_reachable

    def start(self) -> None:
        """Starts checking the configured router, until others have registered."""
        self._links[_CONFIGURED].start()

    def update_view(self, view: FleetView) -> None:
        """Opens links to new routers, and closes those to routers that are gone or were restarted."""
        has_news = False
        for name, link in list(self._links.items()):
            now = view.routers.get(name)
            if name == _CONFIGURED and not view.routers:
                continue
            if now is None or (now.incarnation, now.address) != (link.router.incarnation, link.router.address):
                self._close(name)
            elif now.leading != link.router.leading:
                has_news, link.router = True, now
        for name, router in view.routers.items():
            if name not in self._links:
                self._links[name] = self._link(open_channel(router.address, self._security), router, is_lost=True)
                self._links[name].start()
        if not self._links:
            configured = self.leader = self._links[_CONFIGURED] = self._configured_link()
            configured.start()
        if has_news:
            self._search()

    async def close(self) -> None:
        """Closes all links. Idempotent, also if never started."""
        for name in list(self._links):
            self._close(name)
        while self._closing:
            await asyncio.gather(*self._closing)

    @override
    def place(self, request: PlacementRequest) -> RemotePlace:
        return self._nearest.place(request)

    @override
    async def quote(self, request: PlacementRequest) -> Sequence[Quote]:
        return await self._nearest.quote(request)

    @override
    async def queues(self) -> Sequence[PoolQueue]:
        return await self._nearest.queues()

    @override
    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        if self.leader is None:
            raise WeftError(Reason.NO_ROUTER_AVAILABLE, NO_ROUTER)
        return await self.leader.report_end(request, receipt)

    @property
    def _nearest(self) -> RemoteRouter:
        """The leader, or while there is none a router that may be lost."""
        return self.leader or next(iter(self._links.values()))

    def _configured_link(self) -> RemoteRouter:
        return self._link(self._configured, Router(name="router", address=self._address), is_lost=False)

    def _link(self, channel: grpc.aio.Channel, router: Router, *, is_lost: bool) -> RemoteRouter:
        return RemoteRouter(
            channel,
            self._clock,
            router,
            is_lost=is_lost,
            led=self._led,
            on_change=self._note_change,
            interval=lambda: SEARCH_INTERVAL_SECONDS if self.leader is None else CHECK_INTERVAL_SECONDS,
        )

    def _note_change(self, link: RemoteRouter) -> None:
        if not link.is_lost:
            # The last health check of a closed link may be answered before its checks are stopped.
            if link not in self._links.values():
                return
            self.leader = link
            self._led.set()
        elif link is self.leader:
            self._lose_leader()
            self._search()

    def _lose_leader(self) -> None:
        # Another one that claims to lead: only a change of its health would be noted.
        self.leader = next((link for link in self._links.values() if link.is_reachable), None)
        if self.leader is None:
            self._led.clear()

    def _search(self) -> None:
        for link in self._links.values():
            link.hurry()

    def _close(self, name: str) -> None:
        link = self._links.pop(name)
        if link is self.leader:
            self._lose_leader()
        # Requests at the configured router stay there.
        ended = link.stop() if name == _CONFIGURED else link.close()
        closing = start_task(ended, name=f"router-link-{link.router.name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
