"""Reports of attempts to the routers that wait for them: a bounded buffer for each, repeated until it is answered."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, cast

from weft.api.router.v1 import lane_service_pb2 as pb
from weft.api.router.v1 import lane_service_pb2_grpc
from weft.dispatch.fleet import FleetView
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason
from weft.kernel.report_limits import ReportLimits
from weft.kernel.rpc import ChannelPool, calling
from weft.kernel.service import start_task, stop_tasks

if TYPE_CHECKING:
    from weft.api.router.v1.lane_service_pb2_grpc import LaneServiceAsyncStub

log = get_logger("weft.lane")

MAX_REPORTS = 256
"""Reports in one call, see LaneService."""


MAX_RETRY_SECONDS = 5.0


class ReportFate(StrEnum):
    """What became of a report."""

    ACCEPTED = "accepted"
    UNKNOWN = "unknown"
    """The router does not wait for it."""
    REFUSED = "refused"
    """The router does not accept its ticket."""
    OVERFLOW = "overflow"
    """Dropped: too many wait."""
    GAVE_UP = "gave_up"
    """Dropped: the router did not answer in time, or is gone."""


_FATES = {
    pb.ReportAttemptsResponse.OUTCOME_ACCEPTED: ReportFate.ACCEPTED,
    pb.ReportAttemptsResponse.OUTCOME_REFUSED: ReportFate.REFUSED,
}
OnFate = Callable[[ReportFate], None]


def _ignore_fate(fate: ReportFate) -> None:
    """Does nothing."""


class AttemptReporter:
    """Sends reports to routers by their names; addresses are those that the registry publishes.

    A call carries all that has arrived since the last one.
    """

    def __init__(
        self,
        view: Callable[[], FleetView],
        channels: ChannelPool,
        clock: Clock,
        limits: ReportLimits | None = None,
    ) -> None:
        """`view`: the newest one."""
        self.on_fate: OnFate = _ignore_fate
        """Called with what becomes of each report."""
        self._view = view
        self._channels = channels
        self._clock = clock
        self._limits = limits or ReportLimits()
        self._held: dict[str, deque[tuple[float, pb.AttemptReport]]] = {}
        """Reports with the times of their arrival, by the router's name."""
        self._count = 0
        self._senders: dict[str, asyncio.Task[None]] = {}

    @property
    def held(self) -> int:
        """Number of reports that are not answered yet."""
        return self._count

    def send(self, router: str, report: pb.AttemptReport) -> None:
        """Report an attempt to a router; returns at once. One report too many is dropped, counted and logged."""
        if self._count >= self._limits.max_held:
            self._drop(router, [report], ReportFate.OVERFLOW)
            return
        self._count += 1
        self._held.setdefault(router, deque()).append((self._clock.monotonic(), report))
        sender = self._senders.get(router)
        if sender is None or sender.done():
            self._senders[router] = start_task(self._send_all(router), name=f"lane-reports-{router}")

    async def stop(self, grace_seconds: float) -> None:
        """Give the reports under way this long to be answered, then drop the rest."""
        if self._senders:
            await asyncio.wait(list(self._senders.values()), timeout=grace_seconds)
        await stop_tasks(list(self._senders.values()))
        for router, held in self._held.items():
            self._drop(router, [report for _, report in held], ReportFate.GAVE_UP)
        self._held.clear()
        self._senders.clear()
        self._count = 0

    async def _send_all(self, router: str) -> None:
        held = self._held[router]
        pause = self._limits.retry_seconds
        try:
            while held:
                batch = [report for _, report in list(held)[:MAX_REPORTS]]
                outcomes = await self._call(router, batch)
                if outcomes is None:
                    self._give_up(router, held)
                    await self._clock.sleep(pause)
                    pause = min(pause * 2, MAX_RETRY_SECONDS)
                    continue
                pause = self._limits.retry_seconds
                for outcome in outcomes:
                    held.popleft()
                    self._count -= 1
                    self.on_fate(_FATES.get(outcome, ReportFate.UNKNOWN))
        finally:
            if not held:
                del self._held[router]
                del self._senders[router]

    async def _call(
        self, router: str, batch: Sequence[pb.AttemptReport]
    ) -> "Sequence[pb.ReportAttemptsResponse.Outcome.ValueType] | None":
        """Returns one outcome for each report; None: the router did not answer."""
        known = self._view().routers.get(router)
        if known is None:
            return None
        channel = await self._channels.get(known.address)
        stub = cast("LaneServiceAsyncStub", lane_service_pb2_grpc.LaneServiceStub(channel))
        try:
            with calling(Reason.SERVICE_UNAVAILABLE):
                answer = await stub.ReportAttempts(
                    pb.ReportAttemptsRequest(reports=batch), timeout=self._limits.call_timeout_seconds
                )
        except WeftError as error:
            log.warning("reports not delivered", router=router, count=len(batch), why=error.message)
            return None
        return answer.outcomes if len(answer.outcomes) == len(batch) else None

    def _give_up(self, router: str, held: deque[tuple[float, pb.AttemptReport]]) -> None:
        oldest = self._clock.monotonic() - self._limits.give_up_seconds
        late = []
        while held and held[0][0] <= oldest:
            late.append(held.popleft()[1])
            self._count -= 1
        self._drop(router, late, ReportFate.GAVE_UP)

    def _drop(self, router: str, reports: Sequence[pb.AttemptReport], fate: ReportFate) -> None:
        for report in reports:
            self.on_fate(fate)
            log.warning(
                "report of an attempt dropped",
                router=router,
                why=fate.value,
                request_id=report.receipt.request_id,
                held=self._count,
            )
