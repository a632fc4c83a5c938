"""Addresses of services: a gRPC target, `tls:` before it, and behind it the name a relay knows a runner by.

One rule says what a connection is, at both ends: a Unix socket and loopback are plaintext, everything else is TLS.
`tls:` in front of an address asks for TLS on loopback too. It goes by how the address is written, not by what a name
resolves to, so that whoever listens and whoever connects come to the same answer.
"""

from ipaddress import ip_address

RUNNER_KEY = "weft-runner"
"""Metadata key that tells a relay for which of its runners a call is."""

TLS_PREFIX = "tls:"
"""Before `host:port`: TLS, wherever it is."""

_SEPARATOR = "#runner="


def relayed_address(target: str, runner: str) -> str:
    """The address of a runner that the relay at `target` holds the link of."""
    return f"{target}{_SEPARATOR}{runner}"


def target_of(address: str) -> str:
    """The gRPC target to connect to, with its `tls:` where it has one."""
    return address.partition(_SEPARATOR)[0]


def metadata_of(address: str) -> tuple[tuple[str, str], ...]:
    """Metadata that every call to this address carries; empty when the runner listens there itself."""
    _, separator, runner = address.partition(_SEPARATOR)
    return ((RUNNER_KEY, runner),) if separator else ()


def without_tls(address: str) -> str:
    """The address as gRPC takes it."""
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
    """Whether a host is this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
