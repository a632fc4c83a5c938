"""Reports to the current leader how requests ended that lost their router, never reached one, or needed none.

A bounded in-memory buffer that retries until a router has answered; a killed process loses it.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Le

from weft.api.common.v1 import receipt_pb2
from weft.dispatch.placement import EndPort
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.services.service_lifecycle import start_task, stop_tasks
from weft.kernel.settings.setting_annotations import Seconds
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock, within

log = get_logger("weft.ends")

_REPEATED = frozenset(
    {
        Reason.SERVICE_UNAVAILABLE,
        Reason.SHUTTING_DOWN,
        Reason.NO_ROUTER_AVAILABLE,
        Reason.ROUTER_STANDBY,
        Reason.DEADLINE_EXCEEDED,
    }
)
"""Errors of a report after which it is retried."""


MAX_RETRY_SECONDS = 5.0


class EndFate(StrEnum):
    """The result of reporting an end."""

    ACCEPTED = "accepted"
    UNKNOWN = "unknown"
    """A router already knows the end."""
    REFUSED = "refused"
    OVERFLOW = "overflow"
    """Dropped: the buffer was full."""
    GAVE_UP = "gave_up"
    """Dropped: no router answered in time."""


OnFate = Callable[[EndFate], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLimits:
    """Limits of reports that are retried until a router has answered."""

    max_held: Annotated[int, Ge(1), Le(1_000_000)] = 4_096
    """Maximum number of waiting reports; further ones are dropped."""
    call_timeout_seconds: Seconds = 5.0
    """Timeout of one call to a router."""
    give_up_seconds: Seconds = 120.0
    """Time after which an unanswered report is dropped."""
    retry_seconds: Seconds = 0.2
    """First delay before a retry; it doubles up to 5 seconds."""


@dataclass(frozen=True, slots=True)
class _HeldEnd:
    """The end of a request that no router has recorded yet. Times are monotonic."""

    request: PlacementRequest
    receipt: receipt_pb2.Receipt
    arrived_at: float
    """When the request arrived at the mesh."""
    held_at: float


class EndReporter:
    """Reports ends of requests to the leading router. Called only from the event loop."""

    def __init__(self, port: EndPort, clock: Clock, limits: ReportLimits | None = None) -> None:
        self.on_fate: OnFate = lambda _fate: None
        """Called with the result of each report."""
        self._port = port
        self._clock = clock
        self._limits = limits or ReportLimits()
        self._keys = itertools.count()
        self._held: dict[int, _HeldEnd] = {}
        """In the order of the next attempts."""
        self._dropped: Counter[EndFate] = Counter()
        """Ends dropped since the last log line about them."""
        self._sender: asyncio.Task[None] | None = None

    @property
    def held(self) -> int:
        """Number of ends that no router has answered yet."""
        return len(self._held)

    def send(self, request: PlacementRequest, receipt: receipt_pb2.Receipt, arrived_at: float) -> None:
        """Reports how a request ended that arrived at a monotonic time. Returns immediately.

        If the buffer is full, the end is dropped, counted and logged.
        """
        if len(self._held) >= self._limits.max_held:
            self._drop(EndFate.OVERFLOW)
            return
        now = self._clock.monotonic()
        self._held[next(self._keys)] = _HeldEnd(_names_of(request), receipt, arrived_at, now)
        if self._sender is None or self._sender.done():
            self._sender = start_task(self._send_all(), name="end-reports")

    async def stop(self, grace_seconds: float) -> None:
        """Waits this long for answers, then drops the remaining ends. Safe to call twice."""
        if self._sender is not None:
            await asyncio.wait([self._sender], timeout=grace_seconds)
            await stop_tasks([self._sender])
            self._sender = None
        for _ in range(len(self._held)):
            self._drop(EndFate.GAVE_UP)
        self._held.clear()
        self._log_dropped()

    async def _send_all(self) -> None:
        pause = self._limits.retry_seconds
        while self._held:
            if await self._send_each():
                pause = self._limits.retry_seconds
            self._give_up()
            self._log_dropped()
            if self._held:
                await self._clock.sleep(pause)
                pause = min(pause * 2, MAX_RETRY_SECONDS)

    async def _send_each(self) -> bool:
        """Tries the ends of each target until the first that must wait; returns whether one was answered."""
        waiting: set[str] = set()
        was_answered = False
        for key, end in list(self._held.items()):
            if end.request.model in waiting:
                continue
            fate = await self._fate_of(end)
            del self._held[key]
            if fate is None:
                waiting.add(end.request.model)
                # Moved behind the target's other ends: this may be the only one that has to wait.
                self._held[key] = end
            else:
                was_answered = True
                self.on_fate(fate)
        return was_answered

    async def _fate_of(self, end: _HeldEnd) -> EndFate | None:
        """Returns the result of reporting an end; None: retry."""
        request = replace(end.request, age_seconds=self._clock.monotonic() - end.arrived_at)
        try:
            is_recorded = await within(self._limits.call_timeout_seconds, self._port.report_end(request, end.receipt))
        except TimeoutError:
            return None
        except WeftError as error:
            if error.reason in _REPEATED:
                return None
            log.warning("the end of a request was refused", request_id=request.request_id, why=error.message)
            return EndFate.REFUSED
        return EndFate.ACCEPTED if is_recorded else EndFate.UNKNOWN

    def _give_up(self) -> None:
        oldest = self._clock.monotonic() - self._limits.give_up_seconds
        for key in [key for key, end in self._held.items() if end.held_at <= oldest]:
            del self._held[key]
            self._drop(EndFate.GAVE_UP)

    def _drop(self, fate: EndFate) -> None:
        self.on_fate(fate)
        self._dropped[fate] += 1

    def _log_dropped(self) -> None:
        # One log line for many ends: an outage under load drops too many for one line each.
        for fate, count in sorted(self._dropped.items()):
            log.warning("ends of requests dropped", why=fate.value, count=count, held=len(self._held))
        self._dropped.clear()


def _names_of(request: PlacementRequest) -> PlacementRequest:
    """Returns the parts of a request that its record shows, without those that only a scheduler needs."""
    return PlacementRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        model=request.model,
        operation=request.operation,
        priority=request.priority,
        names_priority=request.names_priority,
        client_id=request.client_id,
        asked_model=request.asked_model,
        caller=request.caller,
    )
