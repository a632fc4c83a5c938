"""Names of the Python functions that a call runs, for tests of hot paths."""

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(function: Callable[[], object]) -> list[str]:
    """Returns the names of the Python functions that `function` calls, in order."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found[1:]
