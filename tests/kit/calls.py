"""Names of the Python functions that a call runs, for tests of hot paths."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def calls_of(function: Callable[[], object]) -> list[str]:
    """Returns the Python functions that `function` calls, by name, in order, none of a garbage collection."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    was_enabled = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        if was_enabled:
            gc.enable()
    return found[1:]
