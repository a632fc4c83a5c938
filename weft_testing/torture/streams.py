"""Streaming chats over all gateways: each is read to its end, and its result is written to a history file.

Only a killed gateway may break streams. The clients run in the process of the run, which is never killed.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import aiohttp

from weft_testing.torture.checker import STREAM_PREFIX
from weft_testing.torture.history import EventFile, Kind, expected_text
from weft_testing.torture.plan import Plan

MIN_TOKENS, MAX_STREAM_TOKENS = 5, 100
RETRY_SECONDS = 0.2
READ_SECONDS = 60.0
"""Maximum silence of a stream."""


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """A gateway of the mesh."""

    name: str
    url: str


class Streams:
    """Clients of all gateways. `start` starts their chats, `stop` waits for the running ones."""

    def __init__(self, plan: Plan, gateways: Sequence[GatewayAddress], file: Path) -> None:
        self._plan = plan
        self._gateways = gateways
        self._path = file
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = count()

    async def until_served(self) -> None:
        """Waits until every gateway offers all pools."""
        async with aiohttp.ClientSession() as http:
            for gateway in self._gateways:
                while not await _offers(http, gateway, self._plan.steady_pools):  # noqa: ASYNC110 - another process says so
                    await asyncio.sleep(RETRY_SECONDS)

    def start(self) -> None:
        """Starts the chats. Raises OSError if the history file cannot be opened."""
        if not self._gateways:
            return
        self._file = EventFile(self._path, "streams")
        self._tasks = [asyncio.create_task(self._chat_on(number)) for number in range(self._plan.streams)]

    async def stop(self) -> None:
        """Ends after the running chats. Raises the error of a client."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _chat_on(self, number: int) -> None:
        random = Random(f"{self._plan.seed}/stream/{number}")  # noqa: S311 - the seed must decide it
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while not self._stopping.is_set():
                gateway = random.choice(self._gateways)
                tokens = random.randint(MIN_TOKENS, MAX_STREAM_TOKENS)
                place = next(self._numbers)
                pool = self._plan.steady_pools[place % len(self._plan.steady_pools)]
                if not await self._stream(http, gateway, pool, f"{STREAM_PREFIX}{place}", tokens):
                    await asyncio.sleep(RETRY_SECONDS)

    async def _stream(
        self, http: aiohttp.ClientSession, gateway: GatewayAddress, pool: str, request_id: str, tokens: int
    ) -> bool:
        """Reads a stream and records how it ended; returns whether it was complete."""
        body = {
            "model": pool,
            "messages": [{"role": "user", "content": request_id}],
            "max_tokens": tokens,
            "stream": True,
        }
        begun = time.time()

        def note(kind: Kind, why: str = "") -> None:
            self._file.write(kind, asked_at=begun, task=request_id, key=gateway.name, tokens=tokens, note=why[:300])

        url, headers = f"{gateway.url}/v1/chat/completions", {"X-Request-Id": request_id}
        try:
            async with http.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    note(Kind.STREAM_BROKEN, f"HTTP {response.status}: {await response.text()}")
                    return False
                wrong = await _wrong_with(response, tokens)
        except aiohttp.ClientConnectorError:
            # The gateway is down, which clients detect before starting.
            return False
        except (aiohttp.ClientError, TimeoutError) as error:
            note(Kind.STREAM_BROKEN, f"{type(error).__name__}: {error}")
            return False
        note(Kind.STREAM_BROKEN if wrong else Kind.STREAM_ENDED, wrong)
        return not wrong


async def _offers(http: aiohttp.ClientSession, gateway: GatewayAddress, pools: Sequence[str]) -> bool:
    try:
        async with http.get(f"{gateway.url}/v1/models") as response:
            if response.status != 200:
                return False
            return set(pools) <= {model["id"] for model in (await response.json())["data"]}
    except aiohttp.ClientError:
        return False


async def _wrong_with(response: aiohttp.ClientResponse, tokens: int) -> str:
    """Returns what is wrong with a stream; empty: the answer is complete."""
    text, is_done = "", False
    async for raw in response.content:
        line = raw.decode().strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            return f"error event: {json.dumps(event['error'])}"
        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if not is_done:
        return f"it ended without [DONE] after {len(text)} characters"
    if text != expected_text(tokens):
        return f"{tokens} tokens were asked for: {text[:200]!r}"
    return ""
