"""Validation of external servers' addresses, and detection of private networks."""

import ipaddress
import re

from yarl import URL

from weft.kernel.errors.error_tree import invalid_field

_PRIVATE_NAMES = (
    ".lan",
    ".local",
    ".localdomain",
    ".localhost",
    ".home",
    ".home.arpa",
    ".internal",
    ".intranet",
    ".corp",
)
"""Suffixes of private names: conventional, or reserved by RFC 6762, RFC 8375 and ICANN (.internal)."""

_VERSION_PATH = "/v1"
_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")
"""Numbers that resolvers accept as an IPv4 address: 134744072 is 8.8.8.8."""


def is_private_host(host: str) -> bool:
    """Whether a host is clearly on a private network."""
    try:
        return not ipaddress.ip_address(host).is_global
    except ValueError:
        name = host.rstrip(".").lower()
        is_alone = "." not in name and _NUMBER.fullmatch(name) is None
        return is_alone or name.endswith(_PRIVATE_NAMES)


def base_url(text: str, field: str) -> str:
    """Returns a valid base URL. Raises INVALID_ARGUMENT; the message omits the URL, which may contain secrets."""
    if not is_http_url(text):
        raise invalid_field(field, "must be an http or https URL with a host")
    url = URL(text)
    if url.user is not None or url.password is not None:
        raise invalid_field(field, "must not contain credentials; set an environment variable in api_key_env")
    if url.raw_query_string or url.raw_fragment:
        raise invalid_field(field, "must end with its path, without a query and a fragment")
    return text


def server_root(url: str) -> str:
    """Returns a server's URL without a trailing /v1."""
    return url.rstrip("/").removesuffix(_VERSION_PATH).rstrip("/")


def require_known_location(url: str, *, remote: bool | None, field: str) -> None:
    """Raises INVALID_ARGUMENT naming `field` if `remote` is unset and the address does not decide it."""
    if remote is None and not is_private_host(URL(url).host or ""):
        raise invalid_field(
            field,
            "must be set, because the server's address is not in your own network: true if it is a "
            "remote provider (then only requests with allow_remote are sent there), else false",
        )


def is_loopback(host: str) -> bool:
    """Whether a host is the local machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_http_url(text: str) -> bool:
    """Whether a text is an http or https URL with a host."""
    try:
        url = URL(text)
    except ValueError:
        return False
    return url.scheme in ("http", "https") and bool(url.host)
