"""The lowest level that a process logs."""

import pytest

from weft.kernel.telemetry.log_threshold import LogThreshold, structlog

METHODS = ("debug", "info", "warning", "error", "exception", "critical")


@pytest.mark.parametrize(("level", "dropped"), [("debug", 0), ("info", 1), ("warning", 2), ("error", 3)])
def test_threshold_drops_lower_levels(level: str, dropped: int) -> None:
    threshold = LogThreshold(level)
    for method in METHODS[:dropped]:
        with pytest.raises(structlog.DropEvent):
            threshold(None, method, {})
    assert [threshold(None, method, method) for method in METHODS[dropped:]] == list(METHODS[dropped:])
