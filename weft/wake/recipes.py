"""Wake recipes as values. See protos/weft/api/registry/v1/wake.proto."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

DEFAULT_MAX_WAIT_SECONDS = 60.0
MAX_WAIT_SECONDS = 3600.0
DEFAULT_METHOD = "POST"
DEFAULT_BROADCAST_ADDRESS = "255.255.255.255"
DEFAULT_WAKE_PORT = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRecipe:
    """One HTTP request; every 2xx is success."""

    url: str = field(repr=False)
    """May hold credentials, so it is never printed."""
    method: str = DEFAULT_METHOD
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecipe:
    """One program, started directly and never through a shell; exit code 0 is success."""

    argv: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeOnLanRecipe:
    """A magic packet to a sleeping network card."""

    mac_address: str
    broadcast_address: str = DEFAULT_BROADCAST_ADDRESS
    port: int = DEFAULT_WAKE_PORT


Recipe = HttpRecipe | CommandRecipe | WakeOnLanRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class WakePlan:
    """How a model is woken, and the timeout. At least one of `by_runner` and `by_mesh` is set."""

    by_runner: bool
    """Whether its runner wakes it on request."""
    by_mesh: Recipe | None = None
    """Recipe that a router runs to wake the runner's host."""
    max_wait_seconds: float = DEFAULT_MAX_WAIT_SECONDS
    """Maximum wait from the first step until the model admits requests."""


_MAC_ADDRESS = re.compile(r"[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5}")
_REPEATS = 16


def is_mac_address(text: str) -> bool:
    """Whether `text` is six pairs of hex digits joined by ':' or '-'."""
    return _MAC_ADDRESS.fullmatch(text) is not None


def magic_packet(mac_address: str) -> bytes:
    """Returns the packet: six 0xff bytes, then the address 16 times. Raises ValueError for an invalid address."""
    if not is_mac_address(mac_address):
        raise ValueError("not a hardware address")
    return b"\xff" * 6 + bytes.fromhex(mac_address.replace(":", "").replace("-", "")) * _REPEATS
