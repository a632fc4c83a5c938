"""Connection limits: open connections in total and per address, and their maximums."""

import ipaddress
import resource
from collections import Counter
from dataclasses import replace

from gateway.config import ConnectionLimits
from weft.kernel.errors import WeftError
from weft.kernel.log import get_logger
from weft.kernel.reasons import Reason

_NETWORK_BITS = 64
"""Prefix length that counts as one IPv6 address: networks of this size are assigned to one household or host."""

log = get_logger("weft.gateway")


class ConnectionCounts:
    """Open connections of one server. Each `admit` is followed by one `release`."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._by_origin: Counter[str] = Counter()
        self._total = 0

    def admit(self, address: str) -> WeftError | None:
        """Count a connection; returns why it is refused, or None. `address`: the peer's, empty for a Unix socket."""
        self._total += 1
        origin = _origin(address)
        if origin:
            self._by_origin[origin] += 1
        if self._total > self._limits.max_connections:
            return WeftError(Reason.QUEUE_FULL, "too many connections")
        if self._by_origin[origin] > self._limits.max_connections_per_address:
            return WeftError(Reason.TOO_MANY_RESOURCES, "too many connections from this address")
        return None

    def release(self, address: str) -> None:
        """Count a connection as closed."""
        self._total -= 1
        origin = _origin(address)
        if origin:
            self._by_origin[origin] -= 1
            if not self._by_origin[origin]:
                del self._by_origin[origin]


def _origin(address: str) -> str:
    """Returns the key that an address is counted under; empty for addresses without a limit of their own."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is None:
            return "" if found.is_loopback else str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
        found = found.ipv4_mapped
    return "" if found.is_loopback else str(found)


def within_open_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Returns the limits, with at most half of the process's open-file limit as connections.

    The other half is for channels, logs and databases. Without files, accepting fails for every caller.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or limits.max_connections <= soft // 2:
        return limits
    room = max(1, soft // 2)
    log.warning("fewer connections than configured", configured=limits.max_connections, most=room, open_files=soft)
    return replace(limits, max_connections=room)
