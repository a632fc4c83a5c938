"""Loggers, configured by `weft.kernel.telemetry.structured_logs`."""

from functools import cached_property
from typing import Any


class _Logger:
    """A logger that imports structlog when it writes its first line, since most commands write none."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _written(self) -> Any:
        from weft.kernel.telemetry.log_threshold import structlog  # noqa: PLC0415 - see the class

        return structlog.get_logger(self._name, component=self._name)

    @cached_property
    def _threshold(self) -> Any:
        from weft.kernel.telemetry.log_threshold import threshold_in_use  # noqa: PLC0415 - see the class

        return threshold_in_use()

    def writes_debug(self) -> bool:
        """Whether debug lines are written now. Check it before per-request lines: a dropped line takes 4 us."""
        return bool(self._threshold.level == "debug")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._written, name)
        if "bind" in vars(self._written):
            # The configuration is fixed now; caching saves structlog's lookup of the method for each line.
            setattr(self, name, found)
        return found


def get_logger(name: str) -> Any:
    """Returns a logger. Its lines have its name as `component`, and the values bound by `structlog.contextvars`."""
    return _Logger(name)
