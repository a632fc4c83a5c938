"""gRPC targets with their metadata, and host names in addresses and allow-lists."""

import re
from ipaddress import ip_address

from weft.kernel.errors.error_tree import invalid_field

RUNNER_KEY = "weft-runner"
"""Metadata key with the name of the runner that a relayed call is for."""

TLS_PREFIX = "tls:"
"""Prefix of `host:port`: TLS, wherever the host is."""

_SEPARATOR = "#runner="


def relayed_address(target: str, runner: str) -> str:
    """Returns the address of a runner that is linked to the relay at `target`."""
    return f"{target}{_SEPARATOR}{runner}"


def target_of(address: str) -> str:
    """Returns the gRPC target to connect to, with its `tls:` if it has one."""
    return address.partition(_SEPARATOR)[0]


def addresses_of(text: str) -> tuple[str, ...]:
    """Returns the comma-separated addresses of one service; at least one.

    If a part has no colon, it is not an address: the comma belongs to the path of a Unix socket.
    """
    parts = tuple(part for each in text.split(",") if (part := each.strip()))
    return parts if len(parts) > 1 and all(":" in part for part in parts) else (text.strip(),)


def metadata_of(address: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata for calls to this address; empty unless a relay forwards them."""
    _, separator, runner = address.partition(_SEPARATOR)
    return ((RUNNER_KEY, runner),) if separator else ()


def without_tls(address: str) -> str:
    """Returns the address in gRPC's form."""
    return address.removeprefix(TLS_PREFIX)


def needs_tls(address: str) -> bool:
    """Whether connections to an address are TLS."""
    return address.startswith(TLS_PREFIX) or not is_local(address)


def is_local(address: str) -> bool:
    """Whether only this machine can connect to a gRPC address."""
    bare = without_tls(address)
    host = bare.rpartition(":")[0].removeprefix("[").removesuffix("]")
    return bare.startswith("unix:") or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


_ANY_HOSTS = ("0.0.0.0", "::", "*", "")  # noqa: S104 - compared with, not bound to


def split_address(address: str, field: str) -> tuple[str, int]:
    """Splits `host:port`, with an IPv6 host in brackets. Raises INVALID_ARGUMENT naming `field`."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise invalid_field(field, "must be an address and a port, such as 0.0.0.0:7443")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_any_host(host: str) -> bool:
    """Whether a listener on this host listens on all addresses of the machine."""
    return host.removeprefix("[").removesuffix("]") in _ANY_HOSTS


def is_address(host: str) -> bool:
    """Whether a host is an IP address and not a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


MAX_HOST_CHARS = 253
MAX_PORT = 65_535

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
# The last label has a letter and is not hexadecimal: some resolvers read `127.1` and `0x7f.0x1` as addresses.
_HOST = re.compile(rf"(?:{_LABEL}\.)+(?=[a-z0-9-]*[a-z])(?!0x){_LABEL}")
_ANY_BELOW = "*."


def is_host_name(host: str) -> bool:
    """Whether it is a lower-case host name of at least two labels, and not an IP address."""
    return len(host) <= MAX_HOST_CHARS and _HOST.fullmatch(host) is not None


def is_host_pattern(pattern: str) -> bool:
    """Whether it is `name.example` or `*.name.example` (every name below it), either with `:port`."""
    name, separator, port = pattern.partition(":")
    if separator and not (port.isascii() and port.isdigit() and port[0] != "0" and int(port) <= MAX_PORT):
        return False
    return is_host_name(name.lower().removeprefix(_ANY_BELOW))


def fits_host_pattern(pattern: str, host: str, port: int, default_port: int) -> bool:
    """Whether `pattern` allows a lower-case host name and port; a pattern without `:port` allows the default port."""
    name, _, wanted = pattern.lower().partition(":")
    if port != (int(wanted) if wanted else default_port):
        return False
    return host.endswith(name[1:]) if name.startswith(_ANY_BELOW) else host == name
