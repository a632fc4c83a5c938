"""Slow bodies, and limits of their chunks."""

import asyncio

from gateway_script import RawResponse, head, serving

from gateway.gateway_config import ConnectionLimits, GatewayConfig

CHAT = "/v1/chat/completions"
GOOD = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
CHUNKED = {"Host": "localhost", "Content-Type": "application/json", "Transfer-Encoding": "chunked"}


def message_of(response: RawResponse) -> str:
    return str(response.error["message"])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def test_trickling_body_returns_408_early() -> None:
    config = GatewayConfig(port=0, body_timeout_seconds=60, connections=ConnectionLimits(body_grace_seconds=0.05))
    async with serving(config=config) as gateway:
        request = head(f"POST {CHAT} HTTP/1.1", {**CHUNKED, "Connection": "close"})
        response = await gateway.exchange(request + chunk(b"{"))
        assert response.status == 408
        assert "more slowly than 1024 bytes per second" in message_of(response)


async def test_body_time_limit_grows_with_the_bytes_received() -> None:
    limits = ConnectionLimits(body_grace_seconds=0.2, min_body_bytes_per_second=10)
    config = GatewayConfig(port=0, connections=limits)
    async with serving(config=config) as gateway, gateway.connection() as (reader, writer):
        # One second for ten bytes: the first chunk of 50 gives five. It comes within the grace, and the next after it.
        writer.write(head(f"POST {CHAT} HTTP/1.1", CHUNKED) + chunk(b" " * 50))
        await writer.drain()
        await asyncio.sleep(0.3)
        writer.write(chunk(GOOD) + b"0\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_client_that_sends_nothing_after_100_continue_gets_408() -> None:
    config = GatewayConfig(port=0, connections=ConnectionLimits(body_grace_seconds=0.05))
    headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": "60"}
    async with serving(config=config) as gateway, gateway.connection() as (reader, writer):
        writer.write(head(f"POST {CHAT} HTTP/1.1", {**headers, "Expect": "100-continue", "Connection": "close"}))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        assert RawResponse.parse(await reader.read()).status == 408


async def test_trailer_is_not_treated_as_a_header() -> None:
    async with serving() as gateway:
        for trailer in (b"X-Tenant-ID: other", b"X-Priority: system", b"Host: evil.example"):
            request = head(f"POST {CHAT} HTTP/1.1", {**CHUNKED, "X-Tenant-ID": "mine", "Connection": "close"})
            response = await gateway.exchange(request + chunk(GOOD) + b"0\r\n" + trailer + b"\r\n\r\n")
            assert response.status == 200
        assert {context.tenant for context in gateway.dispatcher.contexts} == {"mine"}


async def test_endless_chunk_extensions_return_431() -> None:
    async with serving() as gateway, gateway.connection() as (reader, writer):
        writer.write(head(f"POST {CHAT} HTTP/1.1", CHUNKED) + b"5;x=" + b"a" * 1_000_000)
        assert RawResponse.parse(await reader.read()).status == 431


async def test_many_small_chunks_do_not_count_as_overhead() -> None:
    body = GOOD[:-1] + b',"x":"' + b"y" * 15_000 + b'"}'
    request = head(f"POST {CHAT} HTTP/1.1", {**CHUNKED, "Connection": "close"})
    async with serving() as gateway:
        chunks = b"".join(chunk(body[index : index + 1]) for index in range(len(body)))
        assert len(chunks) - len(body) > 64_000
        assert (await gateway.exchange(request + chunks + b"0\r\n\r\n")).status == 200


async def test_next_request_on_a_connection_resets_the_counters() -> None:
    async with serving() as gateway, gateway.connection() as (reader, writer):
        for _ in range(3):
            writer.write(gateway.post(CHAT, GOOD[:-1] + b',"user":"' + b" " * 500 + b'"}' + b" " * 30_000))
            top = await reader.readuntil(b"\r\n\r\n")
            assert top.startswith(b"HTTP/1.1 200"), top
            length = int(top.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
