"""Policy of media URLs: which may be fetched. Pure.

One parser serves both the check and the connection: `gateway.media.fetcher` connects only to the parts that
`require_allowed` returns. Text that two parsers could read differently (a backslash, white space, a user name, a number
as the host) is rejected before parsing.
"""

import re
from dataclasses import dataclass

from gateway.gateway_config import MediaConfig
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.address import MAX_PORT, fits_host_pattern, is_host_name

MAX_URL_CHARS = 2048
HTTPS_PORT = 443
HTTP_PORT = 80

# RFC 3986 without user information and fragment (which is never sent): scheme, host, port, path, query.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+)(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<target>(?:/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?(?:\?[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*)?)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaUrl:
    """The parts of a URL that may be fetched."""

    scheme: str
    """`https` or `http`."""
    host: str
    """A name in lower case; never a number."""
    port: int
    target: str
    """Path and query; begins with `/`."""


def require_allowed(url: str, field: str, config: MediaConfig) -> MediaUrl:
    """Returns the parts of `url`. Raises INVALID_ARGUMENT naming `field` if the operator does not allow it."""
    if not config.allowed_hosts:
        raise invalid_field(
            field,
            "must be a data: URL such as data:image/png;base64,...; this gateway fetches no addresses: the operator "
            "lists the hosts they may be fetched from in gateway.media.allowed_hosts",
        )
    parts = parse_url(url)
    if parts is None:
        raise invalid_field(
            field,
            "must be a data: URL, or an https:// address of printable ASCII with a host name, and without user, "
            f"fragment or backslash, of at most {MAX_URL_CHARS} characters",
        )
    if parts.scheme == "http" and not config.allow_plain_http:
        raise invalid_field(field, "must be an https:// address (gateway.media.allow_plain_http)")
    usual = HTTPS_PORT if parts.scheme == "https" else HTTP_PORT
    if not any(fits_host_pattern(pattern, parts.host, parts.port, usual) for pattern in config.allowed_hosts):
        raise invalid_field(field, "has a host that the operator does not allow (gateway.media.allowed_hosts)")
    return parts


def parse_url(url: str) -> MediaUrl | None:
    """Returns the parts of an http or https URL; None for anything ambiguous."""
    if len(url) > MAX_URL_CHARS:
        return None
    match = _URL.fullmatch(url)
    if match is None:
        return None
    scheme, host = match["scheme"].lower(), match["host"].lower()
    port = int(match["port"] or (HTTPS_PORT if scheme == "https" else HTTP_PORT))
    if not is_host_name(host) or port > MAX_PORT or _has_wrong_escape(match["target"]):
        return None
    target = match["target"]
    return MediaUrl(scheme=scheme, host=host, port=port, target=target if target.startswith("/") else f"/{target}")


def _has_wrong_escape(target: str) -> bool:
    return re.search(r"%(?![0-9A-Fa-f]{2})|%(?:00|0[aAdD]|5[cC])", target) is not None
