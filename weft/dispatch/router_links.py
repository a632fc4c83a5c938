"""Connections to the routers of the mesh. The leader is the one that reports itself healthy, and so places requests.

Each link has a channel, a health check, and the placements waiting there.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from weft.dispatch.fleet import FleetView, RouterView
from weft.dispatch.remote_router import CHECK_INTERVAL_SECONDS, RemotePlacement, RouterSource, RouterWatch
from weft.kernel.clock import Clock
from weft.kernel.log import get_logger
from weft.kernel.rpc import open_channel
from weft.kernel.service import start_task
from weft.kernel.tls_channel import ChannelSecurity

if TYPE_CHECKING:
    import grpc

log = get_logger("weft.router_links")

SEARCH_INTERVAL_SECONDS = 0.1
"""Delay between health checks of a router while no leader is known."""
OpenChannel = Callable[[str], "grpc.aio.Channel"]


class Waiting(Protocol):
    """A placement that waits for a router's decision."""

    def abandon(self) -> None:
        """Stops waiting for this router: `next_decision` raises NO_ROUTER_AVAILABLE."""
        ...


class RouterLink:
    """The connection to one incarnation of a router."""

    def __init__(
        self,
        router: RouterView,
        channel: "grpc.aio.Channel",
        clock: Clock,
        on_change: Callable[["RouterLink"], None],
        interval: Callable[[], float],
    ) -> None:
        """`on_change` is called when it is lost or reachable again; `interval`: see RouterWatch."""
        self.router = router
        self.channel = channel
        self.placement = RemotePlacement(channel)
        self.is_lost = True
        """Whether it places no requests: it is a standby, failed the last health check, or just failed a call."""
        self._on_change = on_change
        self._watch = RouterWatch(channel, clock, self._note_answer, interval)
        self._waiting: set[Waiting] = set()
        self._lost = asyncio.Event()
        self._lost.set()

    def start(self) -> None:
        """Starts the health checks."""
        self._watch.begin()

    def hurry(self) -> None:
        """Checks its health immediately."""
        self._watch.hurry()

    async def close(self) -> None:
        """Stops the checks, closes the channel and abandons waiting placements."""
        await self._watch.stop()
        self._abandon_all()
        await self.channel.close(grace=None)

    def note_lost(self) -> None:
        """Marks it as lost until its next successful health check."""
        if self.is_lost:
            return
        log.warning("router lost", router=self.router.name, address=self.router.address)
        self._abandon_all()
        self._on_change(self)

    async def until_lost(self) -> None:
        """Waits until it is lost."""
        await self._lost.wait()

    def enter(self, waiting: Waiting) -> None:
        """Abandons this placement when the router is lost."""
        self._waiting.add(waiting)

    def leave(self, waiting: Waiting) -> None:
        """Reverts `enter`."""
        self._waiting.discard(waiting)

    def _abandon_all(self) -> None:
        self.is_lost = True
        self._lost.set()
        for each in list(self._waiting):
            each.abandon()

    def _note_answer(self, is_there: bool) -> None:
        if not is_there:
            self.note_lost()
        elif self.is_lost:
            self.is_lost = False
            self._lost.clear()
            log.info("router leads", router=self.router.name, address=self.router.address)
            self._on_change(self)


class RouterLinks(RouterSource):
    """Links to every router of the newest view."""

    def __init__(self, clock: Clock, security: ChannelSecurity | None = None) -> None:
        self._clock = clock
        self._open: OpenChannel = lambda address: open_channel(address, security)
        self._links: dict[str, RouterLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._leader: RouterLink | None = None
        self._led = asyncio.Event()

    @property
    def is_there(self) -> bool:
        """Whether a leading router is reachable."""
        return self._leader is not None

    @property
    def leader(self) -> RouterLink | None:
        """The link to the leading router; None: none is known to lead.

        If two claim to lead, the one that started last: the other one was frozen and will step down.
        """
        return self._leader

    async def until_led(self) -> None:
        """Waits until a router leads."""
        await self._led.wait()

    def update_view(self, view: FleetView) -> None:
        """Opens links to new routers, and closes those to routers that are gone or were restarted."""
        has_news = False
        for name, link in list(self._links.items()):
            now = view.routers.get(name)
            if now is None or (now.incarnation, now.address) != (link.router.incarnation, link.router.address):
                self._close(self._links.pop(name))
            elif now.leading != link.router.leading:
                has_news, link.router = True, now
        for name, router in view.routers.items():
            if name not in self._links:
                channel = self._open(router.address)
                link = self._links[name] = RouterLink(router, channel, self._clock, self._note_change, self._interval)
                link.start()
        if has_news:
            self._search()

    async def close(self) -> None:
        """Closes all links."""
        for name in list(self._links):
            self._close(self._links.pop(name))
        while self._closing:
            await asyncio.gather(*self._closing)

    def _interval(self) -> float:
        return SEARCH_INTERVAL_SECONDS if self._leader is None else CHECK_INTERVAL_SECONDS

    def _note_change(self, link: RouterLink) -> None:
        if not link.is_lost:
            self._leader = link
            self._led.set()
        elif link is self._leader:
            self._leader = None
            self._led.clear()
            self._search()

    def _search(self) -> None:
        for link in self._links.values():
            link.hurry()

    def _close(self, link: RouterLink) -> None:
        if link is self._leader:
            self._leader = None
            self._led.clear()
        closing = start_task(link.close(), name=f"router-link-{link.router.name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
