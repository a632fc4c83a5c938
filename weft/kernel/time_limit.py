"""Time limits of coroutines."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float | None, coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine. Raises TimeoutError if it takes longer than `seconds`; None: no limit."""
    async with asyncio.timeout(seconds):
        return await coroutine
