"""Progress, as a value."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a start, for progress output."""

    name: str
    """The step, such as "services" or "smollm2-135m"."""
    detail: str
    done: bool = False
    is_warning: bool = False
    """Whether it is done with a warning, which the detail gives."""


ShowProgress = Callable[[Stage], None]
