"""An HTTP server of a test, on a free port of this machine."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web


@asynccontextmanager
async def http_server(answer: Callable[[Any], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Yields the URL of a server that answers requests of every path and method."""
    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
