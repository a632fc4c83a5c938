"""Rules for connections that a process of the mesh opens to an address that others name.

They serve wakes, providers, attached servers, pulls and media. Nobody may name link-local addresses, which serve a
cloud's credentials, or the mesh's own ports, where a connection from this machine may count as its operator. Requests
may name public addresses only; those who may use any address (see `ANY_SOURCE`) and weft.yaml may also name private
ones. Callers connect to the addresses that were checked, so that a name cannot change between the check and its use.
"""

import os
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import psutil

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


_LINK_LOCAL_4 = (IPv4Network("169.254.0.0/16"), IPv4Network("168.63.129.16/32"), IPv4Network("100.100.100.200/32"))
_LINK_LOCAL_6 = (IPv6Network("fe80::/10"), IPv6Network("fd00:ec2::254/128"))
"""Link-local, and the metadata services of clouds at other addresses."""
AddressInfo = tuple[int | socket.AddressFamily, int | socket.SocketKind, int, str, tuple[Any, ...]]
"""An entry of `socket.getaddrinfo`; the last element begins with the address."""
MESH_PROCESS = "WEFT_MESH_PROCESS"
"""Environment variable of runners: the id of the process that serves the mesh and has started them."""
LISTENERS_SECONDS = 10
"""Maximum age of the known listeners of a process."""
Listener = tuple[str, int]
"""Address and port; an unspecified address means all of this machine."""


class ForbiddenAddressError(Exception):
    """An address that may not be named. Not an OSError, because HTTP clients report those as network errors."""


def listeners_of(process: int) -> Collection[Listener]:
    """Returns where a process and its children listen over TCP, as known within LISTENERS_SECONDS."""
    return _listeners_of(process, int(time.monotonic() / LISTENERS_SECONDS))


def own_listeners() -> Collection[Listener]:
    """Returns where the process that serves the mesh listens, if it has started this one."""
    parent = os.getppid()
    return listeners_of(parent) if os.environ.get(MESH_PROCESS) == str(parent) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outbound:
    """The addresses that a process connects to for others."""

    is_public_only: bool = False
    """Whether a request named the address."""
    own_listeners: Callable[[], Collection[Listener]] = own_listeners
    """Where the mesh itself listens on this machine."""

    def require(self, address: str, port: int) -> None:
        """Raises ForbiddenAddressError for a resolved address that may not be connected to. May block briefly."""
        refusal = public_refusal(address) if self.is_public_only else None
        if is_link_local(address):
            refusal = "is link-local"
        elif refusal is None and _is_one_of(self.own_listeners(), address, port):
            refusal = "is a port of the mesh itself"
        if refusal is not None:
            raise ForbiddenAddressError(refusal)

    def resolve(self, host: str, port: int) -> list[AddressInfo]:
        """Returns the addresses of a name that may be connected to. Blocks.

        Raises ForbiddenAddressError if there are only others, and OSError.
        """
        allowed: list[AddressInfo] = []
        refused: ForbiddenAddressError | None = None
        for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                self.require(str(info[4][0]), port)
            except ForbiddenAddressError as error:
                refused = error
            else:
                allowed.append(info)
        if refused is not None and not allowed:
            raise refused
        return allowed

    def open_socket(self, info: AddressInfo) -> socket.socket:
        """Returns an unconnected socket. Raises OSError for a forbidden address, so that the next one is tried."""
        try:
            self.require(str(info[4][0]), int(info[4][1]))
        except ForbiddenAddressError as refused:
            raise PermissionError(str(refused)) from None
        return socket.socket(info[0], info[1], info[2])


@lru_cache(maxsize=1)
def _listeners_of(process: int, _round: int) -> frozenset[Listener]:
    listeners = set[Listener]()
    with suppress(psutil.Error):
        parent = psutil.Process(process)
        # Its children are runners and proxies of the mesh; engines are children of runners.
        for each in (parent, *parent.children()):
            with suppress(psutil.Error):
                found = each.net_connections("tcp")
                listeners |= {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
    return frozenset(listeners)


def _is_one_of(listeners: Collection[Listener], address: str, port: int) -> bool:
    hosts = [_plain(host) for host, at in listeners if at == port]
    if not hosts:
        return False
    wanted = _plain(address)
    if wanted.is_unspecified:  # connects to loopback
        return any(host.is_unspecified or host.is_loopback for host in hosts)
    return wanted in hosts or (any(host.is_unspecified for host in hosts) and _is_of_this_machine(wanted))


def _plain(text: str) -> Address:
    address = ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _is_of_this_machine(address: Address) -> bool:
    if address.is_loopback:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((str(address), 0))
        return True
    return False


def is_link_local(text: str) -> bool:
    """Whether it is an address that no caller may name; false for names."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv4Address):
        return any(address in network for network in _LINK_LOCAL_4)
    inner = _inner_4(address) or ()
    return any(address in net for net in _LINK_LOCAL_6) or any(four in net for four in inner for net in _LINK_LOCAL_4)


def public_refusal(text: str) -> str | None:
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
