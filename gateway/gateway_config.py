"""The settings of the HTTP edge: the section `gateway` of weft.yaml, and what the composition adds to it."""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from annotated_types import Ge, Gt, Le, MaxLen, MinLen

from weft.kernel.channels.tls import TlsFiles
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.model_source import asked_source, is_source
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.settings.setting_annotations import PUBLIC, Checked, Constant, PathText, RequestRate, Seconds, UrlText
from weft.kernel.values.address import is_host_pattern
from weft.kernel.values.names import is_name
from weft.kernel.values.reach import TOOL
from weft.kernel.values.units import Rate

MIN_BYTES_PER_SECOND = 1024
"""Lowest average rate of a file ..."""
MAX_HEADER_COUNT = 100
"""Maximum number of headers of a request; above it, the answer is 431."""
HANDSHAKE_TIMEOUT_SECONDS = 10.0
"""Maximum duration of a TLS handshake."""
HEADER_TIMEOUT_SECONDS = 10.0
"""Time from the first byte, or from the connect, to the end of the headers."""
REGISTRY_TIMEOUT_SECONDS = 10.0
"""How long one call of `/api/v1` to the registry may take."""
MEBIBYTE = 1024 * 1024
MAX_FETCHED_BYTES = 48 * MEBIBYTE
"""With a request body it fits into one message between services, which is 64 MiB."""
DEFAULT_RATE = Rate(50, 60)
"""Rate limit of a tenant, if tenants are limited: 50 requests per minute."""
Count = Annotated[int, Ge(1), Le(10_000_000)]
Bytes = Annotated[int, Ge(1024), Le(1_073_741_824)]
HostName = Annotated[str, MinLen(1), MaxLen(253), Checked(str.lower)]


def _host_pattern(text: str) -> str:
    if not is_host_pattern(text):
        raise ValueError("must be a host name such as images.example.org or *.example.org, with or without :port")
    return text.lower()


HostPattern = Annotated[str, Checked(_host_pattern)]


_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]{0,31}://"
    r"(?:\*|(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?|\[[0-9a-f:.]{2,45}\])"
    r"(?::(?:\*|[0-9]{1,5}))?"
)
WEB_SCHEMES = ("http://", "https://")
_FIELD_NAME = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,64}")


def _origin(text: str) -> str:
    origin = text.lower().removesuffix("/")
    if _ORIGIN.fullmatch(origin) is None:
        raise ValueError(
            "must be an origin such as https://app.example.org, https://*.example.org, http://localhost:* or "
            "app://obsidian.md; '*' and 'null' are not origins: list those that may call"
        )
    if origin.startswith(WEB_SCHEMES) and origin.partition("://")[2].partition(":")[0] == "*":
        raise ValueError("matches all web pages: list the hosts, such as https://*.example.org")
    return origin


def _field_name(text: str) -> str:
    name = text.lower()
    if _FIELD_NAME.fullmatch(name) is None or name == "*":
        raise ValueError("must be the name of a header, such as x-my-app")
    return name


TRACE_ID = "{trace_id}"


def _trace_url(text: str) -> str:
    if not text.startswith(WEB_SCHEMES) or TRACE_ID not in text:
        raise ValueError(f"must be a URL with {TRACE_ID} in it, such as https://jaeger.example.org/trace/{TRACE_ID}")
    return text


TraceUrl = Annotated[str, MaxLen(1024), Checked(_trace_url)]
Origin = Annotated[str, MinLen(1), MaxLen(320), Checked(_origin)]
HeaderName = Annotated[str, MinLen(1), MaxLen(64), Checked(_field_name)]


def _source(text: str) -> str:
    asked_source(text, "it")
    return text


def _library_name(text: str) -> str:
    if is_source(text) or not is_name(text):
        raise ValueError("must be a name such as qwen3:0.6b")
    return text.lower()


LibraryName = Annotated[str, Checked(_library_name)]
SourceText = Annotated[str, Checked(_source)]
LOOPBACK_ORIGINS = tuple(
    f"{scheme}://{host}:*" for scheme in ("http", "https") for host in ("localhost", "127.0.0.1", "[::1]")
)
"""Origins of pages served by this machine, on any port."""
APP_ORIGINS = (
    "app://*",
    "capacitor://localhost",
    "ionic://localhost",
    "tauri://*",
    "http://tauri.localhost",
    "https://tauri.localhost",
    "vscode-file://*",
    "vscode-webview://*",
)
"""Origins of installed editors and applications, such as Obsidian (`app://obsidian.md`). No web page has one of
them."""


class KeepResponses(StrEnum):
    """Which completed responses are stored."""

    BY_DEFAULT = "by_default"
    """A response is stored unless its request says `"store": false`."""
    ON_REQUEST = "on_request"
    """A response is stored if its request says `"store": true`."""
    NEVER = "never"
    """No response is stored, and a request with `"store": true` is refused."""


class ResponseEnvelope(StrEnum):
    """The form of a response of `/v1/responses`."""

    OPENAI = "openai"
    """OpenAI's form; with `output_text` and `metrics` if the request uses a field of the extension for pools."""
    POOL = "pool"
    """Text is an item of type `output_text`, without a message around it; always with `output_text` and `metrics`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Images and recordings in requests. Inline files pass the same checks as fetched ones."""

    allowed_hosts: Annotated[tuple[HostPattern, ...], MaxLen(1000), PUBLIC] = ()
    """Hosts from which images in requests may be fetched, such as `images.example.org` or `*.example.org` (all its
    subdomains); append `:port` if it is not 443. A listed host sees the URLs that requests contain. Default: none, and
    image URLs are refused."""
    allow_plain_http: bool = False
    """Whether `http://` URLs of `allowed_hosts` are fetched as well."""
    max_bytes: Annotated[int, Ge(1024), Le(MAX_FETCHED_BYTES)] = 10 * MEBIBYTE
    """Maximum size of one file, fetched or inline."""
    max_pixels: Annotated[int, Ge(1), Le(2**31)] = 64 * 1024 * 1024
    """Maximum number of pixels of an image according to its header: width x height x frames. Default: 8192 x 8192."""
    max_audio_seconds: Seconds = 3600.0
    """Maximum length of a recording according to its header."""
    max_total_bytes: Constant[int] = 20 * MEBIBYTE
    """Size of all files that are fetched for one request."""
    max_files: Constant[int] = 16
    """Files that are fetched for one request."""
    total_timeout_seconds: Constant[float] = 20.0
    """For all files of one request, including the wait for a free fetch."""
    max_concurrent_fetches: Constant[int] = 16
    """Files that are fetched concurrently; others wait, at most half of `total_timeout_seconds`."""
    connect_timeout_seconds: Constant[float] = 5.0
    """For name resolution, the connection and TLS."""
    max_frames: Constant[int] = 300
    """Frames of an animation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEdgeConfig:
    """Limits of files and batches."""

    max_file_bytes: Annotated[int, Ge(1024), Le(1024**5), PUBLIC] = 200 * MEBIBYTE
    """Maximum size of an uploaded file."""
    max_lines: Constant[int] = 50_000
    """Requests of one batch."""
    max_uploads: Constant[int] = 32
    """Concurrent uploads; one more is refused. Each holds about two chunks of a file in memory."""
    max_line_bytes: Constant[int] = MEBIBYTE
    """One line of an input file."""
    max_creations: Constant[int] = 4
    """Batches that are created concurrently; one more is refused. Each takes processor time."""
    max_finishing: Constant[int] = 4
    """Batches whose results are written concurrently; one more stays `finalizing`."""
    finish_timeout_seconds: Constant[float] = 900.0
    """How long writing the results of one batch may take; then it is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultConfig:
    """URLs of generated images and recordings (`response_format: url`)."""

    link_seconds: Annotated[Seconds, PUBLIC] = 86_400.0
    """How long a result URL is valid. The result itself is kept for `router.results.keep_seconds`."""
    public_url: Annotated[UrlText, PUBLIC] = ""
    """URL at which callers reach the gateway if it is behind a proxy, such as `https://weft.example.org`. Default: the
    host in the request."""
    key_file: Annotated[PathText | None, PUBLIC] = None
    """File with the 32 bytes that sign result URLs and encrypt summaries of compacted conversations, readable by its
    owner only. All gateways of a mesh need the same file. Default: `state/results.key` under the home, created at the
    first start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one request. docs/scheduling.md lists the errors above them."""

    max_audio_bytes: Annotated[Bytes, PUBLIC] = 25 * MEBIBYTE
    """Maximum body size of an audio upload."""
    max_image_bytes: Annotated[Bytes, PUBLIC] = 64 * MEBIBYTE
    """Maximum body size of an upload of images to edit."""
    max_messages: Constant[int] = 10_000
    """Messages of one conversation."""
    max_choices: Constant[int] = 8
    """Answers per prompt (`n`)."""
    max_embedding_inputs: Constant[int] = 2048
    """Texts of one request for embeddings."""
    max_tools: Constant[int] = 1024
    """Tools of one request."""
    max_json_depth: Constant[int] = 64
    """Nesting of arrays and objects in a body."""
    max_json_members: Constant[int] = 200_000
    """Number of names in all objects of a body."""
    max_stop: Constant[int] = 16
    """Stop strings."""
    max_stop_chars: Constant[int] = 1024
    """Length of one stop string."""
    max_choice_tokens: Constant[int] = 1024 * 1024
    """`n` times `max_tokens`, where `n` is above 1."""
    max_top_logprobs: Constant[int] = 20
    """Alternatives per token (`top_logprobs`; `logprobs` of a text completion)."""
    max_logit_bias: Constant[int] = 300
    """Tokens in `logit_bias`."""
    max_metadata: Constant[int] = 16
    """Entries of `metadata`."""
    max_user_chars: Constant[int] = 512
    """Length of `user`."""
    max_parts: Constant[int] = 20
    """Parts of a multipart body."""
    max_part_header_bytes: Constant[int] = 8 * 1024
    """Headers of one part together."""
    schemas: Constant[SchemaLimits] = field(default_factory=SchemaLimits)
    """JSON schemas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of a connection before its request is accepted."""

    max_connections: Annotated[int, Ge(1), Le(1_000_000), PUBLIC] = 2048
    """Maximum number of open connections; further ones get 503 and are closed. At most half of the process's limit of
    open files."""
    max_header_bytes: Constant[int] = 32 * 1024
    """Size of the request line and headers."""
    idle_seconds: Constant[int] = 75
    """How long a connection is kept between two requests."""
    max_connections_per_address: Annotated[int | None, Ge(1), Le(1_000_000), PUBLIC] = None
    """Open connections from one address, or one /64 network of IPv6; one more is answered 429 and closed. Default: 256,
    and no limit with `tls_terminated_elsewhere`. Loopback is never limited: a proxy connects for all its callers."""
    max_body_pieces: Constant[int] = 20_000
    """Maximum number of chunks or segments of a body: a 10 MiB body in chunks of 525 bytes."""
    header_timeout_seconds: Constant[float] = HEADER_TIMEOUT_SECONDS
    """See HEADER_TIMEOUT_SECONDS; tests use less."""
    body_grace_seconds: Constant[float] = 10.0
    """How long a body may arrive at any rate ..."""
    min_body_bytes_per_second: Constant[int] = 1024
    """... and the minimum rate after that."""
    linger_seconds: Constant[float] = 5.0
    """How long the rest of a body is read and dropped after its request was answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateLimitConfig:
    """Maximum number of requests per tenant and second, minute or hour."""

    default: Annotated[RequestRate, PUBLIC] = DEFAULT_RATE
    """Limit of each tenant that is not in `tenants`, such as `100req/min`, `5req/sec` or `1000req/hour`."""
    tenants: Annotated[Mapping[str, RequestRate], MaxLen(1000), PUBLIC] = field(default_factory=dict)
    """Limits by tenant (X-Tenant-ID)."""
    max_tenants: Constant[int] = 1000
    """Tenants that are counted one by one; those beyond share one window, so that inventing names gains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeTls:
    """HTTPS with TLS 1.2 or newer. On loopback, the gateway serves plain HTTP unless a certificate is set."""

    certificate_file: Annotated[PathText | None, PUBLIC] = None
    """PEM chain. The certificate and its key are reloaded when they change."""
    key_file: Annotated[PathText | None, PUBLIC] = None
    """PEM key of the certificate, without a passphrase; only its owner and group may be able to read it."""
    authority_file: PathText | None = None
    """PEM file of the certificate authority that clients should trust; `GET /ca.pem` returns it. Default: the gateway's
    own authority, if it issues its certificate."""
    self_signed: Annotated[bool | None, PUBLIC] = None
    """Whether the gateway issues its own certificate, from an authority that it keeps under the home and that clients
    trust by file or fingerprint. Default: true on any address other than loopback if no certificate is set."""

    @property
    def is_set(self) -> bool:
        """Whether a certificate or a key is set."""
        return self.certificate_file is not None or self.key_file is not None

    @property
    def files(self) -> TlsFiles:
        """The files, `~` expanded; errors name them as `gateway.tls`."""
        return TlsFiles(
            certificate_file=None if self.certificate_file is None else self.certificate_file.expanduser(),
            key_file=None if self.key_file is None else self.key_file.expanduser(),
            section="gateway.tls",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The address that an HTTP server listens on, and its protection."""

    host: str
    port: int
    tls: EdgeTls | None = field(default=None)
    """None: plain HTTP."""
    tls_context: ssl.SSLContext | None = None
    """Replaces the certificate of `tls`."""
    has_keys: bool = False
    """Whether callers need API keys."""
    tls_terminated_elsewhere: bool = False
    """Whether a proxy in front terminates TLS, as the operator declares."""
    is_insecure: bool = False
    """Whether the operator wants plain HTTP, which others on the network can read."""

    def require_protection(self) -> None:
        """Checks an address that is not loopback. Raises INVALID_ARGUMENT naming every missing setting."""
        missing = []
        if not self.has_keys:
            missing.append("keys (auth.required: true)")
        if self.tls is None and not self.tls_terminated_elsewhere and not self.is_insecure:
            missing.append(
                "TLS (gateway.tls.certificate_file and gateway.tls.key_file, or gateway.tls_terminated_elsewhere: true "
                "if a proxy in front of it terminates TLS, or gateway.insecure: true for plain HTTP)"
            )
        if missing:
            raise invalid_field("host", f"'{self.host}' is not a loopback address, which needs {' and '.join(missing)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorsConfig:
    """Web pages of other origins that may call the gateway (CORS). Keys are sent in a header, never in cookies."""

    allowed_origins: Annotated[tuple[Origin, ...], MaxLen(256), PUBLIC] = LOOPBACK_ORIGINS + APP_ORIGINS
    """Origins such as `https://app.example.org`, `https://*.example.org`, `http://localhost:*` (any port) or
    `app://obsidian.md`. `[]`: only the gateway's own pages. A list replaces the default, which is pages and
    applications of this machine. If callers need no key, pages cannot change resources."""
    allowed_headers: Annotated[tuple[HeaderName, ...], MaxLen(64)] = ()
    """Request headers that pages may send, in addition to those that the APIs and their SDKs use."""
    max_age_seconds: Constant[int] = 600
    """How long a browser may keep the answer to a preflight request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkbenchConfig:
    """The workbench, the web page at `/ui`."""

    enabled: Annotated[bool, PUBLIC] = True
    """Whether the workbench is served. If callers need no keys, it is served to this machine only."""
    trace_url: Annotated[TraceUrl | None, PUBLIC] = None
    """URL of a trace, such as `https://jaeger.example.org/trace/{trace_id}`. Requests whose trace is recorded link to
    it. Default: no link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebSearchConfig:
    """The web for models. Queries and URLs leave the mesh. `url` or `tool` enables the search, `fetch` pages."""

    url: Annotated[UrlText, PUBLIC] = ""
    """Address of a SearXNG server, such as `http://127.0.0.1:8888`, with `json` among its `search.formats`."""
    tool: Annotated[str, MaxLen(256), TOOL, PUBLIC] = ""
    """In place of `url`: a search tool of an MCP server in `runners`, as `RUNNER/SERVER.TOOL`. The gateway calls the
    server itself."""
    fetch: Annotated[bool, PUBLIC] = False
    """Whether models may read pages, also without a search: the gateway fetches public URLs that the conversation
    names."""
    max_uses: Annotated[int, Ge(1), Le(64), PUBLIC] = 8
    """Maximum number of searches, and of fetched pages, for one request; a request may ask for fewer."""
    max_results: Annotated[int, Ge(1), Le(50), PUBLIC] = 8
    """Maximum number of results of one search that the model gets."""
    max_result_bytes: Annotated[int, Ge(256), Le(65_536)] = 2_048
    """Maximum size of the text of one result; longer text is cut."""
    max_page_bytes: Annotated[int, Ge(256), Le(1_048_576)] = 32_768
    """Maximum size of the text of one fetched page; longer text is cut. 4 bytes are about one token."""
    timeout_seconds: Annotated[float, Gt(0), Le(120)] = 10.0
    """How long one search, or one fetch with its redirects, may take; then the model is told that it failed."""
    max_answer_bytes: Constant[int] = 2 * MEBIBYTE
    """Size of the answer of the server to one search."""
    max_download_bytes: Constant[int] = 8 * MEBIBYTE
    """Size of a fetched page or PDF."""
    max_redirects: Constant[int] = 5
    """Redirects of one fetch."""
    max_concurrent_fetches: Constant[int] = 8
    """Pages that one gateway fetches and reads concurrently; others wait within `timeout_seconds`."""

    def __post_init__(self) -> None:
        if self.url and self.tool:
            raise ValueError("has 'url' and 'tool'; set one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The HTTP gateway."""

    max_body_bytes: Annotated[Bytes, PUBLIC] = 10 * MEBIBYTE
    """Maximum size of a request body, except uploads of audio and images."""
    request_timeout_seconds: Annotated[Seconds, PUBLIC] = 600.0
    """Default deadline of a request, and the maximum of the header X-Request-Timeout-Seconds."""
    receipt_comments: bool = True
    """Whether a stream ends with its receipt as an SSE comment. The request header `X-Receipt-Comment: true` or `false`
    overrides it."""
    keep_responses: Annotated[KeepResponses, PUBLIC] = KeepResponses.BY_DEFAULT
    """Which responses of `/v1/responses` are stored with their input. `by_default`: all except requests with `"store":
    false`; `on_request`: only requests with `"store": true`; `never`: none. Stored responses are kept until they are
    deleted or expire (`router.responses.keep_seconds`)."""
    response_envelope: Annotated[ResponseEnvelope, PUBLIC] = ResponseEnvelope.OPENAI
    """Default format of responses of `/v1/responses`; the request field `envelope` overrides it. `openai`: OpenAI's
    format. `pool`: text is an item of type `output_text`, and the response always has `output_text` and `metrics`."""
    results: ResultConfig = field(default_factory=ResultConfig)
    """URLs of generated images and recordings."""
    batches: BatchEdgeConfig = field(default_factory=BatchEdgeConfig)
    """Files and batches."""
    allowed_hosts: Annotated[frozenset[HostName], MaxLen(1000), PUBLIC] = frozenset()
    """Host names and addresses, without port, that callers may use for the gateway, in addition to `host` and loopback.
    Requests with another Host or Origin header are refused, which stops DNS rebinding."""
    cors: CorsConfig = field(default_factory=CorsConfig)
    """Web pages of other origins."""
    ollama_sources: Annotated[Mapping[LibraryName, SourceText], MaxLen(1000), PUBLIC] = field(default_factory=dict)
    """Sources that `/api/pull` uses for names of Ollama's library, such as `"qwen3:0.6b":
    hf:Qwen/Qwen3-0.6B-GGUF:Q8_0`. A name without a tag means `:latest`. They take precedence over weft's own short
    names: see models.md."""
    tls: EdgeTls = field(default_factory=EdgeTls)
    """HTTPS."""
    tls_terminated_elsewhere: Annotated[bool, PUBLIC] = False
    """Whether a proxy in front terminates TLS; `host` may then be any address without `tls`. Traffic between the proxy
    and the gateway is not encrypted, so that network must be private."""
    insecure: Annotated[bool, PUBLIC] = False
    """Whether to serve plain HTTP on any address, without a proxy in front. Anyone on the network can read and change
    keys, prompts and answers."""
    rate_limits: Annotated[RateLimitConfig | None, PUBLIC] = None
    """Requests per tenant. Default: no limit."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    """Limits of one request."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Limits of one connection."""
    media: MediaConfig = field(default_factory=MediaConfig)
    """Images and recordings in requests."""
    web_search: WebSearchConfig = field(default_factory=WebSearchConfig)
    """The web search for models."""
    workbench: WorkbenchConfig = field(default_factory=WorkbenchConfig)
    """The web page at `/ui`."""
    sse_keepalive_seconds: Constant[float] = 10.0
    """Interval after which a silent stream gets a comment."""
    body_timeout_seconds: Constant[float] = 60.0
    """From the end of a request's headers to the end of its body."""
    headers_within_seconds: Constant[float] = 1.0
    """How long the status line of a stream is held back, so that a refusal is still a status."""
    write_timeout_seconds: Constant[float] = 30.0
    """How long a write may wait for a slow reader before its request is cancelled."""
    max_event_watches: Annotated[int, Ge(1), Le(100_000), PUBLIC] = 64
    """Concurrent streams of `/api/v1/watch` and `/api/v1/events`; one more is answered 429."""
    max_watch_names: Constant[int] = 4096
    """Changes that wait for one reader of `/api/v1/watch`, one for each name: the newest. A source of more waits."""
    watch_interval_seconds: Constant[float] = 0.1
    """Shortest time between two writes of one stream of `/api/v1/watch`; changes of a name meanwhile are one."""
    key_check_seconds: Constant[float] = 2.0
    """Interval in which an open stream of events checks that its key is still valid; it ends with one that is not."""
    max_running_responses: Annotated[int, Ge(1), Le(100_000), PUBLIC] = 2048
    """Concurrent streams of `/v1/responses`, which can be retrieved by id meanwhile; one more is refused."""
    host: Constant[str] = "127.0.0.1"
    """Loopback, or any address with keys and TLS."""
    port: Constant[int] = 8080
    """0: any free port; `GatewayService.port` has it."""
    auth_required: Constant[bool] = False
    """Whether callers need API keys."""
    deadline_slack_seconds: Constant[float] = 0.5
    """Time after its deadline at which the gateway ends a request that is still running."""
    public_scheme: Constant[str] = ""
    """`http` or `https` in URLs for callers, behind a proxy of the same mesh; empty: that of the connection."""

    @property
    def is_behind_proxy(self) -> bool:
        """Whether a proxy connects for the callers: one of the same mesh, or the operator's."""
        return bool(self.public_scheme) or self.tls_terminated_elsewhere

    def exposure(self, port: int | None = None) -> Exposure:
        """Returns the address and its protection; `port` replaces the configured one."""
        return Exposure(
            host=self.host,
            port=self.port if port is None else port,
            tls=self.tls if self.tls.is_set else None,
            has_keys=self.auth_required,
            tls_terminated_elsewhere=self.tls_terminated_elsewhere,
            is_insecure=self.insecure,
        )
