"""Whether an engine's process holds the other end of a connection to it.

A port proves nothing: while the engine listens another process can listen there too (SO_REUSEPORT), and after the
engine has died any process can.
"""

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address

import psutil

QUICK_LOOKS = 10
"""Looks before the first pause: most engines accept within 0.2 ms."""
FIRST_PAUSE_SECONDS = 0.001
MAX_PAUSE_SECONDS = 0.1
End = tuple[str, int]
"""Address and port."""
VerifyPeer = Callable[[asyncio.BaseTransport], Awaitable[None]]
"""Returns once a connection's other end is known to be the right process. Raises ForeignPeerError."""


class ForeignPeerError(OSError):
    """Another process has accepted the connection."""


async def require_peer(transport: asyncio.BaseTransport, members: Callable[[], Iterable[int]]) -> None:
    """Returns once one of the processes `members` has accepted the connection, or it is closed.

    The caller limits the wait. Raises ForeignPeerError if another process has accepted it, which only Linux tells from
    a connection that none has accepted.
    """
    ends = [transport.get_extra_info(name) for name in ("peername", "sockname")]
    if None in ends:
        # Reset before asyncio asked for them: nothing that is written to it leaves.
        return
    peer, local = (end[:2] for end in ends)
    knows = bool(_inode_at(local, peer))
    looks, pause = 0, FIRST_PAUSE_SECONDS
    while not transport.is_closing():
        if knows and (inode := _inode_at(peer, local)):
            if not any(_holds(pid, inode) for pid in members()):
                raise ForeignPeerError
            return
        if not knows and await asyncio.to_thread(_are_connected, tuple(members()), peer, local):
            return
        looks += 1
        if looks <= QUICK_LOOKS:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)


_QUERY = struct.Struct("=IHHIIBBBBIHH16s16sIII")
"""nlmsghdr, and inet_diag_req_v2 of linux/inet_diag.h; ports and addresses are in network order."""
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _ALL_STATES, _NO_COOKIE = 4, 20, 1, 0xFFFFFFFF, 0xFFFFFFFF
_STATE_AT, _INODE_AT, _LISTENING = 17, 84, 10
"""Offsets in an answer: nlmsghdr, and inet_diag_msg."""
_MAX_ANSWER_BYTES = 4096


def _inode_at(end: End, other: End) -> int:
    """Returns the inode of the socket at one end of a connection on this machine, asking the kernel (about 0.03 ms).

    0: no process has accepted it, it is closed, or the kernel does not tell.
    """
    if sys.platform != "linux":
        return 0
    address, peer = ip_address(end[0]), ip_address(other[0])
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    query = _QUERY.pack(
        *(_QUERY.size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0),
        *(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES),
        *(socket.htons(end[1]), socket.htons(other[1]), address.packed, peer.packed, 0, _NO_COOKIE, _NO_COOKIE),
    )
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as kernel:
            kernel.send(query)
            answer = kernel.recv(_MAX_ANSWER_BYTES, socket.MSG_DONTWAIT)
    except OSError:
        return 0
    # Without such a connection the kernel returns an error, or the listener.
    if len(answer) < _INODE_AT + 4 or answer[_STATE_AT] == _LISTENING:
        return 0
    return int.from_bytes(answer[_INODE_AT : _INODE_AT + 4], sys.byteorder)


def _holds(pid: int, inode: int) -> bool:
    wanted, folder = f"socket:[{inode}]", f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - for each connection: paths would take ten times as long
            with suppress(OSError):
                if os.readlink(f"{folder}/{name}") == wanted:  # noqa: PTH115 - as above
                    return True
    return False


def _are_connected(pids: Iterable[int], peer: End, local: End) -> bool:
    """Whether one of the processes has the connection; blocks for milliseconds."""
    for pid in pids:
        with suppress(psutil.Error):
            for found in psutil.Process(pid).net_connections("tcp"):
                if found.raddr and (_plain(found.laddr), _plain(found.raddr)) == (peer, local):
                    return True
    return False


def _plain(end: End) -> End:
    """Returns an end with the IPv4 address that an IPv6 socket maps."""
    address = ip_address(end[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), end[1]
