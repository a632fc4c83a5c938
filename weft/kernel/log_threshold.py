"""The lowest level that a process logs; it may change while the process runs."""

import logging
import sys
from types import MappingProxyType
from typing import Any


def _import_structlog() -> None:
    """Imports structlog as if rich were not installed.

    It would import rich for tracebacks that show local variables, which weft never writes: they hold prompts and keys.
    That took a tenth of the CPU time of a start, and 5 MB.
    """
    if "rich" in sys.modules:
        import structlog  # noqa: PLC0415
    else:
        sys.modules["rich"] = None  # type: ignore[assignment]  # what the import system calls a missing module
        try:
            import structlog  # noqa: F401, PLC0415
        finally:
            del sys.modules["rich"]


_import_structlog()

import structlog  # noqa: E402

__all__ = ["LEVELS", "LogThreshold", "structlog", "threshold_in_use"]

LEVELS = ("debug", "info", "warning", "error")
_NUMBERS = MappingProxyType(
    {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}
    | {"exception": logging.ERROR, "msg": logging.INFO}
)


class LogThreshold:
    """The first processor of the log: drops lines below a level that can be changed."""

    def __init__(self, level: str) -> None:
        self.configured = self.level = level
        self._number = _NUMBERS[level]

    def use(self, level: str) -> None:
        """Drop lines below this level from now on."""
        self.level, self._number = level, _NUMBERS[level]

    def __call__(self, _logger: Any, method: str, event: Any) -> Any:
        """See structlog.typing.Processor."""
        if _NUMBERS[method] < self._number:
            raise structlog.DropEvent
        return event


def threshold_in_use() -> LogThreshold:
    """Returns the threshold of this process's log; of a process without a configured log one that changes nothing."""
    found = (each for each in structlog.get_config()["processors"] if isinstance(each, LogThreshold))
    return next(found, None) or LogThreshold("info")
