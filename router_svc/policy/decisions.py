"""What a scheduler decides about a request."""

from dataclasses import dataclass

from router_svc.policy.candidates import Candidate
from weft.kernel.reasons import Reason


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
    """It waits for a model to load."""

    key: int
    stage: str
    progress: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejects:
    """It is refused; nothing more will be decided about it."""

    key: int
    reason: Reason
    message: str
    retry_after_seconds: float | None = None


Decision = Placed | Waits | Loads | Rejects
