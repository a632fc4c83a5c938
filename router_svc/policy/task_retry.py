"""What becomes of a task whose offer was refused, or whose attempt came to nothing. Pure."""

from dataclasses import dataclass

from weft.kernel.reasons import Reason

FIRST_OFFER_PAUSE_SECONDS = 1.0
"""Pause after an offer that was refused; doubles with each that follows ..."""
MAX_OFFER_PAUSE_SECONDS = 30.0
"""... up to this. News of the mesh end it early."""


MAX_FRUITLESS_ATTEMPTS = 100
"""So often a task may be begun in vain through no fault of its own; after that such attempts count like all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptHistory:
    """What became of a task's attempts so far."""

    attempt: int
    """Which one has come to nothing now, counted from 1."""
    failures: int
    """How many before it count."""
    max_attempts: int
    """How many may count."""
    was_taken: bool = True
    """Whether a runner has said anything at all in this one."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """It waits again."""

    pause_seconds: float
    counts: bool = True
    """Whether it is one of the attempts that the task has."""


@dataclass(frozen=True, slots=True)
class OfferAgain:
    """It still waits: a refusal before the claim is no attempt."""

    pause_seconds: float
    whole_lane: bool
    """Whether everybody of its lane would be refused, too."""


@dataclass(frozen=True, slots=True)
class GivesUp:
    """It fails."""

    reason: Reason
    message: str


_HOPELESS = frozenset(
    {
        Reason.INVALID_ARGUMENT,
        Reason.MALFORMED_REQUEST,
        Reason.REQUEST_TOO_LARGE,
        Reason.CONTEXT_LENGTH_EXCEEDED,
        Reason.METHOD_NOT_ALLOWED,
        Reason.ALREADY_EXISTS,
        Reason.UNAUTHENTICATED,
        Reason.PERMISSION_DENIED,
        Reason.IDEMPOTENCY_CONFLICT,
        Reason.OPERATION_REFUSED,
        Reason.BACKEND_REJECTED,
    }
)
"""The request itself is refused: neither waiting nor another runner cures that."""
_FINAL = _HOPELESS | {
    Reason.NOT_FOUND,
    Reason.UNSUPPORTED_OPERATION,
    Reason.RESOURCE_IN_USE,
    # The same work would do the same again, to one runner after the other.
    Reason.OUT_OF_MEMORY,
    Reason.REPEATED_LINE_LOOP,
    Reason.TOOL_CALL_INVALID,
    Reason.TEMPLATE_FAILED,
}
"""After these an attempt is not made again."""
_NOT_ITS_FAULT = frozenset(
    {
        Reason.WORKER_RESTARTED,
        Reason.NO_SLOT_AVAILABLE,
        Reason.BACKEND_NOT_READY,
        Reason.SHUTTING_DOWN,
        Reason.CLOCK_OFF,
        Reason.TICKET_EXPIRED,
        Reason.TICKET_INVALID,
    }
)
"""With these a runner says that it has not taken a request, or that somebody has stopped its engine on purpose."""
_LOST = frozenset({Reason.WORKER_LOST, Reason.CONNECT_FAILED})
"""With these nobody knows, unless the runner has spoken before."""
_OF_THE_TASK = frozenset(
    {
        Reason.UNSUPPORTED_OPERATION,
        Reason.NO_RUNNER_AVAILABLE,
        Reason.TOOL_UNAVAILABLE,
        Reason.INSUFFICIENT_MEMORY,
        Reason.DEADLINE_UNREACHABLE,
        Reason.INTERNAL,
    }
)
"""Refusals that may hit one task of a lane and not the next: they have skills, tools and permits of their own."""


def after_failed_attempt(
    reason: Reason, message: str, history: AttemptHistory, *, first_pause_seconds: float, max_seconds: float
) -> TryAgain | GivesUp:
    """What follows an attempt that came to nothing.

    A runner that is full, stopped on purpose, or dead and not yet known to be, costs no attempt: until the mesh has
    noticed, a task may be granted to it again and again.
    """
    if reason in _FINAL:
        return GivesUp(reason, message)
    is_free = reason in _NOT_ITS_FAULT or (reason in _LOST and not history.was_taken)
    if is_free and history.attempt <= MAX_FRUITLESS_ATTEMPTS:
        fruitless = max(1, history.attempt - history.failures)
        return TryAgain(doubled(first_pause_seconds, fruitless, max_seconds), counts=False)
    failures = history.failures + 1
    if failures >= history.max_attempts:
        noun = "attempt" if failures == 1 else "attempts"
        return GivesUp(reason, f"after {failures} {noun}: {message}")
    return TryAgain(doubled(first_pause_seconds, failures, max_seconds))


def after_refused_offer(
    reason: Reason, message: str, *, refusals: int, retry_after_seconds: float | None = None
) -> OfferAgain | GivesUp:
    """What follows a refusal before the claim; `refusals` are those without a claim in between, this one included."""
    if reason in _HOPELESS:
        return GivesUp(reason, message)
    pause = doubled(FIRST_OFFER_PAUSE_SECONDS, refusals, MAX_OFFER_PAUSE_SECONDS)
    asked = min(retry_after_seconds or 0.0, MAX_OFFER_PAUSE_SECONDS)
    return OfferAgain(max(pause, asked), whole_lane=reason not in _OF_THE_TASK)


def doubled(first_seconds: float, times: int, most_seconds: float) -> float:
    """The pause after so many failures in a row, 1 or more."""
    # Beyond this a float overflows, long after every bound.
    return min(first_seconds * 2.0 ** min(max(times - 1, 0), 64), most_seconds)
