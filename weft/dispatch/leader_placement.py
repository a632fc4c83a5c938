"""Placement by whichever router currently leads."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.fleet import FleetSource
from weft.dispatch.placement import Decision, OnCancelled, Placement, RouterPort
from weft.dispatch.router_links import RouterLink, RouterLinks
from weft.kernel.clock import within
from weft.kernel.errors import WeftError
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.pool_queue import PoolQueue
from weft.kernel.reasons import Reason

LEADER_WAIT_SECONDS = 1.0
"""How long a request waits for a leader before it is placed again."""


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
        link = self._links.leader
        return _NoLeader(self._links) if link is None else LinkedPlace(link, request)

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
    """A Placement over one link, which stops waiting when the router is lost."""

    def __init__(self, link: RouterLink, request: PlacementRequest) -> None:
        self._link = link
        self._place = link.placement.place(request)
        self._is_opened = False

    async def __aenter__(self) -> Self:
        # A call cancelled before its metadata was sent never finishes its first write (grpcio 1.85).
        opening = asyncio.ensure_future(self._open())
        lost = asyncio.ensure_future(self._link.until_lost())
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

    async def _open(self) -> None:
        # The channel of a lost link may be closed, and then a call cannot be started.
        if not self._link.is_lost:
            self._is_opened = True
            await self._place.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._place.__aexit__(kind, error, trace)

    @override
    async def next_decision(self) -> Decision:
        if self._link.is_lost or not self._is_opened:
            raise _lost(self._link)
        self._link.enter(self._place)
        try:
            return await self._place.next_decision()
        except WeftError as error:
            if self._place.is_disconnected:
                # Keeps the next placement away from this router until a health check succeeds.
                self._link.note_lost()
                raise _lost(self._link) from error
            raise
        finally:
            self._link.leave(self._place)

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        self._place.watch_cancellation(on_cancelled)

    @override
    async def report_first_content(self, attempt: int) -> None:
        if not self._link.is_lost:
            await self._place.report_first_content(attempt)

    @override
    async def report_attempt_failed(self, attempt: int, reason: Reason, message: str = "") -> None:
        if not self._link.is_lost:
            await self._place.report_attempt_failed(attempt, reason, message)

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        if self._link.is_lost or not self._is_opened:
            return False
        return await self._place.report_finished(reason, receipt)


NO_ROUTER = "no router of the mesh leads"


class _NoLeader(Placement):
    """A Placement while no router is known to lead."""

    def __init__(self, links: RouterLinks) -> None:
        self._links = links

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @override
    async def next_decision(self) -> Decision:
        with suppress(TimeoutError):
            await within(LEADER_WAIT_SECONDS, self._links.until_led())
        raise WeftError(Reason.NO_ROUTER_AVAILABLE, NO_ROUTER)

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        pass

    @override
    async def report_first_content(self, attempt: int) -> None:
        pass

    @override
    async def report_attempt_failed(self, attempt: int, reason: Reason, message: str = "") -> None:
        pass

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        return False


def _lost(link: RouterLink) -> WeftError:
    return WeftError(Reason.NO_ROUTER_AVAILABLE, f"the router {link.router.name} does not answer")
