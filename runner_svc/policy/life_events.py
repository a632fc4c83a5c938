"""The commands, events and phases of an instance's lifecycle, and which events each command allows."""

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
    """What the lifecycle loop executes; every command ends with an event."""

    NOTHING = auto()
    """Not begun, or ended."""
    LOAD = auto()
    """Get memory, then start the backend: Loaded, LoadFailed or SleepAsked; Waits meanwhile."""
    WAKE = auto()
    """Carry out the wake recipe, then as LOAD: Loaded or WakeFailed; SleepAsked where there is no recipe."""
    SERVE = auto()
    """Watch a ready backend: Died, Faulted or SleepAsked."""
    CLEAR = auto()
    """End its requests, then the backend with all its processes: Cleared."""
    SLEEP = auto()
    """Let requests end for a while, then put it to sleep: Slept or SleepFailed."""
    REST = auto()
    """Wait for a wake request: WakeAsked."""
    SEEK = auto()
    """Look for a server that weft can neither start nor wake: Loaded, Missing or WakeAsked."""
    PAUSE = auto()
    """Wait until `resume_at`: PauseOver."""
    END = auto()
    """As CLEAR, at the end of the runner: Ended."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The runner starts."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The backend is ready."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The status of a waiting load has changed; empty: it waits no more."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The backend did not start, and no process of it is left."""

    reason: Reason
    how: str
    otherwise: bool = False
    """Whether its load plan differs from the configuration."""


@dataclass(frozen=True, slots=True)
class WakeFailed:
    """The wake failed, and no process of the backend is left."""

    reason: Reason
    how: str
    otherwise: bool = False
    """As in LoadFailed."""


@dataclass(frozen=True, slots=True)
class Died:
    """The backend ended by itself."""

    reason: Reason
    how: str


@dataclass(frozen=True, slots=True)
class Faulted:
    """The backend runs but does not work: a stall, a failed connect, missing headers."""

    reason: Reason
    how: str


@dataclass(frozen=True, slots=True)
class Broke:
    """An internal error of the runner; the backend has been ended."""

    how: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """A backend that died or faulted has been cleaned up."""


@dataclass(frozen=True, slots=True)
class SleepAsked:
    """The idle timer has expired, or an unload was requested."""


@dataclass(frozen=True, slots=True)
class Slept:
    """The model sleeps."""


@dataclass(frozen=True, slots=True)
class SleepFailed:
    """The sleep action failed; the backend is still ready."""


@dataclass(frozen=True, slots=True)
class WakeAsked:
    """A wake was requested."""


@dataclass(frozen=True, slots=True)
class Missing:
    """An attached server was looked for and not found."""

    how: str


@dataclass(frozen=True, slots=True)
class PauseOver:
    """The pause has ended."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The runner drains."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The runner ends."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The backend has ended for good."""


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
"""The events that are possible while a command is executed; any other is refused."""
