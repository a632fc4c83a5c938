"""The lifecycle of an instance (one process with one model) as a state machine: states, events and commands.

`step` takes a state and an event and returns the next state and a command; the lifecycle loop executes the command and
reports the next event. Times are monotonic seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from types import MappingProxyType
from typing import Any

from runner_svc.policy.backoff import RestartHistory, RestartLimits
from runner_svc.policy.engine_failures import ADVICE
from weft.kernel.errors import WeftError
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
    """What the lifecycle loop executes. Every command ends with an event, listed with it."""

    NOTHING = auto()
    """Not started, or ended."""
    LOAD = auto()
    """Obtain memory, then start the backend: Loaded, LoadFailed or SleepAsked; Waits meanwhile."""
    WAKE = auto()
    """Run the wake recipe, then as LOAD: Loaded or WakeFailed; SleepAsked if there is no recipe."""
    SERVE = auto()
    """Watch a ready backend: Died, Faulted or SleepAsked."""
    CLEAR = auto()
    """End its requests, then the backend and all its processes: Cleared."""
    SLEEP = auto()
    """Wait a limited time for requests to finish, then put it to sleep: Slept or SleepFailed."""
    REST = auto()
    """Wait for a wake request: WakeAsked."""
    SEEK = auto()
    """Poll for a server that weft can neither start nor wake: Loaded, Missing or WakeAsked."""
    PAUSE = auto()
    """Wait until `resume_at` or for a load: PauseOver or WakeAsked."""
    END = auto()
    """Like CLEAR, when the runner stops: Ended."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The runner starts."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The backend is ready."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The status of a waiting load has changed; empty: it no longer waits."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The backend did not start, and none of its processes is left."""

    reason: Reason
    how: str
    otherwise: bool = False
    """Whether its load plan differs from the configuration."""
    unfetched: bool = False
    """Whether nothing was started because the model's files could not be pulled."""


@dataclass(frozen=True, slots=True)
class WakeFailed:
    """The wake failed, and none of the backend's processes is left."""

    reason: Reason
    how: str
    otherwise: bool = False
    """As in LoadFailed."""


@dataclass(frozen=True, slots=True)
class Died:
    """The engine exited unexpectedly."""

    reason: Reason
    how: str
    exit: str = ""
    """As `ExitReport.exit`."""


@dataclass(frozen=True, slots=True)
class Faulted:
    """The backend runs but does not work: a stall, a failed connection, missing headers."""

    reason: Reason
    how: str


@dataclass(frozen=True, slots=True)
class Broke:
    """An internal error of the runner; the backend has been ended."""

    how: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """The processes of a backend that died or faulted have been cleaned up."""


@dataclass(frozen=True, slots=True)
class SleepAsked:
    """The idle timer expired, or an unload was requested."""


@dataclass(frozen=True, slots=True)
class Slept:
    """The model hibernates."""


@dataclass(frozen=True, slots=True)
class SleepFailed:
    """The sleep action failed; the backend is still ready."""


@dataclass(frozen=True, slots=True)
class WakeAsked:
    """A wake was requested."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A poll did not find the attached server."""

    how: str


@dataclass(frozen=True, slots=True)
class PauseOver:
    """The pause has ended."""


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """The runner starts to drain."""


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The runner stops."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The backend was ended because the runner stops."""


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
        Command.PAUSE: _ALWAYS | {PauseOver, SleepAsked, WakeAsked},
        Command.END: frozenset({Ended, DrainAsked}),
    }
)
"""The events that each command allows; others raise ImpossibleEvent."""


FALLING_ASLEEP = "going to sleep"
WAKING = "waking"
MAX_DETAIL_CHARS = 1000
"""Maximum length of a detail, set by the registry."""
MAX_HOW_CHARS = 600
"""Maximum length of the cause in a detail, to leave room for the text after it."""
MEMORY_DEATHS = 2
"""Number of out-of-memory deaths within the window after which a restart would only repeat them."""
_HOPELESS = frozenset({Reason.INVALID_ARGUMENT, Reason.OUT_OF_MEMORY, Reason.TEMPLATE_FAILED})
"""Reasons for load failures that an immediate start would repeat."""
UNMET = frozenset({Reason.INSUFFICIENT_MEMORY, Reason.SERVICE_UNAVAILABLE})
"""Reasons why a backend was not started: no memory, or no registry to grant it. They do not count as deaths."""


class ImpossibleEvent(Exception):  # noqa: N818 - named after the event; only tests and logs see it
    """An event that cannot occur in this state: a bug of the runner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeRules:
    """Properties of an instance that determine its lifecycle."""

    attached: bool = False
    """The backend is an external server: it is never restarted, only polled or woken."""
    can_wake: bool = True
    woken_by_mesh: bool = False
    start_asleep: bool = False
    limits: RestartLimits = field(default_factory=RestartLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeState:
    """The lifecycle state of an instance."""

    doing: Command = Command.NOTHING
    phase: Phase = Phase.IDLE
    detail: str = ""
    """Why it is in this phase, as text."""
    reason: Reason = Reason.UNSPECIFIED
    """Reason of the last fault."""
    how: str = ""
    """Description of the last fault."""
    draining: bool = False
    history: RestartHistory = field(default_factory=RestartHistory)
    memory_deaths: tuple[float, ...] = ()
    """Times of its last out-of-memory deaths while ready, at most MEMORY_DEATHS."""
    resume_at: float | None = None
    """End of the current pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The next state and command."""

    state: LifeState
    command: Command
    """NOTHING: continue the current command."""


def step(state: LifeState, event: Event, now: float, rules: LifeRules) -> Transition:
    """Returns the state after `event` and the next command. Raises ImpossibleEvent."""
    if type(event) not in POSSIBLE[state.doing]:
        raise ImpossibleEvent(f"{type(event).__name__} while doing {state.doing.name}")
    after = _HANDLERS[type(event)](state, event, now, rules)
    goes_on = isinstance(event, (DrainAsked, Waits))
    return Transition(state=after, command=Command.NOTHING if goes_on else after.doing)


def needs_restart(reason: Reason, *, attached: bool) -> bool:
    """Whether a failed request means that its backend must be restarted.

    An attached server is only given up if no connection to it is possible.
    """
    return reason is Reason.CONNECT_FAILED or (reason is Reason.HEADERS_TIMEOUT and not attached)


def is_given_up(event: LoadFailed) -> bool:
    """Whether a failed load of weft's own backend is not retried before the next request.

    A failure with special load options says nothing about the configured model, and a failed pull nothing about its
    engine.
    """
    return event.unfetched or event.reason in UNMET or (event.otherwise and event.reason in _HOPELESS)


def with_last_lines(state: LifeState, lines: tuple[str, ...]) -> LifeState:
    """Adds the backend's last output to the detail of a state, without repetition and up to its limit."""
    new = [line for line in lines if line.strip() and line.strip() not in state.detail]
    return (
        state
        if not new
        else replace(state, detail=f"{state.detail}; last output: {' | '.join(new)}"[:MAX_DETAIL_CHARS])
    )


def _at(state: LifeState, doing: Command, phase: Phase, detail: str = "") -> LifeState:
    return replace(state, doing=doing, phase=phase, detail=detail[:MAX_DETAIL_CHARS], resume_at=None)


def _begun(state: LifeState, _event: Begun, _now: float, rules: LifeRules) -> LifeState:
    return _at(state, Command.REST, Phase.HIBERNATING) if rules.start_asleep else _load(state)


def _load(state: LifeState) -> LifeState:
    return _at(state, Command.LOAD, Phase.LOADING, state.how)


def _serve(state: LifeState, _event: Loaded | SleepFailed, _now: float, _rules: LifeRules) -> LifeState:
    return _at(state, Command.SERVE, Phase.DRAINING if state.draining else Phase.READY)


def _load_failed(state: LifeState, event: LoadFailed, now: float, rules: LifeRules) -> LifeState:
    if rules.attached or is_given_up(event):
        return _absent(state, event.how, rules)
    return _after_death(_blame(state, event), now, rules, hopeless=event.reason in _HOPELESS)


def _waits(state: LifeState, event: Waits, _now: float, _rules: LifeRules) -> LifeState:
    otherwise = WAKING if state.doing is Command.WAKE else state.how
    return replace(state, detail=(event.detail or otherwise)[:MAX_DETAIL_CHARS])


def _wake_failed(state: LifeState, event: WakeFailed, now: float, rules: LifeRules) -> LifeState:
    """A failed wake does not count as a restart. The next request tries again unless the failure would repeat."""
    if rules.attached or event.otherwise or event.reason not in _HOPELESS:
        return _absent(state, event.how, rules)
    return _after_death(_blame(state, event), now, rules, hopeless=True)


def _lost(state: LifeState, event: Died | Faulted, now: float, _rules: LifeRules) -> LifeState:
    state = _at(_blame(state, event), Command.CLEAR, Phase.STOPPING, event.how)
    if event.reason is Reason.OUT_OF_MEMORY:
        state = replace(state, memory_deaths=(*state.memory_deaths, now)[-MEMORY_DEATHS:])
    return state


def _cleared(state: LifeState, _event: Cleared, now: float, rules: LifeRules) -> LifeState:
    if rules.attached:
        return _absent(state, state.how, rules)
    recent = [at for at in state.memory_deaths if now - at < rules.limits.window_seconds]
    hopeless = state.reason is Reason.OUT_OF_MEMORY and len(recent) >= MEMORY_DEATHS
    return _after_death(state, now, rules, hopeless=hopeless)


def _broke(state: LifeState, event: Broke, now: float, rules: LifeRules) -> LifeState:
    if rules.attached:
        return _absent(state, event.how, rules)
    blamed = replace(state, reason=Reason.INTERNAL, how=event.how)
    return _after_death(blamed, now, rules, hopeless=False)


def _blame(state: LifeState, event: LoadFailed | WakeFailed | Died | Faulted) -> LifeState:
    return replace(state, reason=event.reason, how=event.how)


def _after_death(state: LifeState, now: float, rules: LifeRules, *, hopeless: bool) -> LifeState:
    """Restarts immediately or after a pause; always after a pause if an immediate start would fail the same way."""
    history, pause = state.history.after_death(now, rules.limits, must_pause=hopeless)
    state = replace(state, history=history)
    if not pause and not hopeless:
        return _load(state)
    how = state.how[:MAX_HOW_CHARS]
    if hopeless and state.reason is Reason.OUT_OF_MEMORY:
        after = _at(state, Command.PAUSE, Phase.FAILED, _advised(how))
    else:
        phase = Phase.FAILED if hopeless else Phase.CRASH_LOOP
        after = _at(state, Command.PAUSE, phase, f"{how}; next start in {pause:.0f} s")
    return replace(after, resume_at=now + pause)


def _advised(how: str) -> str:
    return how if ADVICE in how else f"out of memory: {how}; {ADVICE}"


def _pause_over(state: LifeState, _event: PauseOver, now: float, _rules: LifeRules) -> LifeState:
    """Restarts after a pause, or waits for a request if it ran out of memory."""
    if state.resume_at is None or now < state.resume_at:
        raise ImpossibleEvent(f"PauseOver at {now}, before {state.resume_at}")
    if state.phase is Phase.FAILED and state.reason is Reason.OUT_OF_MEMORY:
        return _at(state, Command.REST, Phase.HIBERNATING, state.detail)
    return _load(state)


def _sleep_asked(state: LifeState, _event: SleepAsked, _now: float, rules: LifeRules) -> LifeState:
    if state.doing is Command.SERVE:
        return _at(state, Command.SLEEP, Phase.STOPPING, FALLING_ASLEEP)
    return _absent(state, "", rules)


def _absent(state: LifeState, why: str, rules: LifeRules) -> LifeState:
    """Enters hibernation. A server that the runner cannot wake is polled, since others may wake it."""
    if rules.can_wake:
        return _at(state, Command.REST, Phase.HIBERNATING, why)
    return _at(state, Command.SEEK, Phase.HIBERNATING if rules.woken_by_mesh else Phase.FAILED, why)


def _drain_asked(state: LifeState, _event: DrainAsked, _now: float, _rules: LifeRules) -> LifeState:
    phase = Phase.DRAINING if state.phase is Phase.READY else state.phase
    return replace(state, draining=True, phase=phase)


_Handler = Callable[[LifeState, Any, float, LifeRules], LifeState]
_HANDLERS: Mapping[type, _Handler] = MappingProxyType(
    {
        Begun: _begun,
        Loaded: _serve,
        Waits: _waits,
        LoadFailed: _load_failed,
        WakeFailed: _wake_failed,
        Died: _lost,
        Faulted: _lost,
        Broke: _broke,
        Cleared: _cleared,
        SleepAsked: _sleep_asked,
        Slept: lambda state, _event, _now, rules: _absent(state, "", rules),
        SleepFailed: _serve,
        WakeAsked: lambda state, *_: _at(state, Command.WAKE, Phase.LOADING, WAKING),
        Missing: lambda state, event, _now, rules: _absent(state, event.how, rules),
        PauseOver: _pause_over,
        DrainAsked: _drain_asked,
        EndAsked: lambda state, *_: _at(state, Command.END, Phase.STOPPING),
        Ended: lambda state, *_: _at(state, Command.NOTHING, Phase.IDLE),
    }
)


def is_unmet(event: Event) -> bool:
    """Whether a failed load does not count as a death: it lacked memory, or its own options caused it."""
    return isinstance(event, LoadFailed) and is_given_up(event)


def verdict_on(event: Died | Faulted, *, attached: bool) -> WeftError:
    """Returns the error of the running requests."""
    if isinstance(event, Faulted):
        done = "released" if attached else "restarted"
        return WeftError(Reason.WORKER_RESTARTED, f"the engine was {done} while it processed the request: {event.how}")
    reason = Reason.OUT_OF_MEMORY if event.reason is Reason.OUT_OF_MEMORY else Reason.SERVER_DIED
    error = WeftError(reason, f"the engine died while it processed the request ({event.how})")
    error.engine_exit = event.exit
    return error
