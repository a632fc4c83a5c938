"""Policy of media URLs: which may be fetched. Pure.

One parser serves both the check and the connection: `gateway.media.fetcher` connects only to the parts that
`require_allowed` returns. Text that two parsers could read differently (a backslash, white space, a user name, a number
as the host) is rejected before parsing.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from gateway.config import MediaConfig
from weft.kernel.address import MAX_PORT, fits_host_pattern, is_host_name
from weft.kernel.errors import invalid_field

MAX_URL_CHARS = 2048
HTTPS_PORT = 443
HTTP_PORT = 80

# RFC 3986 without user information and fragment (which is never sent): scheme, host, port, path, query.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+)(?::(?P<port>[1-9][0-9]{0,4}))?"
    r"(?P<target>(?:/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)?(?:\?[A-Za-z0-9._~!$&'()*+,;=:@%/?-]*)?)",
    re.IGNORECASE,
)

Address = IPv4Address | IPv6Address

# Rejected in addition to `is_global`, which differs between Python versions and admits some of these.
_REFUSED_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
        # Azure's metadata service, which is not link-local.
        "168.63.129.16/32",
    )
)
_REFUSED_6 = tuple(
    IPv6Network(text)
    for text in (
        "::/96",
        "64:ff9b:1::/48",
        "100::/64",
        "100:0:0:1::/64",
        "2001:2::/48",
        "2001:10::/28",
        "2001:20::/28",
        "2001:db8::/32",
        "2620:4f:8000::/48",
        "3fff::/20",
        "5f00::/16",
        "fc00::/7",
        "fe80::/9",
        "ff00::/8",
    )
)
_NAT64 = ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ip_network("2000::/3")
_LOW_32_BITS = 0xFFFFFFFF


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


def address_refusal(text: str) -> str | None:
    """Returns why a resolved address is refused; None: it is public. An embedded IPv4 address alone decides."""
    try:
        address = ip_address(text)
    except ValueError:
        return "is not an address"
    if isinstance(address, IPv4Address):
        return None if _is_public_4(address) else "is not public"
    if address.scope_id is not None:
        return "is not public"
    inner = _inner_4(address)
    if inner is not None:
        return None if all(map(_is_public_4, inner)) else "is not public"
    return None if _is_public_6(address) else "is not public"


def _is_public_4(address: IPv4Address) -> bool:
    return address.is_global and not any(address in network for network in _REFUSED_4)


def _is_public_6(address: IPv6Address) -> bool:
    return address.is_global and address in _GLOBAL_UNICAST and not any(address in net for net in _REFUSED_6)


def _inner_4(address: IPv6Address) -> tuple[IPv4Address, ...] | None:
    """Returns the IPv4 addresses embedded in an IPv6 address: mapped, NAT64, 6to4, Teredo (server and client)."""
    if address.ipv4_mapped is not None:
        return (address.ipv4_mapped,)
    if address in _NAT64:
        return (IPv4Address(int(address) & _LOW_32_BITS),)
    if address.sixtofour is not None:
        return (address.sixtofour,)
    return address.teredo


def _has_wrong_escape(target: str) -> bool:
    return re.search(r"%(?![0-9A-Fa-f]{2})|%(?:00|0[aAdD]|5[cC])", target) is not None
