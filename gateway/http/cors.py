"""Requests of web pages of other origins: allowed origins (CORS), the gateway's own names, preflights, and embedding.

Starlette's middleware makes the headers. It does not wrap the application, because errors are answered outside of it
and a disallowed origin gets no header at all. Credentials are never allowed: pages send their key as a header.
"""

import re
import socket
from collections.abc import Mapping
from functools import lru_cache, partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.gateway_config import WEB_SCHEMES, GatewayConfig
from gateway.result_links import RESULTS_PATH
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import is_address, is_any_host

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


def host_name(url: str) -> str | None:
    """Returns the host name of a URL; None: it has none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def is_own_host(name: str | None, config: GatewayConfig) -> bool:
    """Whether a host name is one of this gateway's."""
    return name is not None and (name in LOOPBACK_NAMES or name == config.host or name in config.allowed_hosts)


def may_be_called(name: str | None, config: GatewayConfig) -> bool:
    """Whether a Host may be answered: one of this gateway's, and names that no stranger can register.

    `.internal` is reserved for private networks (containers reach their host by such names), `.localhost` is this
    machine (RFC 6761). Pages under these names are still foreign: see `is_allowed_origin`. Ollama also accepts any
    `.local` name; every device of a network may announce one, so here only the machine's own is.
    """
    if name is None:
        return False
    if is_own_host(name, config):
        return True
    # DNS rebinding needs a host name, so addresses are safe on a gateway that listens on all of them.
    is_safe = name.endswith(_RESERVED) or (is_any_host(config.host) and is_address(name))
    return is_safe or name in _machine_names()


@lru_cache(maxsize=1)
def _machine_names() -> frozenset[str]:
    short = socket.gethostname().lower().partition(".")[0]
    return frozenset({socket.gethostname().lower(), short, f"{short}.local"})


_RESERVED = (".internal", ".localhost")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
"""HTTP methods that pages may use: all that an endpoint has."""
REQUEST_HEADERS = (
    "anthropic-beta", "anthropic-client-name", "anthropic-client-version", "anthropic-dangerous-direct-browser-access",
    "anthropic-version", "api-key", "authorization", "baggage", "cache-control", "content-encoding",
    "copilot-integration-id", "editor-plugin-version", "editor-version", "http-referer", "idempotency-key",
    "if-none-match", "last-event-id", "openai-beta", "openai-conversation-id", "openai-intent", "openai-organization",
    "openai-project", "pragma", "sentry-trace", "session-id", "session_id", "traceparent", "tracestate", "user-agent",
    "x-api-key", "x-app", "x-app-version", "x-cache-mode", "x-cache-tag", "x-claude-code-session-id", "x-client-id",
    "x-client-name", "x-client-version", "x-goog-api-client", "x-goog-api-key", "x-initiator", "x-labels",
    "x-max-wait-seconds", "x-openrouter-title", "x-prefix-keep-alive", "x-priority", "x-receipt-comment",
    "x-request-id", "x-request-timeout-seconds", "x-requested-with", "x-session-affinity", "x-session-id",
    "x-stainless-arch", "x-stainless-async", "x-stainless-custom-poll-interval", "x-stainless-helper",
    "x-stainless-helper-method", "x-stainless-lang", "x-stainless-os", "x-stainless-package-version",
    "x-stainless-poll-helper", "x-stainless-retry-count", "x-stainless-runtime", "x-stainless-runtime-version",
    "x-stainless-timeout", "x-tenant-id", "x-title", "x-use-cache", "x-user-agent",
)  # fmt: skip
"""Headers that pages may send besides Accept and Content-Type: those of the APIs, and those that SDKs, editors and
applications add."""
EXPOSED_HEADERS = (
    "location", "request-id", "retry-after", "x-audio-ms", "x-cache-hit", "x-cache-tokens-reused", "x-gpu-energy-mj",
    "x-gpu-time-ms", "x-gpu-time-source", "x-image-pixels", "x-image-steps", "x-keep-alive", "x-left-premises",
    "x-load-wait-ms", "x-priority", "x-queue-wait-ms", "x-ratelimit-limit-requests", "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens", "x-request-id", "x-should-retry", "x-weft-task-id", "x-weft-warning-fields",
    "x-weft-warnings",
)  # fmt: skip
"""Response headers that pages may read."""
_ORIGIN = b"origin"
_WANTED_METHOD = b"access-control-request-method"


@lru_cache(maxsize=64)
def _pattern(origins: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(_expression, origins)) or r"(?!)")


def _expression(origin: str) -> str:
    """Returns the regular expression of an origin: `*.` matches one or more labels, a port `*` any port or none."""
    scheme, _, rest = origin.partition("://")
    host, port = (rest.removesuffix(":*"), r"(?::[0-9]{1,5})?") if rest.endswith(":*") else (rest, "")
    if host == "*":
        # `app://` may have no host.
        name = r"[A-Za-z0-9_.-]*"
    elif host.startswith("*."):
        name = r"(?:[A-Za-z0-9_-]+\.)+" + re.escape(host.removeprefix("*."))
    else:
        name = re.escape(host)
    return f"{re.escape(scheme)}://{name}{port}"


def is_allowed_origin(origin: bytes, host: bytes, config: GatewayConfig) -> bool:
    """Whether pages of an origin may call and read answers: allowed origins, and the gateway's own names.

    `origin` and `host` are the request's headers. A loopback name with another port than the gateway's is another
    program, which has to be in the list. If the gateway listens on all addresses, the one that was called is its own.
    """
    text = origin.decode("latin-1")
    if _pattern(config.cors.allowed_origins).fullmatch(text) is not None:
        return True
    name = host_name(text)
    if not text.startswith(WEB_SCHEMES) or name is None:
        return False
    if name in LOOPBACK_NAMES:
        return text.partition("://")[2].encode("latin-1") == host.lower()
    called = host_name(f"//{host.decode('latin-1')}")
    return is_own_host(name, config) or (is_any_host(config.host) and is_address(name) and name == called)


_ELSEWHERE = (b"cross-site", b"same-site")
"""Values of Sec-Fetch-Site for pages of other origins; other ports of this machine are `same-site`."""
_PAGE_FILE = re.compile(r"/ui/[0-9a-f]{16}/.+")
"""Paths of the workbench's files, below the digest of all of them."""
_NO_SNIFF = (b"x-content-type-options", b"nosniff")
_POLICY = b"cross-origin-resource-policy"
ISOLATED = (_NO_SNIFF, (_POLICY, b"same-origin"))
"""Headers of answers that pages of other origins may not embed."""
_EMBEDDED = (_NO_SNIFF, (_POLICY, b"cross-origin"))


def is_page_file(scope: Scope) -> bool:
    """Whether a request is for a file of the workbench, which holds no data."""
    return scope["method"] == "GET" and _PAGE_FILE.fullmatch(scope["path"]) is not None


def may_be_embedded(scope: Scope) -> bool:
    """Whether any page may load what is requested: files of the workbench, and results by their signed URLs."""
    return scope["method"] == "GET" and (is_page_file(scope) or scope["path"].startswith(f"{RESULTS_PATH}/"))


def embedding_headers(scope: Scope) -> tuple[tuple[bytes, bytes], ...]:
    """Returns the headers of every answer that tell browsers which pages may load it, and as what."""
    return _EMBEDDED if may_be_embedded(scope) else ISOLATED


def is_embedded_elsewhere(scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request without an Origin is from a foreign page, such as for an image or a script.

    A page's requests in the mode `cors` have an Origin; those without are of applications that switch its check off.
    """
    if headers.get(b"sec-fetch-site") not in _ELSEWHERE or headers.get(b"sec-fetch-mode") == b"cors":
        return False
    is_opened = headers.get(b"sec-fetch-mode") == b"navigate" and headers.get(b"sec-fetch-dest") == b"document"
    return not (may_be_embedded(scope) or (is_opened and scope["method"] == "GET"))


class CrossOrigin:
    """The CORS headers of one gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        cors = config.cors
        self._headers = CORSMiddleware(
            _no_app,
            # Used for allowed origins only.
            allow_origin_regex=".*",
            allow_methods=METHODS,
            allow_headers=(*REQUEST_HEADERS, *cors.allowed_headers),
            # Allowed pages on the internet may call a gateway in the caller's own network.
            allow_private_network=True,
            expose_headers=EXPOSED_HEADERS,
            max_age=cors.max_age_seconds,
        )

    def sender(self, headers: Mapping[bytes, bytes], send: Send) -> Send:
        """Returns a `send` that adds the CORS headers; `send` itself if the caller is not an allowed page."""
        origin = headers.get(_ORIGIN)
        if origin is None or not is_allowed_origin(origin, headers.get(b"host", b""), self._config):
            return send
        return partial(self._headers.send, send=send, request_headers=Headers(raw=[(_ORIGIN, origin)]))

    def preflight(self, scope: Scope) -> Response | None:
        """Returns the answer to a preflight request, which has no key; None: it is not a preflight.

        Raises PERMISSION_DENIED for a method or header that pages may not use.
        """
        if scope["method"] != "OPTIONS":
            return None
        headers = dict(scope["headers"])
        origin, host = headers.get(_ORIGIN, b""), headers.get(b"host", b"")
        if _WANTED_METHOD not in headers or not is_allowed_origin(origin, host, self._config):
            return None
        answer = self._headers.preflight_response(Headers(scope=scope))
        if answer.status_code >= 400:
            raise WeftError(
                Reason.PERMISSION_DENIED,
                f"pages may use {', '.join(METHODS)} and known headers only: allow others with "
                "`gateway.cors.allowed_headers`",
            )
        # `sender` adds the origin.
        answer.headers["vary"] = "Access-Control-Request-Method, Access-Control-Request-Headers"
        return answer


async def _no_app(_scope: Scope, _receive: Receive, _send: Send) -> None:
    """Is never called: the middleware only makes headers."""
    raise NotImplementedError
