"""The load generator: a process of its own that asks one address as fast as it answers, within bounds.

    echo '{"port": 8080, "path": "/v1/chat/completions", "body": {...}, "connections": 32, "seconds": 5}' \
        | python -m bench.load

Loopback or a Unix socket only. A minimal HTTP/1.1 client over asyncio protocols, so that it is not what is measured: it
looks at a body once, at its end, and counts `data:` in it.
"""

import asyncio
import re
import sys
import time
from collections import Counter
from typing import Any, cast

import msgspec
import uvloop

DRAIN_SECONDS = 60.0
"""How long requests under way at the end may still take; they count."""
MAX_BODY_BYTES = 64 * 1024 * 1024
CONTENT = re.compile(rb'"(?:content|text)":\s?"[^"]')
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s?(\d+)')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:\s*close", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """What to ask, and for how long."""

    port: int
    socket: str = ""
    """Unix socket to connect to instead of the port."""
    path: str
    body: Any
    headers: dict[str, str] = {}
    connections: int = 1
    seconds: float = 5.0
    """No request begins after this."""
    max_requests: int = 1_000_000
    min_events: int = 0
    """A stream with fewer `data:` events than this is a failure."""


class Result(msgspec.Struct, kw_only=True, frozen=True):
    """What came back. Times in milliseconds unless named otherwise; percentiles are over complete answers."""

    requests: int
    events: int
    tokens: int
    """Sum of the `completion_tokens` that answers reported."""
    failures: dict[str, int]
    reconnects: int
    wall_seconds: float
    cpu_seconds: float
    """Of this process, from the first request to the last."""
    latency_p50: float
    latency_p99: float
    first_p50: float
    """Time to the first byte of content."""
    first_p99: float


class RequestError(Exception):
    """A request that was not answered as it should be."""


class Connection(asyncio.Protocol):
    """One connection with at most one request on it."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._head = b""
        self.body = bytearray()
        self.status = 0
        self.first_content_at = 0.0
        """`time.perf_counter()` of the first content; 0 while there is none."""
        self._length = -1
        self._is_chunked = False
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are no asyncio.Transport by inheritance.
        self._transport, self.is_open = cast("asyncio.Transport", transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol. The end of the connection ends a body that has no length."""
        self.is_open = False
        if self._answered is None or self._answered.done():
            return
        if self.status and self._length < 0 and not self._is_chunked:
            self._answered.set_result(None)
        else:
            self._answered.set_exception(exc or ConnectionResetError("closed in mid-answer"))

    def ask(self, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when its answer is complete."""
        assert self._transport is not None
        self._head, self.body = b"", bytearray()
        self.status, self.first_content_at = 0, 0.0
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answered

    def close(self) -> None:
        """Close it. Idempotent."""
        if self._transport is not None:
            self._transport.close()
        self.is_open = False

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if not self.status:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            self._read_head(head)
        self.body += data
        if not self.first_content_at and CONTENT.search(self.body):
            self.first_content_at = time.perf_counter()
        if self._answered is not None and not self._answered.done():
            if len(self.body) > MAX_BODY_BYTES:
                self.close()
            elif self._is_complete():
                self._answered.set_result(None)

    def _read_head(self, head: bytes) -> None:
        self.status = int(head[9:12])
        length = _LENGTH.search(head)
        self._length = int(length[1]) if length else -1
        self._is_chunked = _CHUNKED.search(head) is not None
        if _CLOSES.search(head):
            self.is_open = False

    def _is_complete(self) -> bool:
        if self._is_chunked:
            # JSON has no raw line breaks in it, so this can be nothing but the end.
            return self.body == _LAST_CHUNK or self.body.endswith(b"\r\n" + _LAST_CHUNK)
        return 0 <= self._length <= len(self.body)


class Generator:
    """Runs one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._request = request_bytes(job)
        self._left = job.max_requests
        self._latencies: list[float] = []
        self._firsts: list[float] = []
        self._events = self._tokens = self._reconnects = 0
        self._failures: Counter[str] = Counter()

    async def run(self) -> Result:
        """Ask until time or requests are used up, then wait for what is under way."""
        started, cpu_started = time.perf_counter(), time.process_time()
        deadline = started + self._job.seconds
        try:
            async with asyncio.timeout(self._job.seconds + DRAIN_SECONDS):
                await asyncio.gather(*(self._ask_until(deadline) for _ in range(self._job.connections)))
        except TimeoutError:
            raise TimeoutError(f"requests have gone on for {DRAIN_SECONDS:g} s after the last was begun") from None
        return Result(
            requests=len(self._latencies),
            events=self._events,
            tokens=self._tokens,
            failures=dict(self._failures),
            reconnects=self._reconnects,
            wall_seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu_started,
            latency_p50=1e3 * percentile(self._latencies, 0.50),
            latency_p99=1e3 * percentile(self._latencies, 0.99),
            first_p50=1e3 * percentile(self._firsts, 0.50),
            first_p99=1e3 * percentile(self._firsts, 0.99),
        )

    async def _ask_until(self, deadline: float) -> None:
        connection: Connection | None = None
        while self._left > 0 and time.perf_counter() < deadline:
            self._left -= 1
            try:
                connection = await self._ask(connection)
            except (OSError, RequestError) as error:
                self._failures[str(error) or type(error).__name__] += 1
                if connection is not None:
                    connection.close()
                await asyncio.sleep(0.01)
        if connection is not None:
            connection.close()

    async def _ask(self, connection: Connection | None) -> Connection:
        started = time.perf_counter()
        if connection is None or not connection.is_open:
            connection = await self._connect()
        try:
            await connection.ask(self._request)
        except ConnectionError:
            if connection.status:
                raise
            # It was closed while idle, as llama-server does; a new one is worth a try, on the same stopwatch.
            self._reconnects += 1
            connection = await self._connect()
            await connection.ask(self._request)
        self._record(connection, started, time.perf_counter())
        return connection

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        if self._job.socket:
            _, connection = await loop.create_unix_connection(Connection, self._job.socket)
        else:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._job.port)
        return connection

    def _record(self, connection: Connection, started: float, ended: float) -> None:
        if connection.status != 200:
            raise RequestError(f"status {connection.status}: {bytes(connection.body[:200]).decode(errors='replace')}")
        events = connection.body.count(b"data:")
        if events < self._job.min_events or not connection.first_content_at:
            raise RequestError(f"incomplete answer: {events} events")
        tokens = _COMPLETION_TOKENS.search(connection.body)
        self._tokens += int(tokens[1]) if tokens else 0
        self._events += events
        self._latencies.append(ended - started)
        self._firsts.append(connection.first_content_at - started)


def request_bytes(job: Job) -> bytes:
    """The request of a job, ready to be sent."""
    body = msgspec.json.encode(job.body)
    headers = {"Host": f"127.0.0.1:{job.port}", "Content-Type": "application/json", **job.headers}
    lines = [f"POST {job.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def main() -> None:
    """Read a job from stdin, write its result to stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    result = uvloop.run(Generator(job).run())
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
