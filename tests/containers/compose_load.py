"""Streams and durable tasks of callers of deploy/compose, and their history for the checker of tortures."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from ssl import SSLContext
from types import TracebackType
from typing import Any, Self

import aiohttp

from tools.torture.checker import STREAM_PREFIX
from tools.torture.history import Event, EventFile, KeptTask, Kind, read_events

MODEL = "smollm2-135m"
TASKS = "/api/v1/inference-tasks"
STATES = {"pending": 1, "running": 2, "completed": 3, "failed": 4, "cancelled": 5}
STREAMS = 4
STREAM_TOKENS, TASK_TOKENS = 16, 4
"""Few: the demo model answers one after the other, and a busy machine must not run into the timeout of its queue."""
TASK_PAUSE_SECONDS = 1.0
RETRY_SECONDS = 0.2
AWAY_SECONDS = 0.5
"""Pause between two marks in the history of a runner that is away; less than the checker's tolerance."""
READ_SECONDS = 60.0
EDGE = "edge"
"""Stands for the way of every stream in the history: a kill of something on it is written as one of this."""


class Load:
    """Callers for the length of the block, or until `stop`."""

    def __init__(self, url: str, key: str, trust: SSLContext, file: Path, name: str) -> None:
        """`trust`: the certificates that the edge may show. `name` begins the idempotency key of each task."""
        self.name = name
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}
        self._trust = trust
        self._path = file
        self._file = EventFile(file, "callers")
        self._stopping = asyncio.Event()
        self._numbers = count()

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_SECONDS)
        self._http = aiohttp.ClientSession(
            self._url, headers=self._headers, timeout=timeout, connector=aiohttp.TCPConnector(ssl=self._trust)
        )
        self._callers = [asyncio.create_task(self._stream_on()) for _ in range(STREAMS)]
        self._callers.append(asyncio.create_task(self._submit_on()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
        await self._http.close()
        self._file.close()

    async def stop(self) -> None:
        """Lets what is under way end."""
        self._stopping.set()
        await asyncio.gather(*self._callers)

    def note_kill(self) -> None:
        """Writes that something on the way of the streams is about to be killed."""
        self._file.write(Kind.KILLED, key=EDGE)

    @asynccontextmanager
    async def without_runner(self) -> AsyncIterator[None]:
        """For the length of the block there is no runner: a stream that began meanwhile may end without one."""

        async def note() -> None:
            while True:
                self.note_kill()
                await asyncio.sleep(AWAY_SECONDS)

        noting = asyncio.create_task(note())
        try:
            yield
        finally:
            noting.cancel()

    def events(self, *kinds: Kind) -> list[Event]:
        """The events until now, of all kinds or of some."""
        return [event for event in read_events(self._path) if not kinds or event.kind in kinds]

    async def until(self, kind: Kind, number: int, seconds: float) -> None:
        """Waits for so many further events of a kind."""
        wanted = len(self.events(kind)) + number
        async with asyncio.timeout(seconds):
            while len(self.events(kind)) < wanted:  # noqa: ASYNC110 - the load writes a file
                await asyncio.sleep(RETRY_SECONDS)

    async def _stream_on(self) -> None:
        while not self._stopping.is_set():
            name = f"{STREAM_PREFIX}{self.name}-{next(self._numbers)}"
            asked_at = time.time()
            try:
                wrong = await self._stream()
            except aiohttp.ClientConnectorError:
                # The edge is away, as its callers find out before they have begun.
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except (aiohttp.ClientError, TimeoutError) as error:
                wrong = f"{type(error).__name__}: {error}"
            kind = Kind.STREAM_BROKEN if wrong else Kind.STREAM_ENDED
            self._file.write(kind, asked_at=asked_at, task=name, key=EDGE, tokens=STREAM_TOKENS, note=wrong[:300])
            if wrong:
                await asyncio.sleep(RETRY_SECONDS)

    async def _stream(self) -> str:
        """Reads one stream, and returns what is wrong with it; empty: it is whole."""
        body = {**_body(STREAM_TOKENS), "model": MODEL, "stream": True}
        async with self._http.post("/v1/chat/completions", json=body) as response:
            if response.status != 200:
                return f"HTTP {response.status}: {await response.text()}"
            pieces = 0
            finishes: list[str] = []
            async for raw in response.content:
                if not raw.startswith(b"data:"):
                    continue
                data = raw.decode().removeprefix("data:").strip()
                if data == "[DONE]":
                    return "" if pieces and finishes in (["stop"], ["length"]) else f"{pieces} pieces, {finishes}"
                event = json.loads(data)
                if "error" in event:
                    return f"error event: {event['error']}"
                for choice in event["choices"]:
                    pieces += bool(choice["delta"].get("content"))
                    finishes += [choice["finish_reason"]] * bool(choice["finish_reason"])
            return f"it ended without [DONE] after {pieces} pieces"

    async def _submit_on(self) -> None:
        while not self._stopping.is_set():
            await self._submit(f"{self.name}-{next(self._numbers)}")
            await asyncio.sleep(TASK_PAUSE_SECONDS)

    async def _submit(self, key: str) -> None:
        """Sends a task until it is acknowledged, and once more then: that must be the same task."""
        self._file.write(Kind.INTENT, key=key, tokens=TASK_TOKENS)
        for _ in range(2):
            asked_at = time.time()
            task = await self._answered("POST", TASKS, {"model": MODEL, "body": _body(TASK_TOKENS)}, key)
            assert task is not None
            self._file.write(Kind.ACKED, asked_at=asked_at, key=key, task=task["id"], state=STATES[task["state"]])

    async def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, key: str = ""
    ) -> dict[str, Any] | None:
        """Repeats a call while the mesh cannot answer it; None: it answers 404."""
        headers = {"idempotency-key": key} if key else {}
        while True:
            try:
                async with self._http.request(method, path, json=body, headers=headers) as response:
                    if response.status < 300:
                        found: dict[str, Any] = await response.json()
                        return found
                    if response.status == 404:
                        return None
                    assert response.status in (429, 503, 504), f"{response.status}: {await response.text()}"
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(RETRY_SECONDS)

    async def served(self, seconds: float) -> dict[str, KeptTask]:
        """Every acknowledged task as the mesh shows it once it has ended; those that it does not know are missing."""
        found = {}
        async with asyncio.timeout(seconds):
            for task in sorted({event.task for event in self.events(Kind.ACKED)}):
                while (shown := await self._answered("GET", f"{TASKS}/{task}")) is not None:
                    if shown["state"] not in ("pending", "running"):
                        break
                    await asyncio.sleep(RETRY_SECONDS)
                if shown is not None:
                    found[task] = _kept(shown)
        return found


def _body(tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Tell a long story"}], "max_tokens": tokens}


def _kept(shown: Mapping[str, Any]) -> KeptTask:
    answer = (shown.get("result") or {}).get("choices") or [{}]
    has_answer = bool(answer[0].get("message", {}).get("content"))
    state = STATES[shown["state"]]
    # A completed task without its answer is one that has been lost.
    is_whole = has_answer or shown["state"] != "completed"
    return KeptTask(id=shown["id"], state=state, attempt=shown["attempt"], is_watch_complete=is_whole)
