"""Unrequested bytes of a server reach no other caller."""

import asyncio

import pytest
from kit.engines import CALL, chat
from kit.failures import fails
from kit.hostile_engine.server import Connection, Request, hostile_server, tidy
from kit.upstream import upstream

from runner_svc.openai_upstream.client import OpenAiHttp
from weft.kernel.errors.reasons import Reason

STOLEN = "the answer of another"
HALF_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-"


async def _ask(http: OpenAiHttp, words: str) -> str:
    async with asyncio.timeout(10.0):
        frames = [frame async for frame in http.generate(chat(words), CALL)]
    return "".join(event.delta.text for frame in frames for event in frame)


async def _until_the_client_has_read() -> None:
    """Return once the event loop, which is the client's too, has looked for bytes to read several times."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("extra", [tidy(STOLEN), HALF_HEAD, b"HTTP/1.1 204 No Content\r\n\r\n" * 3])
@pytest.mark.parametrize("when", ["in the same segment", "at once", "while idle", "unread when the next one comes"])
async def test_bytes_after_an_answer_never_reach_the_next_caller(extra: bytes, when: str) -> None:
    async def handle(connection: Connection, request: Request) -> None:
        own = tidy(f"for {request.words}")
        if when == "in the same segment":
            await connection.send(own + extra)
        else:
            await connection.send(own)
            if when == "at once":
                await connection.send(extra)

    async with hostile_server(handle) as server, upstream(server.url) as http:
        for number in range(4):
            assert await _ask(http, str(number)) == f"for {number}"
            last = server.connections[-1]
            if when == "while idle":
                await last.send(extra)
                await _until_the_client_has_read()
            elif when == "unread when the next one comes":
                last.writer.write(extra)  # in the kernel by now, and the client has had no turn to read it


async def test_answer_followed_by_garbage_is_a_protocol_error_of_that_request_only() -> None:
    async def handle(connection: Connection, request: Request) -> None:
        await connection.send(tidy(f"for {request.words}") + (b"\x00" if request.words == "bad" else b""))

    async with hostile_server(handle) as server, upstream(server.url) as http:
        with fails(Reason.BACKEND_PROTOCOL_ERROR):
            await _ask(http, "bad")
        assert await _ask(http, "good") == "for good"
