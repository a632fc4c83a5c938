"""Errors as HTTP: one envelope for every answer that is not 2xx, and the headers that control clients' retries.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}, "request_id": ...}

Clients of Anthropic's API get its format; `param` is present only if a field is wrong:

    {"type": "error", "error": {"type": ..., "message": ..., "code": ..., "param": ...}, "request_id": ...}

Clients of Ollama's API get the message as text; `param` as above:

    {"error": "...", "code": ..., "param": ..., "request_id": ...}

Refusals for lack of capacity also contain figures; see FIGURES.

    WeftError
    ├── EdgeError        has a more specific HTTP status than its reason (408, 431), or a required header (405)
    ├── DetailedError    has additional figures, or another code
    └── ClientGoneError  the caller disconnected; no answer is sent
"""

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType

from weft.api.common.v1.rate_limit_pb2 import RateLimitStatus, RateLimitWindow
from weft.dispatch.rate_windows import status_in
from weft.kernel.channels.rpc import CONNECTION_LOST
from weft.kernel.errors.error_tree import (
    COMPLETION_TOKENS,
    LACKED_ROUTER,
    PROMPT_ESTIMATED,
    PROMPT_TOKENS,
    WeftError,
    with_field,
)
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json
from weft.kernel.time.cancellation import task_is_cancelled
from weft.kernel.values.unknown_names import close_names_of

_MESSAGES = "/v1/messages"
_OLLAMA, _RESOURCES = "/api", "/api/v1"
_MODELS = "/v1/models"
_VERSION = b"anthropic-version"


class Dialect(Enum):
    """A family of clients, with its error format and its header for the request id."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


def dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Returns the dialect of a path; if both APIs have the path, the header `anthropic-version` decides."""
    if is_under(path, _MESSAGES) or (is_under(path, _MODELS) and _VERSION in headers):
        return Dialect.ANTHROPIC
    if is_under(path, _OLLAMA) and not is_under(path, _RESOURCES):
        return Dialect.OLLAMA
    return Dialect.OPENAI


def is_under(path: str, root: str) -> bool:
    """Whether a path is `root` or below it."""
    return path.startswith(root) and path[len(root) : len(root) + 1] in {"", "/"}


MIN_RETRY_AFTER_SECONDS = 1
# openai-js ignores a longer Retry-After; openai-py does not retry above 120 s.
MAX_RETRY_AFTER_SECONDS = 60

_BUSY_STATUSES = frozenset({429, 503})
# Statuses that the OpenAI clients retry by default.
_RETRIED_BY_CLIENTS = frozenset({408, 409, 429})
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES: Mapping[Reason, str] = MappingProxyType({Reason.UNAUTHENTICATED: "invalid_api_key"})
"""OpenAI's codes, which clients check, for reasons with another name.

`model_not_found`, `context_length_exceeded` and `rate_limit_exceeded` are also the names of their reasons.
`insufficient_quota` is not used: it stops a client permanently, but every limit here is temporary.
"""
# Anthropic's error types; its status 529 ("overloaded") is not used here.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# RFC 9110: a 401 names an authentication scheme.
_CHALLENGES = {401: ((b"www-authenticate", b"Bearer"),)}
# Their messages may contain files, addresses or code, and are only logged.
_NOT_FOR_CALLERS = frozenset({Reason.INTERNAL, Reason.UNSPECIFIED})
_INTERNAL_MESSAGE = "an internal error; the gateway's log has the details under this request id"

FIGURES: Mapping[str, str] = {
    "queueDepth": "queueDepth",
    "maxDepth": "maxDepth",
    "avgWaitMs": "avgWaitMs",
    "limit": "limit",
    "remaining": "remaining",
    "resetAt": "resetAt",
    "estimate_seconds": "estimateSeconds",
}
"""Figures in the envelope of a refusal, by name in the error's metadata: whole numbers, except for seconds."""
_WITH_FIGURES = frozenset(
    {Reason.QUEUE_FULL, Reason.QUEUE_TIMEOUT, Reason.RATE_LIMIT_EXCEEDED, Reason.DEADLINE_UNREACHABLE}
)

_LIMITS = frozenset({Reason.RATE_LIMIT_EXCEEDED, Reason.NO_SLOT_AVAILABLE, Reason.BACKEND_NOT_READY})

_TOO_LONG = "prompt is too long: "
"""Anthropic's prefix, by which clients detect that they have to shorten the conversation."""


class EdgeError(WeftError):
    """A refusal with a more specific HTTP status than its reason, or with required headers."""

    def __init__(
        self, http_status: int, reason: Reason, message: str, *, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(reason, message)
        self.http_status = http_status
        self.headers = headers


class DetailedError(WeftError):
    """A refusal with machine-readable details; `code`, if set, replaces the reason's name."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        details: Mapping[str, object] | None = None,
        code: str = "",
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(reason, message, retry_after_seconds=retry_after_seconds)
        self.details = dict(details or {})
        self.code = code


class ClientGoneError(WeftError):
    """The caller closed the connection."""

    def __init__(self, message: str = "the client closed the connection") -> None:
        super().__init__(Reason.CANCELLED, message)


def internal_error() -> WeftError:
    """Returns the public error for a fault in weft itself."""
    return WeftError(Reason.INTERNAL, _INTERNAL_MESSAGE)


def shutting_down() -> WeftError:
    """Returns the error of a request that the gateway's shutdown ends."""
    return WeftError(Reason.SHUTTING_DOWN, "the gateway is shutting down", retry_after_seconds=2)


def cancellation() -> WeftError:
    """Returns the error of a request that ends with CancelledError.

    Only the end of the grace period at shutdown cancels its task, and this is its last step. gRPC raises the same for a
    call on a closed channel, such as that to a lost router.
    """
    if task_is_cancelled():
        return shutting_down()
    return WeftError(Reason.SERVICE_UNAVAILABLE, CONNECTION_LOST, retry_after_seconds=1)


def http_status(error: WeftError) -> int:
    """Returns the HTTP status of an error."""
    return error.http_status if isinstance(error, EdgeError) else error.traits.http_status


def figures_of(error: WeftError) -> dict[str, float]:
    """Returns the figures of a refusal for lack of capacity, without values that are not numbers."""
    if error.reason not in _WITH_FIGURES:
        return {}
    found: dict[str, float] = {}
    for name, figure in FIGURES.items():
        number = _number(error.metadata.get(name, ""))
        if number is not None:
            found[figure] = number if figure.endswith("Seconds") else int(number)
    return found


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


_CALLERS_NAMES = MappingProxyType({"choice_count": "n"})
"""HTTP names of message fields that runners refuse by another name."""


def envelope(error: WeftError, request_id: str = "", dialect: Dialect = Dialect.OPENAI) -> bytes:
    """Returns the body of an error as JSON; `request_id` may be empty."""
    known = {"request_id": request_id} if request_id else {}
    if (name := _CALLERS_NAMES.get(error.metadata.get("field", ""))) is not None:
        error = with_field(error, name)
    if dialect is Dialect.ANTHROPIC:
        return encode_json({"type": "error", "error": _anthropic_fields(error)} | known)
    if dialect is Dialect.OLLAMA:
        field = error.metadata.get("field")
        param = {"param": field} if field else {}
        return encode_json({"error": public_message(error), **_machine_fields(error), **param} | known)
    status = http_status(error)
    default_type = "server_error" if status >= 500 else "invalid_request_error"
    fields: dict[str, object] = {
        "message": public_message(error),
        "type": _TYPES.get(status, default_type),
        "param": error.metadata.get("field"),
        **_machine_fields(error),
    }
    return encode_json({"error": fields} | known)


def _anthropic_fields(error: WeftError) -> dict[str, object]:
    status = http_status(error)
    default_type = "api_error" if status >= 500 else "invalid_request_error"
    field = error.metadata.get("field")
    # With a field, it is the limit of the answer that does not fit.
    is_too_long = error.reason is Reason.CONTEXT_LENGTH_EXCEEDED and not field
    return {
        "type": _ANTHROPIC_TYPES.get(status, default_type),
        "message": (_TOO_LONG if is_too_long else "") + public_message(error),
        **({"param": field} if field else {}),
        **_machine_fields(error),
    }


def public_message(error: WeftError) -> str:
    """Returns the message for the caller; internal errors get a generic one."""
    return _INTERNAL_MESSAGE if error.reason in _NOT_FOR_CALLERS else error.message


def _machine_fields(error: WeftError) -> dict[str, object]:
    """Returns the error's code, figures, usage and details, and whether no router answered."""
    fields: dict[str, object] = {"code": code_of(error), **figures_of(error)}
    close = close_names_of(error)
    if close:
        fields["close_names"] = list(close)
    used = {name: _number(error.metadata.get(name, "")) for name in (PROMPT_TOKENS, COMPLETION_TOKENS)}
    if all(count is not None for count in used.values()):
        estimated = {PROMPT_ESTIMATED: True} if PROMPT_ESTIMATED in error.metadata else {}
        fields["usage"] = {name: int(count) for name, count in used.items() if count is not None} | estimated
    if LACKED_ROUTER in error.metadata:
        fields[LACKED_ROUTER] = True
    if isinstance(error, DetailedError):
        fields |= error.details
    return fields


def code_of(error: WeftError) -> str:
    """Returns an error's machine-readable code: OpenAI's if there is one, otherwise the reason's name."""
    own = error.code if isinstance(error, DetailedError) else ""
    return own or _CODES.get(error.reason) or error.reason.name.lower()


def retry_headers(error: WeftError) -> list[tuple[bytes, bytes]]:
    """Returns `retry-after` if waiting helps or the status requires it, and `x-should-retry` for clients."""
    status = http_status(error)
    retryable = error.traits.retryable and not _is_long_limit(error)
    headers: list[tuple[bytes, bytes]] = []
    if status in _BUSY_STATUSES:
        headers.append((b"retry-after", str(retry_after_seconds(error)).encode()))
        headers.append((b"x-should-retry", b"true" if retryable else b"false"))
    elif not retryable and (status >= 500 or status in _RETRIED_BY_CLIENTS):
        headers.append((b"x-should-retry", b"false"))
    return headers


def _is_long_limit(error: WeftError) -> bool:
    """Whether a limit, also of a model's server, lasts longer than clients wait: they must not retry automatically."""
    return error.reason in _LIMITS and (error.retry_after_seconds or 0.0) > MAX_RETRY_AFTER_SECONDS


def retry_after_seconds(error: WeftError) -> int:
    """Returns whole seconds, 1 to 60; more for a limit that lasts longer, at which no client should retry."""
    if _is_long_limit(error):
        return math.ceil(error.retry_after_seconds or 0.0)
    wanted = min(MAX_RETRY_AFTER_SECONDS, error.retry_after_seconds or 0.0)
    return max(MIN_RETRY_AFTER_SECONDS, math.ceil(wanted))


JSON = b"application/json"
OLLAMA_JSON = b"application/json; charset=utf-8"
"""Content type of Ollama's answers except streams, as Ollama sends it."""


def error_headers(error: WeftError, body: bytes, dialect: Dialect = Dialect.OPENAI) -> list[tuple[bytes, bytes]]:
    """Returns the headers of an error's answer, except the request id."""
    return [
        (b"content-type", OLLAMA_JSON if dialect is Dialect.OLLAMA else JSON),
        (b"content-length", str(len(body)).encode()),
        *_CHALLENGES.get(http_status(error), ()),
        *retry_headers(error),
        *rate_limit_headers(status_in(error.metadata) if error.reason is Reason.RATE_LIMIT_EXCEEDED else None),
        *(error.headers if isinstance(error, EdgeError) else ()),
    ]


RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{part}-{unit}" for part in ("limit", "remaining", "reset") for unit in ("requests", "tokens")
)


def rate_limit_headers(status: RateLimitStatus | None) -> list[tuple[bytes, bytes]]:
    """Returns the rate limit headers; empty: no limit applies."""
    return [] if status is None else [header for unit, window in _windows(status) for header in _headers(unit, window)]


def _windows(status: RateLimitStatus) -> Iterator[tuple[str, RateLimitWindow]]:
    if status.HasField("requests"):
        yield "requests", status.requests
    if status.HasField("tokens"):
        yield "tokens", status.tokens


def _headers(unit: str, window: RateLimitWindow) -> Iterator[tuple[bytes, bytes]]:
    values = (str(window.limit), str(window.remaining), reset_words(window.reset.ToNanoseconds() / 1e9))
    for part, value in zip(("limit", "remaining", "reset"), values, strict=True):
        yield f"x-ratelimit-{part}-{unit}".encode(), value.encode()


def reset_words(seconds: float) -> str:
    """Returns a duration in OpenAI's format: "0s", "120ms", "8.64s", "6m0s", "26h3m0s"."""
    millis = max(0, round(seconds * 1e3))
    if 0 < millis < 1_000:
        return f"{millis}ms"
    whole, rest = divmod(millis, 1_000)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    last = f"{second + rest / 1e3:g}s" if rest and not minutes else f"{second}s"
    return f"{hours}h{minute}m{last}" if hours else f"{minutes}m{last}" if minutes else last
