"""Envoy's own error responses in the gateway's format: the envelope, code and headers of each client API."""

from types import MappingProxyType

from gateway.errors import OLLAMA_JSON, Dialect, envelope, http_status, retry_after_seconds
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.edge.plan import Document

_PATHS = MappingProxyType(
    {
        Dialect.ANTHROPIC: r"/v1/messages([/?].*)?",
        Dialect.OLLAMA: r"/api(/([^v?].*|v[^1?].*|v1[^/?].*)?)?(\?.*)?",
        Dialect.OPENAI: ".*",
    }
)
"""Paths of each client API, as in `gateway.errors.dialect_of`, special ones first."""
RATE_LIMITED = ("RL",)
"""Envoy's flag for requests rejected by its rate limit."""
UNREACHABLE = ("UF", "UH", "UO")
"""Envoy's flags for requests that were not sent: connection failed, no host, overflow."""
CUT = ("UC", "UR", "URX", "LR", "UPE")
"""Envoy's flags for requests that were sent and lost their connection before a response."""
BUSY_SECONDS = 1.0


def local_replies() -> Document:
    """Returns the configuration of Envoy's own error responses."""
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
    errors = [
        (limited, RATE_LIMITED, "true"),
        (unreachable, UNREACHABLE, "true"),
        (cut, CUT, ""),
    ]
    return {
        "mappers": [
            _mapper(error, flags, dialect, should_retry) for error, flags, should_retry in errors for dialect in _PATHS
        ]
    }


def _mapper(error: WeftError, flags: tuple[str, ...], dialect: Dialect, should_retry: str) -> Document:
    path = {"name": ":path", "string_match": {"safe_regex": {"regex": _PATHS[dialect]}}}
    by_flags = {"response_flag_filter": {"flags": list(flags)}}
    body = envelope(error, dialect=dialect).decode()
    return {
        "filter": {"and_filter": {"filters": [by_flags, {"header_filter": {"header": path}}]}},
        "status_code": http_status(error),
        "body_format_override": {
            # Escapes percent signs, which start commands in Envoy's formats.
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
