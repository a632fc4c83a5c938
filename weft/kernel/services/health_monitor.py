"""The loop that runs a process's health checks and reports its health."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from typing_extensions import override

from weft.kernel.services.health import (
    EVENT_LOOP,
    WELL,
    Component,
    HealthCheck,
    HealthLimits,
    HealthReport,
    HealthSource,
    HealthState,
    Observation,
    component_document,
    down,
    next_component,
)
from weft.kernel.services.service_lifecycle import start_critical, stop_tasks
from weft.kernel.telemetry.log import get_logger
from weft.kernel.time.clock import Clock

log = get_logger("weft.health")

T = TypeVar("T")

CHECK_INTERVAL_SECONDS = 1.0
STARTING_INTERVAL_SECONDS = 0.1
"""Interval while a component has not been healthy yet."""
CHECK_TIMEOUT_SECONDS = 5.0
"""After this time a pending check reports its component as down; it keeps running and is not started twice."""
CHECK_WAIT_SECONDS = 0.5
"""How long a round waits for slow checks."""
MAX_STARTING_SECONDS = 60.0
"""After this time the interval is CHECK_INTERVAL_SECONDS, even if a component has not been healthy yet."""
MAX_EVENT_LOOP_DELAY_SECONDS = 5.0
"""A process that is repeatedly this late for its checks is stuck, and not live."""

_NO_ANSWER = f"its check has had no answer for {CHECK_TIMEOUT_SECONDS:.0f} s"

HealthListener = Callable[[HealthReport], Awaitable[None]]


@dataclass(slots=True)
class _Checked:
    check: HealthCheck
    component: Component
    probe: Observation | asyncio.Task[Observation] | None = None
    """The result of the check, or the check itself while it runs."""
    began: float = 0.0

    @property
    def task(self) -> asyncio.Task[Observation] | None:
        return self.probe if isinstance(self.probe, asyncio.Task) else None

    def begin(self, now: float) -> None:
        """Begins a check, unless the last one still runs."""
        if self.task is None:
            found = self._unless_failed(self.check.probe)
            self.probe = found if isinstance(found, Observation) else asyncio.create_task(found)
            self.began = now

    def take(self, now: float) -> Observation | None:
        """Returns the result of the check; None while it runs."""
        probe = self.probe
        if isinstance(probe, asyncio.Task):
            if not probe.done():
                is_late = now - self.began >= CHECK_TIMEOUT_SECONDS
                return down("no_answer", _NO_ANSWER) if is_late else None
            probe = self._unless_failed(probe.result)
        self.probe = None
        return probe

    def _unless_failed(self, result: Callable[[], T]) -> T | Observation:
        try:
            return result()
        except Exception:
            log.exception("a health check failed", check=self.check.name)
            return down("check_failed", "its check failed; the log has the traceback")

    def answered_at(self, now: float) -> Component:
        """Returns the component, as an immediate check sees it now; one that is already down keeps its reason."""
        if not self.check.is_immediate or self.component.state in (HealthState.DOWN, HealthState.STARTING):
            return self.component
        found = self.check.probe()
        if not isinstance(found, Observation) or found.state is HealthState.OK:
            return self.component
        return replace(self.component, state=found.state, reason=found.reason, message=found.message, since=now)


class HealthMonitor(HealthSource):
    """Runs health checks from `start` to `stop`, and reports each change to listeners.

    Delays between its rounds show whether the event loop is stuck.
    """

    def __init__(self, checks: Iterable[HealthCheck], clock: Clock) -> None:
        self._clock = clock
        self._limits = HealthLimits()
        self._delay_seconds = 0.0
        self._checked: list[_Checked] = []
        self._listeners: list[HealthListener] = []
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self._began = clock.monotonic()
        self._last_report: HealthReport | None = None
        self.add(HealthCheck(name=EVENT_LOOP, probe=self._probe_event_loop))
        for check in checks:
            self.add(check)

    def add(self, check: HealthCheck) -> None:
        """Adds a check; the component is STARTING until it has run."""
        self._checked.append(_Checked(check, Component(name=check.name, since=self._clock.monotonic())))

    def subscribe(self, listener: HealthListener) -> None:
        """Calls `listener` with the report of each change, including the first report."""
        self._listeners.append(listener)

    @property
    @override
    def report(self) -> HealthReport:
        components = self._components()
        stopped = [
            service
            for each, component in zip(self._checked, components, strict=True)
            if component.state in (HealthState.DOWN, HealthState.STARTING)
            for service in each.check.services
        ]
        return HealthReport(
            components=components,
            essential=frozenset(each.check.name for each in self._checked if each.check.is_essential),
            stopped_services=frozenset(stopped),
            is_stopping=self._is_stopping,
        )

    @override
    def component_documents(self) -> list[dict[str, Any]]:
        now, utc_now = self._clock.monotonic(), self._clock.utc_now()
        return [component_document(each, now, utc_now) for each in self._components()]

    def _components(self) -> tuple[Component, ...]:
        now = self._clock.monotonic()
        return tuple(each.answered_at(now) for each in self._checked)

    async def start(self) -> None:
        """Checks every component once, then periodically. Idempotent."""
        if self._task is None:
            self._began = self._clock.monotonic()
            await self._check_all()
            self._task = start_critical(self._run(), name="health")

    async def check(self) -> None:
        """Checks every component now, because one has just changed."""
        await self._check_all()

    async def note_stopping(self) -> None:
        """Reports that the process is stopping and should get no further requests."""
        self._is_stopping = True
        await self._tell()

    async def stop(self) -> None:
        """Stops checking. Safe to call twice, or when never started."""
        task, self._task = self._task, None
        # Stop the loop first: cancelling a check that it awaits would probe like the loop's own failure.
        if task is not None:
            await stop_tasks([task])
        probes = [each.task for each in self._checked if each.task is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            pause = self._pause_seconds()
            due = self._clock.monotonic() + pause
            await self._clock.sleep(pause)
            self._delay_seconds = self._clock.monotonic() - due
            await self._check_all()

    def _pause_seconds(self) -> float:
        is_young = self._clock.monotonic() - self._began < MAX_STARTING_SECONDS
        is_starting = any(not each.component.was_healthy for each in self._checked)
        return STARTING_INTERVAL_SECONDS if is_young and is_starting else CHECK_INTERVAL_SECONDS

    def _probe_event_loop(self) -> Observation:
        if self._delay_seconds <= MAX_EVENT_LOOP_DELAY_SECONDS:
            return WELL
        return down("event_loop_stuck", f"the process was {self._delay_seconds:.0f} s late for what it had to do")

    async def _check_all(self) -> None:
        for each in self._checked:
            each.begin(self._clock.monotonic())
        await self._wait_for_looks()
        now = self._clock.monotonic()
        for each in self._checked:
            seen = each.take(now)
            if seen is not None:
                before = each.component
                each.component = next_component(before, seen, now, self._limits)
                _log_change(before, each.component)
        await self._tell()

    async def _wait_for_looks(self) -> None:
        running = {each.task for each in self._checked if each.task is not None}
        if not running:
            return
        timer = asyncio.create_task(self._clock.sleep(CHECK_WAIT_SECONDS))
        try:
            while running and not timer.done():
                _, pending = await asyncio.wait({timer, *running}, return_when=asyncio.FIRST_COMPLETED)
                running = {probe for probe in running if probe in pending}
        finally:
            timer.cancel()
            await asyncio.gather(timer, return_exceptions=True)

    async def _tell(self) -> None:
        report = self.report
        if _facts_of(report) == _facts_of(self._last_report):
            return
        self._last_report = report
        for listener in self._listeners:
            await listener(report)


def _log_change(before: Component, after: Component) -> None:
    if before.state is after.state:
        return
    # A component that is still starting is no reason for a warning, until it is down.
    is_news = after.state is HealthState.DOWN or before.state is not HealthState.STARTING
    write = log.warning if is_news and after.state is not HealthState.OK else log.info
    write("health changed", check=after.name, state=after.state.value, reason=after.reason, message=after.message)


def _facts_of(report: HealthReport | None) -> object:
    """Returns the parts of a report whose change is reported to listeners."""
    if report is None:
        return None
    states = [(each.name, each.state, each.reason) for each in report.components]
    return states, report.is_stopping, report.stopped_services
