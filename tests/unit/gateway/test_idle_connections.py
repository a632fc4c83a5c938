"""Idle connections: closed `idle_seconds` after their last answer, with one timer for many requests."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from test_edge_protocol_memory import Peer
from test_head_turns import GOOD, LIMITS, LINE, answer_ok
from typing_extensions import override
from uvicorn.server import ServerState

from gateway.http.protocol import EdgeProtocol, EdgeServerConfig


class Clock:
    """The running loop, with timers on a clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers = list[asyncio.TimerHandle]()

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio.get_running_loop(), name)

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        self.timers.append(asyncio.TimerHandle(self.now + seconds, callback, (), asyncio.get_running_loop()))
        return self.timers[-1]

    def turn_to(self, now: float) -> None:
        self.now = now
        for timer in [each for each in self.timers if each.when() <= now]:
            self.timers.remove(timer)
            if not timer.cancelled():
                timer._run()


class ClosingPeer(Peer):
    """Remembers whether it was closed."""

    is_closed = False
    unread = 0

    @override
    def get_write_buffer_size(self) -> int:
        return self.unread

    @override
    def close(self) -> None:
        self.is_closed = True


class Connection:
    """One connection and its clock."""

    def __init__(self, app: Any = answer_ok) -> None:
        config = EdgeServerConfig(app, limits=LIMITS, on_refused=lambda _: None, log_config=None)
        config.load()
        self.clock, self.peer = Clock(), ClosingPeer()
        self.protocol = EdgeProtocol(config, ServerState(), {}, self.clock)  # type: ignore[arg-type]
        self.protocol.connection_made(self.peer)

    async def ask(self, at: float) -> None:
        """A request and its answer, at a time."""
        self.clock.turn_to(at)
        self.protocol.data_received(GOOD)
        for _ in range(3):
            await asyncio.sleep(0)
        assert self.protocol.is_idle


@pytest.fixture
async def connection() -> Connection:
    return Connection()


async def test_idle_connection_is_closed_after_its_last_answer(connection: Connection) -> None:
    for at in (0.0, 60.0, 70.0):
        await connection.ask(at)
    for at in (LIMITS.idle_seconds, 70.0 + LIMITS.idle_seconds - 0.1):
        connection.clock.turn_to(at)
        assert not connection.peer.is_closed
    connection.clock.turn_to(70.0 + LIMITS.idle_seconds)
    assert connection.peer.is_closed
    assert not connection.peer.is_aborted


async def test_idle_connection_whose_answer_is_not_read_is_aborted(connection: Connection) -> None:
    await connection.ask(0.0)
    connection.peer.unread = 1
    connection.clock.turn_to(LIMITS.idle_seconds)
    assert connection.peer.is_aborted


async def test_begun_head_has_its_own_time(connection: Connection) -> None:
    await connection.ask(0.0)
    connection.clock.turn_to(LIMITS.idle_seconds - 1)
    connection.protocol.data_received(LINE)
    connection.clock.turn_to(LIMITS.idle_seconds - 1 + LIMITS.header_timeout_seconds - 0.1)
    assert not connection.peer.is_closed
    assert b" 408 " not in connection.peer.written
    connection.clock.turn_to(LIMITS.idle_seconds - 1 + LIMITS.header_timeout_seconds)
    assert b" 408 " in connection.peer.written


async def test_requests_of_a_connection_set_one_timer(connection: Connection) -> None:
    await connection.ask(0.0)
    timers = len(connection.clock.timers)
    for at in range(1, 10):
        await connection.ask(at)
    assert len(connection.clock.timers) == timers
    connection.protocol.connection_lost(None)
    assert all(each.cancelled() for each in connection.clock.timers)


async def test_head_of_a_stream_is_sent_before_its_first_bytes() -> None:
    """It waited for them, which may come much later."""
    ends = asyncio.Event()

    async def stream(_scope: Any, _receive: Any, send: Callable[..., Any]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await ends.wait()
        await send({"type": "http.response.body", "body": b"late"})

    connection = Connection(stream)
    connection.protocol.data_received(GOOD)
    for _ in range(3):
        await asyncio.sleep(0)
    assert connection.peer.written.startswith(b"HTTP/1.1 200 ")
    assert connection.peer.written.endswith(b"\r\n\r\n")
    ends.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert b"late" in connection.peer.written
