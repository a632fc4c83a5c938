"""A plain HTTP client for these tests: what was sent, byte for byte, and what it parses to."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from kit.fake_backend import run_fake_backend

from weft_testing.fake_backend.process import FakeBackendProcess

CHAT = "/v1/chat/completions"
COMPLETION = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def payloads(self) -> list[str]:
        """What follows "data: " in each event."""
        blocks = self.raw.decode().split("\n\n")
        return [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]

    @property
    def chunks(self) -> list[Any]:
        """The parsed events of a tidy stream, without [DONE]."""
        payloads = self.payloads
        assert payloads[-1] == "[DONE]"
        return [json.loads(payload) for payload in payloads[:-1]]

    @property
    def deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        return "".join(delta.get("content") or "" for delta in self.deltas)

    @property
    def finish_reasons(self) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


class Client:
    """Talks to one fake."""

    def __init__(self, session: aiohttp.ClientSession, backend: FakeBackendProcess) -> None:
        self.session = session
        self.backend = backend

    async def get(self, path: str, **headers: str) -> Reply:
        async with self.session.get(self.backend.base_url + path, headers=headers) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        async with self.session.post(self.backend.base_url + path, json=body, headers=headers) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def chat(self, content: str = "hello there", **fields: Any) -> Reply:
        return await self.post(CHAT, chat_body(content, **fields))

    async def stream(self, content: str = "hello there", **fields: Any) -> Reply:
        return await self.chat(content, stream=True, **fields)

    @asynccontextmanager
    async def open_stream(self, **fields: Any) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The response of a stream whose headers have arrived."""
        body = chat_body("hello there", stream=True, **fields)
        async with self.session.post(self.backend.base_url + CHAT, json=body) as response:
            yield response


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    """Poll until it is so; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        await asyncio.sleep(0.01)


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@asynccontextmanager
async def fake(*flags: str, **switches: Any) -> AsyncGenerator[Client]:
    """A fake of one's own, and a client for it."""
    timeout = aiohttp.ClientTimeout(total=20)
    async with run_fake_backend(*flags, **switches) as backend, aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(session, backend)
