"""Chats with a mesh over HTTP, as its callers send them."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from mesh_process import POOL

CHAT_PATH = "/v1/chat/completions"
DONE = "[DONE]"


def chat_body(model: str = POOL, **fields: Any) -> dict[str, Any]:
    """A chat of one message; `fields` are further members."""
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}


async def chat(
    url: str, model: str = POOL, *, headers: Mapping[str, str] | None = None, **fields: Any
) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a chat that is not streamed."""
    async with (
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post(CHAT_PATH, json=chat_body(model, **fields)) as answer,
    ):
        return answer.status, await answer.json()


async def answers(url: str, model: str = POOL, **fields: Any) -> bool:
    """Whether a chat is answered."""
    return (await chat(url, model, max_tokens=2, **fields))[0] == 200


async def streamed_chat(
    url: str,
    model: str = POOL,
    *,
    heard: list[Any] | None = None,
    begun: asyncio.Event | None = None,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> list[Any]:
    """The data of every event of a streamed chat, in order.

    Each is in `heard` as soon as it is there, and `begun` is set with the first content.
    """
    heard = [] if heard is None else heard
    async with (
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post(CHAT_PATH, json=chat_body(model, stream=True, **fields)) as answer,
    ):
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data:"):
                data = line[5:].strip().decode()
                heard.append(data if data == DONE else json.loads(data))
                if begun is not None and content_of(heard[-1:]):
                    begun.set()
    return heard


def content_of(heard: list[Any]) -> str:
    """The text in the events of a stream."""
    choices = [choice for event in heard if isinstance(event, dict) for choice in event.get("choices", ())]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
