"""A plain HTTP client for these tests."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kit.fake_backend import run_fake_backend

from weft_testing.fake_backend.process import FakeBackendProcess

CHAT = "/v1/chat/completions"


class Client:
    """Talks to one fake."""

    def __init__(self, session: aiohttp.ClientSession, backend: FakeBackendProcess) -> None:
        self.session = session
        self.backend = backend

    async def get(self, path: str) -> aiohttp.ClientResponse:
        async with self.session.get(self.backend.base_url + path) as response:
            await response.read()
            return response

    async def chat(self, *, stream: bool = False) -> aiohttp.ClientResponse:
        body = chat_body("hello there", stream=stream)
        async with self.session.post(self.backend.base_url + CHAT, json=body) as response:
            await response.read()
            return response

    @asynccontextmanager
    async def open_stream(self, **fields: Any) -> AsyncGenerator[aiohttp.ClientResponse]:
        """The response of a stream whose headers have arrived."""
        body = chat_body("hello there", stream=True, **fields)
        async with self.session.post(self.backend.base_url + CHAT, json=body) as response:
            yield response


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


@asynccontextmanager
async def fake(*flags: str, **switches: Any) -> AsyncGenerator[Client]:
    """A fake of one's own, and a client for it."""
    timeout = aiohttp.ClientTimeout(total=20)
    async with run_fake_backend(*flags, **switches) as backend, aiohttp.ClientSession(timeout=timeout) as session:
        yield Client(session, backend)
