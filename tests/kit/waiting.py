"""Waiting for what no event tells."""

import asyncio
import time
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Returns once a condition, which may be async, holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Returns once a condition holds. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.005)
