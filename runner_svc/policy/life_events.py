"""What may happen to an instance, and what may be done about it: the words of `lifecycle`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from types import MappingProxyType

from weft.kernel.reasons import Reason


class Phase(IntEnum):
    """Numbers as in `registry.v1.InstanceState.Phase`, whose comments define them."""

    IDLE = 1
    LOADING = 2
    READY = 3
    DRAINING = 4
    STOPPING = 5
    CRASH_LOOP = 6
    FAILED = 7
    HIBERNATING = 8


class Command(Enum):
    """What is done about an instance; every one ends with an event."""

    NOTHING = auto()
    """Not begun, or over."""
    LOAD = auto()
    """Get memory, then start the backend: Loaded, LoadFailed or SleepAsked; Waits meanwhile."""
    WAKE = auto()
    """Carry out the wake recipe, then as LOAD: Loaded or WakeFailed; SleepAsked where there is no recipe."""
    SERVE = auto()
    """Watch over a backend that takes requests: Died, Faulted or SleepAsked."""
    CLEAR = auto()
    """End its requests, then the backend and everything it left behind: Cleared."""
    SLEEP = auto()
    """Let requests end for a while, then put it to sleep: Slept or SleepFailed."""
    REST = auto()
    """Wait until somebody wants it: WakeAsked."""
    SEEK = auto()
    """Look for a server that weft can neither start nor wake: Loaded, Missing or WakeAsked."""
    PAUSE = auto()
    """Wait until `resume_at`: PauseOver."""
    END = auto()
    """As CLEAR, for good: Ended."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The runner starts."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The backend takes requests."""


@dataclass(frozen=True, slots=True)
class Waits:
    """What a load waits for has changed; nothing, where it says nothing."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The backend did not start, and nothing of it is left."""

    reason: Reason
    how: str
    otherwise: bool = False
    """Whether it was to be loaded otherwise than it is configured."""


@dataclass(frozen=True, slots=True)
class WakeFailed:
    """It could not be woken, and nothing of it is left."""

    reason: Reason
    how: str
    otherwise: bool = False
    """As of LoadFailed."""


@dataclass(frozen=True, slots=True)
class Died:
    """The backend ended by itself."""

    reason: Reason
    how: str


@dataclass(frozen=True, slots=True)
class Faulted:
    """The backend is there and of no use: a stall, a failed connect, headers that did not come."""

    reason: Reason
    how: str


@dataclass(frozen=True, slots=True)
class Broke:
    """A fault of our own; the backend has been ended."""

    how: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing is left of a backend that died or faulted."""


@dataclass(frozen=True, slots=True)
class SleepAsked:
    """It is idle for long enough, or somebody wants it unloaded."""


@dataclass(frozen=True, slots=True)
class Slept:
    """It sleeps."""


@dataclass(frozen=True, slots=True)
class SleepFailed:
    """Its sleep action failed; it still takes requests."""


@dataclass(frozen=True, slots=True)
class WakeAsked:
    """Somebody wants it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A server that was looked for is still not there."""

    how: str


@dataclass(frozen=True, slots=True)
class PauseOver:
    """The pause has passed."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The runner is about to end."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The runner ends."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing is left."""


Event = (
    Begun
    | Loaded
    | Waits
    | LoadFailed
    | WakeFailed
    | Died
    | Faulted
    | Broke
    | Cleared
    | SleepAsked
    | Slept
    | SleepFailed
    | WakeAsked
    | Missing
    | PauseOver
    | DrainAsked
    | EndAsked
    | Ended
)

_ALWAYS: frozenset[type] = frozenset({Broke, DrainAsked, EndAsked})
POSSIBLE: Mapping[Command, frozenset[type]] = MappingProxyType(
    {
        Command.NOTHING: frozenset({Begun, DrainAsked, EndAsked}),
        Command.LOAD: _ALWAYS | {Loaded, Waits, LoadFailed, SleepAsked},
        Command.WAKE: _ALWAYS | {Loaded, Waits, WakeFailed, SleepAsked},
        Command.SERVE: _ALWAYS | {Died, Faulted, SleepAsked},
        Command.CLEAR: _ALWAYS | {Cleared},
        Command.SLEEP: _ALWAYS | {Slept, SleepFailed},
        Command.REST: _ALWAYS | {WakeAsked},
        Command.SEEK: _ALWAYS | {Loaded, Missing, WakeAsked},
        Command.PAUSE: _ALWAYS | {PauseOver, SleepAsked},
        Command.END: frozenset({Ended, DrainAsked}),
    }
)
"""Which events may come while a command is carried out; every other is refused."""
