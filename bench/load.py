"""The load generator: a separate process that sends requests to one address as fast as it answers, within bounds.

    echo '{"port": 8080, "path": "/v1/chat/completions", "body": {...}, "connections": 32, "seconds": 5}' \
        | python -m bench.load

It looks at a body once, at its end, and counts `data:` in it.
"""

import asyncio
import re
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec

DRAIN_SECONDS = 60.0
"""How long requests under way at the end may still take; they count."""
CONTENT = re.compile(rb'"(?:content|text)":\s?"[^"]')


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """What to ask, and for how long."""

    port: int
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
    failures: dict[str, int]
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


class Generator:
    """Runs one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._url = f"http://127.0.0.1:{job.port}{job.path}"
        self._body = msgspec.json.encode(job.body)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **job.headers}
        self._left = job.max_requests
        self._latencies: list[float] = []
        self._firsts: list[float] = []
        self._events = 0
        self._failures: Counter[str] = Counter()

    async def run(self) -> Result:
        """Ask until time or requests are used up, then wait for what is under way."""
        started, cpu_started = time.perf_counter(), time.process_time()
        deadline = started + self._job.seconds
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        try:
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
                async with asyncio.timeout(self._job.seconds + DRAIN_SECONDS):
                    await asyncio.gather(*(self._ask_until(http, deadline) for _ in range(self._job.connections)))
        except TimeoutError:
            raise TimeoutError(f"requests have gone on for {DRAIN_SECONDS:g} s after the last was begun") from None
        return Result(
            requests=len(self._latencies),
            events=self._events,
            failures=dict(self._failures),
            wall_seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - cpu_started,
            latency_p50=1e3 * percentile(self._latencies, 0.50),
            latency_p99=1e3 * percentile(self._latencies, 0.99),
            first_p50=1e3 * percentile(self._firsts, 0.50),
            first_p99=1e3 * percentile(self._firsts, 0.99),
        )

    async def _ask_until(self, http: aiohttp.ClientSession, deadline: float) -> None:
        while self._left > 0 and time.perf_counter() < deadline:
            self._left -= 1
            try:
                await self._ask(http)
            except (aiohttp.ClientError, RequestError) as error:
                self._failures[str(error) or type(error).__name__] += 1
                await asyncio.sleep(0.01)

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        started, first, body = time.perf_counter(), 0.0, bytearray()
        async with http.post(self._url, data=self._body, headers=self._headers) as response:
            async for data in response.content.iter_any():
                body += data
                if not first and CONTENT.search(body):
                    first = time.perf_counter()
        if response.status != 200:
            raise RequestError(f"status {response.status}: {bytes(body[:200]).decode(errors='replace')}")
        events = body.count(b"data:")
        if events < self._job.min_events or not first:
            raise RequestError(f"incomplete answer: {events} events")
        self._events += events
        self._latencies.append(time.perf_counter() - started)
        self._firsts.append(first - started)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def main() -> None:
    """Read a job from stdin, write its result to stdout."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    result = asyncio.run(Generator(job).run())
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main()
