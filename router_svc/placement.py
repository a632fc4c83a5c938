"""The placement port inside the router's own process: no transport, the same semantics."""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from router_svc.loop import SchedulingLoop
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.placement import Decision, PlacementRequest, PoolQueue
from weft.kernel.reasons import Reason

if TYPE_CHECKING:
    from router_svc.mailbox import Mailbox


class LocalPlacement:
    """A PlacementPort over the scheduling loop of this process."""

    def __init__(self, loop: SchedulingLoop) -> None:
        self._loop = loop

    def place(self, request: PlacementRequest) -> "LocalPlace":
        """See PlacementPort.place."""
        return LocalPlace(self._loop, request)

    async def queues(self) -> Sequence[PoolQueue]:
        """See QueueSource.queues."""
        return self._loop.queues()


class LocalPlace:
    """A Placement over the scheduling loop of this process."""

    def __init__(self, loop: SchedulingLoop, request: PlacementRequest) -> None:
        self._loop = loop
        self._request = request
        self._key: int | None = None
        self._mailbox: Mailbox | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._key is not None:
            self._loop.finish(self._key, Reason.CANCELLED)

    async def next_decision(self) -> Decision:
        """See Placement.next_decision."""
        if self._mailbox is None:
            self._key, self._mailbox = self._loop.submit(self._request)
        return await self._mailbox.get()

    async def report_first_content(self, attempt: int) -> None:  # noqa: ARG002 - the port's signature
        """See Placement.report_first_content."""
        if self._key is not None:
            self._loop.report_first_content(self._key)

    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None:
        """See Placement.report_attempt_failed."""
        if self._key is not None:
            self._loop.report_failed(self._key, attempt, reason)

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> None:
        """See Placement.report_finished."""
        if self._key is not None:
            self._loop.finish(self._key, reason, receipt)
