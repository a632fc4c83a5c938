"""Who holds the other end of a connection, by what the kernel says of it."""

import asyncio
import os
import socket
from pathlib import Path

import pytest

from runner_svc.supervise import peer_process
from runner_svc.supervise.peer_process import ForeignPeerError, require_peer


async def _connected(address: str, port: int) -> asyncio.Transport:
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, address, port)
    return transport


def _listener(bound: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    return socket.create_server((bound, 0), family=family, dualstack_ipv6=bound == "::")


@pytest.mark.parametrize(("bound", "address"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "::1")])
@pytest.mark.parametrize("tells", [True, False])
async def test_connection_is_recognized_once_it_is_accepted(
    monkeypatch: pytest.MonkeyPatch, bound: str, address: str, tells: bool
) -> None:
    if not tells:  # another system, or a kernel without sock_diag
        monkeypatch.setattr(peer_process, "_inode_at", lambda *_: 0)
    with _listener(bound) as listener:
        transport = await _connected(address, listener.getsockname()[1])
        recognized = asyncio.create_task(require_peer(transport, lambda: [os.getpid()]))
        if tells:
            await asyncio.sleep(0)
            assert not recognized.done()
        with listener.accept()[0]:
            await asyncio.wait_for(recognized, 5.0)
            if tells:
                with pytest.raises(ForeignPeerError):
                    await require_peer(transport, list)
        transport.abort()


async def test_wait_ends_with_the_connection() -> None:
    with _listener("127.0.0.1") as listener:
        transport = await _connected("127.0.0.1", listener.getsockname()[1])
        waiting = asyncio.create_task(require_peer(transport, lambda: [os.getpid()]))
        await asyncio.sleep(0)
        transport.abort()
        await asyncio.wait_for(waiting, 5.0)
