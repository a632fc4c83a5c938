"""What a scheduler decides: about a request, or that something be woken."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from router_svc.policy.endpoints.candidates import Candidate
from router_svc.policy.endpoints.choice import Choice, Considered
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """It runs here."""

    key: int
    candidate: Candidate
    attempt: int
    choice: Choice | None = None
    """Among whom it was chosen; None: nobody kept that."""
    keep_alive_seconds: float | None = None
    """What its route says; None: nothing."""
    deadline_at: float | None = None
    """When its answer must be complete, by itself or by its route; None: at no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """It waits for a slot."""

    key: int
    position: int
    reason: str
    eta_seconds: float | None = None
    """None: no estimate."""
    considered: tuple[Considered, ...] = ()
    """Who could serve it, and what keeps each of them from it; only with the first such word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """It waits for a model to load or to wake."""

    key: int
    stage: str
    progress: float | None
    """0 to 1; None: nobody knows."""
    eta_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejects:
    """It is refused; nothing more will be decided about it."""

    key: int
    reason: Reason
    message: str
    retry_after_seconds: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Facts for machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wakes:
    """A sleeping model is to be woken, once for all who wait for it. Its end is told to the scheduler."""

    model: str
    runner: str
    """Where it slept when that was decided; empty: no runner is known."""
    max_wait_seconds: float
    """When it must have ended, one way or the other."""
    doubted: bool = False
    """The fleet shows it ready, and its runner says that it is not."""
    priority: Priority = Priority.NORMAL
    """Of the request for which it is woken."""
    why: str = field(default="", compare=False)
    """What decided it, in words for people; empty: nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopsWaking:
    """A wake under way waits inside of the runner for memory that does not come. It is to end, and its end is told."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a request that is over really took."""

    prompt_tokens: int
    """All of its prompt, those from a cache too."""
    cached_tokens: int
    """Those of its prompt that came from a cache."""
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeFailure:
    """Why a wake failed."""

    reason: Reason
    """INSUFFICIENT_MEMORY means that it cannot be now, and counts against nobody, if the host is large enough."""
    message: str


RequestDecision = Placed | Waits | Loads | Rejects
Decision = RequestDecision | Wakes | StopsWaking
