"""Streaming chats over all gateways: what a client received, and how it ended, is written to a history file.

The clients run in the process of the run, which is never killed.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

import aiohttp

from tools.torture.checker import STREAM_PREFIX
from tools.torture.history import EventFile, Kind
from tools.torture.plan import DEMO_MODEL, Plan

MIN_TOKENS, MAX_STREAM_TOKENS = 5, 100
RETRY_SECONDS = 0.2
READ_SECONDS = 60.0
"""Maximum silence of a stream, beside that of a frozen gateway."""
MAX_NOTE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """A gateway of the mesh."""

    name: str
    url: str
    socket: Path | None = None
    """The Unix socket at which it serves HTTP too, if clients cannot connect to its address."""

    def session(self, timeout: aiohttp.ClientTimeout) -> aiohttp.ClientSession:
        """Returns a session for requests to it alone."""
        connector = None if self.socket is None else aiohttp.UnixConnector(str(self.socket))
        return aiohttp.ClientSession(timeout=timeout, connector=connector)


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
        pools = [*self._plan.steady_pools, *([DEMO_MODEL] if self._plan.serves_demo else [])]
        for gateway in self._gateways:
            async with gateway.session(aiohttp.ClientTimeout(total=READ_SECONDS)) as http:
                while not await _offers(http, gateway, pools):  # noqa: ASYNC110 - another process says so
                    await asyncio.sleep(RETRY_SECONDS)

    def start(self) -> None:
        """Starts the chats. Raises OSError if the history file cannot be opened."""
        if not self._gateways:
            return
        self._file = EventFile(self._path, "streams")
        pools = [self._plan.steady_pools] * self._plan.streams + [[DEMO_MODEL]] * self._plan.serves_demo
        self._tasks = [asyncio.create_task(self._chat_on(number, targets)) for number, targets in enumerate(pools)]

    async def stop(self) -> None:
        """Ends after the running chats. Raises the error of a client."""
        self._stopping.set()
        await asyncio.gather(*self._tasks)

    async def _chat_on(self, number: int, pools: Sequence[str]) -> None:
        random = Random(f"{self._plan.seed}/stream/{number}")  # noqa: S311 - the seed must decide it
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_SECONDS + self._plan.max_freeze_seconds)
        async with AsyncExitStack() as stack:
            sessions = {
                gateway.name: await stack.enter_async_context(gateway.session(timeout)) for gateway in self._gateways
            }
            while not self._stopping.is_set():
                gateway = random.choice(self._gateways)
                tokens = random.randint(MIN_TOKENS, MAX_STREAM_TOKENS)
                place = next(self._numbers)
                pool = pools[place % len(pools)]
                http = sessions[gateway.name]
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
        begun, received = time.time(), Received()

        def note(kind: Kind, why: str = "") -> None:
            self._file.write(
                kind,
                asked_at=begun,
                task=request_id,
                key=gateway.name,
                # What the demo model answers is not known, only that it ends.
                tokens=0 if pool == DEMO_MODEL else tokens,
                note=why[:MAX_NOTE_CHARACTERS],
                text=None if pool == DEMO_MODEL else received.text,
            )

        url, headers = f"{gateway.url}/v1/chat/completions", {"X-Request-Id": request_id}
        try:
            async with http.post(url, json=body, headers=headers) as response:
                if response.status != 200:
                    note(Kind.STREAM_FAILED, f"HTTP {response.status}: {await response.text()}")
                    return False
                await received.read(response)
        except aiohttp.ClientConnectorError:
            # The gateway is down, which clients detect before starting.
            return False
        except (aiohttp.ClientError, TimeoutError) as error:
            note(Kind.STREAM_BROKEN, f"{type(error).__name__}: {error}")
            return False
        if received.error:
            note(Kind.STREAM_FAILED, f"error event: {received.error}")
        elif received.is_done:
            note(Kind.STREAM_ENDED)
        else:
            note(Kind.STREAM_BROKEN, f"it ended without [DONE] after {len(received.text)} characters")
        return received.is_done


async def _offers(http: aiohttp.ClientSession, gateway: GatewayAddress, pools: Sequence[str]) -> bool:
    try:
        async with http.get(f"{gateway.url}/v1/models") as response:
            if response.status != 200:
                return False
            return set(pools) <= {model["id"] for model in (await response.json())["data"]}
    except aiohttp.ClientError:
        return False


@dataclass(slots=True)
class Received:
    """What a client has received of a stream so far."""

    text: str = ""
    error: str = ""
    """The error of its error event, as JSON; empty: none."""
    is_done: bool = False
    """Whether it ended with [DONE], and without an error event."""

    async def read(self, response: aiohttp.ClientResponse) -> None:
        """Reads a stream to its end. Raises aiohttp.ClientError and TimeoutError."""
        async for raw in response.content:
            line = raw.decode().strip()
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                self.is_done = not self.error
                continue
            event = json.loads(data)
            if "error" in event:
                self.error = json.dumps(event["error"])
            else:
                self.text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
