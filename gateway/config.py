"""Every number the edge can be told, with the unit in its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.kernel.rates import Rate

MEBIBYTE = 1024 * 1024
DEFAULT_RATE = Rate(50, 60)
"""50 requests a minute, where tenants are limited at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may hold. The schemas add the bounds that never change (see `gateway.schemas`)."""

    max_json_depth: int = 64
    """Nesting of arrays and objects in a body."""
    max_messages: int = 10_000
    max_stop: int = 16
    """Stop strings of one request."""
    max_choices: int = 8
    """Answers per prompt (`n`)."""
    max_prompts: int = 128
    """Prompts of one legacy completion."""
    max_embedding_inputs: int = 2048
    max_tools: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may do before its request is accepted."""

    max_connections: int = 2048
    """Open connections; one more is answered 503 and closed."""
    max_header_bytes: int = 32 * 1024
    """Request line and headers together."""
    max_header_count: int = 100
    max_body_pieces: int = 20_000
    """Chunks or segments one body may arrive in: a 10 MiB body in pieces of 525 bytes."""
    header_timeout_seconds: float = 10.0
    """From the first byte (or the connect) to the end of the headers."""
    linger_seconds: float = 5.0
    """How long a body is read and dropped after the request was already answered."""
    idle_seconds: int = 75
    """How long a connection is kept between two requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitConfig:
    """Requests per tenant."""

    default: Rate = DEFAULT_RATE
    """Of a tenant that is not named."""
    tenants: Mapping[str, Rate] = field(default_factory=dict)
    max_tenants: int = 1000
    """Tenants that are counted one by one; those beyond share one window, so that new names buy nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """How the edge listens, what it accepts, and how long it waits."""

    host: str = "127.0.0.1"
    """Loopback only, until keys and TLS exist."""
    port: int = 8080
    """0: any free port; `GatewayService.port` says which."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names besides the loopback ones that a Host or Origin header may carry, without port. A page elsewhere that
    points its own name at 127.0.0.1 carries its own name."""
    max_body_bytes: int = 10 * MEBIBYTE
    body_timeout_seconds: float = 60.0
    headers_within_seconds: float = 1.0
    """How long a stream's status line is held back, so that a rejection still becomes a status."""
    sse_keepalive_seconds: float = 10.0
    """A stream silent for this long gets a comment."""
    write_timeout_seconds: float = 30.0
    """How long one write may wait for a slow reader before its request is cancelled."""
    request_timeout_seconds: float = 600.0
    """Deadline of every request, and the most a caller can ask for with X-Request-Timeout-Seconds."""
    deadline_slack_seconds: float = 5.0
    """How long after its deadline a request that is still alive is cut off here."""
    registry_timeout_seconds: float = 10.0
    """How long one question to the registry may take."""
    max_event_watches: int = 64
    """Streams of events at once; one more is refused."""
    rate_limits: RateLimitConfig | None = None
    """Requests per tenant; None: as many as they like."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
