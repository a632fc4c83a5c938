"""What Envoy answers by itself, as the errors of the gateway: the same envelope, code and headers for each client."""

from collections.abc import Sequence
from types import MappingProxyType

from gateway.errors import OLLAMA_JSON, Dialect, envelope, http_status, retry_after_seconds
from weft.kernel.errors import WeftError
from weft.kernel.lane_names import DESTINATION_NAMESPACE, PLACED
from weft.kernel.reasons import Reason
from weft_app.edge.fragments import Document

_PATHS = MappingProxyType(
    {
        Dialect.ANTHROPIC: r"/v1/messages([/?].*)?",
        Dialect.OLLAMA: r"/api(/([^v?].*|v[^1?].*|v1[^/?].*)?)?(\?.*)?",
        Dialect.OPENAI: ".*",
    }
)
"""The paths of each family of clients, as `gateway.errors.dialect_of` has them, the special ones first."""
RATE_LIMITED = ("RL",)
"""Envoy's flag of a request that its own limit of requests refused."""
LATE = ("UT",)
"""Envoy's flag of a request whose answer did not come within the time that the picker gave it."""
UNREACHABLE = ("UF", "UH", "UO")
"""Envoy's flags of a request that was not sent: connection failed, no host, overflow."""
CUT = ("UC", "UR", "URX", "LR", "UPE")
"""Envoy's flags of a request that was sent, and whose connection ended before an answer."""
NO_PICKER = 510
"""The status that Envoy gives a request whose picker does not answer; no other answer has it. Its caller gets 503."""
NO_PICKER_NAME = "NotExtended"
"""The same by Envoy's name."""
BUSY_SECONDS = 1.0


def local_replies(*, has_picker: bool) -> Document:
    """Returns how the answers of Envoy itself look. What the picker answers passes as it is."""
    limited = WeftError(
        Reason.RATE_LIMIT_EXCEEDED,
        "more requests than the edge of this mesh takes (edge.max_requests_per_second)",
        retry_after_seconds=BUSY_SECONDS,
    )
    unreachable = WeftError(
        Reason.SERVICE_UNAVAILABLE,
        "the mesh behind this edge cannot be reached",
        retry_after_seconds=BUSY_SECONDS,
    )
    cut = WeftError(
        Reason.SERVICE_UNAVAILABLE,
        "the mesh behind this edge ended the connection before it answered; it may have carried the request out",
        retry_after_seconds=BUSY_SECONDS,
    )
    late = WeftError(Reason.DEADLINE_EXCEEDED, "the deadline of the request has passed before it was answered")
    unplaced = WeftError(
        Reason.SERVICE_UNAVAILABLE,
        "the endpoint picker of this mesh does not answer; the request was not carried out",
        retry_after_seconds=BUSY_SECONDS,
    )
    errors = [
        (late, _by_flags(LATE), "false"),
        (limited, _by_flags(RATE_LIMITED), "true"),
        *(_of_runners() if has_picker else ()),
        (unreachable, _by_flags(UNREACHABLE), "true"),
        (cut, _by_flags(CUT), ""),
    ]
    if has_picker:
        errors.append((unplaced, _by_status(NO_PICKER), "true"))
    return {
        "mappers": [
            _mapper(error, which, dialect, should_retry) for error, which, should_retry in errors for dialect in _PATHS
        ]
    }


def _of_runners() -> Sequence[tuple[WeftError, Document, str]]:
    """Returns the errors of requests that the picker has sent to a runner or an engine: the mesh itself is there."""
    unreachable = WeftError(
        Reason.SERVICE_UNAVAILABLE,
        "the runner or engine that was to answer cannot be reached; the request was not carried out",
        retry_after_seconds=BUSY_SECONDS,
    )
    cut = WeftError(
        Reason.SERVICE_UNAVAILABLE,
        "the runner or engine ended the connection before it answered; it may have carried the request out",
        retry_after_seconds=BUSY_SECONDS,
    )
    return ((unreachable, _if_placed(UNREACHABLE), "true"), (cut, _if_placed(CUT), ""))


def _by_flags(flags: tuple[str, ...]) -> Document:
    return {"response_flag_filter": {"flags": list(flags)}}


def _if_placed(flags: tuple[str, ...]) -> Document:
    named = {"filter": DESTINATION_NAMESPACE, "path": [{"key": PLACED}], "value": {"present_match": True}}
    is_placed = {"metadata_filter": {"matcher": named, "match_if_key_not_found": False}}
    return {"and_filter": {"filters": [_by_flags(flags), is_placed]}}


def _by_status(status: int) -> Document:
    value = {"default_value": status, "runtime_key": "weft.local_reply_status"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}


def _mapper(error: WeftError, which: Document, dialect: Dialect, should_retry: str) -> Document:
    path = {"name": ":path", "string_match": {"safe_regex": {"regex": _PATHS[dialect]}}}
    body = envelope(error, dialect=dialect).decode()
    return {
        "filter": {"and_filter": {"filters": [which, {"header_filter": {"header": path}}]}},
        "status_code": http_status(error),
        "body_format_override": {
            # A percent sign begins a command of Envoy's formats.
            "text_format_source": {"inline_string": body.replace("%", "%%")},
            "content_type": OLLAMA_JSON.decode() if dialect is Dialect.OLLAMA else "application/json",
        },
        "headers_to_add": [
            *([] if error.retry_after_seconds is None else [_header("retry-after", str(retry_after_seconds(error)))]),
            *([_header("x-should-retry", should_retry)] if should_retry else []),
        ],
    }


def _header(key: str, value: str) -> Document:
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
