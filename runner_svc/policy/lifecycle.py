"""The lifecycle of an instance (one process with one model) as a state machine: states, events and commands.

`step` takes a state and an event and returns the next state and a command; the lifecycle loop executes the command and
reports the next event. Times are monotonic seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, auto
from types import MappingProxyType

from runner_svc.policy.backoff import RestartHistory, RestartLimits
from runner_svc.policy.engine_failures import ADVICE
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


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
    """Obtain memory, then start the backend: LOADED, LOAD_FAILED or SLEEP_ASKED; WAITS meanwhile."""
    WAKE = auto()
    """Run the wake recipe, then as LOAD: LOADED or WAKE_FAILED; SLEEP_ASKED if there is no recipe."""
    SERVE = auto()
    """Watch a ready backend: DIED, FAULTED or SLEEP_ASKED."""
    CLEAR = auto()
    """End its requests, then the backend and all its processes: CLEARED."""
    SLEEP = auto()
    """Wait a limited time for requests to finish, then put it to sleep: SLEPT or SLEEP_FAILED."""
    REST = auto()
    """Wait for a wake request: WAKE_ASKED."""
    SEEK = auto()
    """Poll for a server that weft can neither start nor wake: LOADED, MISSING or WAKE_ASKED."""
    PAUSE = auto()
    """Wait until `resume_at` or for a load: PAUSE_OVER or WAKE_ASKED."""
    END = auto()
    """Like CLEAR, when the runner stops: ENDED."""


class EventKind(Enum):
    """The kind of an event."""

    BEGUN = auto()
    """The runner starts."""
    LOADED = auto()
    """The backend is ready."""
    WAITS = auto()
    """The status of a waiting load has changed to `how`; empty: it no longer waits."""
    LOAD_FAILED = auto()
    """The backend did not start, and none of its processes is left."""
    WAKE_FAILED = auto()
    """The wake failed, and none of the backend's processes is left."""
    DIED = auto()
    """The engine exited unexpectedly."""
    FAULTED = auto()
    """The backend runs but does not work: a stall, a failed connection, missing headers."""
    BROKE = auto()
    """An internal error of the runner; the backend has been ended."""
    CLEARED = auto()
    """The processes of a backend that died or faulted have been cleaned up."""
    SLEEP_ASKED = auto()
    """The idle timer expired, or an unload was requested."""
    SLEPT = auto()
    """The model hibernates."""
    SLEEP_FAILED = auto()
    """The sleep action failed; the backend is still ready."""
    WAKE_ASKED = auto()
    """A wake was requested."""
    MISSING = auto()
    """A poll did not find the attached server."""
    PAUSE_OVER = auto()
    """The pause has ended."""
    DRAIN_ASKED = auto()
    """The runner starts to drain."""
    END_ASKED = auto()
    """The runner stops."""
    ENDED = auto()
    """The backend was ended because the runner stops."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an instance."""

    kind: EventKind
    reason: Reason = Reason.UNSPECIFIED
    how: str = ""
    """What happened, of a failure or a fault."""
    exit: str = ""
    """Of an engine that died, as `ExitReport.exit`."""
    otherwise: bool = False
    """Whether the load plan of a failed load or wake differs from the configuration."""
    unfetched: bool = False
    """Whether nothing was started by a failed load because the model's files could not be pulled."""
    unstarted: bool = False
    """Whether a failed load started no process, such as for lack of a file: nothing crashed, and nothing restarts."""


_ALWAYS = frozenset({EventKind.BROKE, EventKind.DRAIN_ASKED, EventKind.END_ASKED})
_LOADING = _ALWAYS | {EventKind.LOADED, EventKind.WAITS, EventKind.SLEEP_ASKED}
POSSIBLE: Mapping[Command, frozenset[EventKind]] = MappingProxyType(
    {
        Command.NOTHING: frozenset({EventKind.BEGUN, EventKind.DRAIN_ASKED, EventKind.END_ASKED}),
        Command.LOAD: _LOADING | {EventKind.LOAD_FAILED},
        Command.WAKE: _LOADING | {EventKind.WAKE_FAILED},
        Command.SERVE: _ALWAYS | {EventKind.DIED, EventKind.FAULTED, EventKind.SLEEP_ASKED},
        Command.CLEAR: _ALWAYS | {EventKind.CLEARED},
        Command.SLEEP: _ALWAYS | {EventKind.SLEPT, EventKind.SLEEP_FAILED},
        Command.REST: _ALWAYS | {EventKind.WAKE_ASKED},
        Command.SEEK: _ALWAYS | {EventKind.LOADED, EventKind.MISSING, EventKind.WAKE_ASKED},
        Command.PAUSE: _ALWAYS | {EventKind.PAUSE_OVER, EventKind.SLEEP_ASKED, EventKind.WAKE_ASKED},
        Command.END: frozenset({EventKind.ENDED, EventKind.DRAIN_ASKED}),
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
    if event.kind not in POSSIBLE[state.doing]:
        raise ImpossibleEvent(f"{event.kind.name} while doing {state.doing.name}")
    after = _HANDLERS[event.kind](state, event, now, rules)
    goes_on = event.kind in (EventKind.DRAIN_ASKED, EventKind.WAITS)
    return Transition(state=after, command=Command.NOTHING if goes_on else after.doing)


def needs_restart(reason: Reason, *, attached: bool) -> bool:
    """Whether a failed request means that its backend must be restarted.

    An attached server is only given up if no connection to it is possible.
    """
    return reason is Reason.CONNECT_FAILED or (reason is Reason.HEADERS_TIMEOUT and not attached)


def is_unmet(event: Event) -> bool:
    """Whether a failed load of weft's own backend does not count as a death and is retried only by the next request.

    A failure with special load options says nothing about the configured model, a failed pull nothing about its
    engine, and nothing was started without memory.
    """
    if event.kind is not EventKind.LOAD_FAILED:
        return False
    return event.unfetched or event.reason in UNMET or (event.otherwise and event.reason in _HOPELESS)


def with_log_command(state: LifeState, model: str) -> LifeState:
    """Adds the command that shows the backend's output, which is not in a state because it may quote prompts."""
    return replace(state, detail=f"{state.detail}; output: weft logs {model}"[:MAX_DETAIL_CHARS])


def _at(state: LifeState, doing: Command, phase: Phase, detail: str = "") -> LifeState:
    return replace(state, doing=doing, phase=phase, detail=detail[:MAX_DETAIL_CHARS], resume_at=None)


def _begun(state: LifeState, _event: Event, _now: float, rules: LifeRules) -> LifeState:
    return _at(state, Command.REST, Phase.HIBERNATING) if rules.start_asleep else _load(state)


def _serve(state: LifeState, *_: object) -> LifeState:
    return _at(state, Command.SERVE, Phase.DRAINING if state.draining else Phase.READY)


def _waits(state: LifeState, event: Event, *_: object) -> LifeState:
    otherwise = WAKING if state.doing is Command.WAKE else state.how
    return replace(state, detail=(event.how or otherwise)[:MAX_DETAIL_CHARS])


def _load(state: LifeState) -> LifeState:
    return _at(state, Command.LOAD, Phase.LOADING, state.how)


def _lost(state: LifeState, event: Event, now: float, _rules: LifeRules) -> LifeState:
    state = _at(_blame(state, event), Command.CLEAR, Phase.STOPPING, event.how)
    if event.reason is Reason.OUT_OF_MEMORY:
        state = replace(state, memory_deaths=(*state.memory_deaths, now)[-MEMORY_DEATHS:])
    return state


def _failed(state: LifeState, event: Event, now: float, rules: LifeRules) -> LifeState:
    """Returns the state after a failed load or wake, or an internal error.

    A failed wake does not count as a restart. The next request tries again unless the failure would repeat.
    """
    hopeless = event.reason in _HOPELESS
    is_left = event.kind is EventKind.WAKE_FAILED and (event.otherwise or not hopeless)
    if rules.attached or is_left or is_unmet(event):
        return _absent(state, event.how, rules)
    if event.unstarted:
        return _after_no_start(_blame(state, event), now, rules)
    return _after_death(_blame(state, event), now, rules, hopeless=hopeless)


def _cleared(state: LifeState, _event: Event, now: float, rules: LifeRules) -> LifeState:
    if rules.attached:
        return _absent(state, state.how, rules)
    recent = [at for at in state.memory_deaths if now - at < rules.limits.window_seconds]
    hopeless = state.reason is Reason.OUT_OF_MEMORY and len(recent) >= MEMORY_DEATHS
    return _after_death(state, now, rules, hopeless=hopeless)


def _blame(state: LifeState, event: Event) -> LifeState:
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


def _after_no_start(state: LifeState, now: float, rules: LifeRules) -> LifeState:
    """Tries again after a pause that grows as after deaths, without counting a restart."""
    history, pause = state.history.after_death(now, rules.limits, must_pause=True)
    state = replace(state, history=replace(history, total=state.history.total))
    detail = f"{state.how[:MAX_HOW_CHARS]}; next try in {pause:.0f} s"
    return replace(_at(state, Command.PAUSE, Phase.FAILED, detail), resume_at=now + pause)


def _advised(how: str) -> str:
    return how if ADVICE in how else f"out of memory: {how}; {ADVICE}"


def _pause_over(state: LifeState, _event: Event, now: float, _rules: LifeRules) -> LifeState:
    """Restarts after a pause, or waits for a request if it ran out of memory."""
    if state.resume_at is None or now < state.resume_at:
        raise ImpossibleEvent(f"PAUSE_OVER at {now}, before {state.resume_at}")
    if state.phase is Phase.FAILED and state.reason is Reason.OUT_OF_MEMORY:
        return _at(state, Command.REST, Phase.HIBERNATING, state.detail)
    return _load(state)


def _sleep_asked(state: LifeState, event: Event, _now: float, rules: LifeRules) -> LifeState:
    if state.doing is Command.SERVE:
        return _at(state, Command.SLEEP, Phase.STOPPING, FALLING_ASLEEP)
    return _absent(state, event.how, rules)


def _absent(state: LifeState, why: str, rules: LifeRules) -> LifeState:
    """Enters hibernation. A server that the runner cannot wake is polled, since others may wake it."""
    if rules.can_wake:
        return _at(state, Command.REST, Phase.HIBERNATING, why)
    return _at(state, Command.SEEK, Phase.HIBERNATING if rules.woken_by_mesh else Phase.FAILED, why)


def _drain_asked(state: LifeState, *_: object) -> LifeState:
    phase = Phase.DRAINING if state.phase is Phase.READY else state.phase
    return replace(state, draining=True, phase=phase)


_HANDLERS: Mapping[EventKind, Callable[[LifeState, Event, float, LifeRules], LifeState]] = MappingProxyType(
    {
        EventKind.BEGUN: _begun,
        EventKind.LOADED: _serve,
        EventKind.WAITS: _waits,
        EventKind.LOAD_FAILED: _failed,
        EventKind.WAKE_FAILED: _failed,
        EventKind.DIED: _lost,
        EventKind.FAULTED: _lost,
        EventKind.BROKE: _failed,
        EventKind.CLEARED: _cleared,
        EventKind.SLEEP_ASKED: _sleep_asked,
        EventKind.SLEPT: _sleep_asked,
        EventKind.SLEEP_FAILED: _serve,
        EventKind.WAKE_ASKED: lambda state, *_: _at(state, Command.WAKE, Phase.LOADING, WAKING),
        EventKind.MISSING: _sleep_asked,
        EventKind.PAUSE_OVER: _pause_over,
        EventKind.DRAIN_ASKED: _drain_asked,
        EventKind.END_ASKED: lambda state, *_: _at(state, Command.END, Phase.STOPPING),
        EventKind.ENDED: lambda state, *_: _at(state, Command.NOTHING, Phase.IDLE),
    }
)


def verdict_on(event: Event, *, attached: bool) -> WeftError:
    """Returns the error of the running requests, of an engine that died or faulted."""
    if event.kind is EventKind.FAULTED:
        done = "released" if attached else "restarted"
        return WeftError(Reason.WORKER_RESTARTED, f"the engine was {done} while it processed the request: {event.how}")
    reason = Reason.OUT_OF_MEMORY if event.reason is Reason.OUT_OF_MEMORY else Reason.SERVER_DIED
    error = WeftError(reason, f"the engine died while it processed the request ({event.how})")
    error.engine_exit = event.exit
    return error
