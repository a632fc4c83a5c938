"""What scripted services do, one step after another."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TypeVar

T = TypeVar("T")


async def done(steps: Iterable[T | Exception | asyncio.Event]) -> AsyncGenerator[T]:
    """Yields the steps; waits for those that are events, and raises the errors."""
    for step in steps:
        if isinstance(step, asyncio.Event):
            await step.wait()
        elif isinstance(step, Exception):
            raise step
        else:
            yield step
