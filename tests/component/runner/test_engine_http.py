"""The HTTP client of engines: its limits, its connections, and each way in which an answer can fail."""

import asyncio
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import trustme
from kit.hostile_engine.server import (
    LAST_CHUNK,
    STREAM_HEAD,
    Connection,
    HostileServer,
    Request,
    answer,
    chunked,
    hostile_server,
)
from kit.waiting import until

from runner_svc.engine_http import answer as limits
from runner_svc.engine_http import client as client_module
from runner_svc.engine_http.answer import MAX_BUFFERED_BYTES, MAX_HEAD_BYTES, MAX_HEADERS, Answer
from runner_svc.engine_http.client import EngineClient
from runner_svc.engine_http.faults import (
    BadHeadError,
    BrokenAnswerError,
    ClosedClientError,
    HttpFaultError,
    UnansweredError,
    Unconnected,
    UnconnectedError,
)
from weft_testing.free_port import free_port

HEAD = b"HTTP/1.1 200 OK\r\n"
FLOOD_BYTES = 32 * 1024 * 1024
Handler = Callable[[Connection, Request], Awaitable[None]]


def _client(url: str, **changes: Any) -> EngineClient:
    settings: dict[str, Any] = {"headers": {"User-Agent": "weft"}, "connect_seconds": 5.0, "idle_seconds": 3.0}
    return EngineClient(url, **settings | changes)


@asynccontextmanager
async def _over(handler: Handler, **changes: Any) -> AsyncIterator[tuple[HostileServer, EngineClient]]:
    async with hostile_server(handler) as server:
        client = _client(server.url, **changes)
        try:
            async with asyncio.timeout(20.0):
                yield server, client
        finally:
            client.close()


async def _ask(client: EngineClient, path: str = "/x", body: bytes = b"{}") -> tuple[Answer, bytes]:
    got = await client.send("POST", path, {}, body)
    try:
        return got, b"".join([part async for part in got.parts()])
    finally:
        got.release()


@asynccontextmanager
async def _serving(reply: bytes, heads: list[bytes], place: Path | None = None, **settings: Any) -> AsyncIterator[int]:
    """Yields the port of a server that answers each request with the same bytes; 0: it listens on a Unix socket."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                heads.append(head)
                await reader.readexactly(2)  # the body
                writer.write(reply)

    if place is None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0, **settings)
    else:
        server = await asyncio.start_unix_server(serve, place)
    try:
        yield 0 if place else server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


def _writes(*pieces: bytes, ends: bool = False) -> Handler:
    """A server that answers with these bytes, each in a segment of its own, and perhaps closes."""

    async def handle(connection: Connection, _: Request) -> None:
        for piece in pieces:
            await connection.send(piece)
            await asyncio.sleep(0.001)
        if ends:
            await connection.close()

    return handle


@pytest.mark.parametrize(
    "pieces",
    [
        (answer(b"hello"),),
        tuple(bytes([byte]) for byte in answer(b"hello")),
        (STREAM_HEAD + chunked(b"he"), chunked(b"llo") + b"0\r\nTrailer: x\r\n\r\n"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + answer(b"hello"),),
        (answer(b"hello").replace(b"\r\nContent-Length", b"\nContent-Length"),),
    ],
    ids=["whole", "byte by byte", "chunks and a trailer", "after informational ones", "a line without CR"],
)
async def test_response_is_parsed_at_any_chunk_boundary_and_its_connection_reused(pieces: tuple[bytes, ...]) -> None:
    async with _over(_writes(*pieces)) as (server, client):
        for _ in range(3):
            got, body = await _ask(client)
            assert (got.status, body) == (200, b"hello")
        assert server.opened == 1


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"\r\nhel", b"lo"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",),
        (answer(b"hello", extra="Connection: close\r\n"),),
        (HEAD + b"Transfer-Encoding: gzip\r\n\r\nhello",),
    ],
    ids=["without length", "of HTTP/1.0", "and says so", "in an unknown coding"],
)
async def test_response_ended_by_connection_close_is_complete_and_the_connection_not_reused(
    pieces: tuple[bytes, ...],
) -> None:
    async with _over(_writes(*pieces, ends=True)) as (server, client):
        for _ in range(2):
            assert (await _ask(client))[1] == b"hello"
        assert server.opened == 2


async def test_status_without_a_body_is_read_without_one() -> None:
    async with _over(_writes(b"HTTP/1.1 204 No Content\r\n\r\n")) as (server, client):
        for _ in range(2):
            got, body = await _ask(client)
            assert (got.status, body, server.opened) == (204, b"", 1)


FAULTS: dict[str, tuple[tuple[bytes, ...], bool, type[HttpFaultError]]] = {
    "closed at once": ((), True, UnansweredError),
    "half a head": ((HEAD + b"Content-Ty",), True, BadHeadError),
    "garbage": ((b"\x16\x03\x01 nothing\r\n\r\n",), False, BadHeadError),
    "another protocol": ((b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",), False, BadHeadError),
    "two lengths": ((HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",), False, BadHeadError),
    "a length and chunks": (
        (HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",),
        False,
        BadHeadError,
    ),
    "closed in mid-length": ((HEAD + b"Content-Length: 9\r\n\r\nhello",), True, BrokenAnswerError),
    "closed in mid-chunk": ((STREAM_HEAD + b"9\r\nhello",), True, BrokenAnswerError),
    "closed between chunks": ((STREAM_HEAD + chunked(b"hello"),), True, BrokenAnswerError),
    "closed in the trailers": ((STREAM_HEAD + chunked(b"hello") + b"0\r\nX: ",), True, BrokenAnswerError),
    "a chunk of no length": ((STREAM_HEAD + chunked(b"hello"), b"zz\r\n"), False, BrokenAnswerError),
    "a header too long": ((HEAD + b"X-Long: " + b"x" * 20_000 + b"\r\n\r\n",), False, BadHeadError),
    "too many headers": ((HEAD + b"X-A: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",), False, BadHeadError),
    "a head without end": ((HEAD + b"X: ", *[b"y" * 8_000] * (MAX_HEAD_BYTES // 8_000 + 2)), False, BadHeadError),
    "informational ones without end": ((b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 200,), False, BadHeadError),
    "trailers without end": (
        (STREAM_HEAD + chunked(b"a") + b"0\r\nX: ", *[b"y" * 8_000] * (MAX_HEAD_BYTES // 8_000 + 2)),
        False,
        BrokenAnswerError,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_malformed_response_raises_a_typed_error_immediately_and_closes_the_connection(name: str) -> None:
    pieces, ends, fault = FAULTS[name]
    async with _over(_writes(*pieces, ends=ends)) as (server, client):
        with pytest.raises(fault):
            await _ask(client)
        await asyncio.wait(server.tasks)  # the server has seen the end of the connection
        assert len(server.requests) == 1


async def test_response_heads_within_the_limits_are_accepted() -> None:
    """The negative control of the limits: one header less, one byte less."""
    long = b"X: " + b"y" * (limits.MAX_HEADER_BYTES - 1) + b"\r\n"
    for head in (
        HEAD + long + b"Content-Length: 0\r\n\r\n",
        HEAD + b"A: b\r\n" * (MAX_HEADERS - 1) + b"Content-Length: 0\r\n\r\n",
    ):
        async with _over(_writes(head)) as (_, client):
            assert (await _ask(client))[0].status == 200


async def test_data_before_a_connection_loss_is_read_before_its_error() -> None:
    async with _over(_writes(STREAM_HEAD + chunked(b"hello"), ends=True)) as (server, client):
        got = await client.send("POST", "/x", {}, b"{}")
        await asyncio.wait(server.tasks)
        await asyncio.sleep(0.05)  # the client has seen the end as well
        assert await got.read() == b"hello"
        with pytest.raises(BrokenAnswerError):
            await got.read()
        got.release()


async def test_connection_reset_mid_response_is_an_error_with_any_framing() -> None:
    async def handle(connection: Connection, _: Request) -> None:
        await connection.send(HEAD + b"\r\nhello")
        await asyncio.sleep(0.05)
        sock = connection.writer.get_extra_info("socket")
        sock.setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER of no time: a reset
        connection.reset()

    async with _over(handle) as (_, client):
        with pytest.raises(BrokenAnswerError):
            await _ask(client)


async def test_cancelled_request_closes_its_connection_immediately() -> None:
    async def handle(connection: Connection, request: Request) -> None:
        if request.path == "/begun":
            await connection.send(STREAM_HEAD + chunked(b"hello"))
        await connection.reader.read()  # until the client closes

    async with _over(handle) as (server, client):
        for number, path in enumerate(("/silent", "/begun")):
            server.asked.clear()
            asking = asyncio.create_task(_ask(client, path))
            await server.asked.wait()
            await asyncio.sleep(0.02)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await server.tasks[number]
        assert server.opened == 2


async def test_flooding_server_is_throttled_by_backpressure() -> None:
    sent: list[int] = []

    async def handle(connection: Connection, _: Request) -> None:
        await connection.send(STREAM_HEAD)
        piece = chunked(b"x" * 65_536)
        while sum(sent) < FLOOD_BYTES:
            await connection.send(piece)
            sent.append(65_536)
        await connection.send(LAST_CHUNK)

    async with _over(handle) as (_, client):
        got = await client.send("POST", "/x", {}, b"{}")
        before = -1
        while sum(sent) != before:
            before = sum(sent)
            await asyncio.sleep(0.2)
        held = len(await got.read())
        assert MAX_BUFFERED_BYTES < held <= MAX_BUFFERED_BYTES + 1024 * 1024
        assert sum(sent) < FLOOD_BYTES
        rest = sum([len(part) async for part in got.parts()])
        assert held + rest == FLOOD_BYTES
        got.release()


async def test_idle_connection_closes_after_its_timeout_and_an_active_one_does_not() -> None:
    async def handle(connection: Connection, request: Request) -> None:
        await connection.send(STREAM_HEAD if request.path == "/long" else answer(b"a"))

    async with _over(handle, idle_seconds=0.2) as (server, client):
        used = await client.send("POST", "/long", {}, b"{}")
        await _ask(client)
        assert server.opened == 2
        await server.tasks[1]
        assert not server.tasks[0].done()
        used.release()
        await server.tasks[0]


async def test_idle_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_IDLE_CONNECTIONS", 2)
    goes_on = asyncio.Event()

    async def handle(connection: Connection, _: Request) -> None:
        await goes_on.wait()
        await connection.send(answer(b"a"))

    async with _over(handle) as (server, client):
        asking = [asyncio.create_task(_ask(client)) for _ in range(5)]
        await until(lambda: len(server.requests) == 5)
        goes_on.set()
        await asyncio.gather(*asking)
        await asyncio.wait(server.tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.1)
        assert sum(not task.done() for task in server.tasks) == 2


async def test_close_ends_open_responses_and_later_requests_with_a_closed_client_error() -> None:
    async def handle(connection: Connection, request: Request) -> None:
        await connection.send(answer(b"a") if request.path == "/x" else STREAM_HEAD)

    async with _over(handle) as (server, client):
        got = await client.send("POST", "/open", {}, b"{}")
        await _ask(client)
        reading = asyncio.create_task(got.read())
        await asyncio.sleep(0)
        client.close()
        client.close()
        with pytest.raises(ClosedClientError):
            await reading
        with pytest.raises(ClosedClientError):
            await _ask(client)
        await asyncio.wait(server.tasks)


async def test_double_release_of_a_response_does_not_affect_another() -> None:
    async with _over(_writes(answer(b"a"))) as (server, client):
        first, _ = await _ask(client)
        second = await client.send("POST", "/x", {}, b"{}")
        first.release()
        assert await second.read() == b"a"
        second.release()
        assert server.opened == 1


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\rb", "a\0b"])
async def test_header_injection_is_rejected(value: str) -> None:
    async with _over(_writes(answer(b"a"))) as (server, client):
        with pytest.raises(ValueError, match="line break"):
            await client.send("POST", "/x", {"X-Request-Id": value}, b"{}")
        assert not server.requests
        with pytest.raises(ValueError, match="line break"):
            _client(server.url, headers={"Authorization": value})
        await _ask(client)


async def test_request_works_over_a_unix_socket(tmp_path: Path) -> None:
    heads: list[bytes] = []
    async with _serving(answer(b"hello"), heads, tmp_path / "s.sock"):
        client = _client("http://engine.invalid/base/", socket_path=str(tmp_path / "s.sock"))
        assert (await _ask(client))[1] == b"hello"
        client.close()
    lines = heads[0].split(b"\r\n")
    assert lines[0] == b"POST /base/x HTTP/1.1"
    assert {b"Host: engine.invalid", b"Content-Length: 2", b"User-Agent: weft"} <= set(lines)
    with pytest.raises(UnconnectedError):
        await _client("http://engine.invalid", socket_path=str(tmp_path / "none.sock")).send("GET", "/x", {})


async def test_tls_accepts_a_trusted_certificate_and_rejects_an_untrusted_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    heads: list[bytes] = []
    async with _serving(answer(b"hello"), heads, ssl=context) as port:
        with pytest.raises(UnconnectedError) as refused:
            await _ask(_client(f"https://localhost:{port}"))
        assert refused.value.why is Unconnected.UNTRUSTED
        assert not heads
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        client = _client(f"https://localhost:{port}")
        for _ in range(2):
            assert (await _ask(client))[1] == b"hello"
        client.close()


async def test_each_connection_failure_has_its_reason() -> None:
    with pytest.raises(UnconnectedError) as unknown:
        await _client("http://no-such-host.invalid:1").send("GET", "/x", {})
    with pytest.raises(UnconnectedError) as refused:
        await _client(f"http://127.0.0.1:{free_port()}").send("GET", "/x", {})
    assert (unknown.value.why, refused.value.why) == (Unconnected.UNKNOWN_NAME, Unconnected.REFUSED)


async def test_server_that_accepts_no_connection_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(4):  # the kernel's queue of connections that nobody accepts
            waiting = stack.enter_context(closing(socket.socket()))
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        with pytest.raises(UnconnectedError) as late:
            await _client(f"http://127.0.0.1:{full.getsockname()[1]}", connect_seconds=0.2).send("GET", "/x", {})
    assert late.value.why is Unconnected.TIMEOUT


async def test_url_credentials_are_sent_unless_there_is_a_key() -> None:
    seen: list[bytes] = []
    keys: tuple[dict[str, str], ...] = ({}, {"Authorization": "Bearer k"})
    async with _serving(answer(b""), seen) as port:
        for headers in keys:
            client = _client(f"http://ann:secret@127.0.0.1:{port}", headers=headers)
            await _ask(client)
            client.close()
    assert b"Authorization: Basic YW5uOnNlY3JldA==\r\n" in seen[0]
    assert b"Authorization: Bearer k\r\n" in seen[1]
    assert all(b"ann" not in head and head.count(b"Authorization") == 1 for head in seen)


async def test_nothing_is_left_after_a_request_ends() -> None:
    async with _over(_writes(answer(b"hello"))) as (server, client):
        await _ask(client)
        gc.collect(0)
        gc.disable()
        try:
            for _ in range(20):
                await _ask(client)
            # All that was made since, and is left: nothing has moved on to an older generation.
            assert sum(isinstance(each, Answer) for each in gc.get_objects(generation=0)) == 0
        finally:
            gc.enable()
        # Both ends are in this process, and with them what other tests have left open.
        port = urlsplit(server.url).port
        open_ones = psutil.Process().net_connections(kind="tcp")
        ours = [each for each in open_ones if port in (each.laddr[1], *each.raddr[1:])]
        assert len(ours) <= 3  # the listener and one connection
