"""Failure reasons: one enum and the table that maps it to gRPC, HTTP and retry behaviour.

The numbers are those of `ErrorReason` in protos/weft/api/common/v1/error_reason.proto, whose comments define each
reason; `tests/unit/kernel/test_reasons.py` compares the two.
"""

from dataclasses import dataclass
from enum import IntEnum


class Reason(IntEnum):
    """Copy of ErrorReason, so that policies need no generated code."""

    UNSPECIFIED = 0
    INVALID_ARGUMENT = 1
    MALFORMED_REQUEST = 2
    REQUEST_TOO_LARGE = 3
    CONTEXT_LENGTH_EXCEEDED = 4
    MODEL_NOT_FOUND = 5
    NOT_FOUND = 6
    METHOD_NOT_ALLOWED = 7
    UNSUPPORTED_OPERATION = 8
    ALREADY_EXISTS = 9
    UNAUTHENTICATED = 10
    PERMISSION_DENIED = 11
    RESOURCE_IN_USE = 12
    TOO_MANY_RESOURCES = 13
    IDEMPOTENCY_CONFLICT = 14
    MODALITY_UNSUPPORTED = 15
    RESOURCE_CHANGED = 16
    QUEUE_FULL = 20
    QUEUE_TIMEOUT = 21
    RATE_LIMIT_EXCEEDED = 22
    NO_SLOT_AVAILABLE = 23
    NO_RUNNER_AVAILABLE = 24
    DEADLINE_EXCEEDED = 25
    SHUTTING_DOWN = 26
    CANCELLED = 27
    DEADLINE_UNREACHABLE = 28
    TICKET_INVALID = 40
    TICKET_EXPIRED = 41
    SESSION_UNKNOWN = 42
    STALE_HEARTBEAT = 43
    WATCH_LAGGED = 44
    LEASE_LOST = 45
    PERMIT_INVALID = 46
    OPERATION_REFUSED = 47
    CLOCK_OFF = 48
    BACKEND_NOT_READY = 60
    CONNECT_FAILED = 61
    HEADERS_TIMEOUT = 62
    SERVER_DIED = 63
    WORKER_RESTARTED = 64
    WORKER_LOST = 65
    STALL_TIMEOUT = 66
    LOAD_STALLED = 67
    OUT_OF_MEMORY = 68
    REPEATED_LINE_LOOP = 69
    BACKEND_REJECTED = 70
    BACKEND_ERROR = 71
    BACKEND_PROTOCOL_ERROR = 72
    WAKE_FAILED = 73
    TOOL_CALL_INVALID = 74
    TOOL_UNAVAILABLE = 75
    TEMPLATE_FAILED = 76
    INSUFFICIENT_MEMORY = 77
    RUNNER_UNREACHABLE = 78
    CONSTRAINT_NOT_MET = 79
    INTERNAL = 90
    SERVICE_UNAVAILABLE = 91
    ROUTER_STANDBY = 92
    REGISTRY_STANDBY = 93
    NO_ROUTER_AVAILABLE = 94
    ROUTER_LOST = 95


@dataclass(frozen=True, slots=True)
class ReasonTraits:
    """The meaning of a reason in each protocol."""

    grpc_code: str
    """Name of the grpc.StatusCode: RESOURCE_EXHAUSTED for busy, UNAVAILABLE for broken, on which proxies eject."""
    http_status: int
    retryable: bool
    """Whether the same call may succeed later."""
    safe_to_retry: bool
    """Whether nothing was generated yet, so that a retry repeats no work."""


def _caller(grpc_code: str, http_status: int) -> ReasonTraits:
    return ReasonTraits(grpc_code, http_status, retryable=False, safe_to_retry=True)


def _busy(http_status: int) -> ReasonTraits:
    return ReasonTraits("RESOURCE_EXHAUSTED", http_status, retryable=True, safe_to_retry=True)


def _not_begun(http_status: int) -> ReasonTraits:
    return ReasonTraits("UNAVAILABLE", http_status, retryable=True, safe_to_retry=True)


def _broken(http_status: int) -> ReasonTraits:
    return ReasonTraits("UNAVAILABLE", http_status, retryable=True, safe_to_retry=False)


TRAITS: dict[Reason, ReasonTraits] = {
    Reason.UNSPECIFIED: ReasonTraits("UNKNOWN", 500, retryable=False, safe_to_retry=False),
    Reason.INVALID_ARGUMENT: _caller("INVALID_ARGUMENT", 400),
    Reason.MALFORMED_REQUEST: _caller("INVALID_ARGUMENT", 400),
    Reason.REQUEST_TOO_LARGE: _caller("INVALID_ARGUMENT", 413),
    Reason.CONTEXT_LENGTH_EXCEEDED: _caller("INVALID_ARGUMENT", 400),
    Reason.MODEL_NOT_FOUND: _caller("NOT_FOUND", 404),
    Reason.NOT_FOUND: _caller("NOT_FOUND", 404),
    Reason.METHOD_NOT_ALLOWED: _caller("UNIMPLEMENTED", 405),
    Reason.UNSUPPORTED_OPERATION: _caller("UNIMPLEMENTED", 501),
    Reason.ALREADY_EXISTS: _caller("ALREADY_EXISTS", 409),
    Reason.UNAUTHENTICATED: _caller("UNAUTHENTICATED", 401),
    Reason.PERMISSION_DENIED: _caller("PERMISSION_DENIED", 403),
    Reason.RESOURCE_IN_USE: _caller("FAILED_PRECONDITION", 409),
    Reason.TOO_MANY_RESOURCES: _busy(429),
    Reason.IDEMPOTENCY_CONFLICT: _caller("ALREADY_EXISTS", 409),
    Reason.MODALITY_UNSUPPORTED: _caller("INVALID_ARGUMENT", 400),
    Reason.RESOURCE_CHANGED: _caller("FAILED_PRECONDITION", 409),
    Reason.QUEUE_FULL: _busy(503),
    Reason.QUEUE_TIMEOUT: _busy(503),
    Reason.RATE_LIMIT_EXCEEDED: _busy(429),
    Reason.NO_SLOT_AVAILABLE: _busy(503),
    Reason.NO_RUNNER_AVAILABLE: _not_begun(503),
    Reason.DEADLINE_EXCEEDED: ReasonTraits("DEADLINE_EXCEEDED", 504, retryable=True, safe_to_retry=False),
    Reason.SHUTTING_DOWN: _not_begun(503),
    Reason.CANCELLED: ReasonTraits("CANCELLED", 499, retryable=False, safe_to_retry=False),
    Reason.DEADLINE_UNREACHABLE: _busy(503),
    # HTTP callers have no tickets and their credentials are valid, so they get 503.
    Reason.TICKET_INVALID: ReasonTraits("UNAUTHENTICATED", 503, retryable=True, safe_to_retry=True),
    Reason.TICKET_EXPIRED: ReasonTraits("UNAUTHENTICATED", 503, retryable=True, safe_to_retry=True),
    Reason.SESSION_UNKNOWN: _caller("NOT_FOUND", 404),
    Reason.STALE_HEARTBEAT: _caller("FAILED_PRECONDITION", 409),
    Reason.WATCH_LAGGED: _busy(503),
    Reason.LEASE_LOST: _caller("FAILED_PRECONDITION", 409),
    Reason.PERMIT_INVALID: _caller("UNAUTHENTICATED", 401),
    Reason.OPERATION_REFUSED: _caller("PERMISSION_DENIED", 403),
    Reason.CLOCK_OFF: _not_begun(503),
    Reason.BACKEND_NOT_READY: _not_begun(503),
    Reason.CONNECT_FAILED: _not_begun(502),
    Reason.HEADERS_TIMEOUT: _broken(504),
    Reason.SERVER_DIED: _broken(502),
    Reason.WORKER_RESTARTED: _broken(502),
    Reason.WORKER_LOST: _broken(502),
    Reason.STALL_TIMEOUT: _broken(504),
    Reason.LOAD_STALLED: _not_begun(503),
    Reason.OUT_OF_MEMORY: ReasonTraits("UNAVAILABLE", 503, retryable=False, safe_to_retry=False),
    Reason.REPEATED_LINE_LOOP: ReasonTraits("ABORTED", 502, retryable=False, safe_to_retry=False),
    Reason.BACKEND_REJECTED: _caller("INVALID_ARGUMENT", 400),
    Reason.BACKEND_ERROR: _broken(502),
    Reason.BACKEND_PROTOCOL_ERROR: _broken(502),
    Reason.WAKE_FAILED: _not_begun(503),
    Reason.TOOL_CALL_INVALID: ReasonTraits("ABORTED", 502, retryable=True, safe_to_retry=False),
    Reason.TOOL_UNAVAILABLE: _not_begun(503),
    Reason.TEMPLATE_FAILED: ReasonTraits("ABORTED", 502, retryable=False, safe_to_retry=True),
    Reason.INSUFFICIENT_MEMORY: _busy(503),
    Reason.RUNNER_UNREACHABLE: _not_begun(503),
    Reason.CONSTRAINT_NOT_MET: ReasonTraits("ABORTED", 502, retryable=False, safe_to_retry=False),
    Reason.INTERNAL: ReasonTraits("INTERNAL", 500, retryable=False, safe_to_retry=False),
    Reason.SERVICE_UNAVAILABLE: _not_begun(503),
    Reason.ROUTER_STANDBY: _not_begun(503),
    Reason.REGISTRY_STANDBY: _not_begun(503),
    Reason.NO_ROUTER_AVAILABLE: _not_begun(503),
    Reason.ROUTER_LOST: _broken(502),
}


REGISTRY_AWAY = frozenset({Reason.SERVICE_UNAVAILABLE, Reason.REGISTRY_STANDBY})
"""Reasons of a call that no registry has begun: unreachable, or standby."""
NO_REGISTRY = REGISTRY_AWAY | {Reason.SHUTTING_DOWN, Reason.DEADLINE_EXCEEDED}
"""Reasons of a call that no registry serves now; an owner without its database may not answer at all."""


_BY_NUMBER = {reason.value: reason for reason in Reason}


def reason_of(number: int) -> Reason:
    """Returns the reason for a received number; INTERNAL if it is unknown."""
    return _BY_NUMBER.get(number, Reason.INTERNAL)


def traits(reason: Reason) -> ReasonTraits:
    """Returns the traits of a reason."""
    return TRAITS[reason]


MODEL_NOT_LISTED = "the server has no model "
"""Start of the detail of an attached model that its server does not list."""
PULLING = "pulling"
WAITING_FOR_PULL = "waiting for another pull"
"""Start of an instance's detail while its model's files are pulled."""
