"""What is written for an answer: its head with the first bytes of its body, so that callers read them together."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from test_edge_protocol_memory import LIMITS, Peer
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from gateway.http import protocol
from gateway.http.protocol import EdgeProtocol, EdgeServerConfig

LARGE = b"a" * 100_000


class WritePeer(Peer):
    """Remembers each write, and its end."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = list[bytes]()

    @override
    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    @override
    def close(self) -> None:
        self.writes.append(b"closed")


async def _writes(
    parts: Sequence[bytes], *, length: int | None = None, request: str = "GET", more: str = ""
) -> list[bytes]:
    """What is written for an answer in these parts; a part None raises."""

    async def app(_scope: Any, _receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})
        if not parts:
            raise ValueError

    config = EdgeServerConfig(app, limits=LIMITS, on_refused=lambda _: None, log_config=None, interface="asgi3")
    config.load()
    protocol, peer = EdgeProtocol(config, ServerState(), {}, asyncio.get_running_loop()), WritePeer()
    protocol.connection_made(peer)
    protocol.data_received(f"{request} / HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())
    for _ in range(3):
        await asyncio.sleep(0)
    protocol.connection_lost(ConnectionResetError())
    return peer.writes


async def test_whole_answer_is_one_write() -> None:
    (found,) = await _writes([b"ok"], length=2)
    assert found.startswith(b"HTTP/1.1 200 ")
    assert found.endswith(b"content-length: 2\r\n\r\nok")


async def test_head_of_a_stream_is_written_with_its_first_part() -> None:
    first, *others = await _writes([b"one", b"two", b""])
    assert first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert others == [b"3\r\ntwo\r\n", b"0\r\n\r\n"]


async def test_large_body_is_not_copied_to_its_head() -> None:
    head, body = await _writes([LARGE], length=len(LARGE))
    assert head.endswith(b"\r\n\r\n")
    assert body == LARGE


CLOSE = "Connection: close\r\n"
ENDS: Mapping[str, Mapping[str, Any]] = {
    "answer to HEAD": {"parts": [b"ok"], "length": 2, "request": "HEAD"},
    "last answer to HEAD": {"parts": [b"ok"], "length": 2, "request": "HEAD", "more": CLOSE},
    "failure after the head": {"parts": [], "length": 2},
}


@pytest.mark.parametrize("given", ENDS.values(), ids=ENDS)
async def test_head_without_a_body_is_written_at_the_end(given: Mapping[str, Any]) -> None:
    head, *end = await _writes(**given)
    assert head.startswith(b"HTTP/1.1 200 ")
    assert head.endswith(b"\r\n\r\n")
    assert end == ([] if given["parts"] and "more" not in given else [b"closed"])


class Flow:
    """A connection that can be written to."""

    write_paused = False


HEADS: Mapping[str, Mapping[str, Any]] = {
    "of a body": {"headers": [(b"content-length", b"2"), (b"x-a", b"1, 2")]},
    "of a stream": {"headers": [(b"content-type", b"text/event-stream")]},
    "of the last answer": {"headers": [(b"content-length", b"2")], "keep_alive": False},
    "of two lengths": {"headers": [(b"content-length", b"2"), (b"content-length", b"3")]},
    "of an empty answer": {"status": 204},
    "of an unchanged page": {"status": 304, "headers": [(b"etag", b'"a"')]},
    "for HEAD": {"method": "HEAD", "headers": [(b"content-length", b"2")]},
    "without chunks": {"chunked": False},
    "without headers": {},
    "for uvicorn: capitals": {"headers": [(b"Content-Length", b"2")]},
    "for uvicorn: closed": {"headers": [(b"connection", b"close")]},
    "for uvicorn: chunks": {"headers": [(b"transfer-encoding", b"chunked")]},
    "refused: a value of two lines": {"headers": [(b"x-a", b"1\r\nx-b: 2")]},
    "refused: a name of two words": {"headers": [(b"x a", b"1")]},
    "refused: begun before": {"is_begun": True},
    "nothing: caller has left": {"has_left": True},
}


async def _begun(given: Mapping[str, Any], *, by_uvicorn: bool) -> tuple[object, ...]:
    """What is written for a head, and the state of the answer."""
    peer = WritePeer()
    options: dict[str, Any] = {
        **dict.fromkeys(("logger", "access_logger", "on_response")),
        "default_headers": [(b"date", b"now")],
        "message_event": asyncio.Event(),
        "flow": Flow(),
        "access_log": False,
        "expect_100_continue": True,
        "keep_alive": given.get("keep_alive", True),
    }
    cycle = RequestResponseCycle(scope={"method": given.get("method", "GET")}, transport=peer, **options)  # type: ignore[typeddict-item]
    cycle.chunked_encoding = given.get("chunked")
    cycle.response_started, cycle.disconnected = given.get("is_begun", False), given.get("has_left", False)
    message = {"type": "http.response.start", "status": given.get("status", 200), "headers": given.get("headers", [])}
    error, head = "", b"" if by_uvicorn else protocol._begin_response(cycle, message)
    if head:
        peer.write(head)
    else:
        try:
            await cycle.send(message)  # type: ignore[arg-type]
        except RuntimeError as refusal:
            error = str(refusal)
    state = (cycle.response_started, cycle.keep_alive, cycle.chunked_encoding, cycle.expected_content_length)
    return peer.writes, error, *state, cycle.waiting_for_100_continue


@pytest.mark.parametrize("given", HEADS.values(), ids=HEADS)
async def test_head_is_as_of_uvicorn(given: Mapping[str, Any]) -> None:
    assert await _begun(given, by_uvicorn=False) == await _begun(given, by_uvicorn=True)
