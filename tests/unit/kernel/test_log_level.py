"""The level of a process's log changes for a bounded time, and falls back by itself."""

import asyncio

import pytest

from weft.kernel.errors import WeftError
from weft.kernel.log_level import DEFAULT_LOG_LEVEL_SECONDS, MAX_LOG_LEVEL_SECONDS, LogLevel
from weft.kernel.log_threshold import LogThreshold, structlog
from weft_testing.fake_clock import FakeClock, let_all_run


def written(threshold: LogThreshold) -> list[str]:
    """The methods of a logger whose lines are written."""
    methods = []
    for method in ("debug", "info", "warning", "error", "exception", "critical"):
        try:
            threshold(None, method, {})
        except structlog.DropEvent:
            continue
        methods.append(method)
    return methods


def test_threshold_drops_lower_levels() -> None:
    threshold = LogThreshold("warning")
    assert written(threshold) == ["warning", "error", "exception", "critical"]
    threshold.use("debug")
    assert len(written(threshold)) == 6
    threshold.use("error")
    assert written(threshold) == ["error", "exception", "critical"]


async def test_temporary_level_applies_only_for_its_duration() -> None:
    clock, threshold = FakeClock(), LogThreshold("info")
    level = LogLevel(threshold, clock)
    assert (await level.change("debug", 60.0)).level == "debug"
    await clock.wait_for_sleepers(1)
    await clock.advance(59.0)
    assert (threshold.level, level.current.until is None) == ("debug", False)
    await clock.advance(1.0)
    assert (threshold.level, level.current.until) == ("info", None)


async def test_last_level_change_applies_with_its_own_duration() -> None:
    clock, threshold = FakeClock(), LogThreshold("info")
    level = LogLevel(threshold, clock)
    await level.change("debug", 10.0)
    await clock.wait_for_sleepers(1)
    await level.change("error", None)
    await clock.wait_for_sleepers(1)
    await clock.advance(11.0)
    assert threshold.level == "error", "the end of the first change is not the end of the second"
    await clock.advance(DEFAULT_LOG_LEVEL_SECONDS)
    assert threshold.level == "info"


async def test_of_two_simultaneous_level_changes_only_one_is_in_effect() -> None:
    clock, threshold = FakeClock(), LogThreshold("info")
    level = LogLevel(threshold, clock)
    await level.change("warning", 5.0)
    await clock.wait_for_sleepers(1)
    await asyncio.gather(level.change("debug", 60.0), level.change("error", 60.0))
    await let_all_run()
    assert (threshold.level in ("debug", "error"), clock.sleepers) == (True, 1), "the other one would end this one"
    await level.stop()


async def test_unset_level_restores_the_configured_one_immediately() -> None:
    clock, threshold = FakeClock(), LogThreshold("warning")
    level = LogLevel(threshold, clock)
    await level.change("debug", None)
    await clock.wait_for_sleepers(1)
    assert (await level.change("", None)).level == "warning"
    assert clock.sleepers == 0
    await level.change("debug", None)
    await level.stop()
    await level.stop()
    assert (threshold.level, clock.sleepers) == ("warning", 0)


@pytest.mark.parametrize(
    ("level", "seconds", "field"),
    [
        ("verbose", 1.0, "level"),
        ("debug", 0.0, "duration"),
        ("debug", -1.0, "duration"),
        ("debug", MAX_LOG_LEVEL_SECONDS + 1, "duration"),
        ("debug", float("nan"), "duration"),
    ],
)
async def test_unknown_level_or_unbounded_duration_is_refused_without_effect(
    level: str, seconds: float, field: str
) -> None:
    clock, threshold = FakeClock(), LogThreshold("info")
    changing = LogLevel(threshold, clock)
    await changing.change("error", 5.0)
    with pytest.raises(WeftError, match=field):
        await changing.change(level, seconds)
    assert threshold.level == "error"
    await changing.stop()
