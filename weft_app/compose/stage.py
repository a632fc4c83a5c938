"""Progress, as a value."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of coming up, for whoever shows progress."""

    name: str
    """What is being done, such as "services" or "smollm2-135m"."""
    detail: str
    done: bool = False
    is_warning: bool = False
    """Whether it is done and something is not as it should be, which the detail says."""


ShowProgress = Callable[[Stage], None]
