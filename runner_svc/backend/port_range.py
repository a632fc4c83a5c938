"""Ports that engines may listen on where others are closed."""

import socket
from collections.abc import Container
from dataclasses import dataclass

from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason

FIRST_PORT, LAST_PORT = 1024, 65_535
MAX_PORTS = 4096
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortRange:
    """From `first` to `last`, both included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


class EnginePorts:
    """Hands out the ports of a range to the engines of one runner, each to one of them."""

    def __init__(self, ports: PortRange) -> None:
        self._range = ports
        self._taken: set[int] = set()

    def take(self, avoid: Container[int] = ()) -> int:
        """A free port, to be given back. Blocks for microseconds per port that is not free.

        Somebody else may still come first: then the engine says that it cannot bind it. Raises CONNECT_FAILED when
        none is left.
        """
        for port in range(self._range.first, self._range.last + 1):
            if port not in self._taken and port not in avoid and _is_free(port):
                self._taken.add(port)
                return port
        raise WeftError(
            Reason.CONNECT_FAILED,
            f"no port of port_range {self._range} is free for another engine; unload a model or widen the range",
        )

    def give_back(self, port: int) -> None:
        """Its engine is gone. Idempotent."""
        self._taken.discard(port)


def parse_port_range(text: str, field: str = "port_range") -> PortRange:
    """A range as "41000-41099". Raises INVALID_ARGUMENT naming `field`."""
    first, dash, last = text.partition("-")
    if not (dash and first.isascii() and last.isascii() and first.isdigit() and last.isdigit()):
        raise invalid_field(field, "must be two ports joined by '-', such as 41000-41099")
    # Longer ones are no ports, and text of any length must not become a number.
    low, high = (int(number) if len(number) <= 5 else LAST_PORT + 1 for number in (first, last))
    if not FIRST_PORT <= low <= high <= LAST_PORT:
        raise invalid_field(field, f"must be from {FIRST_PORT} to {LAST_PORT}, the lower port first")
    if high - low >= MAX_PORTS:
        raise invalid_field(field, f"must be at most {MAX_PORTS} ports")
    return PortRange(first=low, last=high)


def _is_free(port: int) -> bool:
    """Whether it can be bound now, as the engine will: with SO_REUSEADDR, so that a port just left counts as free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
