"""Waiting for news, but not for ever."""

import asyncio

from weft.kernel.clock import Clock


async def wait_for_news(news: asyncio.Event, clock: Clock, seconds: float) -> bool:
    """Whether there was news within so many seconds."""
    if news.is_set():
        return True
    waiting = asyncio.ensure_future(news.wait())
    sleeping = asyncio.ensure_future(clock.sleep(max(0.0, seconds)))
    try:
        await asyncio.wait((waiting, sleeping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        sleeping.cancel()
    return news.is_set()
