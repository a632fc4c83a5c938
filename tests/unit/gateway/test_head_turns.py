"""The order in which connections are read: without an accepted head, one at a time, and others between."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, cast

import pytest
from test_edge_protocol_memory import Peer
from uvicorn.server import ServerState

from gateway.gateway_config import MAX_HEADER_COUNT, ConnectionLimits
from gateway.http import head_turns
from gateway.http.protocol import EdgeProtocol, EdgeServerConfig

LIMITS = ConnectionLimits()
FLOOD = 20
FEW_TURNS = 3
"""Within which a request is answered."""
LINE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
GOOD = LINE + b"\r\n"
REFUSED: Mapping[str, bytes] = {
    "too large": LINE + b"X-A: " + b"a" * 4 * LIMITS.max_header_bytes,
    "too many": LINE + b"".join(b"X-%d: a\r\n" % number for number in range(MAX_HEADER_COUNT + 1)),
    "invalid": b"nonsense\r\n\r\n",
}


async def answer_ok(_scope: Any, _receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


class Edge:
    """A server's connections, without sockets."""

    def __init__(self) -> None:
        self.refused = list[int]()
        self._config = EdgeServerConfig(answer_ok, limits=LIMITS, on_refused=self.refused.append, log_config=None)
        self._config.load()
        self.turns = self._config.turns
        self._open = list[EdgeProtocol]()

    def connection(self, address: str = "192.0.2.1") -> EdgeProtocol:
        made = EdgeProtocol(self._config, ServerState(), {}, asyncio.get_running_loop())
        made.connection_made(Peer(address))
        self._open.append(made)
        return made

    def lose(self, connection: EdgeProtocol) -> None:
        self._open.remove(connection)
        connection.connection_lost(ConnectionResetError())

    def close(self) -> None:
        for each in list(self._open):
            self.lose(each)


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    made = Edge()
    yield made
    made.close()


async def _next_turn() -> None:
    for _ in range(head_turns.TURNS):
        await asyncio.sleep(0)


def _peer(connection: EdgeProtocol) -> Peer:
    return cast("Peer", connection.transport)


async def _accepted(edge: Edge) -> EdgeProtocol:
    """A connection that is kept after its first answer."""
    connection = edge.connection()
    connection.data_received(GOOD)
    for _ in range(FEW_TURNS):
        await asyncio.sleep(0)
    assert _peer(connection).written.startswith(b"HTTP/1.1 200")
    _peer(connection).written = b""
    return connection


@pytest.mark.parametrize("head", REFUSED.values(), ids=REFUSED)
async def test_heads_that_arrive_together_are_refused_one_per_turn(edge: Edge, head: bytes) -> None:
    for _ in range(FLOOD):
        edge.connection().data_received(head)
    for turn in range(1, FLOOD + 1):
        assert len(edge.refused) == turn
        await _next_turn()
    assert len(edge.refused) == FLOOD


async def test_request_of_an_accepted_connection_does_not_wait_for_a_flood(edge: Edge) -> None:
    caller = await _accepted(edge)
    for _ in range(FLOOD):
        edge.connection().data_received(REFUSED["too large"])
    caller.data_received(GOOD)
    await asyncio.sleep(0)
    assert _peer(caller).written.startswith(b"HTTP/1.1 200")
    assert len(edge.refused) < FLOOD // 4


async def test_first_requests_are_answered_in_the_order_of_their_arrival(edge: Edge) -> None:
    callers = [edge.connection() for _ in range(FLOOD)]
    for caller in callers:
        caller.data_received(GOOD)
    answered = list[EdgeProtocol]()
    while len(answered) < FLOOD:
        await asyncio.sleep(0)
        answered += [each for each in callers if _peer(each).written and each not in answered]
    assert answered == callers


async def test_first_request_of_an_address_waits_for_one_head_of_each_other_address(edge: Edge) -> None:
    for attacker in ["192.0.2.1", "192.0.2.2"] * FLOOD:
        edge.connection(attacker).data_received(REFUSED["too large"])
    caller = edge.connection("192.0.2.3")
    caller.data_received(GOOD)
    for _ in range(2 + FEW_TURNS):
        await _next_turn()
    assert _peer(caller).written.startswith(b"HTTP/1.1 200")


async def test_head_that_waits_is_not_read_further_and_holds_no_more_than_its_limit(edge: Edge) -> None:
    edge.connection().data_received(GOOD)
    waiting = edge.connection()
    waiting.data_received(REFUSED["too large"])
    assert not _peer(waiting).is_read
    assert len(cast("bytes", waiting._waiting)) == LIMITS.max_header_bytes + 1
    await _next_turn()
    assert _peer(waiting).is_read
    assert _peer(waiting).written.startswith(b"HTTP/1.1 431")


async def test_rest_of_a_body_after_a_head_in_the_same_segment_is_kept_while_it_waits(edge: Edge) -> None:
    edge.connection().data_received(GOOD)
    waiting = edge.connection()
    body = b"a" * 2 * LIMITS.max_header_bytes
    waiting.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    await _next_turn()
    assert bytes(waiting.cycle.body) == body


async def test_input_after_a_refusal_is_dropped_one_connection_per_turn(edge: Edge) -> None:
    refused = [edge.connection() for _ in range(3)]
    for each in refused:
        each.data_received(REFUSED["invalid"])
        await _next_turn()
    for each in refused:
        each.data_received(b"a" * 1000)
    for reading in (1, 2, 3):
        assert [_peer(each).is_read for each in refused] == [True] * reading + [False] * (3 - reading)
        await _next_turn()


async def test_connection_that_closes_while_it_waits_is_skipped(edge: Edge) -> None:
    edge.connection().data_received(GOOD)
    lost, other = edge.connection(), edge.connection()
    for each in (lost, other):
        each.data_received(REFUSED["invalid"])
    edge.lose(lost)
    for _ in range(2):
        await _next_turn()
    assert edge.refused == [400]


async def test_requests_that_wait_are_accepted_when_the_server_stops(edge: Edge) -> None:
    callers = [edge.connection() for _ in range(FLOOD)]
    for caller in callers[:-1]:
        caller.data_received(GOOD)
    edge.turns.end()
    callers[-1].data_received(GOOD)
    for _ in range(FEW_TURNS):
        await asyncio.sleep(0)
    assert all(_peer(each).written for each in callers)


async def test_bytes_that_wait_are_limited(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_turns, "MAX_WAITING_BYTES", 2 * LIMITS.max_header_bytes + 2)
    for _ in range(5):
        edge.connection().data_received(REFUSED["too large"])
    assert edge.refused == [431] * 3


@pytest.mark.parametrize(("pieces", "timers"), [((GOOD,), 0), ((LINE, b"\r\n"), 1), ((b"\r\n", LINE, b"\r\n"), 1)])
async def test_only_later_heads_that_arrive_in_pieces_have_a_timer(
    edge: Edge, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...], timers: int
) -> None:
    connection, began = edge.connection(), list[float]()
    connection.data_received(GOOD)
    await asyncio.sleep(0)
    call_later = connection.loop.call_later

    def note(seconds: float, *call: Any) -> asyncio.TimerHandle:
        began.append(seconds)
        return call_later(seconds, *call)

    monkeypatch.setattr(connection.loop, "call_later", note)
    for piece in pieces:
        connection.data_received(piece)
    assert began.count(LIMITS.header_timeout_seconds) == timers
