"""The writing side of a stream: when the status line goes out, keepalive comments, and slow readers."""

import asyncio

from starlette.types import Send

from gateway.answers.sse import KEEPALIVE
from gateway.config import GatewayConfig
from gateway.errors import ClientGoneError
from weft.kernel.clock import Clock
from weft.kernel.interrupt import Interruptible

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    # no-transform and no buffering: each event must pass a proxy at once.
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)


class SlowReaderError(ClientGoneError):
    """The caller is still there and does not read."""

    def __init__(self) -> None:
        super().__init__("the client did not read its stream")


class SseWriter:
    """Writes one stream. Two tasks use it: the one that has events, and `keep_up`, which speaks in its silences."""

    def __init__(self, send: Send, config: GatewayConfig, clock: Clock, *, keepalive: bytes = KEEPALIVE) -> None:
        self._keepalive = keepalive
        self._send = send
        self._config = config
        self._clock = clock
        # Events of the two writers must not mix, and nothing may precede the status line.
        self._lock = asyncio.Lock()
        self._held: list[bytes] = []
        self._last_write = clock.monotonic()
        self._writing_since: float | None = None
        self.is_committed = False
        """Whether the status line is out: from here on a failure is an event."""

    def hold(self, data: bytes) -> None:
        """Keep `data` until the status line goes out."""
        self._held.append(data)

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send `data` now, the status line first if it is not out; `last` ends the body with it."""
        self._writing_since = self._clock.monotonic()
        async with self._lock:
            if not self.is_committed:
                data = await self._commit() + data
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._writing_since = None
        self._last_write = self._clock.monotonic()

    async def finish(self, data: bytes) -> None:
        """Send the last bytes. Raises SlowReaderError if they do not go out in time."""
        try:
            async with asyncio.timeout(self._config.write_timeout_seconds):
                await self.write(data, last=True)
        except TimeoutError:
            raise SlowReaderError from None

    async def keep_up(self, block: Interruptible) -> None:
        """Commit when the time for that has come, then fill silences; end `block` when a write takes too long."""
        await self._clock.sleep(self._config.headers_within_seconds)
        try:
            if not self.is_committed:
                await self._write_aside(b"")
            while True:
                await self._clock.sleep(await self._check(block))
        except TimeoutError:
            block.interrupt(SlowReaderError())

    async def _check(self, block: Interruptible) -> float:
        """One look at the stream; returns the seconds until the next."""
        now, limit = self._clock.monotonic(), self._config.write_timeout_seconds
        if self._writing_since is not None:
            left = self._writing_since + limit - now
            if left <= 0:
                block.interrupt(SlowReaderError())
        else:
            left = self._last_write + self._config.sse_keepalive_seconds - now
            if left <= 0:
                await self._write_aside(self._keepalive)
                left = self._config.sse_keepalive_seconds
        return min(max(left, 0.0), limit)

    async def _write_aside(self, data: bytes) -> None:
        async with asyncio.timeout(self._config.write_timeout_seconds):
            await self.write(data)

    async def _commit(self) -> bytes:
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
        self.is_committed = True
        held = b"".join(self._held)
        self._held.clear()
        return held
