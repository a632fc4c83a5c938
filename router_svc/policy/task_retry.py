"""Whether and when a task is retried after a refused offer or a failed attempt. Pure."""

from dataclasses import dataclass

from weft.kernel.errors.error_tree import LASTING, WeftError
from weft.kernel.errors.reasons import Reason

FIRST_OFFER_PAUSE_SECONDS = 1.0
"""Pause after a refused offer; doubles with each further refusal ..."""
MAX_OFFER_PAUSE_SECONDS = 30.0
"""... up to this. A change of the mesh ends it early."""
MAX_ASKED_PAUSE_SECONDS = 3_600.0
"""Maximum pause that a provider asks for (Retry-After)."""
ASKS_FOR_PAUSE = frozenset({Reason.RATE_LIMIT_EXCEEDED, Reason.BACKEND_NOT_READY})
"""Reasons whose pause may be longer than `max_retry_delay_seconds`."""
MAX_FRUITLESS_ATTEMPTS = 100
"""Maximum free attempts of a task that fail through no fault of it; further ones count like all others."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """The task waits for another attempt."""

    pause_seconds: float
    counts: bool = True


@dataclass(frozen=True, slots=True)
class OfferAgain:
    """The task keeps waiting: a refusal before the claim is no attempt."""

    pause_seconds: float
    whole_lane: bool
    """Whether all tasks of its lane would be refused too."""


@dataclass(frozen=True, slots=True)
class GivesUp:
    """The task fails."""

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
"""The request itself is refused, so neither waiting nor another runner helps."""
_FINAL = _HOPELESS | {
    Reason.NOT_FOUND,
    Reason.UNSUPPORTED_OPERATION,
    Reason.MODALITY_UNSUPPORTED,
    Reason.RESOURCE_IN_USE,
    # Another runner would fail in the same way.
    Reason.OUT_OF_MEMORY,
    Reason.REPEATED_LINE_LOOP,
    Reason.TOOL_CALL_INVALID,
    Reason.TEMPLATE_FAILED,
    Reason.CONSTRAINT_NOT_MET,
}
"""Reasons after which an attempt is not retried."""
_NOT_ITS_FAULT = frozenset(
    {
        Reason.WORKER_RESTARTED,
        Reason.NO_SLOT_AVAILABLE,
        Reason.RATE_LIMIT_EXCEEDED,
        Reason.RUNNER_UNREACHABLE,
        Reason.BACKEND_NOT_READY,
        Reason.SHUTTING_DOWN,
        Reason.CLOCK_OFF,
        Reason.TICKET_EXPIRED,
        Reason.TICKET_INVALID,
    }
)
"""Reasons for which a runner has not accepted a request, or its engine was stopped on purpose."""
_LOST = frozenset({Reason.WORKER_LOST, Reason.CONNECT_FAILED})
"""Reasons that leave open whether the request was accepted, unless the runner has reported before."""
_OF_THE_TASK = frozenset(
    {
        Reason.UNSUPPORTED_OPERATION,
        Reason.MODALITY_UNSUPPORTED,
        Reason.NO_RUNNER_AVAILABLE,
        Reason.TOOL_UNAVAILABLE,
        Reason.INSUFFICIENT_MEMORY,
        Reason.DEADLINE_UNREACHABLE,
        Reason.INTERNAL,
    }
)
"""Refusals that may concern a task but not the next one in its lane, as tasks differ in skills, tools and permits."""


def after_failed_attempt(
    error: WeftError,
    attempt: int,
    failures: int,
    max_attempts: int,
    *,
    was_taken: bool,
    first_pause_seconds: float,
    max_seconds: float,
) -> TryAgain | GivesUp:
    """Return what follows a failed attempt; `failures`: how many earlier ones count, of at most `max_attempts`.

    `was_taken`: whether a runner has reported anything in this attempt.

    A runner that is full, stopped on purpose, or dead but still listed costs no attempt: a task may be granted to it
    repeatedly until the mesh has noticed.
    """
    reason, message = error.reason, error.log_message
    if is_lasting(error):
        return GivesUp(reason, message)
    is_free = reason in _NOT_ITS_FAULT or (reason in _LOST and not was_taken)
    longest = MAX_ASKED_PAUSE_SECONDS if reason in ASKS_FOR_PAUSE else max_seconds
    asked = min(error.retry_after_seconds or 0.0, longest)
    if is_free and attempt <= MAX_FRUITLESS_ATTEMPTS:
        fruitless = max(1, attempt - failures)
        return TryAgain(max(doubled(first_pause_seconds, fruitless, max_seconds), asked), counts=False)
    failures += 1
    if failures >= max_attempts:
        noun = "attempt" if failures == 1 else "attempts"
        return GivesUp(reason, f"after {failures} {noun}: {message}")
    return TryAgain(max(doubled(first_pause_seconds, failures, max_seconds), asked))


def is_lasting(error: WeftError) -> bool:
    """Return whether another attempt would fail in the same way.

    The reason decides, and for an engine's failure what its runner says about it: an HTML page in place of JSON, a
    refused key and a wrong URL repeat, while a closed stream may not.
    """
    return error.reason in _FINAL or error.metadata.get(LASTING) == "true"


def after_refused_offer(error: WeftError, refusals: int) -> OfferAgain | GivesUp:
    """Return what follows a refusal before the claim; `refusals`: how many since the last claim, this one included."""
    if error.reason in _HOPELESS:
        return GivesUp(error.reason, error.log_message)
    pause = doubled(FIRST_OFFER_PAUSE_SECONDS, refusals, MAX_OFFER_PAUSE_SECONDS)
    requested = min(error.retry_after_seconds or 0.0, MAX_OFFER_PAUSE_SECONDS)
    return OfferAgain(max(pause, requested), whole_lane=error.reason not in _OF_THE_TASK)


def doubled(first_seconds: float, times: int, most_seconds: float) -> float:
    """Return the pause after this many consecutive failures, 1 or more."""
    # A larger exponent would overflow a float, far beyond any bound.
    return min(first_seconds * 2.0 ** min(max(times - 1, 0), 64), most_seconds)
