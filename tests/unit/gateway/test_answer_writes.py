"""What is written for a complete answer: its head with its body, so that callers read both at once."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from test_edge_protocol_memory import LIMITS, Peer
from typing_extensions import override
from uvicorn.server import ServerState

from gateway.http.protocol import WHOLE_KEY, EdgeProtocol, EdgeServerConfig


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


CALL = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def _written(*, whole: bool, call: str = CALL, body: bytes = b"ok", **headers: str) -> tuple[list[bytes], str]:
    """What is written for an answer and then for another one, and the error of the first."""
    refusals = list[str]()

    async def app(_scope: Any, _receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        own = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        length = (b"content-length", str(len(body)).encode())
        try:
            head = {"type": "http.response.start", "status": 200, "headers": [length, *own]}
            await send({**head, WHOLE_KEY: True} if whole else head)
            await send({"type": "http.response.body", "body": body})
        except RuntimeError as error:
            refusals.append(str(error))

    config = EdgeServerConfig(
        app, limits=LIMITS, on_refused=lambda _: None, log_config=None, interface="asgi3", date_header=False
    )
    config.load()
    protocol, peer = EdgeProtocol(config, ServerState(), {}, asyncio.get_running_loop()), WritePeer()
    protocol.connection_made(peer)
    protocol.data_received((call + CALL).encode())
    for _ in range(6):
        await asyncio.sleep(0)
    protocol.connection_lost(ConnectionResetError())
    return peer.writes, "".join(refusals)


async def test_whole_answer_is_one_write() -> None:
    (first, second), _ = await _written(whole=True, x_a="1, 2")
    assert first == second
    assert first.startswith(b"HTTP/1.1 200 ")
    assert first.endswith(b"content-length: 2\r\nx-a: 1, 2\r\n\r\nok")


async def test_large_body_is_not_copied_to_its_head() -> None:
    written, _ = await _written(whole=True, body=b"a" * 100_000)
    assert list(map(len, written))[1::2] == [100_000, 100_000]


GIVEN: Mapping[str, Mapping[str, Any]] = {
    "usual": {},
    "without a body": {"body": b""},
    "to HEAD": {"call": CALL.replace("GET", "HEAD")},
    "the last one": {"call": CALL.replace("Host", "Connection: close\r\nHost")},
    "without chunks": {"call": CALL.replace("1.1", "1.0")},
    "with capitals": {"X_A": "1"},
    "closed by the app": {"connection": "close"},
    "with two lengths": {"content_length": "3"},
    "in chunks": {"transfer_encoding": "chunked"},
    "with a value of two lines": {"x_a": "1\r\nx-b: 2"},
    "with a name of two words": {"x a": "1"},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
async def test_whole_answer_is_as_of_uvicorn(given: Mapping[str, Any]) -> None:
    (found, refusal), (expected, expected_refusal) = [await _written(whole=whole, **given) for whole in (True, False)]
    assert (b"".join(found), refusal) == (b"".join(expected), expected_refusal)
