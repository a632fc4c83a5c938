"""Placement by whichever router of the mesh leads: the one that reports itself healthy.

Each router has a link with a channel, a health check, and the placements waiting there.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.api.registry.v1.router_pb2 import Router
from weft.dispatch.fleet import FleetSource, FleetView
from weft.dispatch.placement import Decision, OnCancelled, Placement, RouterPort
from weft.dispatch.remote_router import (
    CHECK_INTERVAL_SECONDS,
    RemotePlace,
    RemotePlacement,
    RouterSource,
    RouterWatch,
)
from weft.kernel.clock import Clock, within
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.placement_request import PlacementRequest, PoolQueue
from weft.kernel.reasons import Reason
from weft.kernel.rpc import open_channel
from weft.kernel.service import start_task
from weft.kernel.tls_channel import ChannelSecurity

if TYPE_CHECKING:
    import grpc

log = get_logger("weft.router_links")

SEARCH_INTERVAL_SECONDS = 0.1
"""Delay between health checks of a router while no leader is known."""
LEADER_WAIT_SECONDS = 1.0
"""How long a request waits for a leader before it is placed again."""
NO_ROUTER = "no router of the mesh leads"


class RouterLink:
    """The connection to one incarnation of a router."""

    def __init__(
        self,
        router: Router,
        channel: "grpc.aio.Channel",
        clock: Clock,
        on_change: Callable[["RouterLink"], None],
        interval: Callable[[], float],
    ) -> None:
        """`on_change` is called when it is lost or reachable again; `interval`: see RouterWatch."""
        self.router = router
        self.channel = channel
        self.placement = RemotePlacement(channel)
        self._on_change = on_change
        self.watch = RouterWatch(channel, clock, self._note_answer, interval)
        self.waiting: set[RemotePlace] = set()
        """Placements to abandon when it is lost."""
        self.lost = asyncio.Event()
        self.lost.set()

    @property
    def is_lost(self) -> bool:
        """Whether it places no requests: it is a standby, failed the last health check, or just failed a call."""
        return self.lost.is_set()

    async def close(self) -> None:
        """Stops the checks, closes the channel and abandons waiting placements."""
        await self.watch.stop()
        self._abandon_all()
        await self.channel.close(grace=None)

    def note_lost(self) -> None:
        """Marks it as lost until its next successful health check."""
        if self.is_lost:
            return
        log.warning("router lost", router=self.router.name, address=self.router.address)
        self._abandon_all()
        self._on_change(self)

    def _abandon_all(self) -> None:
        self.lost.set()
        for each in list(self.waiting):
            each.abandon()

    def _note_answer(self, is_there: bool) -> None:
        if not is_there:
            self.note_lost()
        elif self.is_lost:
            self.lost.clear()
            log.info("router leads", router=self.router.name, address=self.router.address)
            self._on_change(self)


class RouterLinks(RouterSource):
    """Links to every router of the newest view."""

    def __init__(self, clock: Clock, security: ChannelSecurity | None = None) -> None:
        self._clock = clock
        self._security = security
        self._links: dict[str, RouterLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.leader: RouterLink | None = None
        """The link to the leading router; None: none is known to lead.

        If two claim to lead, the one that started last: the other one was frozen and will step down.
        """
        self.led = asyncio.Event()
        """Set while a router leads."""

    @property
    def is_there(self) -> bool:
        """Whether a leading router is reachable."""
        return self.leader is not None

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
                channel = open_channel(router.address, self._security)
                link = self._links[name] = RouterLink(router, channel, self._clock, self._note_change, self._interval)
                link.watch.start()
        if has_news:
            self._search()

    async def close(self) -> None:
        """Closes all links."""
        for name in list(self._links):
            self._close(self._links.pop(name))
        while self._closing:
            await asyncio.gather(*self._closing)

    def _interval(self) -> float:
        return SEARCH_INTERVAL_SECONDS if self.leader is None else CHECK_INTERVAL_SECONDS

    def _note_change(self, link: RouterLink) -> None:
        if not link.is_lost:
            self.leader = link
            self.led.set()
        elif link is self.leader:
            self.leader = None
            self.led.clear()
            self._search()

    def _search(self) -> None:
        for link in self._links.values():
            link.watch.hurry()

    def _close(self, link: RouterLink) -> None:
        if link is self.leader:
            self.leader = None
            self.led.clear()
        closing = start_task(link.close(), name=f"router-link-{link.router.name}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class LeaderPlacement(RouterPort):
    """A RouterPort that places every request at the leading router of the newest view.

    A request whose router is lost while it waits fails with NO_ROUTER_AVAILABLE; `ReconnectingPlacement` then places it
    again.
    """

    def __init__(self, fleet: FleetSource, links: RouterLinks, configured: RouterPort) -> None:
        """`configured` is used while no router has registered."""
        self._fleet = fleet
        self._links = links
        self._configured = configured

    @override
    def place(self, request: PlacementRequest) -> Placement:
        if not self._fleet.view.routers:
            return self._configured.place(request)
        return LinkedPlace(self._links, request)

    @override
    async def queues(self) -> Sequence[PoolQueue]:
        return await self._configured.queues()

    @override
    async def report_end(self, request: PlacementRequest, receipt: receipt_pb2.Receipt) -> bool:
        if not self._fleet.view.routers:
            return await self._configured.report_end(request, receipt)
        link = self._links.leader
        if link is None:
            raise WeftError(Reason.NO_ROUTER_AVAILABLE, NO_ROUTER)
        return await link.placement.report_end(request, receipt)


class LinkedPlace(Placement):
    """A Placement over the link to the leader, which stops waiting when that router is lost."""

    def __init__(self, links: RouterLinks, request: PlacementRequest) -> None:
        self._links = links
        self._link = links.leader
        self._place = None if self._link is None else self._link.placement.place(request)
        self._is_opened = False

    @property
    def _open(self) -> RemotePlace | None:
        """The placement while its router is not lost."""
        return None if self._link is None or self._link.is_lost else self._place

    async def __aenter__(self) -> Self:
        if self._link is None or self._place is None:
            return self
        # A call cancelled before its metadata was sent never finishes its first write (grpcio 1.85).
        opening = asyncio.ensure_future(self._enter())
        lost = asyncio.ensure_future(self._link.lost.wait())
        try:
            await asyncio.wait({opening, lost}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                opening.result()
            else:
                self._place.abandon()
        finally:
            opening.cancel()
            lost.cancel()
            await asyncio.gather(opening, lost, return_exceptions=True)
        return self

    async def _enter(self) -> None:
        # The channel of a lost link may be closed, and then a call cannot be started.
        if (place := self._open) is not None:
            self._is_opened = True
            await place.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._place is not None:
            await self._place.__aexit__(kind, error, trace)

    @override
    async def next_decision(self) -> Decision:
        link, place = self._link, self._open
        if link is None:
            with suppress(TimeoutError):
                await within(LEADER_WAIT_SECONDS, self._links.led.wait())
            raise WeftError(Reason.NO_ROUTER_AVAILABLE, NO_ROUTER)
        if place is None or not self._is_opened:
            raise _lost(link)
        link.waiting.add(place)
        try:
            return await place.next_decision()
        except WeftError as error:
            if place.is_disconnected:
                # Keeps the next placement away from this router until a health check succeeds.
                link.note_lost()
                raise _lost(link) from error
            raise
        finally:
            link.waiting.discard(place)

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        if self._place is not None:
            self._place.watch_cancellation(on_cancelled)

    @override
    async def report_first_content(self, attempt: int) -> None:
        if (place := self._open) is not None:
            await place.report_first_content(attempt)

    @override
    async def report_attempt_failed(self, attempt: int, reason: Reason, message: str = "") -> None:
        if (place := self._open) is not None:
            await place.report_attempt_failed(attempt, reason, message)

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        place = self._open
        return place is not None and self._is_opened and await place.report_finished(reason, receipt)


def _lost(link: RouterLink) -> WeftError:
    return WeftError(Reason.NO_ROUTER_AVAILABLE, f"the router {link.router.name} does not answer")
