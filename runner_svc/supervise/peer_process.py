"""Whether an engine's process holds the other end of a connection to it.

A port proves nothing: while the engine listens another process can listen there too (SO_REUSEPORT), and after the
engine has died any process can.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

import psutil

FIRST_PAUSE_SECONDS = 0.001
MAX_PAUSE_SECONDS = 0.1
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_MAPPED = "0000000000000000FFFF0000"
"""The kernel's text for the prefix of IPv4 addresses of an IPv6 socket."""
_INODE_COLUMN = 9
VerifyPeer = Callable[[asyncio.BaseTransport], Awaitable[None]]
"""Returns once a connection's other end is known to be the right process. Raises ForeignPeerError."""


class ForeignPeerError(OSError):
    """Another process has accepted the connection."""


async def require_peer(transport: asyncio.BaseTransport, members: Callable[[], Iterable[int]]) -> None:
    """Returns once one of the processes `members` has accepted the connection, or it is closed.

    The caller limits the wait. Raises ForeignPeerError if another process has accepted it, which only Linux tells from
    a connection that none has accepted.
    """
    peer, local = (transport.get_extra_info(name)[:2] for name in ("peername", "sockname"))
    pause = FIRST_PAUSE_SECONDS
    while not transport.is_closing() and not await asyncio.to_thread(_has_accepted, tuple(members()), peer, local):
        await asyncio.sleep(pause)
        pause = min(pause * 2, MAX_PAUSE_SECONDS)


def _has_accepted(pids: Iterable[int], peer: tuple[str, int], local: tuple[str, int]) -> bool:
    """Whether one of the processes has accepted the connection from `local`; False: none has yet.

    Raises ForeignPeerError.
    """
    if sys.platform != "linux":
        return any(_is_among_connections(pid, peer, local) for pid in pids)
    if not (inode := _accepted_inode(peer, local)):
        return False
    if any(_holds(pid, inode) for pid in pids):
        return True
    raise ForeignPeerError


def _accepted_inode(peer: tuple[str, int], local: tuple[str, int]) -> int:
    """Returns the inode of the socket at the other end; 0: not accepted yet, or closed."""
    ends = f" {_text(peer)} {_text(local)} "
    mapped = f" {_MAPPED}{_text(peer)} {_MAPPED}{_text(local)} "
    for table in _TABLES:
        with suppress(FileNotFoundError), table.open(encoding="ascii") as lines:
            for line in lines:
                if ends in line or mapped in line:
                    return int(line.split()[_INODE_COLUMN])
    return 0


def _text(end: tuple[str, int]) -> str:
    """Returns an address and port as the kernel prints them: words of 4 bytes in the machine's order."""
    packed = ip_address(end[0]).packed
    words = (int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed), 4))
    return f"{''.join(f'{word:08X}' for word in words)}:{end[1]:04X}"


def _holds(pid: int, inode: int) -> bool:
    wanted = f"socket:[{inode}]"
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if str(descriptor.readlink()) == wanted:
                    return True
    return False


def _is_among_connections(pid: int, peer: tuple[str, int], local: tuple[str, int]) -> bool:
    with suppress(psutil.Error):
        for found in psutil.Process(pid).net_connections("tcp"):
            if found.raddr and (_plain(found.laddr), _plain(found.raddr)) == (peer, local):
                return True
    return False


def _plain(end: tuple[str, int]) -> tuple[str, int]:
    """Returns an end with an IPv4 address that an IPv6 socket has as itself."""
    address = ip_address(end[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), end[1]
