"""A placement that survives the loss of its router: a request without a grant is placed again.

It enforces the request's deadline itself, so that a frozen or unreachable router cannot delay the answer beyond it.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

from typing_extensions import override

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.end_reporter import EndReporter
from weft.dispatch.placement import PLACED_AGAIN, Decision, OnCancelled, Placement, PlacementPort
from weft.kernel.errors.error_tree import LACKED_ROUTER, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.time.clock import Clock, within

T = TypeVar("T")

REPORT_SECONDS = 1.0
"""Timeout of a report: a frozen router must not delay a complete answer."""
LATE_REPORT_SECONDS = 0.1
"""Timeout of a report after the request's deadline."""
EARLY_DEADLINE_SECONDS = 0.05
"""How much earlier than the request's deadline a router call may time out: gRPC's timer has millisecond resolution and
runs on another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconnectConfig:
    """Tolerance of router outages."""

    router_outage_limit_seconds: float = 30.0
    """Time without a router after which a request fails with NO_ROUTER_AVAILABLE."""
    retry_interval_seconds: float = 0.1
    """First delay before placing again; it doubles up to one second."""
    view_lag_limit_seconds: float = 5.0
    """How long a router's view may lag: for this long it may reject a name that this process already knows."""


class ReconnectingPlacement(Placement):
    """A Placement over any router that answers. Keeps the request's age and used attempts across routers."""

    def __init__(
        self,
        port: PlacementPort,
        request: PlacementRequest,
        clock: Clock,
        config: ReconnectConfig,
        knows: Callable[[str], bool] = lambda _: False,
        ends: EndReporter | None = None,
    ) -> None:
        """`knows`: whether this process's view of the mesh has a name.

        `ends` reports the end of the request if its router was lost; None: the end is lost too.
        """
        self._knows = knows
        self._ends = ends
        self._port = port
        self._request = request
        self._clock = clock
        self._config = config
        self._opened_at = clock.monotonic()
        self._attempts = request.attempts_used
        self._place: Placement = port.place(request)
        self._is_counted = request.is_counted
        """Whether a router has counted it against limits, which every router does before its first decision."""
        self._is_lost = False
        """Whether no router has answered since the last one was lost."""
        self._is_reported = False
        """Whether a router has received its end, or will later."""

    async def __aenter__(self) -> Self:
        if self._place.never_waits:
            await self._place.__aenter__()
            return self
        try:
            await within(self._seconds_left, self._place.__aenter__())
        except BaseException as error:
            # Also if the caller leaves: nothing else ends a placement that is not entered.
            await self._place.__aexit__(None, None, None)
            if isinstance(error, TimeoutError):
                raise self._deadline_passed() from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._place.__aexit__(kind, error, trace)

    async def next_decision(self) -> Decision:
        """Like Placement.next_decision, but places the request again after a lost router, up to the outage limit.

        A rejected name that this process knows is retried too, up to the view lag limit: either watch of the registry
        may be ahead of the other.

        Raises DEADLINE_EXCEEDED at the request's deadline, even if the router does not respond.
        """
        try:
            decision = await within(self._seconds_left, self._next_decision())
        except TimeoutError:
            raise self._deadline_passed() from None
        except WeftError as error:
            left = self._seconds_left()
            if error.reason is Reason.DEADLINE_EXCEEDED and left is not None and left <= EARLY_DEADLINE_SECONDS:
                raise self._deadline_passed() from error
            raise
        self._is_lost = False
        return decision

    async def _next_decision(self) -> Decision:
        lost_at: float | None = None
        pause = self._config.retry_interval_seconds
        while True:
            try:
                decision = await self._place.next_decision()
            except WeftError as error:
                is_behind = error.reason is Reason.MODEL_NOT_FOUND and self._knows(self._request.model)
                if error.reason not in PLACED_AGAIN and not is_behind:
                    raise
                now = self._clock.monotonic()
                self._is_lost = error.reason is Reason.NO_ROUTER_AVAILABLE
                lost_at = now if lost_at is None else lost_at
                if now - lost_at >= self._limit_seconds(is_behind=is_behind):
                    if self._is_lost:
                        error.metadata[LACKED_ROUTER] = "true"
                    raise
                await self._clock.sleep(pause)
                pause = min(pause * 2, 1.0)
                await self._place_again()
                continue
            self._is_counted = True
            if decision.HasField("granted"):
                self._attempts = decision.granted.attempt
            return decision

    def _limit_seconds(self, *, is_behind: bool) -> float:
        return self._config.view_lag_limit_seconds if is_behind else self._config.router_outage_limit_seconds

    async def _place_again(self) -> None:
        await self._place.__aexit__(None, None, None)
        self._place = self._port.place(
            replace(
                self._request,
                age_seconds=self._request.age_seconds + self._clock.monotonic() - self._opened_at,
                seconds_left=self._seconds_left(),
                attempts_used=self._attempts,
                is_counted=self._is_counted,
            )
        )
        await self._place.__aenter__()

    def _seconds_left(self) -> float | None:
        left = self._request.seconds_left
        return None if left is None else max(0.0, left - (self._clock.monotonic() - self._opened_at))

    def _report_seconds(self) -> float:
        return LATE_REPORT_SECONDS if self._seconds_left() == 0 else REPORT_SECONDS

    def _deadline_passed(self) -> WeftError:
        if not self._is_lost:
            return WeftError(Reason.DEADLINE_EXCEEDED, "the request's deadline passed while it waited")
        return WeftError(
            Reason.DEADLINE_EXCEEDED,
            "the request's deadline passed while it waited, and no router answered",
            metadata={LACKED_ROUTER: "true"},
        )

    @override
    def watch_cancellation(self, on_cancelled: OnCancelled) -> None:
        self._place.watch_cancellation(on_cancelled)

    @override
    def report_first_content(self, attempt: int) -> Coroutine[Any, Any, None]:
        return self._report(self._place.report_first_content(attempt))

    @override
    def report_attempt_failed(
        self, attempt: int, reason: Reason, message: str = "", retry_after_seconds: float | None = None
    ) -> Coroutine[Any, Any, None]:
        return self._report(self._place.report_attempt_failed(attempt, reason, message, retry_after_seconds))

    @override
    async def report_finished(self, reason: Reason, receipt: receipt_pb2.Receipt | None = None) -> bool:
        is_acknowledged = False
        try:
            is_acknowledged = bool(await self._report(self._place.report_finished(reason, receipt)))
        finally:
            if is_acknowledged or receipt is None:
                self._is_reported = True
            else:
                self.hand_over(receipt)
        return is_acknowledged

    def hand_over(self, receipt: receipt_pb2.Receipt) -> None:
        """Reports the end of the request to the then leading router, unless it is already reported.

        Used for a request that ends before it is placed; `report_finished` calls it after a lost router.
        """
        if not self._is_reported and self._ends is not None:
            self._ends.send(self._request, receipt, self._opened_at - self._request.age_seconds)
        self._is_reported = True

    async def _report(self, report: Coroutine[Any, Any, T]) -> T | None:
        """Returns the result of a report; None: timeout."""
        if self._place.never_waits:
            return await report
        try:
            return await within(self._report_seconds, report)
        except TimeoutError:
            return None
