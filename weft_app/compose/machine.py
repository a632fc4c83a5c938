"""The names and addresses at which other machines may reach this one."""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

import psutil

from weft.kernel.values.address import is_any_host

MAX_ADDRESSES = 64
_DOCUMENTATION = ("192.0.2.1", 9)
"""A documentation address: connecting a UDP socket to it sends nothing, but selects the default route's interface."""
_SPEAKS_FOR_CONTAINERS = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman")
"""Prefixes of container and VM interfaces, which other machines cannot reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Names and addresses of a machine."""

    names: tuple[str, ...]
    """Its host name and its mDNS name."""
    addresses: tuple[str, ...]
    """Addresses other than loopback and link-local, the likeliest one first."""

    @property
    def all(self) -> tuple[str, ...]:
        """Names and addresses."""
        return (*self.names, *self.addresses)


def this_machine() -> Machine:
    """Returns this machine's current names and addresses. Never raises: without a network there are no addresses."""
    host = socket.gethostname().lower()
    short = host.partition(".")[0]
    names = tuple(dict.fromkeys(name for name in (host, f"{short}.local") if _is_name(name)))
    return Machine(names=names, addresses=ordered_addresses(_interface_addresses(), _default_address()))


def reachable_name() -> str:
    """Returns the name, else the likeliest address, at which other machines reach this one.

    Names that neither DNS nor certificates take are left out, such as those with letters beyond ASCII.
    """
    return (*this_machine().all, "localhost")[0]


def local_url(url: str) -> str:
    """Returns a listener's URL for this machine, with loopback in place of all addresses."""
    parts = urlsplit(url)
    if not is_any_host(parts.hostname or ""):
        return url
    host = "[::1]" if parts.hostname == "::" else "127.0.0.1"
    return parts._replace(netloc=f"{host}:{parts.port}").geturl()


def network_urls(url: str) -> tuple[str, ...]:
    """Returns a listener's known URLs for other machines, the likeliest one first."""
    parts = urlsplit(url)
    if not is_any_host(parts.hostname or ""):
        return (url,)
    machine = this_machine()
    hosts = [f"[{each}]" if ":" in each else each for each in (*machine.addresses, *machine.names)]
    return tuple(parts._replace(netloc=f"{host}:{parts.port}").geturl() for host in hosts)


def ordered_addresses(found: Iterable[tuple[str, str]], default: str | None) -> tuple[str, ...]:
    """Sorts the addresses of (interface, address) pairs: the default route's first, then IPv4.

    Loopback and link-local addresses are removed; those of container bridges come last.
    """
    kept: dict[str, tuple[bool, bool, bool]] = {}
    for interface, text in found:
        address = _parsed(text)
        if address is None or address.is_loopback or address.is_link_local or address.is_unspecified:
            continue
        rank = (interface.startswith(_SPEAKS_FOR_CONTAINERS), str(address) != default, address.version != 4)
        kept.setdefault(str(address), rank)
    return tuple(sorted(kept, key=lambda address: kept[address])[:MAX_ADDRESSES])


def _interface_addresses() -> Iterable[tuple[str, str]]:
    try:
        interfaces, states = psutil.net_if_addrs(), psutil.net_if_stats()
    except OSError:
        return
    for name, addresses in interfaces.items():
        if name in states and not states[name].isup:
            continue
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                yield name, each.address


def _default_address() -> str | None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_DOCUMENTATION)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def certifiable(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names that a certificate may contain, with addresses in their usual form."""
    addresses = ((name, _parsed(name)) for name in names)
    return tuple(str(address) if address else name for name, address in addresses if address or _is_name(name))


def _is_name(name: str) -> bool:
    """Whether a name is a valid DNS name: some machine names are not."""
    labels = name.split(".")
    return len(name) <= 253 and all(
        0 < len(label) <= 63 and label.isascii() and label.replace("-", "").isalnum() and label.strip("-") == label
        for label in labels
    )
