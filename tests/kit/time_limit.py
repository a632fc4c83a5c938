"""A pytest plugin of `make test`: a test over one second fails unless marked slow.

The time includes the test and its function-scoped fixtures. Fixtures with a larger scope are excluded because their
cost is paid once.

A busy machine does not make a test slow: time in which this thread waits for a processor is excluded, and other
waiting time (mostly for child processes) is divided by the slowdown of this thread so far. Shared processors may also
take up to three times as long for the same work, so a slow test is repeated and its fastest run counts.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.runner import runtestprotocol

LIMIT_SECONDS = 1.0
MAX_RUNS = 4
"""Maximum number of runs of a test that passes but is too slow."""
STATISTICS = "/proc/self/schedstat"
"""Three numbers of the main thread: nanoseconds on a processor, nanoseconds waiting for one, time slices."""
MAX_STATISTICS_BYTES = 100


class Moment(NamedTuple):
    """Clocks of the main thread, in seconds."""

    wall: float
    running: float
    waiting_for_processor: float

    def until(self, now: "Moment") -> float:
        """Returns the seconds since then that this thread is responsible for."""
        running = now.running - self.running
        blocked = now.wall - self.wall - running - (now.waiting_for_processor - self.waiting_for_processor)
        contention = 1 + now.waiting_for_processor / now.running
        return running + blocked / contention


class TimeLimit:
    """The time of the running test so far."""

    def __init__(self) -> None:
        # Kept open because tests forbid opening files; it is read again from the start.
        self._statistics = os.open(STATISTICS, os.O_RDONLY)
        self._seconds = 0.0
        self._runs = 0

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Runs a test, and repeats it if it passes but is too slow. Other failures are never repeated."""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for self._runs in range(1, MAX_RUNS + 1):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            if self._seconds <= LIMIT_SECONDS or any(report.failed for report in reports):
                break
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        """Measures the fixtures of a test."""
        self._seconds = 0.0
        return (yield from self._counted(1))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Measures the test itself."""
        return (yield from self._counted(1))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
        """Excludes fixtures that tests share."""
        return (yield) if fixturedef.scope == "function" else (yield from self._counted(-1))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Fails a test that was also too slow in its last run."""
        result = yield
        if item.get_closest_marker("main_path") is not None:
            self._seconds = 0.0
        if self._seconds > LIMIT_SECONDS and self._runs == MAX_RUNS:
            pytest.fail(
                f"{item.nodeid} took {self._seconds:.1f} s; the limit of make test is {LIMIT_SECONDS:g} s. "
                'Make it faster, or mark it: @pytest.mark.slow("why it must be").',
                pytrace=False,
            )
        return result

    def _counted(self, sign: int) -> Iterator[None]:
        began = self._now()
        try:
            return (yield)
        finally:
            self._seconds += sign * began.until(self._now())

    def _now(self) -> Moment:
        running, waiting, _ = os.pread(self._statistics, MAX_STATISTICS_BYTES, 0).split()
        return Moment(time.monotonic(), int(running) / 1e9, int(waiting) / 1e9)


def pytest_configure(config: pytest.Config) -> None:
    """Registers the limit if the kernel reports how long a thread waits for a processor."""
    if Path(STATISTICS).exists():
        config.pluginmanager.register(TimeLimit(), "weft-time-limit")
