"""What a failed attempt means: for its request, and for the runner that had it."""

from enum import Enum

from weft.kernel.reasons import Reason


class FailureKind(Enum):
    """What a failed attempt means for the request and the runner."""

    BUSY = "busy"
    """The runner is full with work that this router does not know of (it restarted, or is not the only router)."""
    BOUNCED = "bounced"
    """The runner did not take the request: nothing was executed, the request returns to its queue."""
    BROKE = "broke"
    """The runner or its backend failed: another runner may succeed."""
    LACKS = "lacks"
    """The runner lacks what this request needs: another runner may have it. Does not count against the runner."""
    FINAL = "final"
    """It would fail on any runner, or the caller is gone."""


_BOUNCES = frozenset(
    {
        Reason.BACKEND_NOT_READY,
        Reason.SHUTTING_DOWN,
        # A runner that restarted between the grant and the call knows neither the incarnation nor the key.
        Reason.TICKET_INVALID,
        Reason.TICKET_EXPIRED,
        Reason.MODEL_NOT_FOUND,
        # It was evicted between the grant and the call, and there is no memory to load it again.
        Reason.INSUFFICIENT_MEMORY,
    }
)
_LACKS = frozenset({Reason.TOOL_UNAVAILABLE, Reason.CLOCK_OFF, Reason.MODALITY_UNSUPPORTED})
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
_MAY_FOLLOW_PROMPT = _BREAKS - {
    Reason.CONNECT_FAILED,
    Reason.WORKER_RESTARTED,
    Reason.WORKER_LOST,
    Reason.LOAD_STALLED,
}


def may_be_the_requests(reason: Reason) -> bool:
    """Whether an engine's error is one that the request itself may have caused, on every engine.

    Not all error texts that engines use for a request that they cannot take are known, and an image that is too large
    for one engine's memory is so for that of others.
    """
    return reason in {Reason.BACKEND_ERROR, Reason.OUT_OF_MEMORY}


def may_follow_prompt(reason: Reason) -> bool:
    """Whether a failure that repeats with its prompt on several engines may be caused by the prompt.

    A connection that breaks or an answer that does not come is no proof for a single request, unlike
    `may_be_the_requests`.
    """
    return reason in _MAY_FOLLOW_PROMPT


def quotes_model(reason: Reason) -> bool:
    """Whether the message of an error with this reason quotes what a model wrote: it is for the caller alone."""
    return reason in {Reason.TOOL_CALL_INVALID, Reason.REPEATED_LINE_LOOP}


def classify(reason: Reason) -> FailureKind:
    """Returns what a failure with this reason means.

    A refusal of the request itself is final: replicas would refuse it too.
    """
    if reason is Reason.NO_SLOT_AVAILABLE:
        return FailureKind.BUSY
    if reason in _BOUNCES:
        return FailureKind.BOUNCED
    if reason in _LACKS:
        return FailureKind.LACKS
    return FailureKind.BROKE if reason in _BREAKS else FailureKind.FINAL
