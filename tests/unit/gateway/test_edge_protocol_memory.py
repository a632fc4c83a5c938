"""The memory that a connection holds for a head: twice its limit while it may go on, nothing once it is refused."""

import asyncio
import errno
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from uvicorn.server import ServerState

from gateway.gateway_config import MAX_HEADER_COUNT, ConnectionLimits
from gateway.http.protocol import EdgeProtocol, EdgeServerConfig

LIMITS = ConnectionLimits(linger_seconds=0.0)
LINE = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
ONE_READ_BYTES = 256 * 1024
"""The most that asyncio hands over at once."""
PIECE_BYTES = 100
OWN_BYTES = 32 * 1024
"""The refusal that is still to be sent, and what the first log line of a process leaves behind."""


class Peer(asyncio.Transport):
    """A transport that remembers what was written, and whether it is read."""

    def __init__(self, address: str = "192.0.2.1") -> None:
        super().__init__({"peername": (address, 4711)})
        self.written = b""
        self.is_read = True
        self.is_gone = False
        self.is_aborted = False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def write(self, data: Any) -> None:
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Its peer reads the refusal, unless it has gone."""
        if self.is_gone:
            raise OSError(errno.ENOTCONN, "not connected")

    def abort(self) -> None:
        self.is_aborted = True

    def is_closing(self) -> bool:
        return False


async def _app(_scope: Any, _receive: Callable[..., Any], _send: Callable[..., Any]) -> None:
    """Is not called: no head is complete."""


@pytest.fixture
async def protocol() -> AsyncIterator[EdgeProtocol]:
    config = EdgeServerConfig(_app, limits=LIMITS, on_refused=lambda _: None, log_config=None, lifespan="off")
    config.load()
    made = EdgeProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    made.connection_made(Peer())
    yield made
    made.connection_lost(ConnectionResetError())


@contextmanager
def _held() -> Iterator[Callable[[], int]]:
    """Yields a function that returns how many bytes more are held now."""
    gc.collect()
    # What only the garbage collector frees is held in practice.
    gc.disable()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield lambda: tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()


TOO_LARGE: Mapping[str, Callable[[], bytes]] = {
    "one header": lambda: LINE + b"X-A: " + b"a" * (ONE_READ_BYTES - 100),
    "few headers": lambda: LINE + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 2500) for n in range(MAX_HEADER_COUNT - 1)),
    "many headers": lambda: LINE + b"".join(b"X-%d: %b\r\n" % (n, b"a" * 2500) for n in range(MAX_HEADER_COUNT + 1)),
    "a path": lambda: b"GET /" + b"a" * (ONE_READ_BYTES - 100),
}


@pytest.mark.parametrize("head", TOO_LARGE.values(), ids=TOO_LARGE)
async def test_refused_head_is_not_held_while_its_connection_lingers(
    protocol: EdgeProtocol, head: Callable[[], bytes]
) -> None:
    with _held() as held:
        protocol.data_received(head())
        assert held() < OWN_BYTES
    assert protocol.transport.written.startswith(b"HTTP/1.1 431 "), "it was refused"  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, MAX_HEADER_COUNT - 1])
async def test_head_that_may_go_on_holds_no_more_than_twice_its_limit(protocol: EdgeProtocol, count: int) -> None:
    size = (LIMITS.max_header_bytes - len(LINE)) // count - 16
    with _held() as held:
        protocol.data_received(LINE)
        for number in range(count):
            protocol.data_received(b"X-%d: " % number)
            for _ in range(size // PIECE_BYTES):
                protocol.data_received(b"a" * PIECE_BYTES)
            protocol.data_received(b"\r\n")
        assert LIMITS.max_header_bytes // 2 < held() < 2 * LIMITS.max_header_bytes
    assert protocol.transport.written == b"", "it may go on"  # type: ignore[attr-defined]


async def test_refused_connection_whose_peer_has_gone_is_closed(protocol: EdgeProtocol) -> None:
    """Regression: the end of what is sent failed with ENOTCONN, and the connection stayed open for good."""
    peer = protocol.transport
    assert isinstance(peer, Peer)
    peer.is_gone = True
    protocol.data_received(b"no HTTP\r\n\r\n")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert peer.is_aborted
