"""Every number the edge can be told, with the unit in its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from weft.dispatch.schema_guard import SchemaLimits
from weft.kernel.errors import invalid_field
from weft.kernel.tls import TlsFiles
from weft.kernel.units import Rate

MEBIBYTE = 1024 * 1024
DEFAULT_RATE = Rate(50, 60)
"""50 requests a minute, where tenants are limited at all."""


class KeepResponses(StrEnum):
    """What becomes of a response that is complete."""

    BY_DEFAULT = "by_default"
    """It is kept unless its request says `"store": false`."""
    ON_REQUEST = "on_request"
    """It is kept where its request says `"store": true`."""
    NEVER = "never"
    """It is not kept, and a request that says `"store": true` is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits of `gateway.media`. Bytes that come inside a request pass the same checks as those that are fetched."""

    allowed_hosts: tuple[str, ...] = ()
    """Hosts that media may be fetched from: `images.example.org`, `*.example.org` (every name below it, not itself),
    with `:port` for another port than 443. Empty: no address is ever fetched."""
    allow_plain_http: bool = False
    """Whether http:// addresses of those hosts are fetched as well as https:// ones."""
    max_bytes: int = 10 * MEBIBYTE
    """Of one file, fetched or sent along."""
    max_total_bytes: int = 20 * MEBIBYTE
    """Of all files that are fetched for one request; a message between services holds 64 MiB."""
    max_files: int = 16
    """Addresses of one request."""
    max_concurrent_fetches: int = 16
    """Files that are fetched at once for all requests; others wait."""
    connect_timeout_seconds: float = 5.0
    """For the look-up of the name, the connection and TLS."""
    total_timeout_seconds: float = 20.0
    """For all files of one request, waiting included."""
    min_bytes_per_second: int = 1024
    """What a file must come at on the average ..."""
    slow_start_seconds: float = 5.0
    """... after this long."""
    max_pixels: int = 64 * 1024 * 1024
    """Width times height times frames of one image, as its header has them: 8192 x 8192."""
    max_frames: int = 300
    """Of one animation."""
    max_audio_seconds: float = 3600.0
    """Length of one recording, as its header has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEdgeConfig:
    """What callers may send, and how much of it is done at once."""

    max_file_bytes: int = 200 * MEBIBYTE
    """Of one file that is sent."""
    upload_timeout_seconds: float = 3600.0
    """How long the bytes of a file may take to come in; the pace of `connections` holds besides."""
    max_uploads: int = 32
    """Files that are taken in at once; one more is refused. Each holds about two pieces of a file in memory."""
    max_lines: int = 50_000
    """Requests of one batch."""
    max_line_bytes: int = MEBIBYTE
    """One line of an input file."""
    max_creations: int = 4
    """Batches that are made at once; one more is refused. Each is work for the processor as long as its file is."""
    max_finishing: int = 4
    """Batches whose results are written at once; whoever asks for one more finds it finalizing."""
    finish_wait_seconds: float = 1.0
    """How long whoever asks for a batch waits for its results to be written."""
    finish_timeout_seconds: float = 900.0
    """How long the results of one batch may take to be written; then they are begun anew when somebody asks."""
    store_timeout_seconds: float = 30.0
    """How long whoever keeps files and batches may take to answer, and for each piece of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What one request may hold. The schemas add the bounds that never change (see `gateway.schemas`)."""

    max_json_depth: int = 64
    """Nesting of arrays and objects in a body."""
    max_json_members: int = 200_000
    """Names in all objects of a body together."""
    max_messages: int = 10_000
    max_stop: int = 16
    """Stop strings of one request."""
    max_stop_chars: int = 1024
    """Length of one stop string."""
    max_choices: int = 8
    """Answers per prompt (`n`)."""
    max_choice_tokens: int = 1024 * 1024
    """`n` times `max_tokens`, where `n` is above 1."""
    max_top_logprobs: int = 20
    """Alternatives per token (`top_logprobs`; `logprobs` of a text completion)."""
    max_logit_bias: int = 300
    """Tokens in `logit_bias`."""
    max_metadata: int = 16
    """Entries of `metadata`."""
    max_user_chars: int = 512
    """Length of `user`."""
    max_prompts: int = 128
    """Prompts of one legacy completion."""
    max_embedding_inputs: int = 2048
    max_tools: int = 1024
    max_audio_bytes: int = 25 * MEBIBYTE
    """Body of an upload of audio."""
    max_image_bytes: int = 64 * MEBIBYTE
    """Body of an upload of images to edit."""
    max_parts: int = 20
    """Parts of a multipart body."""
    max_boundary_chars: int = 70
    """Length of a multipart body's boundary."""
    max_part_header_bytes: int = 8 * 1024
    """Headers of one part together."""
    schemas: SchemaLimits = field(default_factory=SchemaLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What one connection may do before its request is accepted."""

    max_connections: int = 2048
    """Open connections; one more is answered 503 and closed. Never more than half of the files that may be open."""
    max_connections_per_address: int = 256
    """Open connections from one address, or one /64 network of IPv6; one more is answered 429 and closed. Loopback is
    not counted: a proxy on this machine speaks for everybody."""
    max_header_bytes: int = 32 * 1024
    """Request line and headers together."""
    max_header_count: int = 100
    max_body_pieces: int = 20_000
    """Chunks or segments one body may arrive in: a 10 MiB body in pieces of 525 bytes."""
    header_timeout_seconds: float = 10.0
    """From the first byte (or the connect) to the end of the headers."""
    body_grace_seconds: float = 10.0
    """How long a body may arrive as slowly as it likes ..."""
    min_body_bytes_per_second: int = 1024
    """... and how much every second more must bring."""
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
class EdgeTls:
    """The certificate of the edge."""

    files: TlsFiles
    """With a certificate and its key."""
    handshake_timeout_seconds: float = 10.0
    """How long a client may take to set TLS up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Where an HTTP surface listens, and what protects it there."""

    host: str
    port: int
    tls: EdgeTls | None = field(default=None)
    """None: plain HTTP."""
    has_keys: bool = False
    """Whether every caller needs a key."""
    tls_terminated_elsewhere: bool = False
    """Whether the operator says that a proxy in front speaks TLS with the callers."""

    def require_protection(self) -> None:
        """For an address that is not loopback. Raises INVALID_ARGUMENT naming every setting that is missing."""
        missing = []
        if not self.has_keys:
            missing.append("keys (auth.required: true)")
        if self.tls is None and not self.tls_terminated_elsewhere:
            missing.append(
                "TLS (gateway.tls.certificate_file and gateway.tls.key_file, or gateway.tls_terminated_elsewhere: true "
                "where a proxy in front speaks it)"
            )
        if missing:
            raise invalid_field("host", f"'{self.host}' is not a loopback address, which needs {' and '.join(missing)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """How the edge listens, what it accepts, and how long it waits."""

    host: str = "127.0.0.1"
    """Loopback, or any address with keys and TLS."""
    port: int = 8080
    """0: any free port; `GatewayService.port` says which."""
    auth_required: bool = False
    """Whether every caller needs a key."""
    tls: EdgeTls | None = None
    """None: plain HTTP."""
    tls_terminated_elsewhere: bool = False
    """Whether a proxy in front speaks TLS with the callers; an address beyond loopback needs that, or `tls`."""
    allowed_hosts: frozenset[str] = frozenset()
    """Names besides the loopback ones that a Host or Origin header may carry, without port. A page elsewhere that
    points its own name at 127.0.0.1 carries its own name."""
    max_body_bytes: int = 10 * MEBIBYTE
    body_timeout_seconds: float = 60.0
    """From the end of the headers to the end of the body."""
    headers_within_seconds: float = 1.0
    """How long a stream's status line is held back, so that a rejection still becomes a status."""
    sse_keepalive_seconds: float = 10.0
    """A stream silent for this long gets a comment."""
    write_timeout_seconds: float = 30.0
    """How long one write may wait for a slow reader before its request is cancelled."""
    request_timeout_seconds: float = 600.0
    """Deadline of every request, and the most a caller can ask for with X-Request-Timeout-Seconds."""
    deadline_slack_seconds: float = 0.5
    """How long after its deadline a request that is still alive is cut off here."""
    registry_timeout_seconds: float = 10.0
    """How long one question to the registry may take."""
    max_event_watches: int = 64
    """Streams of events at once; one more is refused."""
    max_running_responses: int = 2048
    """Responses that are streamed at once, to be found by their ids meanwhile; one more is refused."""
    keep_responses: KeepResponses = KeepResponses.BY_DEFAULT
    """Which responses are kept, where there is somebody who keeps them."""
    response_store_timeout_seconds: float = 5.0
    """How long whoever keeps responses may take to answer."""
    task_timeout_seconds: float = 30.0
    """How long whoever runs durable tasks may take to answer; to be done, a task may take hours."""
    rate_limits: RateLimitConfig | None = None
    """Requests per tenant; None: as many as they like."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    media: MediaConfig = field(default_factory=MediaConfig)
    batches: BatchEdgeConfig = field(default_factory=BatchEdgeConfig)

    def exposure(self, port: int | None = None) -> Exposure:
        """Where it listens, and how that is protected; `port` instead of its own."""
        return Exposure(
            host=self.host,
            port=self.port if port is None else port,
            tls=self.tls,
            has_keys=self.auth_required,
            tls_terminated_elsewhere=self.tls_terminated_elsewhere,
        )
