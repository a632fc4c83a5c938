"""A placement that outlives its router: while a request has no grant, a lost router only means being placed again."""

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.port import Decision, Grant, Placement, PlacementPort, PlacementRequest
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyConfig:
    """How long to put up with a router that is away."""

    router_outage_limit_seconds: float = 30.0
    """After this long without a router the request fails with SERVICE_UNAVAILABLE."""
    retry_interval_seconds: float = 0.1
    """First pause before placing again; doubles up to one second."""


class SteadyPlacement:
    """A Placement over whatever router answers. Keeps the request's age and its used attempts across routers."""

    def __init__(self, port: PlacementPort, request: PlacementRequest, clock: Clock, config: SteadyConfig) -> None:
        self._port = port
        self._request = request
        self._clock = clock
        self._config = config
        self._opened_at = clock.monotonic()
        self._attempts = request.attempts_used
        self._place: Placement = port.place(request)

    async def __aenter__(self) -> Self:
        await self._place.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._place.__aexit__(kind, error, trace)

    async def next_decision(self) -> Decision:
        """See Placement.next_decision; a lost router is replaced until the outage limit."""
        lost_at: float | None = None
        pause = self._config.retry_interval_seconds
        while True:
            try:
                decision = await self._place.next_decision()
            except WeftError as error:
                if error.reason is not Reason.SERVICE_UNAVAILABLE:
                    raise
                now = self._clock.monotonic()
                lost_at = now if lost_at is None else lost_at
                if now - lost_at >= self._config.router_outage_limit_seconds:
                    raise
                await self._clock.sleep(pause)
                pause = min(pause * 2, 1.0)
                await self._place_again()
                continue
            if isinstance(decision, Grant):
                self._attempts = decision.attempt
            return decision

    async def _place_again(self) -> None:
        await self._place.__aexit__(None, None, None)
        waited = self._clock.monotonic() - self._opened_at
        left = self._request.seconds_left
        self._place = self._port.place(
            replace(
                self._request,
                age_seconds=self._request.age_seconds + waited,
                seconds_left=None if left is None else max(0.0, left - waited),
                attempts_used=self._attempts,
            )
        )
        await self._place.__aenter__()

    async def report_first_content(self, attempt: int) -> None:
        """See Placement.report_first_content."""
        await self._place.report_first_content(attempt)

    async def report_attempt_failed(self, attempt: int, reason: Reason) -> None:
        """See Placement.report_attempt_failed."""
        await self._place.report_attempt_failed(attempt, reason)

    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> None:
        """See Placement.report_finished."""
        await self._place.report_finished(reason, receipt)
