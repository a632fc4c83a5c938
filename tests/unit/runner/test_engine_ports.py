"""Ports from a range: each free port goes to one engine, and the end of the range is an error; who listens."""

import asyncio
import os
import socket
import struct
from pathlib import Path

import pytest
from kit.failures import fails
from kit.presence import present

from runner_svc.backend.engine_process import EnginePorts, PortRange, parse_port_range
from runner_svc.runtimes.started_server import LISTENING
from runner_svc.supervise import peer_process
from runner_svc.supervise.peer_process import ForeignPeerError, require_peer
from weft.kernel.errors.reasons import Reason


def _listen(port: int = 0) -> socket.socket:
    taken = socket.socket()
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
    except OSError:
        taken.close()
        raise
    return taken


def _free_neighbours(count: int) -> int:
    for first in range(42_000, 60_000, count):
        try:
            for port in range(first, first + count):
                _listen(port).close()
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@pytest.mark.parametrize("text", ["41000-41099", "1024-1024", "65535-65535"])
def test_port_range_is_two_ports(text: str) -> None:
    assert str(parse_port_range(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "41000", "41000-", "-41000", "41099-41000", "80-90", "65000-65536", "1024-65535", "a-b", "1" * 5000 + "-2",
     "\u0664\u0661000-41000"],
)  # fmt: skip
def test_invalid_port_range_is_refused_by_name(text: str) -> None:
    with fails(field="runners.a.port_range"):
        parse_port_range(text, "runners.a.port_range")


def test_each_port_is_assigned_once_until_returned() -> None:
    first = _free_neighbours(3)
    ports = EnginePorts(PortRange(first=first, last=first + 2))
    assert [ports.take(), ports.take(), ports.take()] == [first, first + 1, first + 2]
    with fails(Reason.CONNECT_FAILED) as none_left:
        ports.take()
    assert f"{first}-{first + 2}" in none_left.value.message
    ports.give_back(first + 1)
    ports.give_back(first + 1)
    assert ports.take() == first + 1


def test_occupied_ports_are_skipped() -> None:
    first = _free_neighbours(3)
    with _listen(first), _listen(first + 1):
        assert EnginePorts(PortRange(first=first, last=first + 2)).take() == first + 2


def test_port_lost_to_another_process_is_not_retried() -> None:
    first = _free_neighbours(2)
    ports = EnginePorts(PortRange(first=first, last=first + 1))
    assert ports.take({first}) == first + 1


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("listening on http://127.0.0.1:41045", "41045"),
        ("0.00.766.016 I srv          init: listening on http://127.0.0.1:18099", "18099"),
        ("main: server is listening on http://127.0.0.1:8080 - starting the main loop", "8080"),
        ("main: HTTP server is listening, hostname: 127.0.0.1, port: 8081, http threads: 5", "8081"),
        ("listening on http://127.0.0.1:41045listening on http://127.0.0.1:41045", "41045"),
    ],
)
def test_port_is_found_in_the_output_of_every_server(line: str, port: str) -> None:
    found = present(LISTENING.search(line))
    assert port in found.groups()


def test_log_line_joined_to_the_port_is_not_parsed_as_another_port() -> None:
    """Observed: two writers on one pipe made 127.0.0.1:410450.00.766."""
    assert LISTENING.search("listening on http://127.0.0.1:410450.00.766.016 I srv") is None


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
        monkeypatch.setattr(peer_process, "tcp_end", lambda *_: None)
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


async def test_connection_that_was_reset_before_its_ends_were_read_is_not_waited_for() -> None:
    """Fault: the engine's figures ended with a TypeError, and with them the stop of a crashing engine."""
    with _listener("127.0.0.1") as listener, socket.socket() as caller:
        caller.connect(listener.getsockname())
        with listener.accept()[0] as accepted:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(asyncio.Protocol, sock=caller)
        assert transport.get_extra_info("peername") is None
        await require_peer(transport, lambda: [os.getpid()])
        transport.abort()
