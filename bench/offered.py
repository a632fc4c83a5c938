"""An open-loop generator: so many chat requests per second, whatever becomes of them. A process of its own.

    echo '{"port": 8080, "body": {...}, "rate": 200, "seconds": 10}' | python -m bench.offered

Loopback only. Each request has a connection of its own from a pool, so that a waiting request blocks no other.
"""

import asyncio
import sys
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec
import uvloop

from bench.load import percentile

DRAIN_SECONDS = 60.0
"""How long requests under way at the end may still take."""


class Offer(msgspec.Struct, kw_only=True, frozen=True):
    """What to ask, and how often."""

    port: int
    body: Any
    rate: float
    """Requests per second, evenly spaced."""
    seconds: float
    headers: dict[str, str] = {}


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """What came back. Times in milliseconds."""

    offered: int
    served: int
    served_per_second: float
    """Between the first request and the last one that was served."""
    statuses: dict[str, int]
    refused_p50: float
    """From sending a request until its refusal (429 or 503) was read."""
    refused_p99: float
    refused_without_advice: int
    """Refusals without a Retry-After of 1 to 60 seconds."""
    served_p50: float
    served_p99: float


class Offering:
    """Runs one offer."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._statuses: Counter[str] = Counter()
        self._served: list[float] = []
        self._refused: list[float] = []
        self._without_advice = 0
        self._last_served_at = 0.0

    async def run(self) -> Outcome:
        """Send at the given rate, wait for the rest, count."""
        offer = self._offer
        count = int(offer.rate * offer.seconds)
        timeout = aiohttp.ClientTimeout(total=offer.seconds + DRAIN_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            started = time.perf_counter()
            tasks = []
            for number in range(count):
                pause = started + number / offer.rate - time.perf_counter()
                if pause > 0:
                    await asyncio.sleep(pause)
                tasks.append(asyncio.create_task(self._ask(http)))
            await asyncio.gather(*tasks)
        seconds = max(self._last_served_at - started, 1e-9)
        return Outcome(
            offered=count,
            served=len(self._served),
            served_per_second=len(self._served) / seconds if self._served else 0.0,
            statuses=dict(self._statuses),
            refused_p50=1e3 * percentile(self._refused, 0.50),
            refused_p99=1e3 * percentile(self._refused, 0.99),
            refused_without_advice=self._without_advice,
            served_p50=1e3 * percentile(self._served, 0.50),
            served_p99=1e3 * percentile(self._served, 0.99),
        )

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        offer, started = self._offer, time.perf_counter()
        url = f"http://127.0.0.1:{offer.port}/v1/chat/completions"
        try:
            async with http.post(url, json=offer.body, headers=offer.headers) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._statuses[type(error).__name__] += 1
            return
        ended = time.perf_counter()
        self._statuses[str(answer.status)] += 1
        if answer.status == 200:
            self._served.append(ended - started)
            self._last_served_at = ended
        elif answer.status in (429, 503):
            self._refused.append(ended - started)
            advice = answer.headers.get("retry-after", "")
            self._without_advice += not (advice.isdigit() and 1 <= int(advice) <= 60)


def main() -> None:
    """Read an offer from stdin, write its outcome to stdout."""
    offer = msgspec.json.decode(sys.stdin.buffer.read(), type=Offer)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(Offering(offer).run())))


if __name__ == "__main__":
    main()
