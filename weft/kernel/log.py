"""Loggers. They write what `weft.kernel.telemetry` configures."""

from functools import cached_property
from typing import Any


class _Logger:
    """A logger that imports structlog with its first line: most commands write none."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _written(self) -> Any:
        from weft.kernel.log_threshold import structlog  # noqa: PLC0415 - see the class

        return structlog.get_logger(self._name, component=self._name)

    @cached_property
    def _threshold(self) -> Any:
        from weft.kernel.log_threshold import threshold_in_use  # noqa: PLC0415 - see the class

        return threshold_in_use()

    def writes_debug(self) -> bool:
        """Whether debug lines are written now; for lines of every request: a dropped one takes 4 us."""
        return bool(self._threshold.level == "debug")

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._written, name)
        if "bind" in vars(self._written):
            # Its configuration is fixed from here on: structlog would look the method up anew for each line.
            setattr(self, name, found)
        return found


def get_logger(name: str) -> Any:
    """The logger of a package; its lines carry its name as `component`, and what `structlog.contextvars` binds."""
    return _Logger(name)
