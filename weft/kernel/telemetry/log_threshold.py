"""The lowest level that a process logs."""

import logging
import sys
from types import MappingProxyType
from typing import Any


def _import_structlog() -> None:
    """Imports structlog as if rich were not installed.

    structlog imports rich for tracebacks with local variables, which weft never writes because they contain prompts and
    keys. The import took a tenth of the CPU time of a start, and 5 MB.
    """
    if "rich" in sys.modules:
        import structlog  # noqa: PLC0415
    else:
        sys.modules["rich"] = None  # type: ignore[assignment]  # makes the import fail
        try:
            import structlog  # noqa: F401, PLC0415
        finally:
            del sys.modules["rich"]


_import_structlog()

import structlog  # noqa: E402

__all__ = ["LogThreshold", "structlog", "threshold_in_use"]

_NUMBERS = MappingProxyType(
    {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}
    | {"exception": logging.ERROR, "msg": logging.INFO}
)


class LogThreshold:
    """The first log processor: drops lines below a level."""

    def __init__(self, level: str) -> None:
        self.level, self._number = level, _NUMBERS[level]

    def __call__(self, _logger: Any, method: str, event: Any) -> Any:
        """See structlog.typing.Processor."""
        if _NUMBERS[method] < self._number:
            raise structlog.DropEvent
        return event


def threshold_in_use() -> LogThreshold:
    """Returns the threshold of this process's log; one without effect if logging is not configured."""
    found = (each for each in structlog.get_config()["processors"] if isinstance(each, LogThreshold))
    return next(found, None) or LogThreshold("info")
