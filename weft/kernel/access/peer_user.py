"""Which user's process holds the other end of a TCP connection within this machine.

Linux reports the user of any connection; elsewhere, only the connections of one's own processes are visible.
"""

import os
import socket
import struct
import sys
from asyncio.trsock import TransportSocket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, ip_address

End = tuple[str, int]
"""Address and port."""
WEFT_GROUP = "weft"
"""Group whose members count as the user that runs weft, if weft itself runs with this group, as system units do."""
UNKNOWN_UID = 65_534
"""What the kernel reports for a user of another user namespace, such as that of a container."""


@dataclass(frozen=True, slots=True)
class TcpEnd:
    """One end of a connection on this machine."""

    inode: int
    uid: int


_QUERY = struct.Struct("=IHHIIBBBBIHH16s16sIII")
"""nlmsghdr, and inet_diag_req_v2 of linux/inet_diag.h; ports and addresses are in network order."""
_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, _ALL_STATES, _NO_COOKIE = 4, 20, 1, 0xFFFFFFFF, 0xFFFFFFFF
_STATE_AT, _UID_AT, _INODE_AT, _LISTENING = 17, 80, 84, 10
"""Offsets in an answer: nlmsghdr, and inet_diag_msg."""
_MAX_ANSWER_BYTES = 4096


def tcp_end(end: End, other: End) -> TcpEnd | None:
    """Returns the end at `end` of a connection on this machine, asking the kernel (about 0.03 ms).

    None: no process has accepted it, it is closed, or the kernel gives no answer.
    """
    if sys.platform != "linux":
        return None
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
        return None
    # Without such a connection the kernel returns an error, or the listener.
    if len(answer) < _INODE_AT + 4 or answer[_STATE_AT] == _LISTENING:
        return None
    uid, inode = (int.from_bytes(answer[at : at + 4], sys.byteorder) for at in (_UID_AT, _INODE_AT))
    # An end that no process holds any longer has neither: its user 0 is not root.
    return TcpEnd(inode, uid) if inode else None


def are_connected(pids: Iterable[int], peer: End, local: End) -> bool:
    """Whether one of the processes has the end at `peer`; blocks for milliseconds."""
    # Imported here: commands that only read need none of it.
    import psutil  # noqa: PLC0415

    for pid in pids:
        with suppress(psutil.Error):
            for found in psutil.Process(pid).net_connections("tcp"):
                if found.raddr and (_plain(found.laddr), _plain(found.raddr)) == (peer, local):
                    return True
    return False


def is_own_user(peer: End, local: End) -> bool:
    """Whether the user of this process holds the end at `peer`; blocks for milliseconds if the kernel gives no answer.

    `local` is this process's end. An unknown user counts as another one. Root does, too: a proxy may run as root.
    """
    if _kernel_reports():
        found = tcp_end(peer, local)
        return found is not None and _is_trusted(found.uid)
    return are_connected(_own_processes(), peer, local)


def is_connected(opened: socket.socket | TransportSocket) -> bool:
    """Whether a connection still has its two ports: it was not reset."""
    with suppress(OSError):
        opened.getpeername()
        return True
    return False


def _plain(end: End) -> End:
    """Returns an end with the IPv4 address that an IPv6 socket maps."""
    address = ip_address(end[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), end[1]


@lru_cache(maxsize=1)
def _kernel_reports() -> bool:
    """Whether the kernel reports the user of a connection: some sandboxes prevent it."""
    with (
        suppress(OSError),
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=1) as client,
    ):
        found = tcp_end(client.getsockname(), server.getsockname())
        return found is not None and found.inode == os.fstat(client.fileno()).st_ino
    return False


def _is_trusted(uid: int) -> bool:
    if uid == UNKNOWN_UID:
        return False
    return uid == os.geteuid() or uid in _group_members(os.getegid())


def _group_members(gid: int) -> Iterable[int]:
    """Returns the users of weft's group; none if this process runs with another one."""
    import grp  # noqa: PLC0415 - not on every system
    import pwd  # noqa: PLC0415 - as above

    with suppress(KeyError):
        group = grp.getgrnam(WEFT_GROUP)
        if group.gr_gid == gid:
            for name in group.gr_mem:
                with suppress(KeyError):
                    yield pwd.getpwnam(name).pw_uid


def _own_processes() -> Iterable[int]:
    import psutil  # noqa: PLC0415 - as above

    own = psutil.Process().username()
    return [each.pid for each in psutil.process_iter(["username"]) if each.info["username"] == own]
