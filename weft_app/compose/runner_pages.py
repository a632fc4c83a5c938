"""Adds the metrics of the runner processes of `weft up` to the page of the mesh."""

import asyncio
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from prometheus_client.core import Metric

from weft.kernel.telemetry.metrics_page import MetricsPage, PassedOn, passed_on
from weft.kernel.time.clock import Clock

MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Maximum size of a runner's page: 20,000 series."""
MAX_SERIES = 20_000
TIMEOUT_SECONDS = 1.0
"""Timeout for a runner's page. All are read concurrently; late ones are missing from the scrape."""
HELD_SECONDS = 1.0
"""Maximum age of cached pages, so that several scrapers cost no more than one."""
_CHUNK_BYTES = 65_536


class RunnerPages:
    """Reads the pages of runners from their Unix sockets before each scrape of the mesh."""

    def __init__(
        self, page: MetricsPage, socket_of: Callable[[str], Path], runners: Callable[[], Collection[str]], clock: Clock
    ) -> None:
        """`socket_of` returns the socket of a runner's page, `runners` the names of the running ones."""
        self._page = page
        self._socket_of = socket_of
        self._runners = runners
        self._clock = clock
        self._pages: dict[str, PassedOn] = {}
        self._failures: dict[str, int] = {}
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        page.add(self._collect)
        page.before_scrape(self._refresh)

    def _collect(self) -> Iterator[Metric]:
        yield self._page.count(
            "weft_failed_runner_scrapes",
            "Failed scrapes of a runner's metrics.",
            ("runner",),
            (((name,), count) for name, count in self._failures.items()),
        )
        for page in self._pages.values():
            yield from page.families

    async def _refresh(self) -> None:
        """Reads the pages unless the cached ones are recent."""
        async with self._reading:
            now = self._clock.monotonic()
            if self._read_at is not None and now - self._read_at < HELD_SECONDS:
                return
            names = list(self._runners())
            texts = await asyncio.gather(*(self._text(name) for name in names))
            self._failures = {
                name: self._failures.get(name, 0) + (text is None) for name, text in zip(names, texts, strict=True)
            }
            self._pages = {}
            for name, text in zip(names, texts, strict=True):
                if text is not None:
                    self._pages[name] = passed_on(text, {"runner": name}, max_series=MAX_SERIES, keeps_own=True)
                    await asyncio.sleep(0)  # lets other tasks run between two pages
            self._read_at = self._clock.monotonic()

    async def _text(self, runner: str) -> str | None:
        """Returns a runner's page; None if it is late or too large."""
        socket = str(self._socket_of(runner))
        if not os.path.exists(socket):  # noqa: ASYNC240, PTH110 - a look at a local folder
            return None
        import aiohttp  # noqa: PLC0415 - a mesh that nothing scrapes needs no HTTP client

        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket), timeout=timeout) as session,
                session.get("http://runner/metrics") as answer,
            ):
                body = bytearray()
                async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                    body += chunk
                    if len(body) > MAX_PAGE_BYTES:
                        return None
                return body.decode(errors="replace") if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
