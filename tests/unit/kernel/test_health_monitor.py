"""The monitor of health: it runs checks in time, tells of changes, and sees a stuck process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from typing_extensions import override

from weft.kernel.services.health import WELL, Component, HealthCheck, HealthReport, HealthState, Observation, down
from weft.kernel.services.health_monitor import (
    CHECK_TIMEOUT_SECONDS,
    MAX_EVENT_LOOP_DELAY_SECONDS,
    HealthMonitor,
)
from weft_testing.fake_clock import FakeClock, let_all_run

AWAY = down("no_router", "no router answers")


class Switch:
    """A component that a test turns off and on."""

    def __init__(self) -> None:
        self.seen = WELL
        self.looks = 0
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None

    async def probe(self) -> Observation:
        self.looks += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.seen


class LateClock(FakeClock):
    """A clock on which every sleep is late, as in a process whose event loop is busy."""

    lateness = 0.0

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds + self.lateness)


@asynccontextmanager
async def watching(switch: Switch, clock: FakeClock) -> AsyncIterator[HealthMonitor]:
    monitor = HealthMonitor([HealthCheck(name="router", probe=switch.probe, services=("weft.Placement",))], clock)
    await monitor.start()
    try:
        yield monitor
    finally:
        await monitor.stop()


async def seconds_pass(clock: FakeClock, seconds: int) -> None:
    for _ in range(seconds):
        await clock.advance(1.0)
        await let_all_run()


def router(monitor: HealthMonitor) -> Component:
    return next(each for each in monitor.report.components if each.name == "router")


async def test_listeners_are_notified_of_changes_only() -> None:
    clock, switch, told = FakeClock(), Switch(), list[HealthReport]()

    async def listen(report: HealthReport) -> None:
        told.append(report)

    async with watching(switch, clock) as monitor:
        monitor.subscribe(listen)
        told.clear()
        await seconds_pass(clock, 20)
        assert told == []
        switch.seen = AWAY
        await seconds_pass(clock, 5)
        assert [each.status for each in told] == ["not_ready"]
        assert not told[0].serves("weft.Placement")
        switch.seen = WELL
        await seconds_pass(clock, 15)
        await monitor.note_stopping()
    assert [each.status for each in told] == ["not_ready", "ok", "stopping"]


async def test_component_added_to_a_healthy_set_is_known_after_an_extra_check() -> None:
    clock, proxy = FakeClock(), Switch()
    async with watching(Switch(), clock) as monitor:
        await seconds_pass(clock, 5)
        monitor.add(HealthCheck(name="edge", probe=proxy.probe))
        assert monitor.report.components[-1].state is HealthState.STARTING
        await monitor.check()
        assert (monitor.report.components[-1].name, monitor.report.components[-1].state) == ("edge", HealthState.OK)


async def test_hanging_check_is_a_fault_and_is_not_run_concurrently() -> None:
    clock, switch = FakeClock(), Switch()
    async with watching(switch, clock) as monitor:
        looks = switch.looks
        switch.gate = asyncio.Event()
        await seconds_pass(clock, int(CHECK_TIMEOUT_SECONDS) + 8)
        assert (router(monitor).state, router(monitor).reason) == (HealthState.DOWN, "no_answer")
        assert switch.looks == looks + 1
        switch.gate.set()
        await seconds_pass(clock, 15)
        assert router(monitor).state is HealthState.OK


async def test_blocking_condition_counts_immediately_and_listeners_are_notified_next_round() -> None:
    clock, lapsed, told = FakeClock(), list[Observation](), list[str]()

    async def listen(report: HealthReport) -> None:
        told.append(report.status)

    check = HealthCheck(name="router", probe=lambda: lapsed[0] if lapsed else WELL, services=("s",), is_immediate=True)
    monitor = HealthMonitor([check], clock)
    monitor.subscribe(listen)
    await monitor.start()
    await let_all_run()
    try:
        lapsed.append(AWAY)
        assert (monitor.report.is_ready, monitor.report.serves("s")) == (False, False)
        assert [each["reason"] for each in monitor.component_documents()] == ["", "no_router"]
        assert told == ["ok"]
        await seconds_pass(clock, 1)
        lapsed.clear()
        assert (monitor.report.is_ready, monitor.report.serves("s")) == (True, True)
        await seconds_pass(clock, 1)
    finally:
        await monitor.stop()
    assert told == ["ok", "not_ready", "ok"]


async def test_failing_check_is_a_fault_with_its_error_hidden() -> None:
    clock, switch = FakeClock(), Switch()
    async with watching(switch, clock) as monitor:
        switch.error = OSError("postgres://root:secret@db is away")
        await seconds_pass(clock, 5)
        assert router(monitor).reason == "check_failed"
        assert "secret" not in str(monitor.component_documents())


async def test_process_that_is_repeatedly_late_is_stuck() -> None:
    clock, switch = LateClock(), Switch()
    async with watching(switch, clock) as monitor:
        clock.lateness = MAX_EVENT_LOOP_DELAY_SECONDS + 1.0
        for _ in range(5):
            await clock.advance(MAX_EVENT_LOOP_DELAY_SECONDS + 2.0)
            await let_all_run()
        assert not monitor.report.is_live
        clock.lateness = 0.0
        await seconds_pass(clock, 25)
        assert monitor.report.is_live


async def test_component_shows_since_when_in_wall_clock_time() -> None:
    clock, switch = FakeClock(), Switch()
    async with watching(switch, clock) as monitor:
        switch.seen = AWAY
        while router(monitor).state is HealthState.OK:
            await seconds_pass(clock, 1)
        before = clock.utc_now()
        await seconds_pass(clock, 30)
    document = next(each for each in monitor.component_documents() if each["name"] == "router")
    assert document == {
        "name": "router",
        "state": "down",
        "reason": "no_router",
        "message": "no router answers",
        "since": before.isoformat(timespec="seconds").replace("+00:00", "Z"),
    }


@pytest.mark.parametrize("turns", range(8))
async def test_stop_during_a_check_round_is_not_a_loop_failure(turns: int) -> None:
    clock, switch, deaths = FakeClock(), Switch(), list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: deaths.append(context))
    async with watching(switch, clock) as monitor:
        advancing = asyncio.create_task(clock.advance(1.0))
        # So many turns of the event loop after the round was due.
        for _ in range(turns):
            await asyncio.sleep(0)
        await monitor.stop()
        await advancing
    await let_all_run()
    assert deaths == []


async def test_monitor_can_be_stopped_twice_and_before_it_starts() -> None:
    monitor = HealthMonitor((), FakeClock())
    await monitor.stop()
    await monitor.start()
    await monitor.stop()
    await monitor.stop()
