"""Whether an attempt that failed before its first content may be tried elsewhere, and what its runner is worth."""

from enum import Enum

from weft.kernel.reasons import Reason


class FailureKind(Enum):
    """What a failed attempt says about the request and the runner."""

    BUSY = "busy"
    """The runner is full with work this router does not know of (it restarted, or is not the only one)."""
    BOUNCED = "bounced"
    """The runner did not take it: nothing was tried, the request goes back into the queue."""
    BROKE = "broke"
    """The runner or its backend failed: another runner may succeed."""
    LACKS = "lacks"
    """The runner has not what this request needs: another runner may, and this one is none the worse for it."""
    FINAL = "final"
    """It would fail anywhere, or the caller is gone."""


_BOUNCES = frozenset(
    {
        Reason.BACKEND_NOT_READY,
        Reason.SHUTTING_DOWN,
        # A runner that restarted between the grant and the call knows neither the incarnation nor the key.
        Reason.TICKET_INVALID,
        Reason.TICKET_EXPIRED,
        Reason.MODEL_NOT_FOUND,
        # It was evicted between the grant and the call, and there is no room to load it again.
        Reason.INSUFFICIENT_MEMORY,
    }
)
_LACKS = frozenset({Reason.TOOL_UNAVAILABLE, Reason.CLOCK_OFF})
_BREAKS = frozenset(
    {
        Reason.CONNECT_FAILED,
        Reason.HEADERS_TIMEOUT,
        Reason.SERVER_DIED,
        Reason.WORKER_RESTARTED,
        Reason.WORKER_LOST,
        Reason.STALL_TIMEOUT,
        Reason.LOAD_STALLED,
        Reason.OUT_OF_MEMORY,
        Reason.BACKEND_ERROR,
        Reason.BACKEND_PROTOCOL_ERROR,
    }
)


def may_be_the_requests(reason: Reason) -> bool:
    """Whether the engine lives and answered with an error of its own, which what was asked may have caused.

    Engines have many words for a request that they cannot take, and not all of them are known.
    """
    return reason is Reason.BACKEND_ERROR


def classify(reason: Reason) -> FailureKind:
    """What a failure with this reason means. A refusal of the request itself is final: siblings would refuse it too."""
    if reason is Reason.NO_SLOT_AVAILABLE:
        return FailureKind.BUSY
    if reason in _BOUNCES:
        return FailureKind.BOUNCED
    if reason in _LACKS:
        return FailureKind.LACKS
    return FailureKind.BROKE if reason in _BREAKS else FailureKind.FINAL
