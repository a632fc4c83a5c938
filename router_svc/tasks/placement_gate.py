"""Claim on grant: a task is claimed in the moment in which the scheduler has a slot for it, and not before.

So no lease runs while a task waits. What is claimed does not wait either: where an attempt failed before its content
and no other runner is free at once, the attempt is over, and the task waits again as everybody else does.
"""

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.placement import Decision, Grant, Placement, PlacementPort, PlacementRequest
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

Gate = Callable[[], Awaitable[None]]
"""Claims the task; raises ClaimMissedError where somebody else has it, or it waits no more."""


class ClaimMissedError(WeftError):
    """There is nothing to do with the slot that was granted."""

    def __init__(self) -> None:
        super().__init__(Reason.LEASE_LOST, "the task is somebody else's, or waits no more")


class GatedPlacement:
    """A PlacementPort for one task, whose first grant must pass a gate."""

    def __init__(self, port: PlacementPort, gate: Gate) -> None:
        self._port = port
        self._gate = gate
        self.is_claimed = False
        self.failed: Reason | None = None
        """Why the last attempt of a runner failed; None: none has."""

    def place(self, request: PlacementRequest) -> "GatedPlace":
        """See PlacementPort.place."""
        return GatedPlace(self._port.place(request), self)

    async def pass_gate(self) -> None:
        """Claim, unless that is done. Raises ClaimMissedError."""
        if not self.is_claimed:
            await self._gate()
            self.is_claimed = True


class GatedPlace:
    """See Placement."""

    def __init__(self, place: Placement, gated: GatedPlacement) -> None:
        self._place = place
        self._gated = gated

    async def __aenter__(self) -> Self:
        await self._place.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._place.__aexit__(kind, error, trace)

    async def next_decision(self) -> Decision:
        """See Placement.next_decision. Raises ClaimMissedError with the slot given back."""
        decision = await self._place.next_decision()
        if isinstance(decision, Grant):
            try:
                await self._gated.pass_gate()
            except WeftError:
                # At once, and as if its caller had left: the runner is none the worse for it.
                await self._place.report_finished(Reason.CANCELLED)
                raise
        elif self._gated.failed is not None:
            raise WeftError(self._gated.failed, "the runner failed, and no other one is free at once")
        return decision

    async def report_first_content(self, attempt: int) -> None:
        """See Placement.report_first_content."""
        await self._place.report_first_content(attempt)

    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None:
        """See Placement.report_attempt_failed."""
        self._gated.failed = reason
        await self._place.report_attempt_failed(attempt, reason)

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> None:
        """See Placement.report_finished."""
        await self._place.report_finished(reason, receipt)
