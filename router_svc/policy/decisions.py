"""What a scheduler decides: about a request, or that something be woken."""

from dataclasses import dataclass

from router_svc.policy.candidates import Candidate
from weft.kernel.reasons import Reason
from weft.kernel.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """It runs here."""

    key: int
    candidate: Candidate
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """It waits for a slot."""

    key: int
    position: int
    reason: str


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


RequestDecision = Placed | Waits | Loads | Rejects
Decision = RequestDecision | Wakes
