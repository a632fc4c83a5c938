"""How far the clock of one machine is from the mesh's: when that is worth saying, and in which words."""

from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason

NOTABLE_OFFSET_SECONDS = 5.0
"""A clock that is off by less is not mentioned: clocks that are synchronised are off by milliseconds."""


def offset_words(seconds: float) -> str:
    """Such as "its clock is 600 s ahead of the mesh's"; `seconds` are negative where it is behind."""
    return f"its clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the mesh's"


def refused_words(seconds: float) -> str:
    """The same for a clock that is off by more than is allowed, with the remedy."""
    return f"{offset_words(seconds)}, more than is allowed; set it right there (NTP)"


def clock_off(runner: str, seconds: float) -> WeftError:
    """The refusal of a request by a runner whose clock is off by more than is allowed."""
    return WeftError(
        Reason.CLOCK_OFF,
        f"the runner {runner} takes no requests: {refused_words(seconds)}",
        metadata={"runner": runner, "clock_offset_seconds": f"{seconds:.0f}"},
    )
