"""Whether an engine's process holds the other end of a connection to it.

A port proves nothing: while the engine listens another process can listen there too (SO_REUSEPORT), and after the
engine has died any process can.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from weft.kernel.access.peer_user import are_connected, tcp_end

QUICK_LOOKS = 10
"""Looks before the first pause: most engines accept within 0.2 ms."""
FIRST_PAUSE_SECONDS = 0.001
MAX_PAUSE_SECONDS = 0.1
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
    knows = tcp_end(local, peer) is not None
    looks, pause = 0, FIRST_PAUSE_SECONDS
    while not transport.is_closing():
        if knows and (end := tcp_end(peer, local)):
            if not any(_holds(pid, end.inode) for pid in members()):
                raise ForeignPeerError
            return
        if not knows and await asyncio.to_thread(are_connected, tuple(members()), peer, local):
            return
        looks += 1
        if looks <= QUICK_LOOKS:
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)


def _holds(pid: int, inode: int) -> bool:
    wanted, folder = f"socket:[{inode}]", f"/proc/{pid}/fd"
    with suppress(OSError):
        for name in os.listdir(folder):  # noqa: PTH208 - for each connection: paths would take ten times as long
            with suppress(OSError):
                if os.readlink(f"{folder}/{name}") == wanted:  # noqa: PTH115 - as above
                    return True
    return False
