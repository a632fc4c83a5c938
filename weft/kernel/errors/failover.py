"""Failover of a request: whether a failed attempt is retried elsewhere, and whether it counts against the runner."""

from enum import Enum

from weft.kernel.errors.reasons import Reason


class FailureKind(Enum):
    """What a failed attempt means for the request and the runner."""

    BUSY = "busy"
    """The runner is full with work unknown to this router (which restarted, or is not the only one), or its engine's
    server limits requests."""
    BOUNCED = "bounced"
    """The runner did not accept the request. Nothing was executed; the request returns to its queue."""
    UNREACHED = "unreached"
    """The runner could not be connected to, so nothing was sent. The request returns to its queue; the runner gets no
    requests until it can be connected to, or returns as a new incarnation."""
    BROKE = "broke"
    """The runner or its backend failed: another runner may succeed."""
    LACKS = "lacks"
    """The runner lacks what the request needs; another may have it. Does not count against the runner."""
    FINAL = "final"
    """The request would fail on any runner, or the caller is gone."""


_BOUNCES = frozenset(
    {
        Reason.BACKEND_NOT_READY,
        Reason.SHUTTING_DOWN,
        # A runner that restarted between the grant and the call knows neither the incarnation nor the key.
        Reason.TICKET_INVALID,
        Reason.TICKET_EXPIRED,
        Reason.MODEL_NOT_FOUND,
        # The model was evicted between the grant and the call, and there is no memory to load it again.
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
    """Whether the request itself may have caused an engine's error, and would on every engine.

    weft does not know all error texts that engines use for requests they cannot process, and an image that is too large
    for the memory of one engine is too large for others.
    """
    return reason in {Reason.BACKEND_ERROR, Reason.OUT_OF_MEMORY}


def may_follow_prompt(reason: Reason) -> bool:
    """Whether the prompt may be the cause of a failure that repeats with it on several engines.

    A broken connection or a missing answer proves nothing for a single request, unlike `may_be_the_requests`.
    """
    return reason in _MAY_FOLLOW_PROMPT


def quotes_model(reason: Reason) -> bool:
    """Whether the error message quotes model output, so that only the caller may see it."""
    return reason in {Reason.TOOL_CALL_INVALID, Reason.REPEATED_LINE_LOOP, Reason.CONSTRAINT_NOT_MET}


def classify(reason: Reason) -> FailureKind:
    """Returns the kind of a failure. A refusal of the request itself is final: replicas would refuse it too."""
    if reason in {Reason.NO_SLOT_AVAILABLE, Reason.RATE_LIMIT_EXCEEDED}:
        return FailureKind.BUSY
    if reason is Reason.RUNNER_UNREACHABLE:
        return FailureKind.UNREACHED
    if reason in _BOUNCES:
        return FailureKind.BOUNCED
    if reason in _LACKS:
        return FailureKind.LACKS
    return FailureKind.BROKE if reason in _BREAKS else FailureKind.FINAL
