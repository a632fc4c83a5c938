"""Decisions of the scheduler: about a request, or about a wake."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.choice import Choice, Considered
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority
from weft.kernel.value import value_class


@value_class(kw_only=True)
class Placed:
    """The request runs on this candidate."""

    key: int
    candidate: Candidate
    attempt: int
    choice: Choice | None = None
    """The selection; None: not recorded."""
    keep_alive_seconds: float | None = None
    """As its route sets it; None: not set."""
    deadline_at: float | None = None
    """When its answer must be complete, by its own or its route's deadline; None: no deadline."""


class WaitKind(StrEnum):
    """What a request waits for, in few enough words to count by."""

    SLOT = "slot"
    """The slots of its models are busy."""
    TENANT = "tenant"
    """Its tenant has as many requests running as it may."""
    POOL = "pool"
    """Its pool has as many requests running as it may."""
    EVICTION = "eviction"
    """Its model is unloaded for another one."""
    UNHEALTHY = "unhealthy"
    """Runners that are left out for their failures."""
    MEMORY = "memory"
    """No model of its name is loaded, and the one to load waits for memory or its turn."""
    LOAD = "load"
    """Its model loads or wakes."""


@value_class(kw_only=True)
class Waits:
    """The request waits for a slot."""

    key: int
    position: int
    reason: str
    kind: WaitKind = WaitKind.SLOT
    eta_seconds: float | None = None
    """None: no estimate."""
    considered: tuple[Considered, ...] = ()
    """The candidates and what keeps each of them from the request; only with the first status."""


@value_class(kw_only=True)
class Loads:
    """The request waits for a model to load or to wake."""

    key: int
    stage: str
    progress: float | None
    """0 to 1; None: unknown."""
    eta_seconds: float | None = None


@value_class(kw_only=True)
class Rejects:
    """The request is refused; no further decision about it follows."""

    key: int
    reason: Reason
    message: str
    retry_after_seconds: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Machine-readable facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wakes:
    """Wake a sleeping model, once for all waiting requests. The end of the wake must be reported to the scheduler."""

    model: str
    runner: str
    """The runner on which it slept at the time of the decision; empty: unknown."""
    max_wait_seconds: float
    """Time limit of the wake."""
    doubted: bool = False
    """Whether the registry's view shows it ready while its runner reports that it is asleep."""
    priority: Priority = Priority.NORMAL
    """Priority class of the request for which it is woken."""
    why: str = field(default="", compare=False)
    """The reason, as text for explanations; empty: none given."""
    request: int | None = field(default=None, compare=False)
    """Key of the request for which it is woken; None: there is none any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopsWaking:
    """End a wake under way whose runner waits for memory that it does not get. Its end must be reported."""

    model: str


@value_class(kw_only=True)
class Served:
    """What a finished request really used."""

    prompt_tokens: int
    """All tokens of its prompt, cached ones included."""
    cached_tokens: int
    """Tokens of its prompt that came from a cache."""
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeFailure:
    """Why a wake failed."""

    reason: Reason
    """INSUFFICIENT_MEMORY means that the wake is not possible now, and is not a failure if the host is large enough."""
    message: str


RequestDecision = Placed | Waits | Loads | Rejects
Decision = RequestDecision | Wakes | StopsWaking


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt; with a `Placed` after it, it was retried."""

    attempt: int
    reason: Reason
    message: str = ""
    """Its error in words; empty: not known."""
    has_content: bool = False
    """Whether its answer had begun."""


@dataclass(frozen=True, slots=True)
class LoadStart:
    """The start of a load that the request waited for."""

    wakes: Wakes
    at: float
    """Time of the start."""


Noted = Waits | Loads | Placed | Rejects | FailedAttempt | LoadStart
