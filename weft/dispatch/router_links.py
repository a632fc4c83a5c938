"""Connections to the routers of the mesh: of each a channel, a health check, and the placements that wait there."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from weft.dispatch.fleet import FleetView, RouterView
from weft.dispatch.placement import MAX_UNREACHABLE_ROUTERS
from weft.dispatch.remote_router import RemotePlacement, RemoteRequests, RouterSource, RouterWatch
from weft.kernel.clock import Clock
from weft.kernel.log import get_logger
from weft.kernel.rpc import open_channel
from weft.kernel.service import start_task
from weft.kernel.tls_channel import ChannelSecurity

if TYPE_CHECKING:
    import grpc

log = get_logger("weft.router_links")

OpenChannel = Callable[[str], "grpc.aio.Channel"]


class Waiting(Protocol):
    """A placement that waits for a decision of a router."""

    def abandon(self) -> None:
        """Stop waiting for this router: `next_decision` raises SERVICE_UNAVAILABLE."""
        ...


class RouterLink:
    """One life of one router, as this process reaches it. It counts as reachable until it was found otherwise."""

    def __init__(self, router: RouterView, channel: "grpc.aio.Channel", clock: Clock) -> None:
        self.router = router
        self.channel = channel
        self.placement = RemotePlacement(channel, of_this_router=True)
        self.requests = RemoteRequests(channel, of_this_router=True)
        self.is_lost = False
        """Whether it did not answer the last health check, or a call to it has just failed."""
        self._watch = RouterWatch(channel, clock, self._note_answer)
        self._waiting: set[Waiting] = set()
        self._lost = asyncio.Event()

    def start(self) -> None:
        """Begin to check its health."""
        self._watch.begin()

    async def close(self) -> None:
        """Stop the checks and close the channel; placements that wait there are abandoned."""
        await self._watch.stop()
        self._abandon_all()
        await self.channel.close(grace=None)

    def note_lost(self) -> None:
        """Count it as unreachable until it answers a health check."""
        if not self.is_lost:
            log.warning("router lost", router=self.router.name, address=self.router.address)
        self._abandon_all()

    async def until_lost(self) -> None:
        """Returns once it cannot be reached."""
        await self._lost.wait()

    def enter(self, waiting: Waiting) -> None:
        """Abandon this placement when the router is lost."""
        self._waiting.add(waiting)

    def leave(self, waiting: Waiting) -> None:
        """End `enter`."""
        self._waiting.discard(waiting)

    def _abandon_all(self) -> None:
        self.is_lost = True
        self._lost.set()
        for each in list(self._waiting):
            each.abandon()

    def _note_answer(self, is_there: bool) -> None:
        if is_there:
            self.is_lost = False
            self._lost.clear()
        else:
            self.note_lost()


class RouterLinks(RouterSource):
    """Links to every router of the newest view but this process's own."""

    def __init__(self, clock: Clock, security: ChannelSecurity | None = None, *, own: str = "") -> None:
        """`own`: the name of the router in this process; empty: there is none."""
        self._clock = clock
        self._open: OpenChannel = lambda address: open_channel(address, security)
        self._own = own
        self._links: dict[str, RouterLink] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_there(self) -> bool:
        """Whether some router can be reached; one in this process can."""
        return bool(self._own) or any(not link.is_lost for link in self._links.values())

    @property
    def unreachable(self) -> frozenset[str]:
        """The routers that cannot be reached now, by name; of more than MAX_UNREACHABLE_ROUTERS the first ones."""
        lost = sorted(name for name, link in self._links.items() if link.is_lost)
        return frozenset(lost[:MAX_UNREACHABLE_ROUTERS])

    def get(self, name: str) -> RouterLink | None:
        """Returns the link to a router; None: it is unknown, or this process's own."""
        return self._links.get(name)

    def live(self) -> Sequence[RouterLink]:
        """Returns the links to the routers that can be reached, in the order of their names."""
        return [link for _, link in sorted(self._links.items()) if not link.is_lost]

    def update_view(self, view: FleetView) -> None:
        """Open links to routers that have come, and close those to routers that are gone or began another life."""
        wanted = {name: router for name, router in view.routers.items() if name != self._own}
        for name, link in list(self._links.items()):
            now = wanted.get(name)
            if now is None or (now.incarnation, now.address) != (link.router.incarnation, link.router.address):
                self._close(self._links.pop(name))
        for name, router in wanted.items():
            if name not in self._links:
                link = self._links[name] = RouterLink(router, self._open(router.address), self._clock)
                link.start()

    async def close(self) -> None:
        """Close all links."""
        for name in list(self._links):
            self._close(self._links.pop(name))
        while self._closing:
            await asyncio.gather(*self._closing)

    def _close(self, link: RouterLink) -> None:
        closing = start_task(link.close(), name=f"router-link-{link.router.name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
